# SPDX-License-Identifier: Apache-2.0
"""Attention over one part of the keys, and the merge of parts by log-sum-exp.

A part returns ``(out, lse)``: its own softmax average ``[B, Hq, n, Dv]`` and the log-sum-exp of its logits
``[B, Hq, n]``. Two parts with disjoint keys merge exactly::

    weight = sigmoid(lse_1 - lse_2)
    out    = weight * out_1 + (1 - weight) * out_2
    lse    = log(exp(lse_1) + exp(lse_2))
"""

from __future__ import annotations

from typing import Any

import torch

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
    """Attention over the union of two disjoint sets of keys; may overwrite ``second``.

    At most one of the two lse of a row may be ``-inf``: a row sees a key of one part at least.
    """
    out_1, lse_1 = first
    out_2, lse_2 = second
    weight = torch.sigmoid(lse_1 - lse_2)[..., None]
    out = out_2.to(weight.dtype).lerp_(out_1.to(weight.dtype), weight)
    return out, torch.logaddexp(lse_1, lse_2)
