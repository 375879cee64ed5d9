# SPDX-License-Identifier: Apache-2.0
"""The merge of partial attention: results over disjoint sets of keys become the result over all of them.

A part is its own softmax average ``out`` and the log-sum-exp ``lse`` of its logits::

    weight_c = exp(lse_c - lse)          lse = log(sum_c exp(lse_c))
    out      = sum_c weight_c * out_c

A part without keys is *empty*: its lse is ``-inf``, its weight is 0 and its ``out`` is not looked at, whatever it
holds. A buffer that nobody wrote may hold a NaN, and ``0 * NaN`` is NaN, so a weight of 0 alone is not enough. An lse
of ``+inf``, by which FlashAttention marks a row without keys, means the same. With parts ``(1, lse 0)`` and ``(NaN, lse
-inf)`` the result is ``(1, lse 0)``; with two empty parts it is ``(0, lse -inf)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_partials(
    outputs: torch.Tensor | Sequence[torch.Tensor], lse: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of the parts' keys. Nothing is read on the host, and no operand is written.

    Args:
        outputs: ``[C, ..., D]`` or C tensors ``[..., D]``, of any floating dtype: one per part, C at least 1.
        lse: ``[C, ...]`` or C tensors ``[...]``, natural logarithm. A NaN is no mark of an empty part: it stays.

    Returns:
        ``out`` ``[..., D]`` and ``lse`` ``[...]``, both f64 where an operand is f64 and else f32, so that whoever
        stores narrower values rounds once; 0 and ``-inf`` where all parts are empty.
    """
    assert len(outputs) == len(lse) > 0, f"{len(outputs)} outputs and {len(lse)} log-sum-exps of parts"
    wide = any(x.dtype == torch.float64 for x in (*outputs, *lse))
    work = torch.float64 if wide else torch.float32
    levels = [one.to(work) for one in lse]
    levels = [one.masked_fill(one.isinf(), float("-inf")) for one in levels]
    top = levels[0]
    for one in levels[1:]:
        top = torch.maximum(top, one)
    # Where all parts are empty, -inf - -inf would be NaN.
    base = top.masked_fill(top == float("-inf"), 0.0)
    total, out = torch.zeros_like(base), None
    for part, level in zip(outputs, levels, strict=True):
        weight = torch.exp(level - base)
        total += weight
        kept = torch.where((level == float("-inf"))[..., None], 0.0, part.to(work)).mul_(weight[..., None])
        out = kept if out is None else out.add_(kept)
    assert out is not None
    return out.div_(total.masked_fill(total == 0, 1.0)[..., None]), base + total.log()
