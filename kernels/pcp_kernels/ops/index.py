# SPDX-License-Identifier: Apache-2.0
"""Operators around the selection of keys: records and caches, prepared queries, indices to slots."""

from __future__ import annotations

import torch

from pcp_kernels.generate.rows import ROWS
from pcp_kernels.ops.launch import DTYPES, FLOATS, Faults, angles, by_reference, fresh, launch, name_of
from pcp_kernels.ops.records import rope_faults
from pcp_kernels.reference import cache as cache_reference
from pcp_kernels.reference import owner as owner_reference
from pcp_kernels.reference import prep as prep_reference
from pcp_kernels.reference import remap as remap_reference
from pcp_kernels.reference.pack import STORES
from pcp_kernels.specs import (
    DIMS,
    LATENTS,
    ROPE_DIMS,
    KernelSpec,
    LatentScatterSpec,
    OwnerSpec,
    PrepSpec,
    RemapSpec,
    ScatterSpec,
)

SCALE_BYTES = 4


def index_scatter(cache: torch.Tensor, record: torch.Tensor, slots: torch.Tensor) -> None:
    """Write each record at its slot of a paged cache, in place; a negative slot is padding and is skipped.

    Args:
        cache: u8 ``[pages, page * (dim + 4)]`` of fp8 index keys (of a page the values come first, then the scales), or
            ``[pages, page, width]`` of the record's dtype; contiguous.
        record: ``[N, width]``; its rows may be part of wider ones.
        slots: i64 ``[N]``; no two that are not negative may be equal.

    Raises:
        ValueError: arguments other than these; a width that no kernel is generated for; on CPU a slot past the cache,
            which a GPU skips.
    """
    _scatter(cache, record, slots)


