# SPDX-License-Identifier: Apache-2.0
"""``pcp::attend`` written out with an explicit mask: what every other path is compared with."""

from __future__ import annotations

import torch


def attend_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    left: int = -1,
    right: int = 0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Same arguments and result as :func:`pcp_passes.attention.attend`, in O(M * S) memory.

    Computed in float64 and returned in the dtype of ``q``.
    """
    groups = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(groups, dim=1)
    values = v.double().repeat_interleave(groups, dim=1)
    logits = torch.matmul(q.double(), keys.transpose(-1, -2)) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    row = positions[:, None]
    key = torch.arange(k.shape[2], device=k.device)[None, :]
    if slopes is not None:
        logits = logits + slopes.double()[:, None, None] * (key - row)
    seen = torch.ones(row.shape[0], key.shape[1], dtype=torch.bool, device=k.device)
    if left >= 0:
        seen = seen & (row - key <= left)
    if right >= 0:
        seen = seen & (key - row <= right)
    if chunk > 0:
        seen = seen & (row // chunk == key // chunk)
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)
        weights = torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(logits, dim=-1)
    # A row that sees no key is 0 / 0 without a sink; its output is defined as 0. A key no row sees may hold anything.
    weights = weights.masked_fill(~seen, 0.0)
    values = values.masked_fill(~seen.any(0)[:, None], 0.0)
    return torch.matmul(weights, values).to(q.dtype)
