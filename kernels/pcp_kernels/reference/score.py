# SPDX-License-Identifier: Apache-2.0
"""Scores of the lightning indexer, ``s[j] * sum_h w[i, h] * relu(q[i, h] . k[j])``, rounded once.

All sums run in fp64 and the score is rounded to fp32 at the end. A matrix product rounds differently for different
shapes, so scores summed in fp32 would depend on how rows and keys are tiled, and with that on the number of ranks.
"""

from __future__ import annotations

from math import isfinite

import torch


def score(q: torch.Tensor, w: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Scores ``[T, N]``: fp32, or fp64 when ``q`` is. Holds ``[T, H, N]``; selections tile it instead.

    Args:
        q: ``[T, H, D]`` of any floating dtype, FP8 too.
        w: ``[T, H]``, with the scales of FP8 queries folded in.
        k: ``[N, D]``.
        k_scale: ``[N]``, or None for keys without scales.
    """
    scale = None if k_scale is None else k_scale.to(torch.float64)
    return tile_scores(q, w, k.to(torch.float64), scale)[0]


def tile_scores(
    q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, bool]:
    """(:func:`score`, whether surely none is NaN) of keys and scales that are fp64 already."""
    rows, heads, dim = q.shape
    per_head = torch.matmul(q.to(torch.float64).reshape(rows * heads, dim), keys.t()).clamp_(min=0)
    per_head = per_head.view(rows, heads, -1)
    weights = w.to(torch.float64)[:, None]
    out = torch.bmm(weights, per_head)
    if scale is not None:
        out.mul_(scale)
    numbers = isfinite(out.sum())
    if not numbers:
        # relu is max(x, 0) as hardware has it, which drops a NaN of q . k; clamp keeps it. Rare, so looked for late.
        torch.bmm(weights, per_head.nan_to_num_(nan=0.0, posinf=float("inf")), out=out)
        if scale is not None:
            out.mul_(scale)
    out = out[:, 0]
    return out if q.dtype == torch.float64 else out.to(torch.float32), numbers
