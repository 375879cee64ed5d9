# SPDX-License-Identifier: Apache-2.0
"""The step plan: a layout as device tensors of one rank, in buffers whose addresses never change.

The rank enters a graph only here, as run-time tensors. Nothing in this module reads a device value on the host: lengths
and positions come from the device (the host's cursor runs ahead after a rejected draft), and host arrays are uploaded
without waiting. Checked on CPU; the CUDA branch (pinned uploads) has its own test, marked ``gpu``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pcp_passes.errors import LayoutError
from pcp_passes.layout import Batch, Layout, RankRows, build_layout

PAD_SLOT_ID = -1


@dataclass(frozen=True, eq=False)
class StepView:
    """The current step's part of a plan's buffers: views, no copies.

    ``M`` rows per rank, ``N`` attention rows, ``T`` global tokens, ``P`` ranks, ``G`` cache groups.
    """

    input_ids: torch.Tensor
    """i32[M], 0 on pads."""
    positions: torch.Tensor
    """i64[M], 0 on pads."""
    is_padding: torch.Tensor
    """bool[M]."""
    query_start_loc: torch.Tensor
    """i32[N+1]."""
    seq_lens: torch.Tensor
    """i32[N]."""
    row_request: torch.Tensor
    """i64[N], request of each row, for block-table rows and per-request state; 0 on padding rows."""
    gather_index: torch.Tensor
    """i64[P*M]."""
    write_mask: torch.Tensor
    """bool[P*M]."""
    restore_index: torch.Tensor
    """i64[T]."""
    slots: torch.Tensor
    """i64[G, P*M]."""


class LayoutBuffers:
    """What a layout says to one rank, in buffers whose addresses never change: each load writes a prefix.

    The one place where a layout becomes device tensors: the plan of vLLM's steps and that of the step program
    (:class:`pcp_passes.step.inputs.PlanBuffers`) both stand on it.

    Args:
        pcp, rank: size of the group and the rank in it.
        max_tokens: largest ``M``, rows of one rank with padding.
        max_rows: largest ``N``, attention rows of one rank with padding (zigzag: twice the requests).
        device: where the buffers live.
        starts: dtype of the row starts.

    Every token of a batch is on some rank, so ``T <= P * M`` and ``restore_index`` i64[P * max_tokens] holds every
    batch that fits the rank.
    """

    def __init__(
        self,
        pcp: int,
        rank: int,
        *,
        max_tokens: int,
        max_rows: int,
        device: torch.device | str,
        starts: torch.dtype = torch.int32,
    ) -> None:
        if pcp < 1 or not 0 <= rank < pcp:
            raise LayoutError(f"A step plan needs a rank inside its group; found rank {rank} of {pcp} pcp ranks.")
        if min(max_tokens, max_rows) < 1:
            raise LayoutError(
                f"A step plan holds at least one token and row; found max_tokens={max_tokens}, max_rows={max_rows}."
            )
        self.pcp, self.rank, self.max_tokens, self.max_rows = pcp, rank, max_tokens, max_rows
        self.device = torch.device(device)
        dev, gathered = self.device, pcp * max_tokens
        # Converted on the host: a copy that converts would go through memory that is not pinned.
        self._starts = np.int64 if starts == torch.int64 else np.int32
        self.query_start_loc = torch.zeros(max_rows + 1, dtype=starts, device=dev)
        self.row_request = torch.zeros(max_rows, dtype=torch.int64, device=dev)
        self.gather_index = torch.zeros(gathered, dtype=torch.int64, device=dev)
        self.write_mask = torch.zeros(gathered, dtype=torch.bool, device=dev)
        self.restore_index = torch.zeros(gathered, dtype=torch.int64, device=dev)
        self._layout: Layout | None = None
        self._rows: RankRows | None = None

    @property
    def layout(self) -> Layout:
        """The loaded layout. Raises LayoutError when there is none."""
        if self._layout is None:
            raise LayoutError("The step plan holds no layout; call load(layout) or reset_for_dummy(num_tokens) first.")
        return self._layout

    @property
    def rows(self) -> RankRows:
        """This rank's rows of the loaded layout, on the host. Raises LayoutError when there is none."""
        if self._rows is None:
            raise LayoutError("The step plan holds no layout; call load(layout) or reset_for_dummy(num_tokens) first.")
        return self._rows

    def load_layout(self, layout: Layout, padded_rows: int | None = None) -> RankRows:
        """Upload ``layout``'s index tensors and this rank's row starts; ``padded_rows`` pads the rows to a bucket.

        Raises LayoutError, before anything is written, when the layout belongs to another group size or does not fit.
        """
        if layout.pcp != self.pcp:
            raise LayoutError(f"The layout is for {layout.pcp} pcp ranks, the step plan for {self.pcp}; rebuild one.")
        if layout.padded_tokens > self.max_tokens:
            raise LayoutError(
                f"The layout has {layout.padded_tokens} rows per rank (tokens per rank: "
                f"{layout.per_rank_tokens.tolist()}), the step plan holds {self.max_tokens}; raise max_tokens."
            )
        # Judged by the largest rank, not by this one: all ranks must refuse the same batches.
        largest = layout.max_rows if padded_rows is None else max(layout.max_rows, padded_rows)
        if largest > self.max_rows:
            raise LayoutError(
                f"The layout needs {largest} attention rows (rows per rank: {layout.rows_per_rank.tolist()}), the step "
                f"plan holds {self.max_rows}; raise max_rows."
            )
        rows = layout.rows(self.rank, padded_rows=padded_rows)
        self._layout, self._rows = layout, rows
        self._upload(self.gather_index, layout.gather_index)
        self._upload(self.write_mask, layout.write_mask)
        self._upload(self.restore_index, layout.restore_index)
        self._upload(self.query_start_loc, rows.query_start_loc.astype(self._starts, copy=False))
        self.query_start_loc[rows.num_padded_rows + 1 :].fill_(rows.num_tokens)
        self._upload(self.row_request, rows.row_request)
        self.row_request[rows.num_rows :].zero_()
        return rows

    def _upload(self, target: torch.Tensor, array: NDArray[np.generic]) -> torch.Tensor:
        """Write ``array`` over the first entries of a buffer, without waiting; the part written."""
        return target[: len(array)].copy_(_staged(array, self.device), non_blocking=True)


