# SPDX-License-Identifier: Apache-2.0
"""Known mistakes of indexers, each made on purpose: the checks that guard the references turn red for every one.

A prompt of 45 tokens on two ranks goes the whole way: keys are packed where they are, gathered with their padding,
scattered into pages, and each rank selects for its rows. The oracle is a second implementation of the formulas, in
fp64, without records, ranks or pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as memo
from typing import Any

import pytest
import torch

from pcp_kernels.reference import cache, order, pack, prep, score, select
from pcp_passes.layout import Batch, Layout, build_layout
from tests.comparator import compare_selected, selected_by_definition

pytestmark = pytest.mark.unit

TOKENS, HEADS, DIM, ROPE, TOPK, PAGE, PCP = 45, 4, 32, 16, 6, 16, 2
FACTOR = HEADS**-0.5 * DIM**-0.5


@dataclass(frozen=True)
class Case:
    """Projections of one prompt, and the angles of its positions."""

    k: torch.Tensor
    q: torch.Tensor
    w: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


@memo
def case() -> Case:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().float()

    # Keys of many sizes, so that their scales matter; weights of both signs.
    k = draw(TOKENS, DIM) * torch.exp2(torch.randint(-3, 4, (TOKENS, 1), generator=generator))
    theta = torch.arange(TOKENS)[:, None] * 0.5 ** torch.arange(ROPE // 2)
    return Case(k, draw(TOKENS, HEADS, DIM), draw(TOKENS, HEADS), theta.cos(), theta.sin())


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Half-split RoPE as complex numbers, over ROPE values from ``first``."""
    out, half = x.double().clone(), ROPE // 2
    a, b = out[..., first : first + half].clone(), out[..., first + half : first + ROPE].clone()
    shape = (cos.shape[0], *[1] * (x.ndim - 2), half)
    turned = torch.complex(a, b) * torch.complex(cos.double(), sin.double()).view(shape)
    out[..., first : first + half], out[..., first + half : first + ROPE] = turned.real, turned.imag
    return out


