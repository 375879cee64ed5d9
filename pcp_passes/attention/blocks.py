# SPDX-License-Identifier: Apache-2.0
"""``pcp::attend`` tile by tile, in memory that does not grow with ``M * S``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pcp_passes.attention.parts import Result, explicit_part, flash_part, merge, work_dtype
from pcp_passes.attention.tiles import ROWS, Part, Sight, Tile, plan


def attend_blocks(
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
    """Fill ``out`` ``[B, Hq, M, Dv]``. Reads ``positions`` on the host."""
    work = work_dtype(q.dtype)
    flash = q.device.type == "cpu" and softcap <= 0
    # The bias of ALiBi is taken relative to the tile, where it is small; materialised logits want few rows.
    tiles = plan(positions, k.shape[2], left, right, chunk, 0 if flash and slopes is None else ROWS)
    if sum(tile.stop - tile.start for tile in tiles) < q.shape[2]:
        out.zero_()
    size = v.shape[-1]
    if flash:
        q, k, v = (_unit_stride(x) for x in _equal_heads(q, k, v))
    if slopes is not None:
        slopes = slopes.to(work)
    for tile in tiles:
        rows = q[:, :, tile.start : tile.stop]
        result: Result | None = None
        for part in tile.parts:
            keys, values = k[:, :, part.start : part.stop], v[:, :, part.start : part.stop]
            causal = flash and part.sight is Sight.CAUSAL
            masked = part.sight is not Sight.FULL and not causal
            bias = _bias(tile, part, masked, slopes, work, q.device)
            if flash:
                value, lse = flash_part(rows, keys, values, scale, causal, bias)
                if masked:
                    # The kernel's lse of a row that sees nothing here is 0, which would give it weight.
                    lse = lse.masked_fill(tile.blind(part), float("-inf"))
            else:
                value, lse = explicit_part(rows, keys, values, scale, softcap, bias)
            result = (value, lse) if result is None else merge(result, (value, lse))
        assert result is not None, f"tile {tile.start}:{tile.stop} has no part"
        value, lse = result
        if sinks is not None:
            if slopes is not None:
                shift = tile.origin - positions[tile.start : tile.stop].to(work)
                lse = lse + slopes[:, None] * shift
            value = value * torch.sigmoid(lse - sinks.to(work)[:, None])[..., None]
        out[:, :, tile.start : tile.stop] = value[..., :size]


def _equal_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zero columns change neither logits nor the other columns of the output; MLA has 192 against 128."""
    missing = v.shape[-1] - q.shape[-1]
    if missing > 0:
        return F.pad(q, (0, missing)), F.pad(k, (0, missing)), v
    if missing < 0:
        return q, k, F.pad(v, (0, -missing))
    return q, k, v


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(
    tile: Tile,
    part: Part,
    masked: bool,
    slopes: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Bias broadcastable to ``[B, Hq, rows, keys]``, or None."""
    bias = None
    if slopes is not None:
        distance = torch.arange(part.start, part.stop, dtype=dtype, device=device) - tile.origin
        bias = (slopes[:, None] * distance)[None, :, None, :]
    if masked:
        hidden = ~tile.seen(part).to(device)
        if bias is None:
            return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))[None, None]
        bias = bias.masked_fill(hidden, float("-inf"))
    return bias
