# SPDX-License-Identifier: Apache-2.0
"""Merges of partial attention: exact, and deaf to parts without keys whatever their buffers hold.

Measured against one softmax in float64: at most 2e-15 for f64 parts, 7e-7 for f32, 8e-4 for f16 and 8e-3 for bf16 (the
rounding of the parts themselves); 2 or more, or NaN, under each sabotage.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pcp_passes.attention import attend, attend_reference, blocks
from pcp_passes.attention.merge import merge_partials
from pcp_passes.attention.parts import Result, explicit_part
from pcp_passes.layout import Batch, build_layout

CLEAN = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BROKEN = 0.5
GARBAGE = (math.nan, math.inf, -math.inf, 3e38, -1.0)
EMPTY = (-math.inf, math.inf)


def drawn(parts: int, rows: int = 5, heads: int = 3, size: int = 8, keys: int = 7) -> tuple[list[Result], Result]:
    """``parts`` results over ``keys`` keys each in f64, and the result over all keys."""
    rng = torch.Generator().manual_seed(parts)
    logits = 4 * torch.randn(rows, heads, parts * keys, generator=rng, dtype=torch.float64)
    values = torch.randn(heads, parts * keys, size, generator=rng, dtype=torch.float64)

    def result(first: int, last: int) -> Result:
        held = logits[..., first:last]
        return torch.einsum("nhk,hkd->nhd", held.softmax(-1), values[:, first:last]), held.logsumexp(-1)

    return [result(part * keys, (part + 1) * keys) for part in range(parts)], result(0, parts * keys)


def apart(found: Result, expected: Result) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((x.double() - y).nan_to_num(1e9, 1e9, -1e9).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("dtype", CLEAN)
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_make_the_whole(parts: int, dtype: torch.dtype) -> None:
    held, whole = drawn(parts)
    outputs = torch.stack([out for out, _ in held]).to(dtype)
    levels = torch.stack([lse for _, lse in held])
    levels = levels if dtype == torch.float64 else levels.float()
    found = merge_partials(outputs, levels)
    assert found[0].dtype == found[1].dtype == levels.dtype
    assert apart(found, whole) < CLEAN[dtype]
    if parts > 1:
        assert apart(merge_partials(outputs, levels.flip(0)), whole) > BROKEN, "the weights matter"
        assert apart(merge_partials(outputs[:-1], levels[:-1]), whole) > BROKEN, "every part matters"


@pytest.mark.parametrize("dtype", CLEAN)
@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_an_empty_part_never_contributes(garbage: float, empty: float, dtype: torch.dtype) -> None:
    """Some rows of some parts are empty, and the result of each row is bit for bit that of its other parts."""
    held, _ = drawn(3)
    outputs = torch.stack([out for out, _ in held]).to(dtype)
    levels = torch.stack([lse for _, lse in held])
    gone = torch.zeros(3, 5, dtype=torch.bool)
    gone[0, 1] = gone[2, 2] = gone[1, 3] = gone[2, 3] = gone[:, 4] = True
    outputs[gone], levels[gone] = garbage, empty
    before = outputs.clone()
    out, lse = merge_partials(outputs, levels)
    assert torch.equal(outputs, before) or math.isnan(garbage), "operands are not written"
    for row in range(4):
        kept = [part for part in range(3) if not gone[part, row]]
        alone = merge_partials(outputs[kept][:, row], levels[kept][:, row])
        assert torch.equal(out[row], alone[0])
        assert torch.equal(lse[row], alone[1])
    assert bool((out[4] == 0).all())
    assert bool((lse[4] == -math.inf).all())


def by_weight(first: Result, second: Result) -> Result:
    """Sabotage: the usual formula, which multiplies what an empty part holds by a weight of 0."""
    weight = torch.sigmoid(first[1] - second[1])[..., None]
    return weight * first[0] + (1 - weight) * second[0], torch.logaddexp(first[1], second[1])


def by_zero(first: Result, second: Result) -> Result:
    """Sabotage: an empty part is taken at lse 0, as a buffer that was zeroed and not marked."""
    levels = [one[1].masked_fill(one[1] == -math.inf, 0.0) for one in (first, second)]
    return by_weight((first[0].nan_to_num(), levels[0]), (second[0].nan_to_num(), levels[1]))


def test_a_nan_of_a_part_with_keys_is_not_hidden() -> None:
    (first, second), _ = drawn(2)
    spoilt = first[0].clone()
    spoilt[1, 2, 3] = math.nan
    out, lse = merge_partials((spoilt, second[0]), (first[1], second[1]))
    assert out.isnan().nonzero().tolist() == [[1, 2, 3]]
    level = first[1].clone()
    level[2, 0] = math.nan
    out, lse = merge_partials((first[0], second[0]), (level, second[1]))
    assert bool(out[2, 0].isnan().all())
    assert lse.isnan().nonzero().tolist() == [[2, 0]]


Merge = Callable[[Result, Result], Result]


def pairwise(first: Result, second: Result) -> Result:
    return merge_partials((first[0], second[0]), (first[1], second[1]))


def of_ranks(merge: Merge, pcp: int, garbage: float) -> list[list[float]]:
    """Error of each row of each rank: a prompt of 16 tokens over ``pcp`` ranks, context and own keys apart.

    The context of a row are the keys before it, which other ranks computed in the same step; that of rank 0's first row
    is empty, and nobody writes its buffers.
    """
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=rng, dtype=torch.float64) for _ in range(3))
    whole = attend_reference(q, k, v, torch.arange(16), scale=1.0)
    batch = Batch(*(np.array([x]) for x in (16, 0, 16, True)))
    layout = build_layout(batch, pcp)
    found: list[list[float]] = []
    for rank in range(pcp):
        rows = layout.rows(rank)
        found.append([])
        for start, length in zip(rows.row_start.tolist(), rows.row_length.tolist(), strict=True):
            mine = slice(start, start + length)
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            causal = torch.zeros(length, length, dtype=torch.float64).masked_fill(later, -math.inf)
            own = explicit_part(q[:, :, mine], k[:, :, mine], v[:, :, mine], 1.0, 0.0, causal)
            buffer = torch.full_like(own[0], garbage), torch.full_like(own[1], -math.inf)
            context = (
                explicit_part(q[:, :, mine], k[:, :, :start], v[:, :, :start], 1.0, 0.0, None) if start else buffer
            )
            out = merge(context, own)[0] - whole[:, :, mine]
            found[-1].append(float(out.nan_to_num(1e9).abs().max()))
    return found


@pytest.mark.parametrize("pcp", [2, 4])
def test_a_rank_with_an_empty_context_part(pcp: int) -> None:
    for garbage in GARBAGE:
        assert max(max(rows) for rows in of_ranks(pairwise, pcp, garbage)) < 1e-14
    for sabotage in (by_weight, by_zero):
        wrong = of_ranks(sabotage, pcp, math.nan)
        assert wrong[0][0] > BROKEN, sabotage
        assert max(wrong[0][1:] + [x for rows in wrong[1:] for x in rows]) < 1e-14, "the other rows have a context"


@pytest.mark.parametrize("softcap", [0.0, 1.5], ids=["flash", "explicit"])
@pytest.mark.parametrize("merge", [pairwise, by_weight])
def test_a_row_is_deaf_to_a_part_it_does_not_see(merge: Merge, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 300 to 309 with a window: key 100 is in a part with others, of which the last row sees none."""
    monkeypatch.setattr(blocks, "merge", merge)
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(1, 2, 10, 8, generator=rng, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 320, 8, generator=rng, dtype=torch.float64) for _ in range(2))
    where = torch.arange(300, 310)
    expected = attend_reference(q, k, v, where, scale=1.0, left=200, softcap=softcap)
    v[:, :, 100] = math.nan
    found = attend(q, k, v, where, scale=1.0, left=200, softcap=softcap)
    assert bool(found[:, :, 0].isnan().all()), "the first row sees it"
    deaf = float((found[:, :, -1] - expected[:, :, -1]).nan_to_num(1e9).abs().max())
    assert (deaf < 1e-11) == (merge is pairwise), deaf
