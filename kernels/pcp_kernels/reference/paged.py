# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches that reads no value on the host: shapes, and the number of steps, follow from shapes.

Slower than gathering each request's keys, since it walks the whole width of the block table; but it can be captured in
a CUDA graph, and it is what the generated kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pcp_kernels.reference.pack import latent_unpack
from pcp_kernels.reference.select import DEFAULT_WORKSPACE_BYTES

KEYS = 256
"""Keys of a row whose logits exist at a time."""

Fetch = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Blocks i64 ``[n, c]`` -> their keys ``[n, c * page, Hkv, D]`` and values ``[n, c * page, Hkv, Dv]``."""


def paged_attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    rope: torch.Tensor | None,
    v: torch.Tensor | None,
    tables: torch.Tensor,
    row_request: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """``[N, Hq, Dv]``: each row over keys ``low`` to ``high`` of its request; see the operator of this name.

    Logits, weights and sums are fp32, fp64 for fp64 queries. Keys are rounded to the dtype of the queries first, as a
    gather would do.
    """
    page, kv_heads = k.shape[1:3]
    sizes = k.shape[3] + (0 if rope is None else rope.shape[3]), k.shape[3] if v is None else v.shape[3]

    def fetch(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = _gathered(k, blocks, q.dtype)
        values = keys if v is None else _gathered(v, blocks, q.dtype)
        return keys if rope is None else torch.cat([keys, _gathered(rope, blocks, q.dtype)], dim=-1), values

    return _attend(
        q, fetch, k.shape[0], page, kv_heads, sizes, tables, row_request, low, high, positions,
        scale=scale, softcap=softcap, sinks=sinks, slopes=slopes, workspace_bytes=workspace_bytes,
    )  # fmt: skip


def paged_attend_records(
    q: torch.Tensor,
    records: torch.Tensor,
    tables: torch.Tensor,
    row_request: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    *,
    latent_dim: int,
    rope_dim: int,
    scale: float,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """``[N, Hq, L]`` over FP8 latent records u8 ``[blocks, page, width]``; see the operator of this name."""

    def fetch(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = records.index_select(0, blocks.flatten()).view(blocks.shape[0], -1, records.shape[2])
        latent, rope = latent_unpack(held, latent_dim, rope_dim, q.dtype)
        return torch.cat([latent, rope], dim=-1)[:, :, None], latent[:, :, None]

    sizes = latent_dim + rope_dim, latent_dim
    return _attend(
        q, fetch, records.shape[0], records.shape[1], 1, sizes, tables, row_request, low, high, low,
        scale=scale, softcap=0.0, sinks=None, slopes=None, workspace_bytes=workspace_bytes,
    )  # fmt: skip


def _gathered(cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of a cache as ``[n, c * page, H, D]`` in ``dtype``. FP8 is gathered as bytes, which any device can."""
    held = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    found = held.index_select(0, blocks.flatten()).view(cache.dtype)
    return found.to(dtype).view(blocks.shape[0], -1, *cache.shape[2:])


def _attend(
    q: torch.Tensor,
    fetch: Fetch,
    blocks: int,
    page: int,
    kv_heads: int,
    sizes: tuple[int, int],
    tables: torch.Tensor,
    row_request: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    workspace_bytes: int,
) -> torch.Tensor:
    rows, heads, _ = q.shape
    out = q.new_zeros(rows, heads, sizes[1])
    if not out.numel() or not tables.numel():
        return out
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    # Gathered, converted and widened keys and values; three copies of the logits and the mask.
    key_bytes = 3 * work.itemsize * kv_heads * sum(sizes) + heads * (3 * work.itemsize + 1)
    # How many keys are summed at once depends on no number of rows, so neither does the result of a row.
    columns = min(max(1, min(KEYS, workspace_bytes // key_bytes) // page), tables.shape[1])
    step = max(1, workspace_bytes // (columns * page * key_bytes))
    inside = torch.arange(columns * page, device=q.device)
    requests = row_request.long().clamp(0, tables.shape[0] - 1)
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        query = (q[some].to(work) * scale).unflatten(1, (kv_heads, -1))
        since, until, at = (bound[some, None].long() for bound in (low, high, positions))
        best = query.new_full(query.shape[:3], float("-inf"))
        total = torch.zeros_like(best)
        sums = query.new_zeros(*query.shape[:3], sizes[1])
        for column in range(0, tables.shape[1], columns):
            # What a table holds beyond the keys of its request may be anything.
            named = tables[requests[some], column : column + columns].long().clamp(0, blocks - 1)
            keys, values = (part.to(work).transpose(1, 2) for part in fetch(named))
            place = column * page + inside[: keys.shape[2]]
            seen = (place >= since) & (place < until)
            logits = torch.matmul(query, keys.transpose(2, 3))
            if softcap > 0:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
            if slopes is not None:
                bias = slopes.to(work)[:, None] * (place - at)[:, None]
                logits += bias.view_as(logits)
            logits.masked_fill_(~seen[:, None, None], float("-inf"))
            higher = torch.maximum(best, logits.amax(-1))
            level = higher.masked_fill(higher == float("-inf"), 0)  # -inf - -inf would be NaN
            weights = logits.sub_(level[..., None]).exp_()
            fade = (best - level).exp()
            total = total * fade + weights.sum(-1)
            # A key that no row may see can hold NaN, which a weight of 0 would hand on.
            values = values.masked_fill(~seen[:, None, :, None], 0)
            sums = sums * fade[..., None] + torch.matmul(weights, values)
            best = higher
        if sinks is not None:
            total = total + (sinks.to(work).view(kv_heads, -1) - best.masked_fill(total == 0, 0)).exp()
        # A row that sees no key has sums of 0.
        out[some] = (sums / total.masked_fill(total == 0, 1)[..., None]).flatten(1, 2).to(q.dtype)
    return out
