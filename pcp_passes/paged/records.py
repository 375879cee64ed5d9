# SPDX-License-Identifier: Apache-2.0
"""One record per token and MLA layer: ``pcp::pack_record`` makes it from rows, ``pcp::record_write`` stores it.

A record holds the latent, the rope key and, in a layer with an indexer of its own, the index key. So what a sharded
body gathers of a layer is one tensor, in one collective, already in the bytes that the caches keep:

==========  =======================================  =========================
store       record                                   bytes at 512 + 64 + 128
==========  =======================================  =========================
``native``  ``[N, L + R + D]``, dtype of the rows    1152 + 256 in bf16
``bf16``    ``[N, L + R + D]``                       1152 + 256
``fp8``     ``u8[N, W + D + 4]``                     656 + 132
==========  =======================================  =========================

An FP8 record is the latent record of pcp_kernels (L values, a power-of-two scale for each 128 of them, the rope key in
bf16), then the index record (D values and a scale). Each row is quantised by itself, so gathering records gives the
bytes that packing gathered rows would, whatever the number of ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from pcp_kernels.ops import dsa_pack, index_pack, index_scatter, latent_pack, latent_unpack
from pcp_passes.errors import ConfigError
from pcp_passes.ir.library import define
from pcp_passes.paged.rows import write_rows
from pcp_passes.paged.state import REPLICATED_SLOTS, PagedCaches, current, require_layout

PACK_RECORD = "pcp::pack_record"
RECORD_WRITE = "pcp::record_write"

Store = Literal["native", "bf16", "fp8"]
STORES: tuple[Store, ...] = ("native", "bf16", "fp8")

GROUP = 128
"""Values of a latent that share a scale."""


def latent_bytes(latent: int, rope: int) -> int:
    """Bytes of an FP8 latent record: 656 of 512 + 64."""
    return latent + 4 * -(-latent // GROUP) + 2 * rope


def index_bytes(index: int) -> int:
    """Bytes of an FP8 index record: 132 of 128; 0 where there is none."""
    return index + 4 if index else 0


def pack_record(latent: torch.Tensor, rope: torch.Tensor, index: torch.Tensor | None, store: Store) -> torch.Tensor:
    """Records of rows.

    Args:
        latent: ``[N, 1, L]`` or ``[N, L]``.
        rope: ``[N, 1, R]`` or ``[N, R]``, dtype of ``latent``.
        index: ``[N, D]``, or ``None`` in a layer that shares another's selection.
        store: as the module's table says.

    Returns:
        ``[N, W]``, contiguous.

    Raises:
        ConfigError: an unknown store, or rows of different counts.
    """
    result: torch.Tensor = pack_record_op(latent, rope, index, store)
    return result


def record_write(
    record: torch.Tensor, layer: str, *, latent: int, rope: int, index: int = 0, layout: str = REPLICATED_SLOTS
) -> torch.Tensor:
    """Write records of a layer into their slots: ``"<layer>.latent"`` and, with ``index``, ``"<layer>.index"``.

    Caches in FP8 take float records too, and pack them on the way: the same bytes, gathered wider.

    Args:
        record: what :func:`pack_record` gave, gathered or not.
        layer: name of the layer's cache.
        latent, rope, index: L, R and D; D is 0 where the record has no index key.
        layout: layout of the rows, see :mod:`pcp_passes.paged.ops`.

    Returns:
        an empty tensor, to hand to the reads as ``dep``.

    Raises:
        ConfigError: rows in another layout than the slots, a record of another width, or bytes for caches that are not
            FP8.
    """
    result: torch.Tensor = record_write_op(record, layer, latent, rope, index, layout)
    return result


def unpacked(rows: torch.Tensor, latent: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
    """``[n, L + R]`` of rows of a latent cache, FP8 records or floats."""
    if rows.dtype != torch.uint8:
        return rows.to(dtype)
    return torch.cat(latent_unpack(rows, latent, rope, dtype=dtype), dim=1)


def _fp8(latent: torch.Tensor, rope: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    if index is None:
        return latent_pack(latent, rope, store="fp8")
    # The rows are rounded already, to the dtype of the model; a second rounding would change codes.
    return dsa_pack(latent, rope, index, rope="none", rounding="fp32", store="fp8")


def _pack_record(latent: torch.Tensor, rope: torch.Tensor, index: torch.Tensor | None, store: str) -> torch.Tensor:
    latent, rope = latent.flatten(1), rope.flatten(1)
    rows = [part.shape[0] for part in (latent, rope, *([] if index is None else [index]))]
    if store not in STORES or len(set(rows)) > 1:
        raise ConfigError(
            f"{PACK_RECORD}: found store {store!r} and parts of {rows} rows; required one of {', '.join(STORES)} and "
            "one row of each part per token."
        )
    if store == "fp8":
        return _fp8(latent, rope, index)
    record = torch.cat([latent, rope] if index is None else [latent, rope, index], dim=1)
    return record.to(torch.bfloat16) if store == "bf16" else record


def _pack_record_fake(latent: torch.Tensor, rope: torch.Tensor, index: torch.Tensor | None, store: str) -> torch.Tensor:
    widths = latent.flatten(1).shape[1], rope.flatten(1).shape[1], 0 if index is None else index.shape[1]
    if store == "fp8":
        width = latent_bytes(*widths[:2]) + index_bytes(widths[2])
        return latent.new_empty(latent.shape[0], width, dtype=torch.uint8)
    return latent.new_empty(latent.shape[0], sum(widths), dtype=torch.bfloat16 if store == "bf16" else latent.dtype)


def _record_write(
    record: torch.Tensor, layer: str, latent: int, rope: int, index: int = 0, layout: str = REPLICATED_SLOTS
) -> torch.Tensor:
    caches, inputs = current(RECORD_WRITE)
    require_layout(RECORD_WRITE, layer, layout, record, inputs)
    packed = record.dtype == torch.uint8
    widths = (latent_bytes(latent, rope), index_bytes(index)) if packed else (latent + rope, index)
    if record.dim() != 2 or record.shape[1] != sum(widths) or (packed and not caches.holds_records):
        raise ConfigError(
            f"{RECORD_WRITE} of {layer}: found {record.dtype} records {list(record.shape)}, caches of {caches.dtype}; "
            f"required width {sum(widths)} at L={latent}, R={rope}, D={index}, and bytes for FP8 caches only. Make the "
            "bodies for the caches' dtype."
        )
    dep = record.new_empty(0)
    if caches.holds_records and not packed:
        parts = record.split([latent, rope, index], dim=1)
        record = _fp8(parts[0], parts[1], parts[2] if index else None)
        widths = latent_bytes(latent, rope), index_bytes(index)
    rows, keys = record.split(widths, dim=1)
    name = f"{layer}.latent"
    write_rows(rows.unsqueeze(1), caches.written(name, rows.unsqueeze(1)), inputs.slots, name, lambda: inputs.kept)
    if index:
        write_index(keys, f"{layer}.index", caches, inputs.slots, lambda: inputs.kept)
    return dep


def write_index(keys: torch.Tensor, name: str, caches: PagedCaches, slots: torch.Tensor, kept: Any) -> None:
    """Write index keys ``[N, D]``, or records ``u8[N, D + 4]``, into a cache of index keys."""
    if caches.holds_records:
        record = keys if keys.dtype == torch.uint8 else index_pack(keys, rope="none", rounding="fp32", store="fp8")
        index_scatter(caches.pages(name, record.shape[1]), record, slots)
    else:
        write_rows(keys.unsqueeze(1), caches.written(name, keys.unsqueeze(1)), slots, name, kept)


def _record_write_fake(
    record: torch.Tensor, layer: str, latent: int, rope: int, index: int = 0, layout: str = REPLICATED_SLOTS
) -> torch.Tensor:
    return record.new_empty(0)


pack_record_op: Any = define(
    "pack_record(Tensor latent, Tensor rope, Tensor? index, str store) -> Tensor", _pack_record, _pack_record_fake
)
record_write_op: Any = define(
    'record_write(Tensor record, str layer, int latent, int rope, int index=0, str layout="replicated") -> Tensor',
    _record_write,
    _record_write_fake,
)
