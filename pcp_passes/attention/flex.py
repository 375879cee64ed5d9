# SPDX-License-Identifier: Apache-2.0
"""``pcp::attend`` on CUDA: FlexAttention with a block mask made of positions, on the device alone (no host sync).

Never run on a GPU by this project's tests: they run the same functions on CPU, where FlexAttention computes the score
and mask functions densely, and compare the block mask with PyTorch's own construction. Checked with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch._dynamo.config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from pcp_passes.attention.tiles import intervals

BLOCK = 128
"""Rows and keys of a block of the mask: FlexAttention's default."""


def attend_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    left: int,
    right: int,
    chunk: int,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    softcap: float,
) -> None:
    """Fill ``out`` ``[B, Hq, M, Dv]`` with one fused kernel, compiled once for all lengths."""
    low, high = intervals(positions, k.shape[2], left, right, chunk)
    blocks = block_indices(low, high, k.shape[2])
    # FlexAttention refuses the symbolic floats that Dynamo would make of the scale and the soft cap.
    with torch._dynamo.config.patch(specialize_float=True):
        out.copy_(_compiled()(q, k, v, positions, low, high, blocks, scale, sinks, slopes, softcap))


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return compile_masked("inductor")


def compile_masked(backend: str | Callable[..., Any]) -> Any:
    """:func:`attend_masked` compiled once for all lengths; once again for each scale, soft cap and set of options."""
    return torch.compile(attend_masked, dynamic=True, fullgraph=True, backend=backend)


def attend_masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """The part that is compiled: row m sees keys ``[low[m], high[m])``; ``blocks`` as :func:`block_indices` gives."""

    def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= low[row]) & (key < high[row])

    def score(
        logit: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        if softcap > 0:
            logit = softcap * torch.tanh(logit / softcap)
        if slopes is not None:
            logit = logit + slopes[head] * (key - positions[row])
        return logit

    block_mask = BlockMask.from_kv_blocks(
        *blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(q.shape[2], k.shape[2]),
        compute_q_blocks=False,
    )
    call: Any = flex_attention
    score_mod = score if softcap > 0 or slopes is not None else None
    grouped = q.shape[1] != k.shape[1]
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": grouped}
    if sinks is None:
        plain: torch.Tensor = call(q, k, v, **options)
        return plain
    value, aux = call(q, k, v, **options, return_aux=AuxRequest(lse=True))
    weight = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
    weighted: torch.Tensor = value * weight[..., None]
    return weighted.to(q.dtype)


def block_indices(
    low: torch.Tensor, high: torch.Tensor, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks of keys that each block of :data:`BLOCK` rows visits, in O(M * S / BLOCK**2) memory.

    Returns:
        ``(partial count, partial indices, full count, full indices)``, i32 ``[1, 1, R]`` and ``[1, 1, R, C]`` for R
        blocks of rows and C blocks of keys. A full block needs no mask; the last, incomplete block of rows has none.
    """
    rows = low.shape[0]
    missing = -rows % BLOCK
    # Rows past the end repeat the last one, so they add nothing to the hull of their block.
    index = torch.arange(rows + missing, device=low.device).clamp(max=rows - 1)
    lows, highs = low[index].view(-1, BLOCK), high[index].view(-1, BLOCK)
    # Rows that see no key must not widen the hull of the others.
    blind = lows >= highs
    first = lows.masked_fill(blind, keys).amin(1, keepdim=True)
    last = highs.masked_fill(blind, 0).amax(1, keepdim=True)
    start = torch.arange(0, keys, BLOCK, device=low.device)[None, :]
    stop = start + BLOCK
    visited = (start < last) & (stop > first)
    full = (start >= lows.amax(1, keepdim=True)) & (stop <= highs.amin(1, keepdim=True))
    if missing:
        full[-1] = False
    return (*_ordered(visited & ~full), *_ordered(full & visited))


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count of set columns of each row, and the columns with the set ones first, ascending."""
    columns = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.to(torch.int32)[None, None].contiguous()
