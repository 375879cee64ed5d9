# SPDX-License-Identifier: Apache-2.0
"""Attention over one part of the keys.

A part returns ``(out, lse)``: its own softmax average ``[B, Hq, n, Dv]`` and the log-sum-exp of its logits
``[B, Hq, n]``. Parts with disjoint keys merge exactly: :mod:`pcp_passes.attention.merge`.
"""

from __future__ import annotations

from typing import Any

import torch

from pcp_passes.attention.merge import merge_partials

Result = tuple[torch.Tensor, torch.Tensor]

KEYS = 2048
"""Keys whose logits are materialised at a time by :func:`explicit_part`."""


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of logits, biases and log-sum-exps for operands of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flash_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, bias: torch.Tensor | None
) -> Result:
    """PyTorch's CPU flash kernel (checked with torch 2.13).

    It takes fewer key heads than query heads and any strides but a last one other than 1 (silent NaN); wants equal head
    sizes; divides by zero on an empty operand; reads ``causal`` from the top left; adds ``bias`` (broadcast to
    ``[B, Hq, n, keys]``, f64 for f64 operands, else f32), and gives 0 and lse 0 where a row's bias is all ``-inf``.
    """
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = kernel(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def explicit_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float, bias: torch.Tensor | None
) -> Result:
    """Materialised logits, :data:`KEYS` keys at a time, any device. ``bias`` is added after the soft cap.

    Query heads of one key head are folded into rows, so keys are not repeated. Products are taken in
    :func:`work_dtype`.
    """
    batch, heads, rows, _ = q.shape
    kv_heads = k.shape[1]
    work = work_dtype(q.dtype)
    folded = (q.to(work) * scale).reshape(batch, kv_heads, -1, q.shape[-1])
    result: Result | None = None
    for start in range(0, k.shape[2], KEYS):
        stop = min(start + KEYS, k.shape[2])
        logits = torch.matmul(folded, k[:, :, start:stop].to(work).transpose(-1, -2)).view(batch, heads, rows, -1)
        if softcap > 0:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        if bias is not None:
            logits = logits + bias[..., start:stop]
        lse = torch.logsumexp(logits, dim=-1)
        # Where every logit is -inf the lse is too, and -inf - -inf would be NaN.
        weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
        values = v[:, :, start:stop].to(work)
        out = torch.matmul(weights.view(batch, kv_heads, -1, stop - start), values).view(batch, heads, rows, -1)
        result = (out, lse) if result is None else merge(result, (out, lse))
    assert result is not None, "explicit_part needs at least one key"
    return result


def merge(first: Result, second: Result) -> Result:
    """Attention over the union of two disjoint sets of keys; see :func:`pcp_passes.attention.merge.merge_partials`."""
    return merge_partials((first[0], second[0]), (first[1], second[1]))