def quantised(x: torch.Tensor, *, scaled: bool = True) -> torch.Tensor:
    """Values after FP8 with the logarithm form of the scale, in fp64; the scale left out unless ``scaled``."""
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    values = (x / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
    return values * scale if scaled else values


def logits(c: Case, *, factor: float = FACTOR, first: int = 0, scaled: bool = True, relu: str = "each") -> torch.Tensor:
    """fp64 ``[T, T]`` by the formulas; the arguments are the places where mistakes are made."""
    q = quantised(rotated(c.q, c.cos, c.sin, first).float())
    k = quantised(rotated(c.k, c.cos, c.sin, first).float().bfloat16(), scaled=scaled)
    products = torch.einsum("thd,nd->thn", q, k)
    if relu == "each":
        products = products.relu()
    out = torch.einsum("th,thn->tn", c.w.double() * factor, products)
    return out.relu() if relu == "sum" else out


VISIBLE = torch.arange(1, TOKENS + 1)


def bounds(layout: Layout, rank: int) -> torch.Tensor:
    """i32 ``[M]``: position + 1 of each row of the rank, 0 on its padding."""
    out = torch.zeros(layout.padded_tokens, dtype=torch.int32)
    start = rank * layout.padded_tokens
    held = torch.from_numpy(layout.gather_index[start : start + int(layout.per_rank_tokens[rank])])
    out[: len(held)] = held.int() + 1
    return out


def chain(
    c: Case,
    *,
    rope: str = "half",
    pad_slot: int = -1,
    bound: Callable[[Layout, int], torch.Tensor] = bounds,
    select_rows: Callable[..., torch.Tensor] = select.topk_paged,
) -> torch.Tensor:
    """i32 ``[T, TOPK]`` in global order, through records, a gather of two ranks, pages and each rank's selection."""
    layout = build_layout(Batch([TOKENS], [0], [TOKENS]), PCP)
    gather, written = torch.from_numpy(layout.gather_index), torch.from_numpy(layout.write_mask)
    local = gather.view(PCP, -1)
    records = []
    for rank in range(PCP):
        record = pack.index_pack(c.k[local[rank]], None, None, 0.0, c.cos[local[rank]], c.sin[local[rank]], rope=rope)
        record[int(layout.per_rank_tokens[rank]) :] = 77  # a rank's padding holds whatever was there
        records.append(record)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    slot_of = table[0].long()[torch.arange(TOKENS) // PAGE] * PAGE + torch.arange(TOKENS) % PAGE
    slots = torch.where(written, slot_of[gather], pad_slot)
    held = torch.zeros(4, PAGE * (DIM + 4), dtype=torch.uint8)
    for record, where in zip(records, slots.view(PCP, -1), strict=True):
        cache.scatter(held, record, where)
    found = []
    for rank in range(PCP):
        rows = local[rank]
        q, w = prep.index_prep(c.q[rows], c.w[rows], c.cos[rows], c.sin[rows], rope=rope, factor=FACTOR)
        request = torch.zeros(len(rows), dtype=torch.int32)
        found.append(select_rows(q, w, held, table, request, bound(layout, rank), TOPK, PAGE))
    return torch.cat(found)[torch.from_numpy(layout.restore_index)]


def by_logits(scores: torch.Tensor) -> torch.Tensor:
    return selected_by_definition(scores, VISIBLE, TOPK)


def judge(found: torch.Tensor) -> int:
    """Against the oracle; a band of 2**-20 for fp32 beside fp64, which no two keys of this case fall into."""
    scores = logits(case())
    return compare_selected(found, by_logits(scores), scores, VISIBLE, TOPK, epsilon=float(scores.abs().max()) * 2**-20)


def scored_without_relu(c: Case) -> torch.Tensor:
    return by_logits(logits(c, relu="none"))


def scored_with_relu_after_the_sum(c: Case) -> torch.Tensor:
    return by_logits(logits(c, relu="sum"))


def scored_without_key_scales(c: Case) -> torch.Tensor:
    return by_logits(logits(c, scaled=False))


def rotated_in_the_wrong_pairs(c: Case) -> torch.Tensor:
    return chain(c, rope="interleaved")


def rotated_at_the_end(c: Case) -> torch.Tensor:
    return by_logits(logits(c, first=DIM - ROPE))


def bounded_by_the_position(c: Case) -> torch.Tensor:
    return chain(c, bound=lambda layout, rank: (bounds(layout, rank) - 1).clamp(min=0))


def bounded_by_the_local_row(c: Case) -> torch.Tensor:
    def local(layout: Layout, rank: int) -> torch.Tensor:
        return torch.where(bounds(layout, rank) > 0, torch.arange(1, layout.padded_tokens + 1), 0).int()

    return chain(c, bound=local)


def bounded_by_the_other_chunk(c: Case) -> torch.Tensor:
    return chain(c, bound=lambda layout, rank: bounds(layout, rank).roll(layout.padded_tokens // 2))


def padded_to_slot_zero(c: Case) -> torch.Tensor:
    return chain(c, pad_slot=0)


def selected_from_the_last_tile(c: Case) -> torch.Tensor:
    """Keys in two tiles of which the second's best replace the first's, where they are enough."""

    def forget(q: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = select.topk_paged(q, w, *rest)
        ke = rest[3]
        keys, scale = cache.gather(rest[0], (rest[1][0].long()[:, None] * PAGE + torch.arange(PAGE)).flatten(), DIM)
        late = score.score(q, w, keys, scale)[:, PAGE:]
        last = select.select_scores(late, (ke - PAGE).clamp(min=0), TOPK)
        return torch.where(ke[:, None] >= PAGE + TOPK, last + PAGE, out)

    return chain(c, select_rows=forget)


def selected_without_sorting(c: Case) -> torch.Tensor:
    found = chain(c)
    return torch.where(found >= 0, found.flip(1), found)


def selected_with_zeros_for_none(c: Case) -> torch.Tensor:
    return chain(c).clamp(min=0)


MUTANTS = (
    scored_without_relu,
    scored_with_relu_after_the_sum,
    scored_without_key_scales,
    rotated_in_the_wrong_pairs,
    rotated_at_the_end,
    bounded_by_the_position,
    bounded_by_the_local_row,
    bounded_by_the_other_chunk,
    padded_to_slot_zero,
    selected_from_the_last_tile,
    selected_without_sorting,
    selected_with_zeros_for_none,
)


def test_the_chain_is_the_oracle() -> None:
    assert judge(chain(case())) == 0
    assert judge(by_logits(logits(case()))) == 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant: Callable[[Case], torch.Tensor]) -> None:
    with pytest.raises(AssertionError, match=r"rows are wrong"):
        judge(mutant(case()))


def test_mutants_of_the_scorer_itself_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's own function, changed: what guards it is not only guarding a copy."""

    def no_relu(q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, bool]:
        products = torch.einsum("thd,nd->thn", q.double(), keys)
        return (torch.einsum("th,thn->tn", w.double(), products) * scale).float(), True

    def no_scale(
        q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, bool]:
        return score.tile_scores(q, w, keys, None)

    for mutant in (no_relu, no_scale):
        monkeypatch.setattr(select, "tile_scores", mutant)
        with pytest.raises(AssertionError, match=r"rows are wrong"):
            judge(chain(case()))
    monkeypatch.undo()
    assert judge(chain(case())) == 0


def test_a_common_factor_shows_in_logits_and_never_in_a_selection() -> None:
    c = case()
    bare = logits(c, factor=DIM**-0.5)
    assert judge(by_logits(bare)) == 0
    q, w = prep.index_prep(c.q, c.w, c.cos, c.sin, rope="half", factor=FACTOR)
    k, scale = pack.index_unpack(pack.index_pack(c.k, None, None, 0.0, c.cos, c.sin, rope="half"), DIM)
    found = score.score(q, w, k, scale).double()
    near = {"rtol": 1e-5, "atol": 1e-5}
    assert torch.allclose(found, logits(c), **near)
    assert not torch.allclose(found, bare, **near)


def test_verification_rows_off_by_one_are_caught() -> None:
    """Three rows at the end of a request of 45: row j sees 43 + j keys, and the mistake 42 + j."""
    c = case()
    q, w = prep.index_prep(c.q[-3:], c.w[-3:].abs(), c.cos[-3:], c.sin[-3:], rope="half", factor=FACTOR)
    keys, scale = pack.index_unpack(pack.index_pack(c.k, None, None, 0.0, c.cos, c.sin, rope="half"), DIM)
    assert scale is not None
    # The newest key of each row scores highest, as it does in a model that attends to the present.
    k, scale = torch.cat((keys[:-3], q[:, 0])), torch.cat((scale[:-3], scale.max().expand(3) * 8))
    right = torch.tensor([43, 44, 45], dtype=torch.int32)
    zeros = torch.zeros(3, dtype=torch.int32)
    scores = score.score(q, w, k, scale)
    wanted = selected_by_definition(scores, right, TOPK)
    assert bool((wanted[:, -1] == right - 1).all())
    assert compare_selected(select.topk_rows(q, w, k, scale, zeros, right, TOPK), wanted, scores, right, TOPK) == 0
    for wrong in (right - 1, right + torch.tensor([1, 1, 0])):
        found = select.topk_rows(q, w, k, scale, zeros, wrong.int(), TOPK)
        with pytest.raises(AssertionError, match=r"rows are wrong"):
            compare_selected(found, wanted, scores, right, TOPK)


def test_double_rounding_moves_three_percent_of_the_elements_and_some_keys() -> None:
    generator = torch.Generator().manual_seed(3)
    k, q = torch.randn(2000, 128, generator=generator), torch.randn(4, 8, 128, generator=generator)
    w = torch.randn(4, 8, generator=generator)
    direct, twice = (pack.index_pack(k, rounding=rounding) for rounding in ("fp32", "bf16"))
    share = float((direct[:, :128] != twice[:, :128]).float().mean())
    assert 0.025 < share < 0.038
    q8, w8 = prep.index_prep(q, w)
    valid = torch.full((4,), 2000)
    zeros = torch.zeros(4, dtype=torch.int32)
    found = []
    for record in (direct, twice):
        keys, scale = pack.index_unpack(record, 128)
        found.append(select.topk_rows(q8, w8, keys, scale, zeros, valid, 200))
    scores = score.score(q8, w8, *pack.index_unpack(direct, 128))
    assert compare_selected(found[0], found[0], scores, valid, 200) == 0
    with pytest.raises(AssertionError, match=r"4 rows are wrong"):
        compare_selected(found[1], found[0], scores, valid, 200)


def streamed(keys: list[int], topk: int, capacity: int, block: int, gate: str) -> tuple[list[int], int]:
    """(selection, appended): keys in blocks through a gate into a buffer, thinned to the best when it may overflow."""
    kept: list[tuple[int, int]] = []
    threshold, appended = -math.inf, 0
    for start in range(0, len(keys), block):
        for index in range(start, min(start + block, len(keys))):
            if keys[index] > threshold or (gate == ">=" and keys[index] == threshold):
                kept.append((keys[index], index))
                appended += 1
        if len(kept) > capacity - block:
            kept = sorted(sorted(kept, key=lambda pair: (-pair[0], pair[1]))[:topk], key=lambda pair: pair[1])
            threshold = min(key for key, _ in kept) if len(kept) == topk else threshold
    best = sorted(kept, key=lambda pair: (-pair[0], pair[1]))[:topk]
    return sorted(index for _, index in best), appended


@pytest.mark.parametrize("data", ["plateau", "integers", "rising", "falling"])
def test_gates_of_a_streaming_selection(data: str) -> None:
    """Both gates are exact; on a plateau of zeros ``>`` stops appending and ``>=`` never does."""
    generator = torch.Generator().manual_seed(1)
    values = {
        "plateau": torch.zeros(400),
        "integers": torch.randint(0, 5, (400,), generator=generator).float(),
        "rising": torch.arange(400.0),
        "falling": -torch.arange(400.0),
    }[data]
    keys = order.sortable_key(values).tolist()
    wanted = select.select_scores(values[None], torch.tensor([400]), 16)[0].tolist()
    strict, few = streamed(keys, 16, 48, 16, ">")
    loose, many = streamed(keys, 16, 48, 16, ">=")
    assert strict == loose == wanted
    if data == "plateau":
        assert few <= 48
        assert many == 400
    # A buffer that is cut to what came first, instead of thinned to the best, is not exact.
    assert (sorted(range(16)) == wanted) is (data in ("plateau", "falling"))
