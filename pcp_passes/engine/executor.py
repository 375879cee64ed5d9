# SPDX-License-Identifier: Apache-2.0
"""Runs one scheduled batch on the ranks: lays it out, prepares each rank's inputs, calls the step program, keeps state.

What the layout says to a rank belongs to exactly one batch *object*. :meth:`Executor.load` ties them; a step of any
other batch (a dummy one, a stale one) takes the global path: the plain program, no collective, nothing written and no
state advanced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import Entry, Request, ScheduledBatch
from pcp_passes.engine.state import NO_BLOCK, DeviceState
from pcp_passes.engine.stats import StepRecord
from pcp_passes.errors import RankMismatch
from pcp_passes.layout import Layout, build_layout
from pcp_passes.paged import PagedCaches
from pcp_passes.plan import PAD_SLOT_ID
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs, plan_inputs
from pcp_passes.step.program import RankState


@dataclass(eq=False)
class Rank:
    """What one rank holds between steps: the requests, and the caches and buffers of the step program."""

    index: int
    state: DeviceState
    memory: RankState


@dataclass(eq=False)
class _Loaded:
    """A batch and what its layout says to the ranks of this process; ``plans`` is empty for the plain program."""

    batch: ScheduledBatch
    layout: Layout
    plans: list[StepPlanInputs] = field(default_factory=list)


class Executor(ABC):
    """The ranks that this process holds: all of them in the simulator, one of a real group.

    Args:
        options: of the engine.
        steps: drafts per step.
        ranks: which ranks are here.
        cache_dtype: of the KV caches.
    """

    def __init__(
        self,
        options: EngineOptions,
        steps: int,
        ranks: Sequence[int],
        *,
        cache_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.options, self.steps, self.device = options, steps, torch.device(device)
        self.ranks = []
        for index in ranks:
            memory = RankState(PagedCaches(options.num_blocks, options.block_size, cache_dtype, device, options.sparse))
            # Zigzag gives a request two attention rows, so the buffer never has to move.
            memory.table_buffer(2 * options.max_requests, options.blocks_per_request(steps))
            self.ranks.append(Rank(index, DeviceState(options, steps, device), memory))
        self._loaded: _Loaded | None = None

    def admit(self, row: int, tokens: Sequence[int], computed: int, params: SamplingParams) -> None:
        """See :meth:`DeviceState.admit`; on every rank here."""
        for rank in self.ranks:
            rank.state.admit(row, tokens, computed, params)

    def set_blocks(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """See :meth:`DeviceState.set_blocks`; on every rank here."""
        for rank in self.ranks:
            rank.state.set_blocks(row, first, blocks)

    def load(self, batch: ScheduledBatch) -> Layout:
        """Lay ``batch`` out and tie the ranks' local parts to it; whatever was loaded before is stale from now on."""
        options = self.options
        layout = build_layout(batch.layout_batch, options.pcp, kind=options.layout, decode=options.decode)
        loaded = _Loaded(batch, layout)
        if options.pcp > 1 and not layout.is_replicated:
            rows = batch.logit_rows
            loaded.plans = [plan_inputs(layout, rank.index, rows, self.device) for rank in self.ranks]
        self._loaded = loaded
        return layout

    def execute(self, batch: ScheduledBatch) -> tuple[StepOutputs, StepRecord]:
        """Run a step and advance the state of every rank here; the outputs are those of the first.

        Raises:
            RankMismatch: ranks of this process sampled different tokens.
        """
        loaded = self._loaded
        if batch.dummy or loaded is None or loaded.batch is not batch:
            inputs = [without_writes(rank.state.prepare(batch)) for rank in self.ranks]
            outputs, log = self._run(inputs, [])
            return outputs[0], self._record(batch, [batch.num_tokens] * self.options.pcp, batch.num_tokens, False, log)
        inputs = [rank.state.prepare(batch) for rank in self.ranks]
        outputs, log = self._run(inputs, loaded.plans)
        self._require_equal(batch, outputs)
        for rank, mine in zip(self.ranks, outputs, strict=True):
            rank.state.apply(batch, mine)
        layout = loaded.layout
        rows = layout.per_rank_tokens.tolist()
        return outputs[0], self._record(batch, rows, layout.padded_tokens, bool(loaded.plans), log)

    def _record(
        self, batch: ScheduledBatch, rows: Sequence[int], padded: int, sharded: bool, log: CollectiveLog
    ) -> StepRecord:
        counts = (len(batch.entries), batch.num_tokens)
        return StepRecord(batch.step, *counts, sharded, tuple(rows), padded, log.calls, log.bytes)

    def _require_equal(self, batch: ScheduledBatch, outputs: Sequence[StepOutputs]) -> None:
        """The scheduler is one for all ranks, so it cannot go on when they accepted different tokens."""
        for rank, mine in zip(self.ranks[1:], outputs[1:], strict=True):
            if torch.equal(mine.sampled, outputs[0].sampled) and torch.equal(mine.drafts, outputs[0].drafts):
                continue
            differs = (mine.sampled != outputs[0].sampled).any(1) | (mine.drafts != outputs[0].drafts).any(1)
            names = [entry.request.id for entry, other in zip(batch.entries, differs.tolist(), strict=True) if other]
            raise RankMismatch(
                f"step {batch.step}: pcp ranks {self.ranks[0].index} and {rank.index} sampled different tokens for "
                f"{', '.join(names)}. Either a near tie fell differently, or a rank read other cache rows.\n"
                "  next  use verify_tokens='broadcast'; when acceptance then falls, compare with pcp=1 in float64"
            )

    @abstractmethod
    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        """One step on every rank here: the sharded program with ``plans``, the plain one without.

        The log holds what one rank sent.
        """

    def close(self) -> None:  # noqa: B027  # a subclass without a group has nothing to leave
        """Leave the group of ranks, if there is one."""


def without_writes(inputs: StepInputs) -> StepInputs:
    """The same shapes, but no row is written and none sees a key: slots and block tables are -1, lengths 0."""
    return replace(
        inputs,
        slots=torch.full_like(inputs.slots, PAD_SLOT_ID),
        seq_lens=torch.zeros_like(inputs.seq_lens),
        block_table_pool=torch.full_like(inputs.block_table_pool, NO_BLOCK),
    )


def dummy_batch(num_tokens: int, num_requests: int = 1) -> ScheduledBatch:
    """A batch for profiling or warm-up: fresh prefills of rows that exist in no request; it writes nothing."""
    sizes = np.full(num_requests, num_tokens // num_requests)
    sizes[: num_tokens % num_requests] += 1
    entries = []
    for row, size in enumerate(sizes.tolist()):
        request = Request(f"dummy-{row}", (0,) * size, SamplingParams(), prefill_len=size)
        entries.append(Entry(request, 0, row, 0, size, 0, True, -1))
    return ScheduledBatch(0, tuple(entries), dummy=True)
