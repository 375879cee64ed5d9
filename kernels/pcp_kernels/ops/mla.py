# SPDX-License-Identifier: Apache-2.0
"""Operators for absorbed sparse MLA attention over selected rows of a latent cache.

The generated kernel is for where no tuned one is installed. Selected keys that are counted from the start of their
request become slots through :func:`pcp_kernels.ops.index.index_remap`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pcp_kernels import catalog
from pcp_kernels.ops.launch import FLOATS, Faults, by_reference, capability, fp8_fault, launch, name_of
from pcp_kernels.reference import mla as reference
from pcp_kernels.reference.pack import latent_width
from pcp_kernels.reference.select import DEFAULT_WORKSPACE_BYTES
from pcp_kernels.specs import MlaSpec


def sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    *,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every head over the rows at ``slots``: keys ``[latent | rope]``, values ``latent``, for all heads.

    Args:
        q: ``[T, H, L + R]``, queries absorbed into the latent, then their rope part.
        latent: ``[S, L]``, on a GPU of q's dtype; rows may be part of wider ones.
        rope_key: ``[S, R]``, likewise.
        slots: i32 ``[T, k]``, below S; -1, anywhere in the row, selects nothing.
        scale: of the softmax.
        workspace_bytes: bound of the temporaries on CPU; the kernel has none.

    Returns:
        out ``[T, H, L]`` of q's dtype and the natural log-sum-exp, fp32 ``[T, H]`` (fp64 of fp64): 0 and -inf on rows
        that select nothing.

    Raises:
        ValueError: arguments other than these, or a spec without a kernel; on CPU a slot past the rows.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _sparse_mla(q, latent, rope_key, slots, scale, workspace_bytes)
    return result


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
    """:func:`sparse_mla` over fp8 latent records, u8 ``[S, width]`` contiguous; on a GPU ``q`` is bf16.

    Raises:
        ValueError: arguments other than these, or a spec without a kernel.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _sparse_mla_records(
        q, records, slots, scale, latent_dim, rope_dim, workspace_bytes
    )
    return result


@torch.library.custom_op("pcp_kernels::sparse_mla", mutates_args=())
def _sparse_mla(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    faults = Faults("sparse_mla", q)
    dims = [part.shape[-1] if part.ndim else 0 for part in (latent, rope_key)]
    faults.tensor("q", q, ("T", "H", sum(dims)), FLOATS)
    referred = by_reference(q)
    dtypes = FLOATS if referred else (q.dtype,)
    faults.tensor("latent", latent, ("S", "L"), dtypes)
    faults.tensor("rope_key", rope_key, (latent.shape[0] if latent.ndim else 0, "R"), dtypes)
    faults.tensor("slots", slots, (q.shape[0] if q.ndim else 0, "k"), (torch.int32,))
    faults.workspace(workspace_bytes)
    faults.check()
    faults.below("slots", slots, latent.shape[0], "the rows of the cache")
    faults.check()
    if referred:
        return reference.sparse_mla(q, latent, rope_key, slots, scale, workspace_bytes=workspace_bytes)
    spec = catalog.mla(latent=dims[0], rope_dim=dims[1], store=name_of(q.dtype), arch=capability(q))
    rows = {
        "latent_ptr": latent,
        "latent_stride": latent.stride(0),
        "rope_ptr": rope_key,
        "rope_stride": rope_key.stride(0),
    }
    return _attend(spec, q, rows, slots, scale)


@_sparse_mla.register_fake
def _(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(q, latent.shape[1])


@torch.library.custom_op("pcp_kernels::sparse_mla_records", mutates_args=())
def _sparse_mla_records(
    q: torch.Tensor,
    records: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    latent_dim: int,
    rope_dim: int,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    faults = Faults("sparse_mla_records", q)
    faults.tensor("q", q, ("T", "H", latent_dim + rope_dim), FLOATS)
    width = latent_width(latent_dim, rope_dim, "fp8")
    faults.tensor("records", records, ("S", width), (torch.uint8,), contiguous=True)
    faults.tensor("slots", slots, (q.shape[0] if q.ndim else 0, "k"), (torch.int32,))
    referred = by_reference(q)
    faults.expect(referred or q.dtype == torch.bfloat16, f"q: found {q.dtype}; required bfloat16 over fp8 records")
    fp8_fault(faults, q, "keep bf16 rows")
    faults.workspace(workspace_bytes)
    faults.check()
    faults.below("slots", slots, records.shape[0], "the rows of the cache")
    faults.check()
    if referred:
        return reference.sparse_mla_records(
            q, records, slots, scale, latent_dim=latent_dim, rope_dim=rope_dim, workspace_bytes=workspace_bytes
        )
    rope_at = latent_width(latent_dim, 0, "fp8")
    rows = {
        "latent_ptr": records.view(torch.float8_e4m3fn),
        "scale_ptr": records[:, latent_dim:rope_at].view(torch.float32),
        "rope_ptr": records[:, rope_at:].view(torch.bfloat16),
    }
    spec = catalog.mla(latent=latent_dim, rope_dim=rope_dim, store="fp8", arch=capability(q))
    return _attend(spec, q, rows, slots, scale)


@_sparse_mla_records.register_fake
def _(
    q: torch.Tensor,
    records: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    latent_dim: int,
    rope_dim: int,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(q, latent_dim)


def _attend(
    spec: MlaSpec, q: torch.Tensor, rows: Mapping[str, object], slots: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _empty(q, spec.latent)
    arguments = {
        "q_ptr": q,
        "q_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "slot_ptr": slots,
        "slot_stride": slots.stride(0),
        "out_ptr": out,
        "lse_ptr": lse,
        "heads": q.shape[1],
        "topk": slots.shape[1],
        "softmax_scale": scale,
        **rows,
    }
    launch(spec, (q.shape[0], -(-q.shape[1] // spec.block_heads)), q, arguments)
    return out, lse


def _empty(q: torch.Tensor, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:2], latent)), q.new_empty(q.shape[:2], dtype=lse)
