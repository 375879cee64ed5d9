# SPDX-License-Identifier: Apache-2.0
"""The total order of scores: integer keys, the best of many candidates, and the rows that come out.

A score's key is an integer that compares as the score does, with -0 = +0 and NaN below every number::

    score  -inf       -1.0        -0.0  0.0  1.0         inf         NaN          (no key: not a candidate)
    key    -2139095041 -1065353217 0    0    1065353216  2139095040  -2147483647  -2147483648

Candidates are ordered by key, largest first, and equal keys by index, smallest first. No two candidates of a row are
equal then, so what is selected depends neither on the order in which candidates are seen nor on how they are divided.
"""

from __future__ import annotations

from math import isfinite

import torch
import torch.nn.functional as F

_LAST = 0xFFFFFFFF
"""Complements an index, so that of equal keys the smaller index makes the larger packed number."""
_FAR = 0x7FFFFFFF
"""Sorts behind every index."""


def no_key(dtype: torch.dtype) -> int:
    """The key that only a non-candidate has, of keys i32 or i64."""
    return torch.iinfo(dtype).min


def sortable_key(scores: torch.Tensor, *, numbers: bool = False) -> torch.Tensor:
    """Keys of scores in the order of the module: i32 of fp32, i64 of fp64, of the same shape.

    Args:
        numbers: the caller knows that none is NaN, and spares the search.

    Raises:
        ValueError: scores of another dtype.
    """
    if scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"sortable_key: found scores of {scores.dtype}; required fp32 or fp64, so convert them.")
    # Adding zero turns -0 into +0. A NaN of either sign would be at one of the ends of the order.
    bits = (scores + 0.0).view(torch.int32 if scores.dtype == torch.float32 else torch.int64)
    info = torch.iinfo(bits.dtype)
    key = (bits >> (info.bits - 1)).bitwise_and_(info.max).bitwise_xor_(bits)
    return key if numbers or isfinite(scores.sum()) else key.masked_fill_(scores.isnan(), info.min + 1)


def best(keys: torch.Tensor, index: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``min(topk, M)`` candidates of each row, in no particular order, as (keys, i64 index).

    Args:
        keys: i32 or i64 ``[n, M]``; the smallest integer marks what is not a candidate and comes last.
        index: i64 ``[M]`` rising, or ``[n, M]`` in any order; from 0 to 2**31 - 2, and distinct among candidates.
    """
    width = min(topk, keys.shape[1])
    if keys.dtype == torch.int32:
        packed = torch.add(_LAST - index, keys, alpha=1 << 32)
        first = packed.topk(width, dim=1, sorted=False).values
        return (first >> 32).to(torch.int32), first.bitwise_and_(_LAST).neg_().add_(_LAST)
    # A 64-bit key leaves no room for the index: the last of the best decides all but its equals, which are counted off
    # in the order of their indices.
    if index.dim() == 2:
        by_index = index.argsort(dim=1)
        keys, index = keys.gather(1, by_index), index.gather(1, by_index)
    least = keys.topk(width, dim=1, sorted=False).values.amin(dim=1, keepdim=True) if width else keys[:, :1]
    above, equal = keys > least, keys == least
    wanted = width - above.sum(dim=1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(dim=1) <= wanted))).nonzero()[:, 1].view(keys.shape[0], width)
    return keys.gather(1, chosen), index.expand_as(keys).gather(1, chosen)


def emit(keys: torch.Tensor, index: torch.Tensor, topk: int) -> torch.Tensor:
    """i32 ``[n, topk]``: the candidates among ``[n, W <= topk]`` by rising index, then -1."""
    held = index.to(torch.int32).masked_fill_(keys == no_key(keys.dtype), _FAR).sort(dim=1).values
    if held.shape[1] < topk:
        held = F.pad(held, (0, topk - held.shape[1]), value=_FAR)
    return held.masked_fill_(held == _FAR, -1)


def merge(keys: torch.Tensor, indices: torch.Tensor, topk: int) -> torch.Tensor:
    """i32 ``[n, topk]``: the selection among candidates that several parts of the key range put forward.

    Exact for any division of the range, as long as every part puts forward its own ``topk`` best.

    Args:
        keys: i32 or i64 ``[n, M]``, see :func:`sortable_key`.
        indices: i32 or i64 ``[n, M]`` in any order; negative where there is no candidate, whatever its key.
    """
    index = indices.to(torch.int64)
    keys = keys.masked_fill(index < 0, no_key(keys.dtype))
    return emit(*best(keys, index.clamp(min=0), topk), topk)
