# SPDX-License-Identifier: Apache-2.0
"""Rank-local rows give vLLM's latent attention an empty context part, which its own code has to neutralise.

In a sharded prefill the context of a row is what precedes it in its request, computed by other ranks in the same step;
the first row of rank 0 has none, beside a row that has. vLLM attends to contexts and to own keys apart, and merges.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pcp_passes.attention.merge import merge_partials
from pcp_passes.layout import Batch, build_layout

HEADS, SIZE = 2, 8


@pytest.fixture(scope="module")
def mla() -> Any:
    from vllm.model_executor.layers.attention import mla_attention

    return mla_attention


def rows(rank: int) -> list[tuple[int, int]]:
    """``(context, tokens)`` of each row of a rank: prompts of 24 and 9 tokens over two ranks."""
    batch = Batch(
        np.array([24, 9], dtype=np.int32), np.zeros(2, dtype=np.int32), np.array([24, 9], dtype=np.int32),
        np.array([True, True]),
    )  # fmt: skip
    held = build_layout(batch, 2, compat="vllm").rows(rank)
    return list(zip(held.row_start.tolist(), held.row_length.tolist(), strict=True))


def partials(rank: int, garbage: float) -> tuple[list[slice], list[torch.Tensor], torch.Tensor]:
    """Slices of the rows without context; ``(out, lse)`` of contexts and of own keys; which tokens have no context."""
    rng = torch.Generator().manual_seed(rank)
    count = sum(length for _, length in rows(rank))
    values = [torch.randn(count, HEADS, SIZE, generator=rng) for _ in range(2)]
    levels = [torch.randn(HEADS, count, generator=rng) for _ in range(2)]
    empty, slices, begin = torch.zeros(count, dtype=torch.bool), [], 0
    for context, length in rows(rank):
        if not context:
            slices.append(slice(begin, begin + length))
            empty[begin : begin + length] = True
        begin += length
    values[0][empty], levels[0][:, empty] = garbage, garbage
    return slices, [values[0], levels[0], values[1], levels[1]], empty


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 7.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_rows_without_context_keep_their_own_keys(mla: Any, rank: int, garbage: float) -> None:
    slices, (context, context_lse, own, own_lse), empty = partials(rank, garbage)
    assert bool(empty.any()) == (rank == 0), "rank 0 holds the beginning of both prompts"
    expected_lse = context_lse.masked_fill(empty, -math.inf)
    expected, _ = merge_partials((context, own), (expected_lse.T, own_lse.T))

    def merged() -> torch.Tensor:
        out = torch.full_like(own, math.nan)
        mla.merge_attn_states(out, context, context_lse, own, own_lse)
        return out

    before = merged()
    mla.neutralize_empty_context_partials(SimpleNamespace(empty_token_slices=slices), context, context_lse)
    torch.testing.assert_close(merged(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(expected[empty], own[empty])
    if rank == 0:
        assert not torch.allclose(before[empty], own[empty]), "without it they hold what the buffer held"
