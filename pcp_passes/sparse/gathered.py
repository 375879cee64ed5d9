# SPDX-License-Identifier: Apache-2.0
"""Attention over the keys that each row has selected, gathered a few rows at a time."""

from __future__ import annotations

import torch

from pcp_passes.attention.parts import work_dtype


def attend_gathered(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    workspace_bytes: int,
) -> torch.Tensor:
    """``softmax(scale * q . k[indices])`` times ``v[indices]``, in f32 (f64 for f64 operands).

    Args:
        q: ``[M, H, D]``; k: ``[S, Hkv, D]``; v: ``[S, Hkv, Dv]``, the query heads of a key head adjacent.
        indices: i32 ``[M, K]``; -1, anywhere, is no key.
        sinks: ``[H]``, one extra logit a head in the softmax denominator.
        workspace_bytes: bound on the gathered keys, values and logits held at once; one row is always taken.

    Returns:
        ``[M, H, Dv]``, dtype of ``q``; 0 where a row has no key.
    """
    work = work_dtype(q.dtype)
    rows, heads, size = q.shape
    kept, kv_heads, width = indices.shape[1], k.shape[1], v.shape[2]
    out = q.new_zeros(rows, heads, width)
    if not out.numel() or not kept or not k.shape[0]:
        return out
    # Gathered in the keys' dtype, then widened; logits and their exponentials.
    each = kept * (kv_heads * (size + width) * (k.element_size() + work.itemsize) + 3 * heads * work.itemsize)
    step = max(1, workspace_bytes // each)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        held = indices[start:stop].long()
        seen = held >= 0
        flat = held.clamp(min=0).flatten()
        keys, values = (one.index_select(0, flat).to(work).unflatten(0, held.shape) for one in (k, v))
        queries = q[start:stop].to(work).unflatten(1, (kv_heads, -1))  # [m, Hkv, H / Hkv, D]
        logits = torch.einsum("mgnd,mkgd->mgnk", queries, keys).flatten(1, 2) * scale
        logits = logits.masked_fill(~seen[:, None], float("-inf"))
        lse = torch.logsumexp(logits, dim=-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(work)[None])
        weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
        found = torch.einsum("mgnk,mkgd->mgnd", weights.unflatten(1, (kv_heads, -1)), values)
        out[start:stop] = found.flatten(1, 2).to(q.dtype)
    return out
