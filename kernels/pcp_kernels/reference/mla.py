# SPDX-License-Identifier: Apache-2.0
"""Absorbed sparse MLA: attention of every head over the selected latents, which all heads share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pcp_kernels.reference.pack import latent_unpack, latent_width
from pcp_kernels.reference.select import DEFAULT_WORKSPACE_BYTES

Rows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    *,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out ``[T, H, L]`` of q's dtype, lse fp32 ``[T, H]``, natural logarithm) over the rows at ``slots``.

    ``p = softmax(scale * (q[:L] . latent + q[L:] . rope_key))``, ``out = p @ latent``, in fp32 (fp64 of fp64, then lse
    is fp64). A row without a slot gives 0 and -inf.

    Args:
        q: ``[T, H, L + R]``.
        latent: ``[S, L]``.
        rope_key: ``[S, R]``.
        slots: i32 ``[T, k]``, -1 where there is none, anywhere in the row.
        scale: of the softmax.
        workspace_bytes: bound of all temporaries together.

    Raises:
        ValueError: shapes that do not fit together, a slot past the rows, or a workspace that one row does not fit.
    """
    if latent.ndim != 2 or rope_key.shape[:1] != latent.shape[:1]:
        raise ValueError(
            f"sparse_mla: found latents {list(latent.shape)} and rope keys {list(rope_key.shape)}; required [S, L] and "
            "[S, R]."
        )
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32

    def rows(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return latent.index_select(0, flat).to(compute), rope_key.index_select(0, flat).to(compute)

    return _attend(q, rows, slots, scale, latent.shape[1], rope_key.shape[1], latent.shape[0], workspace_bytes)


def sparse_mla_records(
    q: torch.Tensor,
    records: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    *,
    latent_dim: int,
    rope_dim: int,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sparse_mla` over latent records: u8 ``[S, width]`` of FP8, or ``[S, L + R]``.

    Raises:
        ValueError: see :func:`sparse_mla`.
    """
    width = latent_width(latent_dim, rope_dim, "fp8" if records.dtype == torch.uint8 else "bf16")
    if records.ndim != 2 or records.shape[1] != width:
        raise ValueError(
            f"sparse_mla_records: found records {records.dtype} {list(records.shape)}; required [S, {width}] for "
            f"latents of {latent_dim} and rope keys of {rope_dim}."
        )
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32

    def rows(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return latent_unpack(records.index_select(0, flat), latent_dim, rope_dim, compute)

    return _attend(q, rows, slots, scale, latent_dim, rope_dim, records.shape[0], workspace_bytes)


def _attend(
    q: torch.Tensor,
    rows: Rows,
    slots: torch.Tensor,
    scale: float,
    latent_dim: int,
    rope_dim: int,
    held: int,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.ndim != 3 or q.shape[2] != latent_dim + rope_dim or slots.ndim != 2 or slots.shape[0] != q.shape[0]:
        raise ValueError(
            f"sparse_mla: found queries {list(q.shape)} and slots {list(slots.shape)} for latents of {latent_dim} and "
            f"rope keys of {rope_dim}; required [T, H, L + R] and [T, k]."
        )
    if slots.numel() and int(slots.max()) >= held:
        raise ValueError(f"sparse_mla: slots: found {int(slots.max())}; required below {held}, the rows of the cache.")
    tokens, heads, _ = q.shape
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((tokens, heads, latent_dim))
    lse = q.new_full((tokens, heads), float("-inf"), dtype=compute)
    if tokens == 0 or slots.shape[1] == 0:
        return out, lse
    # Fewer columns than k are in use while contexts are short.
    used = (slots >= 0).any(dim=0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 0
    if width == 0:
        return out, lse
    size = compute.itemsize
    # Records, their unpacked groups and the result; a score, a weight and a mask; widened queries and outputs.
    row_bytes = width * (latent_dim + rope_dim) * (4 + 3 * size) + heads * (width * 4 * size + 4 * size * q.shape[2])
    step = workspace_bytes // (row_bytes + 64 * width)
    if step < 1:
        raise ValueError(
            f"sparse_mla: found a workspace of {workspace_bytes} bytes; one query of {heads} heads over {width} rows "
            f"takes {row_bytes + 64 * width}. Give at least that much."
        )
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        chosen = slots[first:last, :width]
        absent = chosen < 0
        values, keys = rows(chosen.clamp(min=0).flatten().to(torch.int64))
        values, keys = values.unflatten(0, chosen.shape), keys.unflatten(0, chosen.shape)
        # An absent slot reads row 0, which may hold anything: 0 * NaN would reach the output.
        values.masked_fill_(absent[..., None], 0)
        query = q[first:last].to(compute)
        scores = torch.matmul(query[..., :latent_dim], values.transpose(1, 2))
        scores.baddbmm_(query[..., latent_dim:], keys.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(absent[:, None], float("-inf"))
        total = scores.logsumexp(dim=-1)
        lse[first:last] = total
        weights = scores.sub_(total.masked_fill(total == float("-inf"), 0)[..., None]).exp_()
        out[first:last] = torch.matmul(weights, values).to(q.dtype)
    return out, lse
