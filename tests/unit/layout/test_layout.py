# SPDX-License-Identifier: Apache-2.0
"""Even chunks, every kind and decode mode: the oracle exhaustively for small batches, then drawn ones."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_passes import layout as layout_module
from pcp_passes.errors import ConfigError, LayoutError
from pcp_passes.layout import Batch, Layout, build_layout, dispatch_tokens, partition
from tests.unit.layout.oracle import DECODES, KINDS, check_identities, check_layout, check_rows, make_batch

pytestmark = pytest.mark.unit

MODES = [pytest.param(kind, decode, id=f"{kind}-{decode}") for kind in KINDS for decode in DECODES]


def check(batch: Batch, pcp: int, kind: str, decode: str) -> Layout:
    layout = build_layout(batch, pcp, kind=kind, decode=decode)
    check_layout(layout)
    assert dispatch_tokens(batch, pcp, kind=kind, decode=decode) == layout.padded_tokens
    check_balance(layout)
    return layout


def check_balance(layout: Layout) -> None:
    """The ranks' prefill token counts differ by at most one over the whole batch."""
    prefill = layout.batch.is_prefilling[layout.seg_request]
    counts = np.bincount(layout.seg_rank[prefill], layout.seg_length[prefill], minlength=layout.pcp)
    assert counts.max() - counts.min() <= 1, f"prefill tokens per rank: {counts.tolist()}"


def test_documented_example() -> None:
    layout = build_layout(Batch([6, 1], [0, 9], [6, 4]), 2, decode="owner")
    assert layout.gather_index.tolist() == [6, 0, 1, 5, 2, 3, 4, 0]
    assert layout.write_mask.astype(int).tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert layout.restore_index.tolist() == [1, 2, 4, 5, 6, 3, 0]
    assert layout_module.__doc__ is not None and "[1 2 4 5 6 3 0]" in layout_module.__doc__


@pytest.mark.parametrize(("kind", "decode"), MODES)
@pytest.mark.parametrize("pcp", range(1, 9))
def test_single_requests(pcp: int, kind: str, decode: str) -> None:
    for length, prefilling in itertools.product(range(65), (True, False)):
        check(make_batch([length], [3], [prefilling]), pcp, kind, decode)


@pytest.mark.parametrize("pcp", range(1, 9))
def test_single_requests_compat(pcp: int) -> None:
    for length, prefilling, decode in itertools.product(range(65), (True, False), DECODES):
        layout = build_layout(make_batch([length], [3], [prefilling]), pcp, decode=decode, compat="vllm")
        check_identities(layout)
        for rank in range(pcp):
            check_rows(layout, rank)


@pytest.mark.parametrize(("kind", "decode"), MODES)
@pytest.mark.parametrize("pcp", [2, 3, 4, 5])
def test_pairs(pcp: int, kind: str, decode: str) -> None:
    symbols = list(itertools.product(range(2 * pcp + 2), (True, False)))
    for (a, flag_a), (b, flag_b) in itertools.product(symbols, symbols):
        check(make_batch([a, b], [0, 5], [flag_a, flag_b]), pcp, kind, decode)


REQUEST = st.one_of(
    st.tuples(st.integers(0, 90), st.just(0), st.just(True)),  # fresh prefill
    st.tuples(st.integers(1, 90), st.integers(1, 200), st.just(True)),  # a later chunk, or a prefix-cache hit
    st.tuples(st.just(1), st.integers(1, 200), st.just(False)),  # decode
    st.tuples(st.integers(2, 6), st.integers(1, 200), st.just(False)),  # verification: last token and drafts
    st.just((0, 7, False)),  # scheduled nothing
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=12),
    pcp=st.integers(1, 8),
    kind=st.sampled_from(KINDS),
    decode=st.sampled_from(DECODES),
    spare=st.integers(0, 5),
)
def test_drawn_batches(requests: list[tuple[int, int, bool]], pcp: int, kind: str, decode: str, spare: int) -> None:
    lens, computed, flags = (list(column) for column in zip(*requests, strict=True))
    batch = make_batch(lens, computed, flags)
    smallest = check(batch, pcp, kind, decode).padded_tokens
    check_layout(build_layout(batch, pcp, kind=kind, decode=decode, padded_tokens=smallest + spare))
    compat = build_layout(batch, pcp, decode=decode, compat="vllm")
    check_identities(compat)
    assert compat.padded_tokens == dispatch_tokens(batch, pcp, decode=decode, compat="vllm")
    for rank in range(pcp):
        check_rows(compat, rank)


