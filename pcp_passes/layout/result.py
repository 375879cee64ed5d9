# SPDX-License-Identifier: Apache-2.0
"""The result of laying out a batch, and the rows of one rank in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pcp_passes.errors import LayoutError
from pcp_passes.layout.batch import Batch, BoolArray, IntArray, LongArray


@dataclass(frozen=True, eq=False)
class RankRows:
    """The attention rows of one rank: ``n`` real rows, ``N >= n`` with row padding.

    A split prefill has up to two rows (zigzag). A rank without work has one row of zero tokens of request 0, so that
    every rank calls attention. Host values are upper bounds; the device's positions are the truth.
    """

    rank: int
    num_tokens: int
    """Real tokens of the rank."""
    row_request: LongArray
    """i64[n], request of each row."""
    row_start: IntArray
    """i32[n], host position of the row's first token, that is the context before it."""
    row_length: IntArray
    """i32[n], tokens of the row."""
    query_start_loc: IntArray
    """i32[N+1], local row starts; entries after row n repeat ``num_tokens``."""
    seq_lens_host: IntArray
    """i32[N], ``row_start + row_length``: an upper bound of the device's length; 0 on padding rows."""
    is_prefilling: BoolArray
    """bool[N], per row ``row_start < prefill_len``; false on padding rows."""

    @property
    def num_rows(self) -> int:
        """n, rows before padding."""
        return int(self.row_request.shape[0])

    @property
    def num_padded_rows(self) -> int:
        """N, rows after padding."""
        return int(self.seq_lens_host.shape[0])


@dataclass(frozen=True, eq=False)
class Layout:
    """Where each token of a batch is. Same on every rank; :meth:`rows` is the view of one rank.

    ``P`` ranks, ``T`` global tokens, ``M`` rows per rank after padding, ``S`` segments. The segment arrays are in rank
    order; per rank decodes come first, then prefills, each by request, then by token. See the package docstring for
    the identities and a worked example.
    """

    batch: Batch
    kind: str
    decode: str
    compat: str | None
    pcp: int
    num_tokens: int
    """T."""
    padded_tokens: int
    """M."""
    per_rank_tokens: LongArray
    """i64[P], real tokens per rank."""
    rows_per_rank: LongArray
    """i64[P], segments per rank; 0 for a rank without work."""
    seg_rank: LongArray
    """i64[S]."""
    seg_request: LongArray
    """i64[S]."""
    seg_start: LongArray
    """i64[S], first global token."""
    seg_length: LongArray
    """i64[S], tokens, at least 1."""
    seg_offset: LongArray
    """i64[S], first rank-local row."""
    gather_index: LongArray
    """i64[P*M], ``rank_major = global[gather_index]``; pads hold 0."""
    write_mask: BoolArray
    """bool[P*M], rows whose cache entries are written: each token once, rank 0's copy of a replicated one, no pad."""
    restore_index: LongArray
    """i64[T], ``global = rank_major[restore_index]``; points at written rows only."""

    @property
    def is_replicated(self) -> bool:
        """True when every rank holds every token of the batch: a pure decode step with decode="replicate".

        Then rank-local order is global order and the body without collectives may run.
        """
        return self.decode == "replicate" and len(self.batch.prefills) == 0

    @cached_property
    def replicated_requests(self) -> BoolArray:
        """bool[R], requests whose whole query is on every rank."""
        replicated = np.zeros(self.batch.num_requests, dtype=np.bool_)
        if self.decode == "replicate":
            replicated[self.batch.decodes] = True
        return replicated

    @property
    def max_rows(self) -> int:
        """Rows of the rank with the most rows, counting the zero-token row of a rank without work."""
        return max(1, int(self.rows_per_rank.max()))

    @cached_property
    def row_offsets(self) -> LongArray:
        """i64[P+1], first segment of each rank in the segment arrays, and S."""
        return np.concatenate((np.zeros(1, dtype=np.int64), np.add.accumulate(self.rows_per_rank)))

    def rows(self, rank: int, *, padded_rows: int | None = None) -> RankRows:
        """The rows of ``rank``, padded to ``padded_rows`` when given.

        Raises LayoutError when ``rank`` is outside the group, when ``padded_rows`` is below the rows of *any* rank (all
        ranks must refuse alike), and in compat="vllm" for row padding of a batch with a prefill, as vLLM does.
        """
        if not 0 <= rank < self.pcp:
            raise LayoutError(f"Rank {rank} is outside the group of {self.pcp} pcp ranks.")
        batch = self.batch
        if padded_rows is not None:
            self._check_padded_rows(padded_rows)
        first, last = int(self.row_offsets[rank]), int(self.row_offsets[rank + 1])
        if first == last:
            request = np.zeros(1, dtype=np.int64)
            start = batch.num_computed[:1].copy()
            length = np.zeros(1, dtype=np.int32)
        else:
            request = self.seg_request[first:last]
            inside = self.seg_start[first:last] - batch.query_start_loc[request]
            start = (batch.num_computed[request] + inside).astype(np.int32)
            length = self.seg_length[first:last].astype(np.int32)
        num_rows = len(request)
        num_padded = num_rows if padded_rows is None else padded_rows
        num_tokens = int(self.per_rank_tokens[rank])
        query_start_loc = np.full(num_padded + 1, num_tokens, dtype=np.int32)
        query_start_loc[0] = 0
        np.add.accumulate(length, out=query_start_loc[1 : num_rows + 1])
        seq_lens = np.zeros(num_padded, dtype=np.int32)
        np.add(start, length, out=seq_lens[:num_rows])
        is_prefilling = np.zeros(num_padded, dtype=np.bool_)
        np.less(start, batch.prefill_len[request], out=is_prefilling[:num_rows])
        return RankRows(rank, num_tokens, request, start, length, query_start_loc, seq_lens, is_prefilling)

    def _check_padded_rows(self, padded_rows: int) -> None:
        if self.compat == "vllm" and bool(self.batch.is_prefilling.any()):
            raise LayoutError("Row padding needs a decode-only batch in vLLM's layout; this batch has a prefill.")
        if padded_rows < self.max_rows:
            raise LayoutError(
                f"padded_rows = {padded_rows} is below the {self.max_rows} rows of the largest rank "
                f"(rows per rank: {self.rows_per_rank.tolist()}); use at least {self.max_rows}."
            )
