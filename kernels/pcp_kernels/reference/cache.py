# SPDX-License-Identifier: Apache-2.0
"""Paged caches: where a slot's bytes are, writing records and reading keys.

A slot is ``page number * page + offset``. Index keys in FP8 are kept page by page, all values of a page before all of
its scales (DeepGEMM's layout), so a page of 64 keys of 128 values has 8448 bytes::

    page 0   64 x 128 value bytes | 64 x 4 scale bytes      values at 0, scales at 8192
    page 1   ...                                            values at 8448, scales at 16640

Everything else is ``[pages, page, width]``: index keys of other dtypes, latents, and latent records of bytes.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4


def page_bytes(page: int, dim: int) -> int:
    """Bytes of a page of FP8 index keys."""
    return page * (dim + SCALE_BYTES)


def value_offset(slot: int, page: int, dim: int) -> int:
    """Byte at which the values of an FP8 index key begin in the whole cache."""
    return slot // page * page_bytes(page, dim) + slot % page * dim


def scale_offset(slot: int, page: int, dim: int) -> int:
    """Byte at which the scale of an FP8 index key begins in the whole cache."""
    return slot // page * page_bytes(page, dim) + page * dim + slot % page * SCALE_BYTES


def page_size(cache: torch.Tensor, dim: int) -> int:
    """Keys per page of an index cache: u8 ``[pages, page * (dim + 4)]``, or ``[pages, page, dim]``.

    Raises:
        ValueError: a cache that is neither.
    """
    if cache.ndim == 3 and cache.shape[2] == dim:
        return cache.shape[1]
    if cache.ndim == 2 and cache.dtype == torch.uint8 and cache.shape[1] and cache.shape[1] % (dim + SCALE_BYTES) == 0:
        return cache.shape[1] // (dim + SCALE_BYTES)
    raise ValueError(
        f"found an index cache {cache.dtype} {list(cache.shape)} for keys of {dim} values; required u8 "
        f"[pages, page * {dim + SCALE_BYTES}] (FP8 pages) or [pages, page, {dim}]."
    )


def scatter(cache: torch.Tensor, record: torch.Tensor, slots: torch.Tensor) -> None:
    """Write each record at its slot; a negative slot is skipped, and no two others may be equal.

    Args:
        cache: ``[pages, page, width]`` of the record's dtype, or u8 ``[pages, page * width]`` of FP8 index keys.
        record: ``[N, width]``.
        slots: i64 ``[N]``.

    Raises:
        ValueError: arguments other than these.
    """
    width = record.shape[-1]
    faults = []
    if record.ndim != 2 or slots.shape != record.shape[:1] or slots.dtype != torch.int64:
        faults.append(
            f"found records {list(record.shape)} and slots {slots.dtype} {list(slots.shape)}; required [N, width] and "
            "i64 [N]"
        )
    if cache.dtype != record.dtype:
        faults.append(f"found a cache of {cache.dtype} for records of {record.dtype}; required one dtype")
    pages = cache.ndim == 2 and cache.dtype == torch.uint8 and width > SCALE_BYTES and cache.shape[1] % width == 0
    if not pages and not (cache.ndim == 3 and cache.shape[2] == width):
        faults.append(
            f"found a cache {list(cache.shape)} for records of {width}; required [pages, page, {width}], or u8 "
            f"[pages, page * {width}]"
        )
    if faults:
        raise ValueError("\n  ".join(["scatter cannot run:", *faults]))
    kept = slots >= 0
    slots, record = slots[kept], record[kept]
    page = cache.shape[1] // width if pages else cache.shape[1]
    where = (slots // page, slots % page)
    if not pages:
        cache[where] = record
        return
    dim = width - SCALE_BYTES
    values, scales = _split_pages(cache, page, dim)
    values[where] = record[:, :dim]
    scales[where] = record[:, dim:]


def gather(cache: torch.Tensor, slots: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(keys ``[n, dim]``, scale fp32 ``[n]`` or None) at slots i64 ``[n]``; a negative slot reads slot 0.

    Raises:
        ValueError: a cache that holds no such keys.
    """
    page = page_size(cache, dim)
    slots = slots.clamp(min=0)
    where = (slots // page, slots % page)
    if cache.ndim == 3:
        return cache[where], None
    values, scales = _split_pages(cache, page, dim)
    return values[where].view(torch.float8_e4m3fn), scales[where].view(torch.float32)[:, 0]


def gather_pages(cache: torch.Tensor, pages: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(keys ``[n, page, dim]``, scale fp32 ``[n, page]`` or None) of whole pages ``[n]``, in their order."""
    held = cache.index_select(0, pages)
    if held.ndim == 3:
        return held, None
    values, scales = _split_pages(held, page_size(cache, dim), dim)
    return values.view(torch.float8_e4m3fn), scales.contiguous().view(torch.float32)[..., 0]


def _split_pages(cache: torch.Tensor, page: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """u8 views ``[pages, page, dim]`` of the values and ``[pages, page, 4]`` of the scales."""
    return cache[:, : page * dim].unflatten(1, (page, dim)), cache[:, page * dim :].unflatten(1, (page, SCALE_BYTES))