@pytest.mark.parametrize("pcp", range(2, 9))
def test_even_chunks_give_every_rank_rows(pcp: int) -> None:
    for length in range(2 * pcp, 6 * pcp + 1):
        for offset in range(pcp):
            # The first prefill moves the remainder's first rank to ``offset``.
            layout = build_layout(make_batch([offset, length]), pcp)
            own = layout.seg_request == 1
            counts = np.bincount(layout.seg_rank[own], layout.seg_length[own], minlength=pcp)
            assert counts.min() >= 2
            last = layout.seg_rank == pcp - 1
            sizes = [*layout.seg_length[own & ~last].tolist()]
            middle = int(layout.seg_length[own & last].sum())  # chunks P-1 and P, one segment
            assert len(sizes) == 2 * pcp - 2
            assert max([*sizes, -(-middle // 2)]) - min([*sizes, middle // 2]) <= 1


@pytest.mark.parametrize("pcp", range(2, 9))
def test_short_prefills_are_split_never_replicated(pcp: int) -> None:
    for length in range(1, 2 * pcp):
        layout = build_layout(make_batch([length]), pcp)
        assert layout.per_rank_tokens.sum() == length
        assert layout.per_rank_tokens.max() <= 2
        assert not layout.replicated_requests.any() and not layout.is_replicated


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_prefills_do_not_pile_up_on_rank_0(kind: str) -> None:
    layout = build_layout(make_batch([1] * 256), 8, kind=kind)
    assert layout.per_rank_tokens.tolist() == [32] * 8


def test_owned_one_token_decodes_and_prefills_balance_together() -> None:
    for decodes, length in itertools.product(range(9), range(1, 20)):
        layout = build_layout(make_batch([1] * decodes + [length], None, [False] * decodes + [True]), 4, decode="owner")
        assert layout.per_rank_tokens.max() - layout.per_rank_tokens.min() <= 1


def test_verification_requests_have_one_owner_each() -> None:
    batch = make_batch([2, 4, 0, 5, 9], [10, 20, 30, 40, 0], [False, False, False, False, True])
    layout = build_layout(batch, 2, decode="owner")
    check_layout(layout)
    owner = {int(r): int(k) for k, r in zip(layout.seg_rank, layout.seg_request, strict=True) if r != 4}
    assert owner == {0: 0, 1: 1, 3: 0}, "the request with nothing scheduled takes no turn"


def test_replicated_body_only_for_pure_replicated_decodes() -> None:
    decodes = make_batch([1, 3, 0], [4, 5, 6], [False] * 3)
    assert build_layout(decodes, 4).is_replicated
    assert not build_layout(decodes, 4, decode="owner").is_replicated
    mixed = make_batch([1, 3], [4, 0], [False, True])
    assert not build_layout(mixed, 4).is_replicated
    assert build_layout(mixed, 4).replicated_requests.tolist() == [True, False]
    layout = build_layout(decodes, 4)
    assert layout.restore_index.tolist() == [0, 1, 2, 3], "rank-local order is global order"
    assert (layout.gather_index.reshape(4, 4) == np.arange(4)).all()
    assert layout.write_mask.reshape(4, 4).tolist() == [[True] * 4] + [[False] * 4] * 3


def test_rank_without_work_has_one_row_of_no_tokens() -> None:
    layout = build_layout(make_batch([1, 0], [7, 2], [True, False]), 4)
    assert layout.rows_per_rank.tolist() == [1, 0, 0, 0]
    rows = layout.rows(3)
    assert (rows.num_tokens, rows.row_request.tolist(), rows.query_start_loc.tolist()) == (0, [0], [0, 0])
    assert rows.seq_lens_host.tolist() == [7]


def test_last_short_chunk_of_a_prefill_stays_a_prefill() -> None:
    # Two tokens left to prefill after 30: short enough to look like a decode with a draft.
    layout = build_layout(Batch([2, 1], [30, 30], [32, 30]), 2)
    assert not layout.is_replicated
    assert layout.per_rank_tokens.tolist() == [2, 2]
    assert layout.rows(0).is_prefilling.tolist() == [False, True]


def test_row_padding() -> None:
    layout = build_layout(make_batch([1] * 5, [3] * 5, [False] * 5), 2, decode="owner")
    rows = layout.rows(1, padded_rows=4)
    assert rows.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert rows.seq_lens_host.tolist() == [4, 4, 0, 0]
    assert (rows.num_rows, rows.num_padded_rows) == (2, 4)
    with pytest.raises(LayoutError, match=r"padded_rows = 2 is below the 3 rows.*use at least 3"):
        layout.rows(1, padded_rows=2)
    with pytest.raises(LayoutError, match="Rank 2 is outside"):
        layout.rows(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dcp": 2}, r"\(dcp=2\) is not supported; the field is reserved"),
        ({"kind": "ring"}, "layout is one of zigzag, interleave, contiguous; found 'ring'"),
        ({"decode": "shard"}, "decode is one of replicate, owner; found 'shard'"),
        ({"compat": "sglang"}, "compat is None or 'vllm'"),
        ({"compat": "vllm", "kind": "interleave"}, "knows the zigzag layout only"),
        ({"pcp": 0}, "integer of at least 1; found 0"),
        ({"pcp": 2.0}, "integer of at least 1; found 2.0"),
    ],
)
def test_refused_options(options: dict[str, object], message: str) -> None:
    arguments = {"pcp": 2, **options}
    pcp = arguments.pop("pcp")
    for function in (build_layout, dispatch_tokens):
        with pytest.raises(ConfigError, match=message):
            function(make_batch([4]), pcp, **arguments)  # type: ignore[arg-type]


def test_padding_below_the_largest_rank_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"padded_tokens = 4 is below the 5 tokens.*\[5, 4\]"):
        build_layout(make_batch([9]), 2, padded_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [0], [1, 2]), r"num_scheduled\[2\], num_computed\[1\]"),
        (([], [], []), "at least one request"),
        (([1, -1], [0, 0], [1, -2]), r"num_scheduled\[1\] = -1, prefill_len\[1\] = -2"),
        (([1.5], [0], [1]), "vector of integers; found float64"),
        (([[1]], [0], [1]), r"vector of integers; found int64\[1, 1\]"),
        (([1], [2**31], [1]), "fits in 32 bits"),
        (([1], [0], [1], [True, False]), r"is_prefilling\[2\]"),
    ],
)
def test_refused_batches(arguments: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Batch(*arguments)  # type: ignore[arg-type]


def _rotate(array: np.ndarray) -> np.ndarray:
    return np.roll(array, 1)


def _off_by_one(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed[0] += 1
    return changed


SABOTAGE = {
    "gather-permuted": ("gather_index", _rotate),
    "restore-permuted": ("restore_index", _rotate),
    "restore-identity": ("restore_index", lambda a: np.arange(len(a))),
    "mask-all-true": ("write_mask", np.ones_like),
    "mask-all-false": ("write_mask", np.zeros_like),
    "segment-length-off-by-one": ("seg_length", _off_by_one),
    "segment-start-off-by-one": ("seg_start", _off_by_one),
    "rank-count-off-by-one": ("per_rank_tokens", _off_by_one),
    "pad-reads-last-token": ("gather_index", lambda a: np.where(np.arange(len(a)) == len(a) - 1, a.max(), a)),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage(name: str) -> None:
    good = build_layout(make_batch([1, 11, 3], [4, 0, 6], [False, True, False]), 4)
    check_layout(good)
    assert good.per_rank_tokens[-1] < good.padded_tokens, "the last row is a pad"
    field, change = SABOTAGE[name]
    broken = dataclasses.replace(good, **{field: change(getattr(good, field))})
    with pytest.raises(AssertionError):
        check_layout(broken)


def test_sabotage_no_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the running offset every short prefill lands on the low ranks; the balance check sees it."""

    def still(query_lens: np.ndarray, pcp: int, per_rank: int, first: int) -> np.ndarray:
        alone = [even_chunks(query_lens[i : i + 1], pcp, per_rank, 0) for i in range(len(query_lens))]
        return np.concatenate(alone, axis=1)

    even_chunks = partition.even_chunks
    monkeypatch.setattr(partition, "even_chunks", still)
    layout = build_layout(make_batch([1, 1, 1]), 4)
    check_identities(layout)
    with pytest.raises(AssertionError, match="prefill tokens per rank"):
        check_balance(layout)


def test_layout_needs_neither_torch_nor_vllm() -> None:
    code = "import sys, pcp_passes.layout; print([m for m in ('torch', 'vllm', 'triton') if m in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_arrays_of_one_layout_survive_the_next() -> None:
    """Scratch is shared between calls, results are not."""
    first = build_layout(make_batch([37, 5]), 4)
    kept = {name: getattr(first, name).copy() for name in ("gather_index", "write_mask", "restore_index", "seg_start")}
    build_layout(make_batch([5, 41, 9000]), 4)
    assert all(np.array_equal(getattr(first, name), value) for name, value in kept.items())
    assert first.gather_index.flags.writeable, "torch.from_numpy warns on read-only arrays"
