# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches, in two forms that agree within rounding.

On a CPU the keys of a request are gathered, then attended by position: fast enough for tests and small models. That
reads lengths on the host, once per call of a body. Off the CPU, and inside
:func:`pcp_passes.capture_mode.capturable_only`, each row walks its own keys through ``pcp_kernels.paged_attend_rows``,
which reads none, so a graph can hold it. Attention over selected keys is handed to a back end
(:mod:`pcp_passes.sparse.backends`), and reads none either.
"""

from __future__ import annotations

from typing import Any

import torch

from pcp_kernels.ops import index_remap, paged_attend_records, paged_attend_rows
from pcp_kernels.ops.launch import by_reference
from pcp_kernels.reference import paged, remap
from pcp_passes.attention import attend
from pcp_passes.capture_mode import host_free
from pcp_passes.errors import ConfigError
from pcp_passes.paged.records import latent_bytes, unpacked
from pcp_passes.paged.state import AttentionInputs, PagedCaches
from pcp_passes.sparse.backends import sparse_mla


def over_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    left: int = -1,
    right: int = 0,
    chunk: int = 0,
    **options: Any,
) -> torch.Tensor:
    """``[N, Hq, Dv]`` of queries ``[N, Hq, D]``; see :func:`pcp_passes.paged.kv_attend`.

    Raises:
        ConfigError: shapes that do not fit together.
    """
    _require_rows(q, inputs)
    if q.shape[2] != k_cache.shape[3]:
        raise ConfigError(f"queries are {list(q.shape)}, the key cache {list(k_cache.shape)}; required one head size")
    if host_free(q):
        return over_pages(
            q, k_cache, None, v_cache, inputs, scale=scale, left=left, right=right, chunk=chunk, **options
        )
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[3])
    size = k_cache.shape[1]
    for (_, start, stop, keys), slots in zip(inputs.segments, inputs.key_slots(size), strict=True):
        where = inputs.positions[start:stop]
        skip = _out_of_sight(where, left, chunk)
        if skip >= keys:
            continue
        seen = attend(
            q[start:stop].transpose(0, 1)[None],
            _heads_first(k_cache, slots[skip:], q.dtype),
            _heads_first(v_cache, slots[skip:], q.dtype),
            where - skip,
            scale=scale, left=left, right=right, chunk=chunk, **options,
        )  # fmt: skip
        out[start:stop] = seen[0].transpose(0, 1)
    return out


def over_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    rope_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    inputs: AttentionInputs,
    *,
    scale: float,
    left: int = -1,
    right: int = 0,
    chunk: int = 0,
    **options: Any,
) -> torch.Tensor:
    """:func:`over_blocks` without a value read on the host; a request is cut at the end of its block table.

    ``rope_cache`` is the part of the keys that lies apart, and without ``v_cache`` the keys in ``k_cache`` are values.
    """
    low, high = inputs.interval(left, right, chunk)
    call = paged.paged_attend_rows if by_reference(q) else paged_attend_rows
    return call(
        q, k_cache, rope_cache, v_cache, inputs.tables, inputs.row_request, low, high, inputs.positions,
        scale=scale, **options,
    )  # fmt: skip


def absorbed(
    q: torch.Tensor,
    caches: PagedCaches,
    layer: str,
    inputs: AttentionInputs,
    scale: float,
    latent: int,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """``[N, H, L]`` of queries ``[N, H, L + R]`` over ``[latent | rope]``; see :func:`pcp_passes.paged.mla_attend`.

    Raises:
        ConfigError: shapes that do not fit together, or a back end that cannot serve the call.
    """
    _require_rows(q, inputs)
    rope = q.shape[2] - latent
    if indices is None and host_free(q):
        return _absorbed_pages(q, caches, layer, inputs, scale, latent, rope)
    rows = _latent_rows(caches, layer, latent, rope)
    if indices is not None:
        if indices.shape[0] != q.shape[0]:
            raise ConfigError(
                f"{layer}: {list(indices.shape)} indices for queries {list(q.shape)}; required a row each"
            )
        if not inputs.seq_lens.shape[0]:
            return q.new_zeros(q.shape[0], q.shape[1], latent)
        to_slots = remap.index_remap if by_reference(indices) else index_remap
        slots, _ = to_slots(indices, inputs.tables, inputs.row_request, caches.block_size)
        slots = slots.masked_fill(inputs.visible[:, None] == 0, -1)  # padding rows, and requests without a key
        options = caches.sparse
        return sparse_mla(
            q, rows, slots, scale,
            latent=latent, rope=rope, backend=options.attention, workspace_bytes=options.workspace_bytes,
        )  # fmt: skip
    out = q.new_zeros(q.shape[0], q.shape[1], latent)
    for (_, start, stop, _), slots in zip(inputs.segments, inputs.key_slots(caches.block_size), strict=True):
        keys = unpacked(rows.index_select(0, slots), latent, rope, q.dtype)
        out[start:stop] = attend(
            q[start:stop].transpose(0, 1)[None], keys[None, None], keys[None, None, :, :latent],
            inputs.positions[start:stop], scale=scale,
        )[0].transpose(0, 1)  # fmt: skip
    return out


def _absorbed_pages(
    q: torch.Tensor, caches: PagedCaches, layer: str, inputs: AttentionInputs, scale: float, latent: int, rope: int
) -> torch.Tensor:
    """Dense absorbed attention without a value read on the host, over any of the three kinds of cache."""
    if f"{layer}.k" in caches.tensors:
        halves = [caches.read(f"{layer}.{kind}") for kind in ("k", "v")]
        _require_halves(layer, halves, latent, rope)
        return over_pages(q, halves[0], halves[1] if rope else None, None, inputs, scale=scale)
    held = caches.read(f"{layer}.latent")
    _require_width(layer, held, latent, rope)
    if held.dtype != torch.uint8:
        parts = held.split([latent, rope], dim=3)
        return over_pages(q, parts[0], parts[1] if rope else None, None, inputs, scale=scale)
    low, high = inputs.interval(-1, 0, 0)
    call = paged.paged_attend_records if by_reference(q) else paged_attend_records
    return call(
        q, held.squeeze(2), inputs.tables, inputs.row_request, low, high,
        latent_dim=latent, rope_dim=rope, scale=scale,
    )  # fmt: skip


def _latent_rows(caches: PagedCaches, layer: str, latent: int, rope: int) -> torch.Tensor:
    """``[slots, W]``: the records of a layer, or the two halves of a body that writes them apart, joined by a copy."""
    if f"{layer}.k" in caches.tensors:
        halves = [caches.read(f"{layer}.{kind}") for kind in ("k", "v")]
        _require_halves(layer, halves, latent, rope)
        rows = [half.flatten(0, 2) for half in halves]
        return torch.cat([half.float() if half.dtype.itemsize == 1 else half for half in rows], dim=1)
    held = caches.read(f"{layer}.latent")
    _require_width(layer, held, latent, rope)
    return held.flatten(0, 2)


def _require_halves(layer: str, halves: list[torch.Tensor], latent: int, rope: int) -> None:
    found = [half.shape[3] for half in halves]
    if found != [latent, rope]:
        raise ConfigError(f"{layer}: queries are {latent} + {rope} wide, the caches {found[0]} + {found[1]}")


def _require_width(layer: str, held: torch.Tensor, latent: int, rope: int) -> None:
    width = latent_bytes(latent, rope) if held.dtype == torch.uint8 else latent + rope
    if held.shape[3] != width:
        raise ConfigError(
            f"{layer}: queries are {latent} + {rope} wide, which takes cache rows of {width}; found {held.shape[3]}"
        )


def _out_of_sight(positions: torch.Tensor, left: int, chunk: int) -> int:
    """Leading keys that no row of a sliding window sees: they need not be gathered.

    Chunks count from position 0, so nothing is cut there.
    """
    return 0 if left < 0 or chunk else max(int(positions.min()) - left, 0)


def _heads_first(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gathered rows as ``[1, H, S, D]``."""
    return cache.flatten(0, 1).index_select(0, slots).to(dtype).transpose(0, 1)[None]


def _require_rows(q: torch.Tensor, inputs: AttentionInputs) -> None:
    if q.dim() != 3 or q.shape[0] != inputs.rows:
        raise ConfigError(
            f"found queries {list(q.shape)} for attention inputs of {inputs.rows} rows; required [N, H, D] with a row "
            "per position. Give a body the inputs that were made for its rows."
        )
