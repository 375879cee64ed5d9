# SPDX-License-Identifier: Apache-2.0
"""Operators that select the best keys of each query row: ``index_topk_rows`` and ``index_topk_paged``.

What they compute is the contract of :mod:`pcp_kernels.reference`: the same indices on every device, for every plan and
every workspace. Nothing on the device is read by the host, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pcp_kernels import catalog
from pcp_kernels.generate.logits import SPAN
from pcp_kernels.ops import plans
from pcp_kernels.ops.launch import DTYPES, FLOATS, Faults, by_reference, capability, fp8_fault, launch, name_of
from pcp_kernels.ops.plans import Kind, Plan, Shape
from pcp_kernels.reference import select as reference
from pcp_kernels.reference.select import DEFAULT_WORKSPACE_BYTES

__all__ = ["index_topk_paged", "index_topk_rows", "select_paged", "select_rows"]

_INTERPRETER_UNITS = 2
_KEYS = tuple(DTYPES.values())


@torch.library.custom_op("pcp_kernels::index_topk_rows", mutates_args=())
def index_topk_rows(
    q: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """i32 ``[T, topk]``: of each row the best keys among ``ks`` to ``ke``, relative to ``ks``, ascending, -1 tail.

    Args:
        q: ``[T, H, D]`` of the dtype of ``k``, heads next to each other.
        w: ``[T, H]``, any float; with the scales of FP8 queries folded in.
        k: ``[N, D]``; fp64 is for the reference alone.
        k_scale: f32 ``[N]`` of FP8 keys, else None.
        ks, ke: i32 ``[T]``, each clamped to ``[0, N]``; ``ke <= ks`` is an empty row.
        topk: multiple of 16 from 16 to 2048; the reference takes any.
        workspace_bytes: bound of all temporaries together; 64 MiB unless told otherwise.

    Raises:
        ValueError: arguments other than these, each with what is required; or a workspace that is negative or too small
            for what is scored.
    """
    _check_rows(q, w, k, k_scale, ks, ke, workspace_bytes)
    if by_reference(q, k):
        return reference.topk_rows(q, w, k, k_scale, ks, ke, topk, workspace_bytes=workspace_bytes)
    return select_rows(q, w, k, k_scale, ks, ke, topk, workspace_bytes)


@torch.library.custom_op("pcp_kernels::index_topk_paged", mutates_args=())
def index_topk_paged(
    q: torch.Tensor,
    w: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    row_request: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    page: int,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """i32 ``[T, topk]``: of each row the best of its request's keys 0 to ``ke``, ascending, -1 tail.

    Args:
        q: ``[T, H, D]``: e4m3 for an FP8 cache, else of the dtype of ``cache``; heads next to each other.
        w: ``[T, H]``, any float; with the scales of FP8 queries folded in.
        cache: u8 ``[pages, page * (D + 4)]`` (FP8), else ``[pages, page, D]``; fp64 is for the reference alone.
        block_table: i32 ``[R, nb]``, the pages of each request; entries past its keys are not read.
        row_request: i32 ``[T]``, below R; negative is no request, and its row selects nothing. Rows of one request are
            best kept together.
        ke: i32 ``[T]``, position + 1, clamped to ``[0, nb * page]``; 0 for a row of padding, whose request is not read.
        topk: multiple of 16 from 16 to 2048; the reference takes any.
        page: 16, 32, 64 or 128; the reference takes any.
        workspace_bytes: bound of all temporaries together; 64 MiB unless told otherwise.

    Raises:
        ValueError: arguments other than these, each with what is required; or a workspace that is negative or too small
            for what is scored. On CPU also keys of a request past the table, which has none on a GPU, or of a page past
            the cache, which a GPU does not look for.
    """
    _check_paged(q, w, cache, block_table, row_request, ke, page, workspace_bytes)
    if by_reference(q, cache):
        return reference.topk_paged(
            q, w, cache, block_table, row_request, ke, topk, page, workspace_bytes=workspace_bytes
        )
    if not q.is_cuda:
        _require_pages(cache.shape[0], block_table, row_request, ke, topk, page)
    return select_paged(q, w, cache, block_table, row_request, ke, topk, page, workspace_bytes)


@index_topk_rows.register_fake
def _(
    q: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], topk), dtype=torch.int32)


@index_topk_paged.register_fake
def _(
    q: torch.Tensor,
    w: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    row_request: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    page: int,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], topk), dtype=torch.int32)


def select_rows(
    q: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    workspace_bytes: int,
    *,
    kind: Kind | None = None,
) -> torch.Tensor:
    """:func:`index_topk_rows` by the generated kernels, and by plan ``kind`` if one is named."""
    limit = k.shape[0]
    arguments = {"key_ptr": k, "scale_ptr": k_scale, "start_ptr": ks, "end_ptr": ke, "key_stride": k.stride(0)}
    valid = (ke.clamp(max=limit) - ks.clamp(min=0)).clamp_(min=0)
    sizes = {"heads": q.shape[1], "dim": q.shape[2], "store": name_of(k.dtype), "layout": "contiguous"}
    return _select(q, w, arguments, valid, limit, topk, sizes, workspace_bytes, kind)


def select_paged(
    q: torch.Tensor,
    w: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    row_request: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    page: int,
    workspace_bytes: int,
    *,
    kind: Kind | None = None,
) -> torch.Tensor:
    """:func:`index_topk_paged` by the generated kernels, and by plan ``kind`` if one is named."""
    fp8 = cache.dtype == torch.uint8
    limit = block_table.shape[1] * page
    arguments = {
        "key_ptr": cache.view(torch.float8_e4m3fn) if fp8 else cache,
        "scale_ptr": cache.view(torch.float32) if fp8 else None,
        "table_ptr": block_table,
        "end_ptr": ke,
        "key_stride": cache.stride(0),
        "table_stride": block_table.stride(0),
    }
    # The kernels know of no last request: one past the table becomes none.
    row_request = row_request.masked_fill(row_request >= block_table.shape[0], -1)
    arguments["request_ptr"] = row_request
    valid = ke.clamp(0, limit).masked_fill_(row_request < 0, 0)
    sizes = {"heads": q.shape[1], "dim": q.shape[2], "store": "fp8" if fp8 else name_of(cache.dtype), "page": page}
    return _select(q, w, arguments, valid, limit, topk, sizes, workspace_bytes, kind)


def _select(
    q: torch.Tensor,
    w: torch.Tensor,
    keys: Mapping[str, Any],
    valid: torch.Tensor,
    limit: int,
    topk: int,
    sizes: Mapping[str, Any],
    workspace_bytes: int,
    kind: Kind | None,
) -> torch.Tensor:
    rows = q.shape[0]
    if rows == 0:
        return valid.new_empty((0, topk))
    arch = capability(q)
    streaming = catalog.topk(topk=topk, arch=arch, **sizes)
    plan = plans.choose(
        Shape(rows, limit, topk, _units(q)),
        streaming,
        catalog.select(topk, arch),
        catalog.merge(topk, arch),
        workspace_bytes,
        longest_tiled=catalog.CROSSOVER[streaming.store].keys,
        kind=kind,
    )
    if plan.kind == "all":
        every = torch.arange(topk, dtype=torch.int32, device=q.device)
        return torch.where(every < valid[:, None], every, -1)
    out = torch.empty((rows, topk), dtype=torch.int32, device=q.device)
    w = w.float()
    arguments = {
        **keys,
        "q_ptr": q,
        "w_ptr": w,
        "valid_ptr": valid,
        "out_ptr": out,
        "rows": rows,
        "limit": limit,
        "q_stride": q.stride(0),
        "w_stride": w.stride(0),
        "out_stride": topk,
    }
    workspace = torch.empty(plan.workspace_bytes // 4, dtype=torch.int32, device=q.device)
    held, rest = workspace[: 2 * plan.held_words], workspace[2 * plan.held_words :]
    arguments["held_key_ptr"], arguments["held_id_ptr"] = held.view(2, -1)
    if plan.kind == "fused":
        launch(streaming, (plan.programs,), q, arguments)
    elif plan.kind == "split":
        arguments["part_key_ptr"], arguments["part_id_ptr"] = rest.view(2, -1)
        arguments["width"] = plan.ranges * topk
        launch(catalog.split(topk=topk, arch=arch, **sizes), (plan.programs, plan.ranges), q, arguments)
        launch(catalog.merge(topk, arch), (plan.mergers,), q, arguments)
    else:
        _tiled(plan, arch, topk, sizes, rest.view(torch.float32), arguments)
    return out


_PER_ROW = ("q_ptr", "w_ptr", "start_ptr", "end_ptr", "request_ptr", "valid_ptr", "out_ptr")


def _tiled(
    plan: Plan, arch: int, topk: int, sizes: Mapping[str, Any], scores: torch.Tensor, arguments: Mapping[str, Any]
) -> None:
    scorer, selector = catalog.logits(arch=arch, **sizes), catalog.select(topk, arch)
    spans = -(-arguments["limit"] // (scorer.block_keys * SPAN))
    for first in range(0, arguments["rows"], plan.rows):
        count = min(plan.rows, arguments["rows"] - first)
        part = {name: value[first : first + count] if name in _PER_ROW else value for name, value in arguments.items()}
        part |= {"rows": count, "score_ptr": scores, "score_stride": plan.columns}
        tiles = -(-count // scorer.block_queries)
        launch(scorer, (tiles, spans), scores, {**part, "out_ptr": scores, "out_stride": plan.columns})
        launch(selector, (min(plan.programs, count),), scores, part)


def _units(tensor: torch.Tensor) -> int:
    """Programs that the device of ``tensor`` runs at once."""
    if not tensor.is_cuda:
        return _INTERPRETER_UNITS
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def _check_rows(
    q: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    ks: torch.Tensor,
    ke: torch.Tensor,
    workspace_bytes: int,
) -> None:
    faults = _check_queries("index_topk_rows", q, w, k.dtype)
    faults.workspace(workspace_bytes)
    faults.tensor("k", k, ["N", q.shape[-1]], _KEYS)
    faults.tensor("k_scale", k_scale, [*k.shape[:1]], [torch.float32])
    fp8 = k.dtype == torch.float8_e4m3fn
    faults.expect(fp8 == (k_scale is not None), "k_scale: required with e4m3 keys, and with no others")
    faults.tensor("ks", ks, [q.shape[0]], [torch.int32])
    faults.tensor("ke", ke, [q.shape[0]], [torch.int32])
    faults.check()


def _check_paged(
    q: torch.Tensor,
    w: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    row_request: torch.Tensor,
    ke: torch.Tensor,
    page: int,
    workspace_bytes: int,
) -> None:
    fp8 = cache.dtype == torch.uint8
    faults = _check_queries("index_topk_paged", q, w, torch.float8_e4m3fn if fp8 else cache.dtype)
    faults.workspace(workspace_bytes)
    if page < 1:  # the sizes of a cache follow from it
        faults.expect(False, f"page: found {page}; required at least 1")
    elif fp8:
        faults.tensor("cache", cache, ["pages", page * (q.shape[-1] + 4)], [torch.uint8])
        faults.expect(
            cache.stride(0) % 4 == 0 and cache.data_ptr() % 4 == 0,
            f"cache: found a page stride of {cache.stride(0)} bytes; required pages that begin on 4 bytes",
        )
    else:
        faults.tensor("cache", cache, ["pages", page, q.shape[-1]], _KEYS)
        faults.expect(
            cache.ndim != 3 or cache.stride(1) == cache.shape[2],
            f"cache: found strides {list(cache.stride())}; required keys of a page next to each other",
        )
    faults.tensor("block_table", block_table, ["R", "nb"], [torch.int32])
    faults.tensor("row_request", row_request, [q.shape[0]], [torch.int32])
    faults.tensor("ke", ke, [q.shape[0]], [torch.int32])
    faults.check()


def _require_pages(
    held: int, block_table: torch.Tensor, row_request: torch.Tensor, ke: torch.Tensor, topk: int, page: int
) -> None:
    """What the reference says of requests and pages that are not there, before a kernel reads them on a CPU."""
    counts = ke.clamp(0, block_table.shape[1] * page).masked_fill_(row_request < 0, 0)
    reference.require_requests(row_request, counts, block_table.shape[0])
    for request in row_request[counts > topk].unique().tolist():
        longest = int(counts[row_request == request].max())
        reference.require_pages(block_table[request, : -(-longest // page)], held, request)


def _check_queries(operator: str, q: torch.Tensor, w: torch.Tensor, keys: torch.dtype) -> Faults:
    faults = Faults(operator, q)
    faults.tensor("q", q, ["T", "H", "D"], [keys])
    faults.expect(
        q.ndim != 3 or q.stride(1) == q.shape[2] or q.shape[1] == 1,
        f"q: found strides {list(q.stride())}; required heads next to each other",
    )
    faults.tensor("w", w, [*q.shape[:2]], FLOATS)
    if keys == torch.float8_e4m3fn:
        fp8_fault(faults, q, "keep bf16 keys")
    return faults
