# SPDX-License-Identifier: Apache-2.0
"""Operators for attention over every key that a row may see in a paged cache.

No value on the device is read by the host, on any device and by either implementation, so a call can be captured in a
CUDA graph. On CUDA the generated kernel runs where there is one; sizes without one run the reference's tensor ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pcp_kernels import catalog
from pcp_kernels.ops.launch import FLOATS, Faults, by_reference, capability, launch, name_of
from pcp_kernels.reference import paged as reference
from pcp_kernels.reference.pack import latent_width
from pcp_kernels.reference.select import DEFAULT_WORKSPACE_BYTES
from pcp_kernels.specs import PagedSpec, UnsupportedSpec

_CACHES = (*FLOATS, torch.float8_e4m3fn)


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
    """Attention of every row over keys ``low`` to ``high`` of its request.

    Key ``j`` of request ``r`` lies in slot ``tables[r, j // page] * page + j % page``. A row's result depends on no
    other row.

    Args:
        q: ``[N, Hq, D]``, with ``rope`` ``[N, Hq, D + R]``; Hq a multiple of Hkv.
        k: ``[blocks, page, Hkv, D]``, of q's dtype or e4m3 (a plain cast); blocks and slots may lie in wider rows.
        rope: ``[blocks, page, Hkv, R]``, the part of the keys that lies apart, as MLA's rope key does, or None.
        v: ``[blocks, page, Hkv, Dv]``, or None: ``k`` is the value too, as MLA's latent is.
        tables: i32 ``[R, B]``; entries past a row's keys may hold anything.
        row_request: i32 ``[N]``, the row of ``tables``; any valid one on rows without keys.
        low, high: i32 ``[N]``, at least 0, and clamped to the keys that a row of the table can name; ``high <= low``
            sees nothing.
        positions: i64 ``[N]``, for ``slopes`` alone.
        scale: of the logits.
        softcap: ``softcap * tanh(logit / softcap)`` where it is above 0.
        sinks: ``[Hq]``, a further logit of each head, without a value.
        slopes: ``[Hq]``: ``slope * (j - position)`` is added to a logit, after the soft cap.
        workspace_bytes: bound of the temporaries of the reference; the kernel has none.

    Returns:
        ``[N, Hq, Dv]`` of q's dtype; 0 on rows that see nothing.

    Raises:
        ValueError: arguments other than these.
    """
    result: torch.Tensor = _paged_attend_rows(
        q, k, rope, v, tables, row_request, low, high, positions, scale, softcap, sinks, slopes, workspace_bytes
    )
    return result


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
    """:func:`paged_attend_rows` of absorbed MLA over FP8 latent records, u8 ``[blocks, page, width]`` contiguous.

    Args:
        q: ``[N, H, L + R]``.
        latent_dim, rope_dim: L and R.

    Returns:
        ``[N, H, L]``.

    Raises:
        ValueError: arguments other than these.
    """
    result: torch.Tensor = _paged_attend_records(
        q, records, tables, row_request, low, high, latent_dim, rope_dim, scale, workspace_bytes
    )
    return result


@torch.library.custom_op("pcp_kernels::paged_attend_rows", mutates_args=())
def _paged_attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    rope: torch.Tensor | None,
    v: torch.Tensor | None,
    tables: torch.Tensor,
    row_request: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    workspace_bytes: int,
) -> torch.Tensor:
    faults = Faults("paged_attend_rows", q)
    blocks, page, kv_heads, dim = k.shape if k.ndim == 4 else (0, 0, 0, 0)
    turned = 0 if rope is None else rope.shape[-1]
    faults.tensor("q", q, ("N", "Hq", dim + turned), FLOATS)
    faults.tensor("k", k, ("blocks", "page", "Hkv", "D"), _CACHES)
    faults.tensor("rope", rope, (blocks, page, kv_heads, "R"), (k.dtype,))
    faults.tensor("v", v, (blocks, page, kv_heads, "Dv"), (k.dtype,))
    heads = q.shape[1] if q.ndim == 3 else 0
    faults.expect(bool(kv_heads) and heads % max(kv_heads, 1) == 0, f"q: found {heads} heads over {kv_heads} of keys")
    for name, one in (("sinks", sinks), ("slopes", slopes)):
        faults.tensor(name, one, (heads,), FLOATS)
    faults.tensor("positions", positions, (q.shape[0],), (torch.int64,))
    _check_rows(faults, q, tables, row_request, low, high, workspace_bytes)
    spec = None if by_reference(q) else _spec(q, k, rope, v, page, sinks, slopes, softcap)
    caches = {"k": k} | ({} if v is None else {"v": v}) | ({} if rope is None else {"rope": rope})
    # A kernel numbers slots through: block b begins page slots after block b - 1.
    if spec is None or any(one.stride(0) != page * one.stride(1) for one in caches.values()):
        return reference.paged_attend_rows(
            q, k, rope, v, tables, row_request, low, high, positions,
            scale=scale, softcap=softcap, sinks=sinks, slopes=slopes, workspace_bytes=workspace_bytes,
        )  # fmt: skip
    arguments: dict[str, Any] = {"position_ptr": positions, "cap": softcap}
    for name, one in caches.items():
        arguments |= {f"{name}_ptr": one, f"{name}_stride": one.stride(1), f"{name}_head_stride": one.stride(2)}
    if sinks is not None:
        arguments["sink_ptr"] = sinks.float()
    if slopes is not None:
        arguments["slope_ptr"] = slopes.float()
    return _attend(
        spec, q, kv_heads, dim if v is None else v.shape[3], tables, row_request, low, high, scale, arguments
    )


@_paged_attend_rows.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, rope: torch.Tensor | None, v: torch.Tensor | None, *operands: Any
) -> torch.Tensor:
    return q.new_empty((*q.shape[:2], (k if v is None else v).shape[3]))


@torch.library.custom_op("pcp_kernels::paged_attend_records", mutates_args=())
def _paged_attend_records(
    q: torch.Tensor,
    records: torch.Tensor,
    tables: torch.Tensor,
    row_request: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    latent_dim: int,
    rope_dim: int,
    scale: float,
    workspace_bytes: int,
) -> torch.Tensor:
    faults = Faults("paged_attend_records", q)
    faults.tensor("q", q, ("N", "H", latent_dim + rope_dim), FLOATS)
    width = latent_width(latent_dim, rope_dim, "fp8")
    faults.tensor("records", records, ("blocks", "page", width), (torch.uint8,), contiguous=True)
    _check_rows(faults, q, tables, row_request, low, high, workspace_bytes)
    spec = None
    if not by_reference(q) and not (q.is_cuda and capability(q) < 89):
        spec = _or_none(
            q, head_dim=latent_dim, value_dim=0, rope_dim=rope_dim, store="fp8", records=True, page=records.shape[1]
        )
    if spec is None:
        return reference.paged_attend_records(
            q, records, tables, row_request, low, high,
            latent_dim=latent_dim, rope_dim=rope_dim, scale=scale, workspace_bytes=workspace_bytes,
        )  # fmt: skip
    rope_at = latent_width(latent_dim, 0, "fp8")
    arguments = {
        "k_ptr": records.view(torch.float8_e4m3fn),
        "scale_ptr": records[..., latent_dim:rope_at].view(torch.float32),
        "rope_ptr": records[..., rope_at:].view(torch.bfloat16),
    }
    return _attend(spec, q, 1, latent_dim, tables, row_request, low, high, scale, arguments)


@_paged_attend_records.register_fake
def _(
    q: torch.Tensor,
    records: torch.Tensor,
    tables: torch.Tensor,
    row_request: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    latent_dim: int,
    rope_dim: int,
    scale: float,
    workspace_bytes: int,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:2], latent_dim))


def _check_rows(
    faults: Faults,
    q: torch.Tensor,
    tables: torch.Tensor,
    row_request: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    workspace_bytes: int,
) -> None:
    rows = q.shape[0] if q.ndim else 0
    faults.tensor("tables", tables, ("R", "B"), (torch.int32,))
    for name, one in (("row_request", row_request), ("low", low), ("high", high)):
        faults.tensor(name, one, (rows,), (torch.int32,), contiguous=True)
    faults.workspace(workspace_bytes)
    faults.check()


def _spec(
    q: torch.Tensor,
    k: torch.Tensor,
    rope: torch.Tensor | None,
    v: torch.Tensor | None,
    page: int,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    softcap: float,
) -> PagedSpec | None:
    if k.dtype == torch.float8_e4m3fn and q.is_cuda and capability(q) < 89:
        return None
    return _or_none(
        q, head_dim=k.shape[3], value_dim=0 if v is None else v.shape[3], rope_dim=0 if rope is None else rope.shape[3],
        store=name_of(k.dtype), page=page, sinks=sinks is not None, slopes=slopes is not None, softcap=softcap > 0,
    )  # fmt: skip


def _or_none(q: torch.Tensor, **fields: Any) -> PagedSpec | None:
    """The kernel for these fields, or None where none is generated."""
    try:
        return catalog.paged(arch=capability(q), source=name_of(q.dtype), **fields)
    except UnsupportedSpec:
        return None


def _attend(
    spec: PagedSpec,
    q: torch.Tensor,
    kv_heads: int,
    value_dim: int,
    tables: torch.Tensor,
    row_request: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    scale: float,
    caches: Mapping[str, Any],
) -> torch.Tensor:
    rows, heads, _ = q.shape
    out = q.new_empty((rows, heads, value_dim))
    if not tables.numel():
        return out.zero_()
    groups = heads // kv_heads
    arguments = {
        "q_ptr": q,
        "q_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "table_ptr": tables,
        "table_stride": tables.stride(0),
        "request_ptr": row_request,
        "low_ptr": low,
        "high_ptr": high,
        "out_ptr": out,
        "limit": tables.shape[1] * spec.page,
        "heads": heads,
        "groups": groups,
        "softmax_scale": scale,
        **caches,
    }
    launch(spec, (rows, kv_heads, -(-groups // spec.block_heads)), q, arguments)
    return out
