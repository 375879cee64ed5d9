# SPDX-License-Identifier: Apache-2.0
"""How one batch is cut: chunk sizes, their ranks, and the segments of every rank in local order.

Zigzag (also called DualChunkSwap or head-tail) cuts a sequence in 2P chunks; rank ``r`` holds chunks ``r`` and
``2P-1-r``, so that under a causal mask every rank has about the same attention work::

    P = 4      | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
    rank         0   1   2   3   3   2   1   0

Even chunks: a query of ``q`` tokens has ``q mod 2P`` remainder tokens over equal chunks. Remainder token ``k`` goes to
rank ``(offset + k) mod P``, to its low chunk the first time and to its high chunk the second; the offset is the
running count of remainder tokens of the batch, so the ranks' prefill counts differ by at most one over the *whole*
batch (256 one-token prefills do not all land on rank 0). Contiguous (one chunk per rank) and interleave (token ``i``
on rank ``(i + offset) mod P``) follow the same rule. With owned decodes the count starts where the decodes' ordinals
ended, which keeps the sum of both within one as well when decodes have one token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pcp_passes.layout.batch import Batch, LongArray


class Cut(NamedTuple):
    """Segments as matrices of one row per rank and one column per candidate segment, in local order."""

    request: LongArray
    """i64[C] or i64[P, C], the request of each candidate."""
    start: LongArray
    """i64[P, C], first global token."""
    length: LongArray
    """i64[P, C], tokens; 0 where the rank has no such segment."""


def first_remainder_rank(batch: Batch, pcp: int, decode: str) -> int:
    """The rank of the batch's first remainder token."""
    return len(batch.decodes) % pcp if decode == "owner" else 0


def even_chunks(query_lens: LongArray, pcp: int, chunks_per_rank: int, first: int) -> LongArray:
    """Chunk sizes i64[chunks_per_rank * P, F] of prefills i64[F]; chunk ``c`` of a query is its ``c``-th part."""
    num_chunks = chunks_per_rank * pcp
    base, remainder = np.divmod(query_lens, num_chunks)
    offset = np.add.accumulate(remainder)
    offset -= remainder
    offset += first
    ranks = np.arange(pcp)[:, None]
    # turn[r, f]: how many remainder tokens rank r lets pass before it takes one, in the first round over the ranks.
    turn = (ranks - offset) % pcp
    sizes = np.empty((num_chunks, len(query_lens)), dtype=np.int64)
    np.add(base, turn < remainder, out=sizes[:pcp])
    if chunks_per_rank == 2:
        np.add(base, turn + pcp < remainder, out=sizes[pcp:][::-1])
    return sizes


def vllm_chunks(query_lens: LongArray, pcp: int) -> LongArray:
    """Chunk sizes i64[2P, F] as vLLM cuts them: ``ceil(q / 2P)`` each, the last ones short or empty."""
    num_chunks = 2 * pcp
    size = (query_lens + (num_chunks - 1)) // num_chunks
    left = query_lens - np.arange(num_chunks)[:, None] * size
    sizes: LongArray = np.minimum(np.maximum(left, 0), size)
    return sizes


def cut(batch: Batch, pcp: int, kind: str, decode: str, compat: str | None) -> Cut:
    """Cut ``batch``: per rank all decodes by request, then all prefills by request and token."""
    decodes, prefills, starts = batch.decodes, batch.prefills, batch.query_start_loc
    num_decodes = len(decodes)
    if compat is None and pcp == 1:
        kind = "contiguous"  # chunks of one rank touch: one segment per request
    if kind == "interleave":
        request, start, length = _interleave(batch, pcp, num_decodes, first_remainder_rank(batch, pcp, decode))
        request[:, :num_decodes] = decodes
    else:
        per_rank = 1 if kind == "contiguous" else 2
        query_lens = batch.query_lens[prefills]
        if compat == "vllm":
            sizes = vllm_chunks(query_lens, pcp)
        else:
            sizes = even_chunks(query_lens, pcp, per_rank, first_remainder_rank(batch, pcp, decode))
        begins = np.add.accumulate(sizes, axis=0)
        begins -= sizes
        begins += starts[prefills]
        if compat is None and per_rank == 2:
            # Chunks P-1 and P of the last rank touch; a segment is one contiguous run.
            sizes[pcp - 1] += sizes[pcp]
            sizes[pcp] = 0
        request = np.concatenate((decodes, np.repeat(prefills, per_rank)))
        start = np.empty((pcp, num_decodes + per_rank * len(prefills)), dtype=np.int64)
        length = np.zeros_like(start)
        for half in range(per_rank):
            # The high chunk of rank r is chunk 2P-1-r, hence the reversal.
            rows = slice(None, pcp) if half == 0 else slice(None, pcp - 1, -1)
            start[:, num_decodes + half :: per_rank] = begins[rows]
            length[:, num_decodes + half :: per_rank] = sizes[rows]
    start[:, :num_decodes] = starts[decodes]
    if decode == "owner":
        ordinal = np.arange(num_decodes)
        length[ordinal % pcp, ordinal] = batch.query_lens[decodes]
    else:
        length[:, :num_decodes] = batch.query_lens[decodes]
    return Cut(request, start, length)


def _interleave(batch: Batch, pcp: int, num_decodes: int, first: int) -> Cut:
    """One-token segments: token ``g``, counted over the batch's prefills, is on rank ``(first + g) mod P``."""
    prefills = batch.prefills
    query_lens = batch.query_lens[prefills]
    total = int(query_lens.sum())
    per_rank = -(-total // pcp)
    before = np.add.accumulate(query_lens) - query_lens
    table = np.zeros((3, per_rank * pcp), dtype=np.int64)
    table[0, :total] = np.repeat(prefills, query_lens)
    table[1, :total] = np.repeat(batch.query_start_loc[prefills] - before, query_lens) + np.arange(total)
    table[2, :total] = 1
    out = np.zeros((3, pcp, num_decodes + per_rank), dtype=np.int64)
    by_rank = table.reshape(3, per_rank, pcp).transpose(0, 2, 1)
    out[:, first:, num_decodes:] = by_rank[:, : pcp - first]
    out[:, :first, num_decodes:] = by_rank[:, pcp - first :]
    return Cut(out[0], out[1], out[2])
