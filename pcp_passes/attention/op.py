# SPDX-License-Identifier: Apache-2.0
"""The op ``pcp::attend``: attention of rows that sit anywhere in the sequence, their positions given as a tensor.

A rank holds rows of the sequence that are not consecutive (zigzag: two chunks, then padding), and all keys. Positions
take the place of an explicit mask, so nothing of size M x S exists and rows cost only the keys that they see.

Windows are flash-attn's: row m sees key j iff ``positions[m] - j <= left`` and ``j - positions[m] <= right``, a
negative bound meaning none. Causal is ``(-1, 0)``, a sliding window of w is ``(w - 1, 0)``, bidirectional ``(-1, -1)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from pcp_passes.attention.blocks import attend_blocks
from pcp_passes.errors import ConfigError
from pcp_passes.ir.library import define

ATTEND = "pcp::attend"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLEX_SIZES = range(16, 257)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float | None = None,
    left: int = -1,
    right: int = 0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention of the rows of ``q`` at ``positions`` over all keys. Inference only: it has no backward.

    On CPU, rows go through PyTorch's flash kernel part by part (:mod:`~pcp_passes.attention.tiles`); with a soft cap,
    through materialised logits of at most 128 rows by 2048 keys. On CUDA, through FlexAttention where it takes the
    operands (not executed on a GPU by the tests), else as with a soft cap, which reads positions on the host.

    Args:
        q: ``[B, Hq, M, D]``, f16, bf16, f32 or f64.
        k: ``[B, Hkv, S, D]`` in position order, same dtype; Hq is a multiple of Hkv, the query heads of
            a key head adjacent.
        v: ``[B, Hkv, S, Dv]``, same dtype; Dv may differ from D.
        positions: i64 ``[M]``, the key index at which each row sits. Any order; repeats are fine. Fast where it
            consists of runs of consecutive numbers.
        scale: factor of the logits; ``1 / sqrt(D)`` by default.
        left, right: keys seen before and after the row's own position; negative means all.
        chunk: rows and keys see each other only within the same ``chunk`` positions; 0 means no chunks.
        sinks: ``[Hq]``, one extra logit a head in the softmax denominator.
        slopes: ``[Hq]``, ALiBi: ``slopes[h] * (j - positions[m])`` is added to the scaled logit.
        softcap: c > 0 replaces a scaled logit by ``c * tanh(logit / c)``, before the ALiBi bias.

    Returns:
        ``[B, Hq, M, Dv]``, dtype of ``q``, laid out as ``[B, M, Hq, Dv]``; 0 where a row sees no key. Rows are
        independent of keys that no row sees, even of NaN in them.

    Raises:
        ConfigError: shapes or dtypes that do not fit together.
    """
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    result: torch.Tensor = attend_op(
        q,
        k,
        v,
        positions,
        scale=factor,
        left=left,
        right=right,
        chunk=chunk,
        sinks=sinks,
        slopes=slopes,
        softcap=softcap,
    )
    return result


def _attend(
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
    _check(q, k, v, positions, sinks, slopes)
    out = _result(q, v)
    if out.numel() == 0 or k.shape[2] == 0:
        # The kernels divide by zero on empty operands.
        return out.zero_()
    _path(q, v)(
        q,
        k,
        v,
        positions,
        out,
        scale=scale,
        left=left,
        right=right,
        chunk=chunk,
        sinks=sinks,
        slopes=slopes,
        softcap=softcap,
    )
    return out


def _path(q: torch.Tensor, v: torch.Tensor) -> Callable[..., None]:
    """FlexAttention for CUDA operands it takes, the tiles for all others."""
    fits = q.dtype != torch.float64 and q.shape[-1] in _FLEX_SIZES and v.shape[-1] in _FLEX_SIZES
    if q.device.type != "cuda" or not fits:
        return attend_blocks
    # Imported where it is used: it brings the whole compiler along.
    from pcp_passes.attention.flex import attend_flex

    return attend_flex


def _attend_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, **options: Any
) -> torch.Tensor:
    return _result(q, v)


def _result(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows before heads in memory, as models view it right after: ``out.transpose(1, 2)`` is contiguous."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ConfigError(f"{ATTEND}: q, k and v need 4 dims [B, H, rows, D], found {q.dim()}, {k.dim()}, {v.dim()}.")
    batch, heads, rows, size = q.shape
    kv_heads = k.shape[1]
    wrong = [
        f"{name} is {list(found)}, required {list(required)}"
        for name, found, required in (
            ("k", k.shape, (batch, kv_heads, k.shape[2], size)),
            ("v", v.shape, (batch, kv_heads, k.shape[2], v.shape[3])),
            ("positions", positions.shape, (rows,)),
            ("sinks", (heads,) if sinks is None else sinks.shape, (heads,)),
            ("slopes", (heads,) if slopes is None else slopes.shape, (heads,)),
        )
        if tuple(found) != tuple(required)
    ]
    if kv_heads == 0 or heads % kv_heads:
        wrong.append(f"q has {heads} heads, required a multiple of the {kv_heads} of k")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        wrong.append(f"dtypes are {q.dtype}, {k.dtype}, {v.dtype}, required one of 16, 32 or 64 bit floats for all")
    if positions.dtype != torch.int64:
        wrong.append(f"positions is {positions.dtype}, required torch.int64")
    if wrong:
        raise ConfigError(f"{ATTEND} of q {list(q.shape)}: {'; '.join(wrong)}. Pass operands of these shapes.")


attend_op: Any = define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor positions, *, float scale, int left=-1, int right=0, int chunk=0, "
    "Tensor? sinks=None, Tensor? slopes=None, float softcap=0.0) -> Tensor",
    _attend,
    _attend_fake,
    tags=(torch.Tag.needs_exact_strides,),
)


@register_flop_formula(attend_op.overloadpacket)
def attend_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, out_shape: Any = None, **options: Any
) -> int:
    """What PyTorch counts for SDPA: both products over all M x S pairs, masks disregarded.

    So a sharded graph and the unsharded graph compare like with like; neither is credited for keys it does not visit.
    """
    batch, heads, rows, size = q
    return int(2 * batch * heads * rows * k[2] * (size + v[3]))
