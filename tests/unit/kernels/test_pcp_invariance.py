# SPDX-License-Identifier: Apache-2.0
"""From the indexer's inputs on, caches and selections are the same bytes on 1, 2, 3, 4 and 8 ranks.

Every rank packs the keys of its own rows; records are gathered rank after rank with their padding, scattered at
expanded slots, and every rank selects for its rows. What differs between sizes of the group is which rows are beside
each other, how many keys a tile has, and here the workspace as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pcp_kernels.reference import cache, pack, prep, score, select
from pcp_passes.layout import Batch, Layout, build_layout
from tests.comparator import compare_selected, selected_by_definition

pytestmark = pytest.mark.unit

HEADS, DIM, ROPE, PAGE, TOPK = 4, 32, 16, 16, 8
SIZES = (1, 2, 3, 4, 8)
KINDS = ("integers", "ties", "plateau", "gaussian")


@dataclass(frozen=True)
class Request:
    """A request of a step: tokens that are in the cache already, and tokens of the step."""

    context: int
    query: int
    prefill: bool = True


@dataclass(frozen=True)
class Step:
    """One step's projections, of the context's tokens as well, per request in order of position."""

    requests: tuple[Request, ...]
    keys: tuple[torch.Tensor, ...]
    q: torch.Tensor
    w: torch.Tensor
    store: str
    rounding: str


def draw(kind: str, generator: torch.Generator, *shape: int) -> torch.Tensor:
    if kind == "integers":
        return torch.randint(-3, 4, shape, generator=generator).float()
    if kind == "ties":  # few different rows, so whole keys repeat
        few = torch.randint(-1, 2, (3, *shape[1:]), generator=generator).float()
        return few[torch.randint(0, 3, shape[:1], generator=generator)]
    if kind == "plateau":  # products with the queries below are negative: scores are zero throughout
        return -torch.rand(shape, generator=generator) - 0.1
    return torch.randn(shape, generator=generator)


def step_of(requests: tuple[Request, ...], kind: str, store: str, rounding: str, seed: int) -> Step:
    generator = torch.Generator().manual_seed(seed)
    keys = tuple(draw(kind, generator, r.context + r.query, DIM) for r in requests)
    tokens = sum(r.query for r in requests)
    q = torch.randn(tokens, HEADS, DIM, generator=generator)
    q = q.abs() if kind == "plateau" else draw(kind if kind == "integers" else "gaussian", generator, *q.shape)
    return Step(requests, keys, q, torch.randn(tokens, HEADS, generator=generator), store, rounding)


def angles(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    theta = positions[:, None] * 0.5 ** torch.arange(ROPE // 2)
    return theta.cos(), theta.sin()


def packed(step: Step, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    weight, bias = torch.linspace(0.5, 2, DIM), torch.linspace(-1, 1, DIM)
    norm = (weight, bias) if step.rounding == "fp32" else (None, None)
    rope = "none" if step.store == "fp32" else "interleaved"  # integers stay integers
    return pack.index_pack(k, *norm, 1e-6, *angles(positions), rope=rope, rounding=step.rounding, store=step.store)


@dataclass(frozen=True)
class Outcome:
    """What a step leaves: the cache, and the selection of every token in global order."""

    cache: torch.Tensor
    selected: torch.Tensor


def run(
    step: Step,
    pcp: int,
    kind: str,
    *,
    decode: str = "replicate",
    compat: str | None = None,
    spare: int = 0,
    pack_rows: Callable[[Step, torch.Tensor, torch.Tensor], torch.Tensor] = packed,
    restore: bool = True,
) -> Outcome:
    """The step on ``pcp`` ranks; ``spare`` rows of padding on each rank beyond the largest."""
    requests = step.requests
    starts = [r.context for r in requests]
    batch = Batch(
        [r.query for r in requests], starts, [r.context + r.query if r.prefill else r.context for r in requests]
    )
    layout = build_layout(batch, pcp, kind=kind, decode=decode, compat=compat)
    layout = build_layout(
        batch, pcp, kind=kind, decode=decode, compat=compat, padded_tokens=layout.padded_tokens + spare
    )
    request = torch.repeat_interleave(torch.arange(len(requests)), torch.tensor([r.query for r in requests]))
    position = torch.cat([torch.arange(r.context, r.context + r.query) for r in requests])
    fresh = torch.cat([k[r.context :] for k, r in zip(step.keys, requests, strict=True)])

    # Pages of the requests, interleaved: request r has pages r + 1, r + 1 + R, ...; page 0 is nobody's.
    pages = max(-(-(r.context + r.query) // PAGE) for r in requests)
    table = (torch.arange(pages)[None] * len(requests) + torch.arange(len(requests))[:, None] + 1).int()
    held = empty_cache(step, pages * len(requests) + 1)
    for row, (k, r) in enumerate(zip(step.keys, requests, strict=True)):
        past = torch.arange(r.context)
        cache.scatter(held, packed(step, k[: r.context], past), slots_of(table, torch.full_like(past, row), past))

    gather, written = torch.from_numpy(layout.gather_index), torch.from_numpy(layout.write_mask)
    records = torch.cat([local_records(step, layout, rank, fresh, position, pack_rows) for rank in range(pcp)])
    slots = slots_of(table, request, position)[gather].masked_fill(~written, -1)
    cache.scatter(held, records, slots)

    found = torch.cat([local_selection(step, layout, rank, position, request, held, table, pcp) for rank in range(pcp)])
    selected = found[torch.from_numpy(layout.restore_index)] if restore else found[written]
    # Tokens that several ranks hold have one selection.
    for rank in range(pcp):
        rows = slice(rank * layout.padded_tokens, rank * layout.padded_tokens + int(layout.per_rank_tokens[rank]))
        if restore:
            assert torch.equal(found[rows], selected[gather[rows]])
        assert bool((found[rows.stop : (rank + 1) * layout.padded_tokens] == -1).all()), "padding selects nothing"
    return Outcome(held, selected)


def empty_cache(step: Step, pages: int) -> torch.Tensor:
    if step.store == "fp8":
        return torch.zeros(pages, PAGE * (DIM + 4), dtype=torch.uint8)
    return torch.zeros(pages, PAGE, DIM, dtype=pack.STORES[step.store])


def slots_of(table: torch.Tensor, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return table.long()[request, position // PAGE] * PAGE + position % PAGE


def local_records(
    step: Step,
    layout: Layout,
    rank: int,
    fresh: torch.Tensor,
    position: torch.Tensor,
    pack_rows: Callable[[Step, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    rows = torch.from_numpy(layout.gather_index).view(layout.pcp, -1)[rank]
    record = pack_rows(step, fresh[rows], position[rows])
    record[int(layout.per_rank_tokens[rank]) :] = 99  # padding holds whatever was there
    return record


def local_selection(
    step: Step,
    layout: Layout,
    rank: int,
    position: torch.Tensor,
    request: torch.Tensor,
    held: torch.Tensor,
    table: torch.Tensor,
    pcp: int,
) -> torch.Tensor:
    rows = torch.from_numpy(layout.gather_index).view(layout.pcp, -1)[rank]
    real = torch.arange(len(rows)) < int(layout.per_rank_tokens[rank])
    ke = torch.where(real, position[rows] + 1, 0).int()
    own = torch.where(real, request[rows], 0).int()
    rope = "none" if step.store == "fp32" else "interleaved"
    q, w = prep.index_prep(step.q[rows], step.w[rows], *angles(position[rows]), rope=rope, store=step.store)
    room = {1: 64 << 20, 2: 1 << 16, 3: 1 << 20, 4: 1 << 17, 8: 1 << 18}[pcp]
    return select.topk_paged(q, w, held, table, own, ke, TOPK, PAGE, workspace_bytes=room)


def by_definition(step: Step) -> torch.Tensor:
    """Request by request, from contiguous keys."""
    out, first = [], 0
    for k, r in zip(step.keys, step.requests, strict=True):
        rows, at = slice(first, first + r.query), torch.arange(r.context, r.context + r.query)
        rope = "none" if step.store == "fp32" else "interleaved"
        q, w = prep.index_prep(step.q[rows], step.w[rows], *angles(at), rope=rope, store=step.store)
        keys, scale = pack.index_unpack(packed(step, k, torch.arange(r.context + r.query)), DIM)
        scores = score.score(q, w, keys, scale)
        selected = selected_by_definition(scores, at + 1, TOPK)
        assert compare_selected(selected, selected, scores, at + 1, TOPK) == 0
        out.append(selected)
        first += r.query
    return torch.cat(out)


REQUESTS = st.lists(
    st.builds(Request, st.integers(0, 40), st.integers(1, 24), st.just(True))
    | st.builds(Request, st.integers(1, 40), st.integers(1, 3), st.just(False)),
    min_size=1,
    max_size=4,
).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    kind=st.sampled_from(KINDS),
    store=st.sampled_from(["fp8", "bf16", "fp16", "fp32"]),
    rounding=st.sampled_from(["bf16", "fp32"]),
    layout=st.sampled_from(["zigzag", "contiguous", "interleave", "vllm"]),
    decode=st.sampled_from(["replicate", "owner"]),
    spare=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 999),
)
@example((Request(0, 1),), "gaussian", "fp8", "bf16", "zigzag", "replicate", 0, 0)
@example((Request(0, 1), Request(30, 1, False), Request(9, 1)), "ties", "fp8", "fp32", "zigzag", "owner", 2, 1)
@example((Request(0, 40), Request(17, 5)), "plateau", "fp32", "bf16", "interleave", "replicate", 0, 2)
@example((Request(0, 64),), "gaussian", "fp32", "fp32", "zigzag", "replicate", 1, 3)
@example((Request(40, 3, False),), "integers", "bf16", "bf16", "vllm", "replicate", 0, 4)
def test_bytes_do_not_depend_on_the_number_of_ranks(
    requests: tuple[Request, ...], kind: str, store: str, rounding: str, layout: str, decode: str, spare: int, seed: int
) -> None:
    step = step_of(requests, kind, store, rounding, seed)
    compat = "vllm" if layout == "vllm" else None
    name = "zigzag" if layout == "vllm" else layout
    alone = run(step, 1, name)
    assert torch.equal(alone.selected, by_definition(step))
    for pcp in SIZES[1:]:
        found = run(step, pcp, name, decode=decode, compat=compat, spare=spare)
        assert torch.equal(found.cache.view(torch.uint8), alone.cache.view(torch.uint8)), f"records differ at P={pcp}"
        assert torch.equal(found.selected, alone.selected), f"selections differ at P={pcp}"


@pytest.mark.parametrize("store", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "interleave"])
def test_a_longer_prompt_with_context(store: str, layout: str) -> None:
    step = step_of((Request(100, 150), Request(0, 90), Request(70, 2, False)), "gaussian", store, "fp32", 7)
    alone = run(step, 1, layout)
    for pcp in SIZES[1:]:
        found = run(step, pcp, layout)
        assert torch.equal(found.cache.view(torch.uint8), alone.cache.view(torch.uint8))
        assert torch.equal(found.selected, alone.selected)


def test_sabotage_quantising_after_the_gather_from_bf16_is_seen() -> None:
    """One rank quantises from fp32, several from the bf16 copy that they gather: a mistake with a precedent."""
    step = step_of((Request(0, 200),), "gaussian", "fp8", "fp32", 11)

    def from_copy(step: Step, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return packed(Step(step.requests, step.keys, step.q, step.w, "fp8", "bf16"), k, positions)

    alone, found = run(step, 1, "zigzag"), run(step, 2, "zigzag", pack_rows=from_copy)
    assert not torch.equal(found.cache, alone.cache)
    assert not torch.equal(found.selected, alone.selected)


def test_sabotage_rank_major_order_taken_for_global_is_seen() -> None:
    step = step_of((Request(0, 60),), "gaussian", "fp8", "bf16", 12)
    alone = run(step, 1, "zigzag").selected
    assert not torch.equal(run(step, 2, "zigzag", restore=False).selected, alone)
    assert torch.equal(run(step, 2, "contiguous", restore=False).selected, alone)


def test_sabotage_scores_summed_in_fp32_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same chain with fp32 sums whose order depends on the number of rows, as that of a library may."""

    def narrow(
        q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, bool]:
        terms = q.float()[:, :, None] * keys.float()
        products = terms.roll(q.shape[0] % 7, dims=-1).sum(-1).relu()
        return torch.bmm(w[:, None], products)[:, 0], True

    # Every key occurs with a copy of itself that is off by one bit, so each boundary has a near tie.
    step = step_of((Request(0, 256),), "gaussian", "fp32", "bf16", 13)
    (keys,) = step.keys
    keys[1::2] = keys[::2] * (1 + 2.0**-23)
    alone = run(step, 1, "zigzag").selected
    assert all(torch.equal(run(step, pcp, "zigzag").selected, alone) for pcp in (4, 8))
    monkeypatch.setattr(select, "tile_scores", narrow)
    narrow_alone = run(step, 1, "zigzag").selected
    assert not all(torch.equal(run(step, pcp, "zigzag").selected, narrow_alone) for pcp in SIZES[1:])