class StepPlan(LayoutBuffers):
    """Persistent buffers of one rank, refilled each step: ``load``, ``shard_tokens``, ``expand_slots``.

    Args:
        pcp, rank, max_tokens, max_rows, device: see :class:`LayoutBuffers`.
        slot_groups: ``G``, KV cache groups with their own slot mapping.
    """

    def __init__(
        self, pcp: int, rank: int, *, max_tokens: int, max_rows: int, device: torch.device | str, slot_groups: int = 1
    ) -> None:
        super().__init__(pcp, rank, max_tokens=max_tokens, max_rows=max_rows, device=device)
        if slot_groups < 1:
            raise LayoutError(f"A step plan holds at least one slot group; found slot_groups={slot_groups}.")
        self.slot_groups = slot_groups
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=self.device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=self.device)
        self.is_padding = torch.ones(max_tokens, dtype=torch.bool, device=self.device)
        self.seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        self.slots = self._new_slots()

    def _new_slots(self) -> torch.Tensor:
        shape = (self.slot_groups, self.pcp * self.max_tokens)
        return torch.full(shape, PAD_SLOT_ID, dtype=torch.int64, device=self.device)

    def set_slot_groups(self, slot_groups: int) -> None:
        """Reallocate ``slots`` for a number of cache groups that was not known at construction. Before any capture."""
        if slot_groups != self.slot_groups:
            self.slot_groups = slot_groups
            self.slots = self._new_slots()

    def view(self) -> StepView:
        """The loaded step's part of every buffer."""
        layout, num_rows = self.layout, self.rows.num_padded_rows
        per_rank, gathered = layout.padded_tokens, self.pcp * layout.padded_tokens
        return StepView(
            input_ids=self.input_ids[:per_rank],
            positions=self.positions[:per_rank],
            is_padding=self.is_padding[:per_rank],
            query_start_loc=self.query_start_loc[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            row_request=self.row_request[:num_rows],
            gather_index=self.gather_index[:gathered],
            write_mask=self.write_mask[:gathered],
            restore_index=self.restore_index[: layout.num_tokens],
            slots=self.slots[:, :gathered],
        )

    def load(self, layout: Layout, *, padded_rows: int | None = None) -> StepView:
        """:meth:`load_layout`, and which of this rank's rows are padding.

        Raises LayoutError, before anything is written, when the layout belongs to another group size or does not fit.
        """
        rows = self.load_layout(layout, padded_rows)
        self.is_padding[: rows.num_tokens].fill_(False)
        self.is_padding[rows.num_tokens :].fill_(True)
        return self.view()

    def shard_tokens(self, global_ids: torch.Tensor, global_positions: torch.Tensor) -> StepView:
        """Pick this rank's tokens from the *device* tensors of the global batch and derive the rows' lengths.

        ``global_ids`` (any integer type) and ``global_positions`` hold at least ``T`` tokens in global order. A row's
        length is the device position of its last token + 1: the context and its own chunk, so the causal mask of an
        ordinary paged kernel is right for every row. Rows without tokens and padding rows have length 0.
        """
        self._pick(global_ids, self.input_ids)
        self._pick(global_positions, self.positions)
        num_rows = self.rows.num_padded_rows
        ends, begins = self.query_start_loc[1 : num_rows + 1], self.query_start_loc[:num_rows]
        lengths = self.positions.index_select(0, (ends - 1).clamp_min(0)) + 1
        self.seq_lens[:num_rows].copy_(lengths.masked_fill(ends == begins, 0))
        self.seq_lens[num_rows:].zero_()
        return self.view()

    def _pick(self, source: torch.Tensor, target: torch.Tensor) -> None:
        layout, count = self.layout, self.rows.num_tokens
        if source.ndim != 1 or source.shape[0] < layout.num_tokens:
            raise LayoutError(
                f"The global batch has {layout.num_tokens} tokens; found a tensor of shape {list(source.shape)}."
            )
        first = self.rank * layout.padded_tokens
        index = self.gather_index[first : first + count]
        if source.dtype == target.dtype:
            torch.index_select(source, 0, index, out=target[:count])
        else:
            target[:count].copy_(source.index_select(0, index))
        # Pads, and what a longer batch left behind them.
        target[count:].zero_()

    def shard_rows(self, global_rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows [M, ...] of any token-major tensor [T, ...]; pads are zero. Same index as the tokens'."""
        layout, count = self.layout, self.rows.num_tokens
        first = self.rank * layout.padded_tokens
        out = global_rows.new_zeros((layout.padded_tokens, *global_rows.shape[1:]))
        out[:count] = global_rows.index_select(0, self.gather_index[first : first + count])
        return out

    def restore_rows(self, rank_major: torch.Tensor) -> torch.Tensor:
        """Global order [T, ...] of rank-major rows [P*M, ...]."""
        expected = self.pcp * self.layout.padded_tokens
        if rank_major.shape[0] != expected:
            raise LayoutError(
                f"Rank-major rows of this step are {self.pcp} x {self.layout.padded_tokens} = {expected}; "
                f"found {rank_major.shape[0]}. Gather every rank's padded rows first."
            )
        return rank_major.index_select(0, self.restore_index[: self.layout.num_tokens])

    def expand_slots(self, global_slots: torch.Tensor) -> torch.Tensor:
        """Slots of the gathered rows, i64[G, P*M], from the global slot mapping i64[G, T] (longer is allowed).

        PAD_SLOT_ID wherever a row is not written. The buffer beyond ``P*M`` is reset too: a graph captured for a larger
        bucket would otherwise write a shorter batch's rows to slots that a longer one left there.
        """
        layout = self.layout
        shape = tuple(global_slots.shape)
        if len(shape) != 2 or shape[0] != self.slot_groups or shape[1] < layout.num_tokens:
            raise LayoutError(
                f"Global slots have shape [{self.slot_groups}, {layout.num_tokens}] for this step; found {list(shape)}."
            )
        gathered = self.pcp * layout.padded_tokens
        view = self.slots[:, :gathered]
        if layout.num_tokens > 0:
            picked = global_slots.index_select(1, self.gather_index[:gathered])
            view.copy_(picked.masked_fill_(~self.write_mask[:gathered], PAD_SLOT_ID))
        else:
            view.fill_(PAD_SLOT_ID)
        self.slots[:, gathered:].fill_(PAD_SLOT_ID)
        return view

    def reset_for_dummy(self, num_tokens: int, *, num_rows: int = 1) -> StepView:
        """Load a dummy step for profiling, warm-up or capture, through the same path as a real batch.

        Each rank gets ``num_tokens`` tokens without padding in ``num_rows`` fresh sequences; ids are 0 and nothing is
        written: every slot is PAD_SLOT_ID. The shapes are those of a real batch with ``M = num_tokens`` and
        ``N = num_rows``; a body without collectives sees a replicated step.
        """
        if not 1 <= num_rows <= num_tokens:
            raise LayoutError(f"A dummy step needs 1 <= num_rows <= num_tokens; found {num_rows} and {num_tokens}.")
        lengths = np.full(num_rows, num_tokens // num_rows, dtype=np.int32)
        lengths[: num_tokens % num_rows] += 1
        none = np.zeros(num_rows, dtype=np.int32)
        self.load(build_layout(Batch(lengths, none, none), self.pcp, decode="replicate"))
        self.write_mask.zero_()
        self.slots.fill_(PAD_SLOT_ID)
        starts = np.repeat(self.rows.query_start_loc[:-1], lengths)
        positions = torch.empty(num_tokens, dtype=torch.int64, device=self.device)
        self._upload(positions, np.arange(num_tokens) - starts)
        return self.shard_tokens(torch.zeros(num_tokens, dtype=torch.int32, device=self.device), positions)


def upload(array: NDArray[np.generic], device: torch.device | str) -> torch.Tensor:
    """``array`` on ``device``, without waiting for it; on CPU a view of the array."""
    return _staged(array, torch.device(device)).to(device, non_blocking=True)


def _staged(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(np.ascontiguousarray(array))
    # A block of the caching host allocator is not handed out again before its copy has run, so a step never overwrites
    # the staging of the one before, and nobody waits.
    return host.pin_memory() if device.type == "cuda" else host
