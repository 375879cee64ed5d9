# SPDX-License-Identifier: Apache-2.0
"""Reference selection of DeepSeek's lightning indexer over a paged cache of index keys."""

from __future__ import annotations

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.paged.state import AttentionInputs

_SCORED_ELEMENTS = 1 << 22
"""Per-head scores materialised at once."""


def select(
    q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, inputs: AttentionInputs, topk: int
) -> torch.Tensor:
    """i32 ``[N, topk]``; see :func:`pcp_passes.paged.index_topk`.

    Raises:
        ConfigError: shapes that do not fit together.
    """
    if q.shape[0] != inputs.rows or weights.shape != q.shape[:2] or q.shape[2] != cache.shape[3]:
        raise ConfigError(
            f"found index queries {list(q.shape)}, weights {list(weights.shape)} and an index cache "
            f"{list(cache.shape)} for {inputs.rows} rows; required [N, Hi, D], [N, Hi] and [blocks, block size, 1, D]."
        )
    out = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    for (_, start, stop, keys), slots in zip(inputs.segments, inputs.key_slots(cache.shape[1]), strict=True):
        positions = inputs.positions[start:stop]
        if keys <= topk:
            # Every visible key is selected, whatever it scores.
            held = torch.arange(keys, device=q.device)
            out[start:stop, :keys] = torch.where(held <= positions[:, None], held, -1).int()
            continue
        rows = cache.flatten(0, 2).index_select(0, slots).to(q.dtype)
        step = max(1, _SCORED_ELEMENTS // (q.shape[1] * keys))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            scores = score(q[first:last], weights[first:last], rows)
            out[first:last] = best(scores, inputs.positions[first:last], topk)
    return out


def score(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``sum_h weights[n, h] * relu(q[n, h] . k[j])`` as ``[n, S]`` of ``[n, Hi, D]``, ``[n, Hi]`` and ``[S, D]``."""
    heads = torch.matmul(q.flatten(0, 1), keys.t()).relu_().unflatten(0, q.shape[:2])
    return torch.bmm(weights[:, None].to(q.dtype), heads)[:, 0]


def best(scores: torch.Tensor, positions: torch.Tensor, topk: int) -> torch.Tensor:
    """i32 ``[n, topk]``: the ``topk`` best of the keys up to each row's position, in rising order, -1 past them.

    Of equal scores the lower position wins. The k-th best score decides all but its equals, and those are counted off
    from the left; sorting whole rows by (score, position) says the same and costs several times as much.
    """
    visible = torch.arange(scores.shape[1], device=scores.device) <= positions[:, None]
    scores = scores.masked_fill(~visible, float("-inf"))
    least = scores.topk(topk, dim=1).values[:, -1:]
    above = scores > least
    equal = (scores == least) & visible
    wanted = topk - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= wanted))
    place = (kept.cumsum(1) - 1).masked_fill(~kept, topk)  # one spare column takes what is not kept
    held = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device).expand_as(scores)
    out = torch.full((scores.shape[0], topk + 1), -1, dtype=torch.int32, device=scores.device)
    return out.scatter_(1, place, held)[:, :topk]
