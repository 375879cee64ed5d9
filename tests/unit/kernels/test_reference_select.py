# SPDX-License-Identifier: Apache-2.0
"""Selections by definition, from contiguous keys and from pages, in any tiles and within their workspace."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_kernels.reference import cache, pack, prep, score, select
from pcp_passes.live_bytes import LiveBytes
from tests.comparator import check_form, compare_selected, selected_by_definition

pytestmark = pytest.mark.unit

HEADS, DIM, PAGE = 4, 32, 16


def values(kind: str, *shape: int, seed: int) -> torch.Tensor:
    """Integers with heavy ties, values of which most products are negative (zero plateaus), or Gaussians."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "integers":
        return torch.randint(-1, 2, shape, generator=generator).float()
    if kind == "plateau":
        return -torch.rand(shape, generator=generator).round() - 1
    return torch.randn(shape, generator=generator)


def paged(k: torch.Tensor, scale: torch.Tensor | None, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache, block table [1, nb]) of keys [N, D] on shuffled pages among pages of garbage."""
    pages = -(-k.shape[0] // PAGE)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(pages + 3, generator=generator)[:pages]
    slots = (table[:, None] * PAGE + torch.arange(PAGE)).flatten()[: k.shape[0]]
    if scale is None:
        held = torch.full((pages + 3, PAGE, k.shape[1]), math.nan, dtype=k.dtype)
        cache.scatter(held, k, slots)
    else:
        held = torch.full((pages + 3, PAGE * (k.shape[1] + 4)), 255, dtype=torch.uint8)
        record = torch.cat((k.view(torch.uint8), scale[:, None].contiguous().view(torch.uint8)), dim=1)
        cache.scatter(held, record, slots)
    return held, table[None].int()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["integers", "plateau", "gaussian"]),
    store=st.sampled_from(["fp8", "bf16", "fp32", "fp64"]),
    rows=st.integers(1, 12),
    keys=st.integers(1, 90),
    topk=st.sampled_from([1, 4, 16, 100]),
    seed=st.integers(0, 999),
    budget=st.sampled_from(["least", "default"]),
)
def test_both_forms_select_by_definition(
    kind: str, store: str, rows: int, keys: int, topk: int, seed: int, budget: str
) -> None:
    dtype = torch.float64 if store == "fp64" else torch.float32
    raw = values(kind, rows, HEADS, DIM, seed=seed).to(dtype).abs_()
    q, w = prep.index_prep(raw, values("gaussian", rows, HEADS, seed=seed + 1).to(dtype), store=store)
    k, scale = pack.index_unpack(pack.index_pack(values(kind, keys, DIM, seed=seed + 2).to(dtype), store=store), DIM)
    generator = torch.Generator().manual_seed(seed)
    ke = torch.randint(0, keys + 1, (rows,), generator=generator, dtype=torch.int32)
    ks = torch.minimum(ke, torch.randint(0, keys + 1, (rows,), generator=generator, dtype=torch.int32))
    least = select.plan_tiles(1 << 40, heads=HEADS, dim=DIM, topk=topk, rows=1, keys=1, page=PAGE)
    assert least.keys == PAGE
    room = {"workspace_bytes": smallest_workspace(topk)} if budget == "least" else {}

    scores = score.score(q, w, k, scale)
    wanted = selected_by_definition(scores, ke, topk)
    held, table = paged(k, scale, seed)
    request = torch.zeros(rows, dtype=torch.int32)
    found = select.topk_paged(q, w, held, table, request, ke, topk, PAGE, **room)
    check_form(found, ke, topk)
    assert torch.equal(found, wanted)

    from_start = select.topk_rows(q, w, k, scale, ks, ke, topk, **room)
    shifted = torch.stack([torch.cat((row[s:], row[:s])) for row, s in zip(scores, ks.tolist(), strict=True)])
    assert torch.equal(from_start, selected_by_definition(shifted, ke - ks, topk))


def smallest_workspace(topk: int, heads: int = HEADS, dim: int = DIM, page: int = PAGE) -> int:
    with pytest.raises(ValueError, match=r"found a workspace of 0 bytes") as refused:
        select.plan_tiles(0, heads=heads, dim=dim, topk=topk, rows=1, keys=1, page=page)
    return int(str(refused.value).split(" take ")[1].split(".")[0])


def test_requests_of_several_rows_and_padding() -> None:
    q, w = values("gaussian", 7, HEADS, DIM, seed=0), values("gaussian", 7, HEADS, seed=1)
    k = values("gaussian", 40, DIM, seed=2)
    held, table = paged(k, None, 3)
    half = table[:, : table.shape[1] - 1]
    tables = torch.cat((half.flip(1), half, half.flip(1)))
    request = torch.tensor([1, 1, 1, 2, 0, 0, 0], dtype=torch.int32)
    ke = torch.tensor([18, 19, 20, 30, 0, 0, 0], dtype=torch.int32)
    found = select.topk_paged(q, w, held, tables, request, ke, 4, PAGE)
    other = torch.cat((k[16:32], k[:16]))
    scores = torch.cat((score.score(q[:3], w[:3], k[:32]), score.score(q[3:], w[3:], other)))
    assert torch.equal(found, selected_by_definition(scores, ke, 4))
    assert found[4:].tolist() == [[-1] * 4] * 3


def test_nan_weights_select_the_first_keys() -> None:
    q, w, k = (
        values("gaussian", 2, HEADS, DIM, seed=0),
        torch.full((2, HEADS), math.nan),
        values("gaussian", 9, DIM, seed=1),
    )
    w[1] = 1.0
    k[4] = math.nan
    found = select.topk_rows(q, w, k, None, torch.zeros(2).int(), torch.full((2,), 9).int(), 3)
    assert found[0].tolist() == [0, 1, 2]
    assert torch.equal(found, selected_by_definition(score.score(q, w, k), torch.full((2,), 9), 3))


def test_select_scores_at_the_edges() -> None:
    scores = torch.tensor([[0.0, -0.0, 1.0, math.nan, -math.inf], [math.nan] * 5, [3.0, 3.0, 3.0, 3.0, 9.0]])
    for n in range(6):
        valid = torch.full((3,), n)
        for topk in (1, 2, 3, 5, 8):
            wanted = selected_by_definition(scores, valid, topk)
            assert torch.equal(select.select_scores(scores, valid, topk), wanted)
            assert torch.equal(select.select_scores(scores.double(), valid, topk, workspace_bytes=1), wanted)


def test_split_candidates_merge_to_the_same_rows() -> None:
    scores = values("integers", 5, 50, seed=3)
    keys = select.sortable_key(scores)
    whole = select.select_scores(scores, torch.full((5,), 50), 8)
    for cut in ([25], [7, 7, 41], [10, 20, 30, 40]):
        bounds = list(zip([0, *cut], [*cut, 50], strict=True))
        parts = [select.select_scores(scores[:, a:b], torch.full((5,), b - a), 8) for a, b in bounds]
        index = torch.cat([torch.where(part < 0, -1, part + a) for part, (a, _) in zip(parts, bounds, strict=True)], 1)
        put = keys.gather(1, index.clamp(min=0).long())
        assert torch.equal(select.merge(put, index, 8), whole)
        assert torch.equal(select.merge(put.flip(1), index.flip(1), 8), whole)


@pytest.mark.parametrize("store", ["fp8", "fp64"])
@pytest.mark.parametrize(("heads", "topk", "rows", "keys"), [(2, 16, 3, 120), (8, 64, 2, 200), (32, 16, 20, 120)])
def test_temporaries_stay_within_the_workspace(store: str, heads: int, topk: int, rows: int, keys: int) -> None:
    dtype = torch.float64 if store == "fp64" else torch.float32
    q, w = prep.index_prep(
        values("gaussian", rows, heads, DIM, seed=0).to(dtype), values("gaussian", rows, heads, seed=1), store=store
    )
    k, scale = pack.index_unpack(pack.index_pack(values("gaussian", keys, DIM, seed=2).to(dtype), store=store), DIM)
    held, table = paged(k, scale, 0)
    request = torch.zeros(rows, dtype=torch.int32)
    ke = torch.arange(keys - rows, keys, dtype=torch.int32) + 1
    whole = select.topk_paged(q, w, held, table, request, ke, topk, PAGE)
    least = smallest_workspace(topk, heads=heads)
    for room in (least, 3 * least, 1 << 20):
        with LiveBytes() as counted:
            found = select.topk_paged(q, w, held, table, request, ke, topk, PAGE, workspace_bytes=room)
        temporaries = counted.peak - found.nbytes
        assert torch.equal(found, whole)
        # The per-row numbers of keys are not counted as temporaries: 8 bytes a row.
        assert temporaries <= room + 8 * rows
        assert temporaries > room // 40, "the bound is not an order of magnitude above the truth"
    with LiveBytes() as counted:
        again = select.topk_rows(q, w, k, scale, torch.zeros_like(ke), ke, topk, workspace_bytes=3 * least)
    assert torch.equal(again, whole)
    assert counted.peak - again.nbytes <= 3 * least + 64 * rows


@pytest.mark.parametrize("heads", [32, 64])
def test_tiles_of_a_long_prompt_are_small_and_still_worth_a_product(heads: int) -> None:
    tiles = select.plan_tiles(
        select.DEFAULT_WORKSPACE_BYTES, heads=heads, dim=128, topk=2048, rows=8192, keys=131072, page=64
    )
    assert tiles.rows * tiles.keys * heads * 8 < select.DEFAULT_WORKSPACE_BYTES < 8192 * 131072 * heads * 8 // 1000
    assert tiles.rows * heads >= 256
    assert tiles.keys % 64 == 0
    assert tiles.keys >= 1024


def test_a_workspace_that_fits_nothing_is_refused_with_what_would() -> None:
    q, w, k = values("gaussian", 1, HEADS, DIM, seed=0), torch.ones(1, HEADS), values("gaussian", 20, DIM, seed=1)
    held, table = paged(k, None, 0)
    one, ke = torch.zeros(1, dtype=torch.int32), torch.tensor([20])
    least = smallest_workspace(4)
    with pytest.raises(ValueError, match=rf"found a workspace of {least - 1} bytes; one query of 4 heads of 32"):
        select.topk_paged(q, w, held, table, one, ke, 4, PAGE, workspace_bytes=least - 1)
    assert select.topk_paged(q, w, held, table, one, ke, 4, PAGE, workspace_bytes=least).shape == (1, 4)


def test_unfit_arguments_are_refused() -> None:
    q, w, k = torch.zeros(2, HEADS, DIM), torch.zeros(2, HEADS), torch.zeros(20, DIM)
    held, table = paged(k, None, 0)
    rows, ke = torch.zeros(2, dtype=torch.int32), torch.tensor([3, 20])
    with pytest.raises(ValueError, match=r"found queries \[2, 4, 32\] and weights \[2, 3\]"):
        select.topk_rows(q, w[:, :3], k, None, rows, ke, 4)
    with pytest.raises(ValueError, match=r"ke: found torch.float32 \[2\]; required i32 or i64 \[2\]"):
        select.topk_rows(q, w, k, None, rows, ke.float(), 4)
    with pytest.raises(ValueError, match=r"topk: found 0"):
        select.topk_rows(q, w, k, None, rows, ke, 0)
    with pytest.raises(ValueError, match=r"found keys \[20, 31\] and scales None"):
        select.topk_rows(q, w, k[:, 1:], None, rows, ke, 4)
    with pytest.raises(ValueError, match=r"found a cache torch.uint8 \[5, 16, 32\]; required floating keys"):
        select.topk_paged(q, w, held.to(torch.uint8), table, rows, ke, 4, PAGE)
    with pytest.raises(ValueError, match=r"found pages of 16 keys .* required pages of 64"):
        select.topk_paged(q, w, held, table, rows, ke, 4, 64)
    with pytest.raises(ValueError, match=r"row_request: found 3 in row 1; required below 1, the requests of the block"):
        select.topk_paged(q, w, held, table, torch.tensor([0, 3]), ke, 4, PAGE)
    for wrong in (-1, 5):
        with pytest.raises(
            ValueError, match=rf"block_table: found page {wrong} among the keys of request 0; required 0"
        ):
            select.topk_paged(q, w, held, torch.full_like(table, wrong), rows, ke, 4, PAGE)
    for call in (lambda: select.topk_rows(q, w, k, None, rows, 0 * ke, 4, workspace_bytes=-1),
                 lambda: select.topk_paged(q, w, held, table, rows, 0 * ke, 4, PAGE, workspace_bytes=-1)):  # fmt: skip
        with pytest.raises(ValueError, match="workspace_bytes: found -1; required at least 0"):
            call()


def test_no_rows_select_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    held, table = paged(torch.zeros(20, DIM), None, 0)
    q, w = torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS)
    assert select.topk_paged(q, w, held, table, none, none, 4, PAGE).shape == (0, 4)
    assert select.topk_rows(q, w, torch.zeros(0, DIM), None, none, none, 4).shape == (0, 4)


VALID = torch.tensor([6, 2])
GOOD = torch.tensor([[1, 3, 5], [0, 1, -1]], dtype=torch.int32)
SCORES = torch.tensor([[0.0, 5.0, 1.0, 4.0, 1.0, 3.0], [0.0] * 6])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([[1, 5, 3], [0, 1, -1]], "rising, unique"),
        ([[1, 3, 3], [0, 1, -1]], "rising, unique"),
        ([[1, 3, 6], [0, 1, -1]], r"required keys of 0 .. 5"),
        ([[1, 3, -1], [0, 1, -1]], r"required keys of 0 .. 5"),
        ([[1, 3, 5], [0, 1, 2]], "required -1 after 2 keys"),
        ([[1, 3, 5], [-1, 0, 1]], "required -1 after 2 keys"),
        ([[1, 3, 4], [0, 1, -1]], r"the k-th score is 3.0, band 0.0; keys outside it: \{4: 1.0\}"),
    ],
)
def test_comparator_is_red_for_each_fault(broken: list[list[int]], message: str) -> None:
    assert compare_selected(GOOD, GOOD, SCORES, VALID, 3) == 0
    with pytest.raises(AssertionError, match=message):
        compare_selected(torch.tensor(broken, dtype=torch.int32), GOOD, SCORES, VALID, 3)


def test_comparator_takes_ties_at_the_boundary_and_no_others() -> None:
    scores = torch.tensor([[5.0, 1.0, 1.0 + 1e-4, 0.0]])
    other, want = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([[0, 2]])
    assert compare_selected(other, want, scores, torch.tensor([4]), 2, epsilon=1e-3) == 1
    with pytest.raises(AssertionError, match=r"keys outside it: \{1: 1.0\}"):
        compare_selected(other, want, scores, torch.tensor([4]), 2, epsilon=1e-5)
    with pytest.raises(AssertionError, match=r"missing \[2\], unexpected \[1\]"):
        compare_selected(other, want, None, torch.tensor([4]), 2)
    with pytest.raises(AssertionError, match=r"found torch.int64; required int32"):
        compare_selected(other.long(), want, scores, torch.tensor([4]), 2)
    # A model that writes keys it does not see, where there are not topk: they are no difference.
    short = torch.tensor([[0, 1, -1]], dtype=torch.int32)
    assert compare_selected(short, torch.tensor([[3, 1, 0]]), scores, torch.tensor([2]), 3) == 0