@torch.library.custom_op("pcp_kernels::index_scatter", mutates_args=("cache",))
def _scatter(cache: torch.Tensor, record: torch.Tensor, slots: torch.Tensor) -> None:
    faults = Faults("index_scatter", cache)
    width = record.shape[-1] if record.ndim else 0
    paged = cache.ndim == 2
    faults.tensor("record", record, ("N", "width"), (torch.uint8, *FLOATS))
    faults.tensor("slots", slots, (record.shape[0] if record.ndim else 0,), (torch.int64,), contiguous=True)
    kinds = (torch.uint8,) if paged else (record.dtype,)
    faults.tensor("cache", cache, ("pages", "bytes") if paged else ("pages", "page", width), kinds, contiguous=True)
    if paged:
        faults.expect(
            record.dtype == torch.uint8 and width > SCALE_BYTES and cache.shape[1] % width == 0,
            f"cache: found pages of {cache.shape[1]} bytes for records of {record.dtype} [N, {width}]; required u8 "
            "records and pages of a whole number of them",
        )
    faults.check()
    if not record.shape[0]:
        return
    page = cache.shape[1] // width if paged else cache.shape[1]
    capacity = cache.shape[0] * page
    if by_reference(cache, record):
        faults.below("slots", slots, capacity, "the slots of the cache")
        faults.check()
        cache_reference.scatter(cache, record, slots)
        return
    words = record.element_size() * record.stride(0)
    aligned = (
        words % 4 == width * record.element_size() % 4 == 0 and record.storage_offset() * record.element_size() % 4 == 0
    )
    faults.expect(
        aligned, f"record: found rows of {words} bytes from byte {record.storage_offset()}; required whole words of 4"
    )
    faults.check()
    launch(
        ScatterSpec(dim=width - SCALE_BYTES, store="fp8", page=page) if paged else _row_spec(record, page),
        (-(-record.shape[0] // ROWS),),
        cache,
        {
            "record_ptr": record.view(torch.int32),
            "record_words": words // 4,
            "slot_ptr": slots,
            "cache_ptr": cache.view(torch.int32),
            "slots": capacity,
            "rows": record.shape[0],
        },
    )


@_scatter.register_fake
def _(cache: torch.Tensor, record: torch.Tensor, slots: torch.Tensor) -> None:
    return None


def _row_spec(record: torch.Tensor, page: int) -> KernelSpec:
    """The kernel that copies rows of this width: all with one number of bytes a row are alike."""
    width, store = record.shape[1], "fp8" if record.dtype == torch.uint8 else name_of(record.dtype)
    if store != "fp8" and width in DIMS:
        return ScatterSpec(dim=width, store=store, page=page)
    for latent in LATENTS:
        for rope_dim in ROPE_DIMS:
            found = latent + 4 * -(-latent // 128) + 2 * rope_dim if store == "fp8" else latent + rope_dim
            if found == width:
                return LatentScatterSpec(latent=latent, rope_dim=rope_dim, store=store)
    raise ValueError(
        f"index_scatter cannot run:\n  record: found {record.dtype} of width {width}; required keys of "
        f"{', '.join(map(str, DIMS))} values, or latent records of {', '.join(map(str, LATENTS))} values and a rope "
        f"part of {', '.join(map(str, ROPE_DIMS))}"
    )


def index_prep(
    q: torch.Tensor,
    w: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    rope: str = "none",
    hadamard: bool = False,
    store: str = "fp8",
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The indexer's queries as they are scored: RoPE, Hadamard, the store; fp8 scales folded into the weights.

    Args:
        q: ``[T, H, D]``, bf16, fp16, fp32 or fp64.
        w: ``[T, H]``, any of these.
        cos, sin: ``[T, R/2]``, looked up per row; dimensions ``[0:R]`` are rotated.
        rope: "interleaved", "half" or "none".
        store: "fp8" (one power-of-two scale per token and head), "bf16", "fp16", "fp32"; "fp64" by the reference
            alone.
        factor: of the weights, ``H**-0.5 * D**-0.5`` in the published models.

    Returns:
        ``[T, H, D]`` of the store's dtype and fp32 ``[T, H]``, ``w * factor * scale``.

    Raises:
        ValueError: arguments other than these, or a spec without a kernel.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _prep(
        q, w, cos, sin, rope=rope, hadamard=hadamard, store=store, factor=factor
    )
    return result


@torch.library.custom_op("pcp_kernels::index_prep", mutates_args=())
def _prep(
    q: torch.Tensor,
    w: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    rope: str,
    hadamard: bool,
    store: str,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    faults = Faults("index_prep", q)
    faults.tensor("q", q, ("T", "H", "D"), FLOATS)
    faults.tensor("w", w, q.shape[:2], FLOATS)
    faults.choice("store", store, tuple(STORES))
    rope_dim = rope_faults(faults, rope, cos, sin, q)
    faults.check()
    if by_reference(q):
        out, weights = prep_reference.index_prep(
            q, w, cos, sin, rope=rope, hadamard=hadamard, store=store, factor=factor
        )
        return fresh(out, q), fresh(weights, w)
    tokens, heads, dim = q.shape
    spec = PrepSpec(
        heads=heads, dim=dim, rope=rope, rope_dim=rope_dim, hadamard=hadamard, store=store, source=name_of(q.dtype)
    )
    out = torch.empty(q.shape, dtype=DTYPES[store], device=q.device)
    weights = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    given = w.float()
    arguments = {
        "q_ptr": q,
        "q_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "w_ptr": given,
        "w_step": given.stride(0),
        "factor": factor,
        "code_ptr": out.view(torch.uint8) if store == "fp8" else None,
        "out_ptr": out,
        "weight_ptr": weights,
        "pairs": tokens * heads,
    }
    launch(spec, (-(-tokens * heads // ROWS),), q, arguments | angles(cos, sin))
    return out, weights


@_prep.register_fake
def _(
    q: torch.Tensor,
    w: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    rope: str,
    hadamard: bool,
    store: str,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    double = q.dtype == torch.float64 and store == "fp64"
    weights = torch.float64 if double else torch.float32
    return q.new_empty(q.shape, dtype=STORES[store]), q.new_empty(q.shape[:2], dtype=weights)


def index_remap(
    indices: torch.Tensor, block_table: torch.Tensor, row_request: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of selected keys, ``block_table[request, i // page] * page + i % page``, and how many there are.

    Args:
        indices: i32 ``[T, k]``, request-local; -1 where there is none.
        block_table: i32 ``[R, nb]``.
        row_request: i32 ``[T]``, the request of each row; a row of no request (negative) has no slots.
        page: keys per page.

    Returns:
        slots i32 ``[T, k]``, -1 where the index is -1 or names no page of the request, and i32 ``[T]``, the number of
        slots that are not -1.

    Raises:
        ValueError: arguments other than these, or a spec without a kernel; on CPU an index of a request past the
            table, which is no slot on a GPU.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _remap(indices, block_table, row_request, page)
    return result


@torch.library.custom_op("pcp_kernels::index_remap", mutates_args=())
def _remap(
    indices: torch.Tensor, block_table: torch.Tensor, row_request: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    faults = Faults("index_remap", indices)
    faults.tensor("indices", indices, ("T", "k"), (torch.int32,))
    faults.tensor("block_table", block_table, ("R", "nb"), (torch.int32,))
    faults.tensor("row_request", row_request, indices.shape[:1], (torch.int32,), contiguous=True)
    faults.expect(page > 0, f"page: found {page}; required at least 1")
    faults.check()
    if by_reference(indices):
        return remap_reference.index_remap(indices, block_table, row_request, page)
    if not indices.is_cuda:
        remap_reference.require_requests(indices, row_request, block_table.shape[0])
    rows, topk = indices.shape
    slots = torch.empty((rows, topk), dtype=torch.int32, device=indices.device)
    count = torch.empty((rows,), dtype=torch.int32, device=indices.device)
    arguments = {
        "index_ptr": indices,
        "index_stride": indices.stride(0),
        "table_ptr": block_table,
        "table_step": block_table.stride(0),
        "request_ptr": row_request,
        "slot_ptr": slots,
        "requests": block_table.shape[0],
        "pages": block_table.shape[1],
        "count_ptr": count,
    }
    launch(RemapSpec(topk=topk, page=page, count=True), (rows,), indices, arguments)
    return slots, count


@_remap.register_fake
def _(
    indices: torch.Tensor, block_table: torch.Tensor, row_request: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return indices.new_empty(indices.shape), indices.new_empty(indices.shape[:1])


def select_owner_rows(indices: torch.Tensor, rows: torch.Tensor, fill: int = 0) -> torch.Tensor:
    """Row ``rows[r]`` of ``indices`` for every request, ``fill`` where ``rows[r]`` is negative: i32 ``[R, k]``.

    A rank that gives its own selections, its rows of the last tokens that it owns, -1 for the others and fill 0 gets
    what a sum over the ranks completes: the owner's row, whose -1 tail the others leave alone.

    Args:
        indices: i32 ``[M, k]``.
        rows: i64 ``[R]``, below M.

    Raises:
        ValueError: arguments other than these, or a spec without a kernel; on CPU a row past the last, which is
            ``fill`` on a GPU.
    """
    result: torch.Tensor = _owner(indices, rows, fill)
    return result


@torch.library.custom_op("pcp_kernels::select_owner_rows", mutates_args=())
def _owner(indices: torch.Tensor, rows: torch.Tensor, fill: int) -> torch.Tensor:
    faults = Faults("select_owner_rows", indices)
    faults.tensor("indices", indices, ("M", "k"), (torch.int32,))
    faults.tensor("rows", rows, ("R",), (torch.int64,), contiguous=True)
    faults.check()
    faults.below("rows", rows, indices.shape[0], "the rows of indices")
    faults.check()
    if by_reference(indices):
        return owner_reference.select_owner_rows(indices, rows, fill)
    out = torch.empty((rows.shape[0], indices.shape[1]), dtype=torch.int32, device=indices.device)
    arguments = {
        "index_ptr": indices,
        "index_stride": indices.stride(0),
        "row_ptr": rows,
        "out_ptr": out,
        "rows": indices.shape[0],
        "fill": fill,
    }
    launch(OwnerSpec(topk=indices.shape[1]), (rows.shape[0],), indices, arguments)
    return out


@_owner.register_fake
def _(indices: torch.Tensor, rows: torch.Tensor, fill: int) -> torch.Tensor:
    return indices.new_empty((rows.shape[0], indices.shape[1]))
