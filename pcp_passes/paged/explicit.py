# SPDX-License-Identifier: Apache-2.0
"""The same write and read with caches, slots and tables as operands: ``pcp::write_cache`` and ``pcp::paged_attend``.

For models that are compiled by ``torch.compile`` over a cache of their own: there, what a step needs are inputs of the
graph, one graph serves every step, and a model may go on computing with the keys it reads. Bodies of the engine use the
ops of :mod:`pcp_passes.paged.ops`. Both run one implementation.

A cache tensor is ``[num_blocks, block_size, Hkv, D]``; *slot* ``b * block_size + i`` is row ``i`` of block ``b``. Rows
are token-major and all requests of a step are stacked along them, so both ops keep the token dimension first.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.ir.library import define
from pcp_passes.paged.attend import over_blocks
from pcp_passes.paged.rows import write_rows
from pcp_passes.paged.state import REPLICATED_SLOTS, AttentionInputs

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
    write_rows(k, k_cache, slots, "k_cache")
    write_rows(v, v_cache, slots, "v_cache")


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
    nothing = positions.new_empty(0, dtype=torch.int64)
    inputs = AttentionInputs(nothing, REPLICATED_SLOTS, block_table, query_start_loc, seq_lens, positions)
    return over_blocks(
        q, k_cache, v_cache, inputs,
        scale=scale, left=left, right=right, chunk=chunk, sinks=sinks, slopes=slopes, softcap=softcap,
    )  # fmt: skip


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
