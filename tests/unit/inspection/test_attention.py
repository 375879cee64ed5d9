# SPDX-License-Identifier: Apache-2.0
"""Attention work of a layout against a count of the mask itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from pcp_passes.frontends.torch.plan import build_plan
from pcp_passes.inspection.attention import Sight


def counted(sight: Sight, rows: torch.Tensor, tokens: int) -> list[int]:
    """Pairs under the definition of ``pcp::attend``."""
    i, j = rows[:, :, None], torch.arange(tokens)
    seen = torch.ones(*rows.shape, tokens, dtype=torch.bool)
    if sight.left >= 0:
        seen &= i - j <= sight.left
    if sight.right >= 0:
        seen &= j - i <= sight.right
    if sight.chunk:
        seen &= i // sight.chunk == j // sight.chunk
    return [int(count) for count in seen.sum(dim=(1, 2))]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "interleave"])
@pytest.mark.parametrize("tokens", [8, 37])
def test_pairs_are_those_of_the_mask(layout: str, tokens: int) -> None:
    rows = build_plan(tokens, 3, layout).rows
    for left, right, chunk in itertools.product((-1, 0, 4, 50), (-1, 0, 3), (0, 5)):
        sight = Sight(left, right, chunk)
        assert sight.pairs(rows, tokens) == counted(sight, rows, tokens), sight
    assert Sight(0, 0).pairs(rows, tokens) != Sight(4, 0).pairs(rows, tokens)


def test_zigzag_is_even_where_contiguous_is_not() -> None:
    assert Sight(right=0).pairs(build_plan(8, 2, "zigzag").rows, 8) == [18, 18]
    assert Sight(right=0).pairs(build_plan(8, 2, "contiguous").rows, 8) == [10, 26]


def test_an_explicit_mask_skips_nothing() -> None:
    assert Sight(explicit=True).pairs(build_plan(8, 2, "zigzag").rows, 8) == [32, 32]


def test_what_has_to_be_kept() -> None:
    assert [Sight(15, 0).reach, Sight(right=0).reach, Sight(31, 0, chunk=8).reach] == [16, 0, 8]
    assert [str(Sight(15, 0)), str(Sight()), str(Sight(right=0, chunk=8))] == [
        "causal, window of 16", "all keys", "causal, chunks of 8",
    ]  # fmt: skip
