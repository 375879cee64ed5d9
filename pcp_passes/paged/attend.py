# SPDX-License-Identifier: Apache-2.0
"""Reference attention over paged caches: the keys of a request are gathered, then attended by position.

Correct everywhere and fast enough for tests and small models on a CPU. It reads lengths on the host, once per call of
a body. Attention over selected keys is handed to a back end (:mod:`pcp_passes.sparse.backends`), and reads none.
"""

from __future__ import annotations

from typing import Any

import torch

from pcp_kernels.ops import index_remap
from pcp_kernels.ops.launch import by_reference
from pcp_kernels.reference import remap
from pcp_passes.attention import attend
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


def _latent_rows(caches: PagedCaches, layer: str, latent: int, rope: int) -> torch.Tensor:
    """``[slots, W]``: the records of a layer, or the two halves of a body that writes them apart, joined by a copy."""
    if f"{layer}.k" in caches.tensors:
        halves = [caches.read(f"{layer}.{kind}").flatten(0, 2) for kind in ("k", "v")]
        found = [half.shape[1] for half in halves]
        if found != [latent, rope]:
            raise ConfigError(f"{layer}: queries are {latent} + {rope} wide, the caches {found[0]} + {found[1]}")
        return torch.cat([half.float() if half.dtype.itemsize == 1 else half for half in halves], dim=1)
    rows = caches.read(f"{layer}.latent").flatten(0, 2)
    width = latent_bytes(latent, rope) if rows.dtype == torch.uint8 else latent + rope
    if rows.shape[1] != width:
        raise ConfigError(
            f"{layer}: queries are {latent} + {rope} wide, which takes cache rows of {width}; found {rows.shape[1]}"
        )
    return rows


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
