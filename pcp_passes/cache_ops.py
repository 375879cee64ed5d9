# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache as two ops: ``pcp::write_cache`` puts token rows into slots, ``pcp::paged_attend`` reads them.

A cache tensor is ``[num_blocks, block_size, Hkv, D]``; *slot* ``b * block_size + i`` is row ``i`` of block ``b``. Rows
are token-major and all requests of a step are stacked along them, as vLLM does, so both ops keep the token dimension
first: a pass can give the write the rows of all ranks, and leave the queries rank-local.

Position ``j`` of a request lives in slot ``block_table[r, j // block_size] * block_size + j % block_size``.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pcp_passes.attention import attend
from pcp_passes.errors import ConfigError
from pcp_passes.ir.library import define

WRITE_CACHE = "pcp::write_cache"
PAGED_ATTEND = "pcp::paged_attend"


def write_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write key and value rows into their slots, in place.

    Args:
        k, v: ``[N, Hkv, D]`` and ``[N, Hv, Dv]``; converted to the dtype of their cache.
        k_cache, v_cache: contiguous ``[num_blocks, block_size, Hkv, D]`` and ``[num_blocks, block_size, Hv, Dv]``.
        slots: i64 ``[N]``; a row with slot -1 is not written, and no two rows may name one slot.

    Raises:
        ConfigError: shapes or dtypes that do not fit together.
        IndexError: a slot beyond the cache (on CPU; a device-side assertion elsewhere).
    """
    write_cache_op(k, v, k_cache, v_cache, slots)


def paged_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float | None = None,
    left: int = -1,
    right: int = 0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention of stacked query rows, each over the cached keys of its own request.

    The one implementation is a reference: it gathers a request's keys and calls ``pcp::attend`` on them. It reads the
    integer operands on the host, so on CUDA it waits for the device once per call.

    Args:
        q: ``[N, Hq, D]``; rows of request r are ``query_start_loc[r]`` up to ``query_start_loc[r + 1]``.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]`` and ``[num_blocks, block_size, Hkv, Dv]``.
        block_table: integer ``[R, max_blocks]``; entries past the last block that a request needs are not read.
        query_start_loc: integer ``[R + 1]``, from 0 up; rows past its last entry are padding.
        seq_lens: integer ``[R]``, cached keys of each request, those of this step included.
        positions: i64 ``[N]``, position of each row within its request.
        scale, left, right, chunk, sinks, slopes, softcap: as :func:`pcp_passes.attention.attend` takes them.

    Returns:
        ``[N, Hq, Dv]``, contiguous, dtype of ``q``; 0 on padding rows and where a row sees no key.

    Raises:
        ConfigError: shapes that do not fit together, or a request longer than its row of the block table.
    """
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    result: torch.Tensor = paged_attend_op(
        q, k_cache, v_cache, block_table, query_start_loc, seq_lens, positions,
        scale=factor, left=left, right=right, chunk=chunk, sinks=sinks, slopes=slopes, softcap=softcap,
    )  # fmt: skip
    return result


def _write_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    _check_write(k, v, k_cache, v_cache, slots)
    if slots.numel() == 0:
        return
    write = _write_kept if slots.device.type == "cpu" else _write_without_sync
    write(k, k_cache, slots)
    write(v, v_cache, slots)


def _write_kept(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    keep = slots >= 0
    cache.flatten(0, 1).index_copy_(0, slots[keep], rows[keep].to(cache.dtype))


def _write_without_sync(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Selecting the rows to keep has a data-dependent size, which neither a CUDA graph nor a fast launch can have.

    Instead each dropped row repeats a kept one: the same value goes to the same slot, in whatever order. When no row
    is kept, all rows write slot 0 back as it is.
    """
    flat = cache.flatten(0, 1)
    keep = slots >= 0
    stand_in = keep.to(torch.int8).argmax()
    slot = slots[stand_in].clamp(min=0)
    value = torch.where(keep[stand_in], rows[stand_in].to(cache.dtype), flat[slot])
    flat.index_copy_(
        0, torch.where(keep, slots, slot), torch.where(keep[:, None, None], rows.to(cache.dtype), value[None])
    )


def _write_cache_fake(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    return None


def _check_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    wrong = [
        f"{name} is {list(rows.shape)}, required {[slots.shape[0], *cache.shape[2:]]} for a cache {list(cache.shape)}"
        for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache))
        if cache.dim() != 4 or tuple(rows.shape) != (slots.shape[0], *cache.shape[2:])
    ]
    if k_cache.shape[:2] != v_cache.shape[:2]:
        wrong.append(f"the caches have {list(k_cache.shape[:2])} and {list(v_cache.shape[:2])} blocks and rows")
    wrong += [
        f"{name} is not contiguous"
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache))
        if not cache.is_contiguous()
    ]
    if slots.dim() != 1 or slots.dtype != torch.int64:
        wrong.append(f"slots is {slots.dtype}{list(slots.shape)}, required torch.int64 [N]")
    if wrong:
        raise ConfigError(f"{WRITE_CACHE}: {'; '.join(wrong)}. Pass one slot per token row.")


def _paged_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    left: int = -1,
    right: int = 0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    _check_read(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, positions)
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[3])
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    capacity = block_table.shape[1] * k_cache.shape[1]
    if max(lengths, default=0) > capacity:
        raise ConfigError(
            f"{PAGED_ATTEND}: a request has {max(lengths)} keys, but a row of the block table holds {capacity}. "
            "Give the block table more columns."
        )
    for request, length in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:
            continue
        where = positions[rows]
        skip = _blocks_out_of_sight(where, left, chunk, k_cache.shape[1])
        blocks = block_table[request, skip : -(-length // k_cache.shape[1])].long()
        keys = length - skip * k_cache.shape[1]
        if keys <= 0:
            continue
        seen = attend(
            q[rows].transpose(0, 1)[None],
            _heads_first(k_cache, blocks, keys),
            _heads_first(v_cache, blocks, keys),
            where - skip * k_cache.shape[1],
            scale=scale, left=left, right=right, chunk=chunk, sinks=sinks, slopes=slopes, softcap=softcap,
        )  # fmt: skip
        out[rows] = seen[0].transpose(0, 1)
    return out


def _blocks_out_of_sight(positions: torch.Tensor, left: int, chunk: int, block_size: int) -> int:
    """Leading blocks that no row of a sliding window sees: they need not be gathered.

    Chunks count from position 0, so nothing is cut there.
    """
    if left < 0 or chunk:
        return 0
    return max(int(positions.min()) - left, 0) // block_size


def _heads_first(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """Gathered rows as ``[1, H, length, D]``."""
    return cache.index_select(0, blocks).flatten(0, 1)[:length].transpose(0, 1)[None]


def _paged_attend_fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *operands: Any, **options: Any
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])


def _check_read(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.dim() != 4 or block_table.dim() != 2:
        raise ConfigError(
            f"{PAGED_ATTEND}: found q {list(q.shape)}, caches {list(k_cache.shape)} and {list(v_cache.shape)}, block "
            f"table {list(block_table.shape)}; required [N, Hq, D], [blocks, rows, Hkv, D] twice, and [R, blocks]."
        )
    requests = block_table.shape[0]
    wrong = [
        f"{name} is {list(found)}, required {list(required)}"
        for name, found, required in (
            ("v_cache", v_cache.shape[:3], k_cache.shape[:3]),
            ("query_start_loc", query_start_loc.shape, (requests + 1,)),
            ("seq_lens", seq_lens.shape, (requests,)),
            ("positions", positions.shape, (q.shape[0],)),
        )
        if tuple(found) != tuple(required)
    ]
    if wrong:
        raise ConfigError(f"{PAGED_ATTEND} of q {list(q.shape)}: {'; '.join(wrong)}. Pass operands of these shapes.")


write_cache_op: Any = define(
    "write_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()",
    _write_cache,
    _write_cache_fake,
)

paged_attend_op: Any = define(
    "paged_attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start_loc, "
    "Tensor seq_lens, Tensor positions, *, float scale, int left=-1, int right=0, int chunk=0, Tensor? sinks=None, "
    "Tensor? slopes=None, float softcap=0.0) -> Tensor",
    _paged_attend,
    _paged_attend_fake,
)
