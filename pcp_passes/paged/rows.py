# SPDX-License-Identifier: Apache-2.0
"""Writing rows into the slots of a paged tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pcp_passes.capture_mode import host_free
from pcp_passes.errors import ConfigError
from pcp_passes.host_reads import allowed

Kept = tuple[torch.Tensor | None, torch.Tensor]


@allowed("only where rows may be read on the host: elsewhere a skipped row repeats a kept one")
def kept_rows(slots: torch.Tensor) -> Kept:
    """Rows that have a slot, i64, or ``None`` for all; and their slots. Their count is read on the host."""
    rows = (slots >= 0).nonzero().flatten()
    return (None, slots) if len(rows) == len(slots) else (rows, slots[rows])


def write_rows(
    rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, name: str, kept: Callable[[], Kept] | None = None
) -> None:
    """Write ``rows`` into their slots, in place.

    Args:
        rows: ``[n, heads, dim]``; converted to the dtype of the cache.
        cache: contiguous ``[num_blocks, block_size, heads, dim]``; slot ``b * block_size + i`` is row i of block b.
        slots: i64 ``[n]``; a row with slot -1 is not written, and no two rows may name one slot.
        name: of the cache, for the error.
        kept: gives :func:`kept_rows` of ``slots`` where that is known already; asked only where the host may be read
            (:func:`pcp_passes.capture_mode.host_free`).

    Raises:
        ConfigError: shapes or dtypes that do not fit together.
        IndexError: a slot beyond the cache (on CPU; a device-side assertion elsewhere).
    """
    if (
        cache.dim() != 4
        or rows.shape != (slots.shape[0], *cache.shape[2:])
        or slots.dtype != torch.int64
        or not cache.is_contiguous()
    ):
        raise ConfigError(
            f"{name}: found rows {list(rows.shape)}, {slots.dtype} slots {list(slots.shape)} and a cache "
            f"{list(cache.shape)} of strides {list(cache.stride())}; required rows [n, heads, dim], int64 slots [n] "
            "and a contiguous cache [blocks, block size, heads, dim]. Pass one slot per token row."
        )
    if slots.numel() == 0:
        return
    if not host_free(slots):
        _write_kept(rows, cache, kept() if kept is not None else kept_rows(slots))
    else:
        _write_without_sync(rows, cache, slots)


def _write_kept(rows: torch.Tensor, cache: torch.Tensor, kept: Kept) -> None:
    index, slots = kept
    rows = rows if index is None else rows.index_select(0, index)
    _as_copied(cache).flatten(0, 1).index_copy_(0, slots, _as_copied(rows.to(cache.dtype)))


def _write_without_sync(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Selecting the rows to keep has a data-dependent size, which neither a CUDA graph nor a fast launch can have.

    Instead each dropped row repeats a kept one: the same value goes to the same slot, in whatever order. When no row
    is kept, all rows write slot 0 back as it is.
    """
    flat = _as_copied(cache).flatten(0, 1)
    rows = _as_copied(rows.to(cache.dtype))
    keep = slots >= 0
    # One-element tensors throughout: an index without dimensions is read on the host.
    stand_in = keep.to(torch.int8).argmax(0, keepdim=True)
    slot = slots[stand_in].clamp(min=0)
    value = torch.where(keep[stand_in, None, None], rows[stand_in], flat[slot])
    flat.index_copy_(0, torch.where(keep, slots, slot), torch.where(keep[:, None, None], rows, value))


def _as_copied(x: torch.Tensor) -> torch.Tensor:
    """Types of one byte as bytes: PyTorch copies no rows of an FP8 type by index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
