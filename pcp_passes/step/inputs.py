# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of a step program: what all ranks know, what the plan gives one rank, and what a step returns.

Sizes: ``T`` global tokens, ``R`` requests of the step (each has at least one token), ``L`` rows with logits, ``K``
drafts, ``Q`` requests of the pool, ``B`` blocks of a request, ``P`` ranks, ``M`` rows of a rank, ``N`` attention rows
of a rank, ``S`` sampled rows of a rank, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from pcp_passes.errors import ConfigError, LayoutError
from pcp_passes.layout import Layout, sampled_rows
from pcp_passes.plan import LayoutBuffers


@dataclass(frozen=True, eq=False)
class StepInputs:
    """One scheduled batch, on the device; the same values on every rank."""

    input_ids: torch.Tensor
    """i64[T]; of a verification request the last token, then its drafts."""
    positions: torch.Tensor
    """i64[T], from the device's own cursor."""
    slots: torch.Tensor
    """i64[T], where the token's cache row goes; -1 writes nothing."""
    query_start_loc: torch.Tensor
    """i64[R+1]."""
    seq_lens: torch.Tensor
    """i64[R], position of the request's last token + 1."""
    requests: torch.Tensor
    """i64[R], row of each request in the pool."""
    block_table_pool: torch.Tensor
    """i32[Q, B]; -1 where a request has no block."""
    logit_rows: torch.Tensor
    """i64[L], global token rows, request by request: its last row and the rows of the drafts it verifies (the last one
    plus ``d_r``). A request that is still prefilling has its last row."""
    cu_logits: torch.Tensor
    """i64[R+1], first logit row of each request."""
    draft_ids: torch.Tensor
    """i64[R, K], drafts being verified; -1 padded."""
    next_prefill: torch.Tensor
    """i64[R], the next prompt token of a request that is still prefilling after this step, else -1."""
    temperature: torch.Tensor
    """f64[R]; 0 is greedy."""
    seeds: torch.Tensor
    """i64[R], one random stream per request."""
    draft_logits: torch.Tensor | None = None
    """[R, K, V], what the drafts were sampled from; ``None`` takes each draft as certain (also exact)."""


@dataclass(frozen=True, eq=False)
class StepPlanInputs:
    """What the layout of a batch says to one rank. Names end up in the program's inputs."""

    local_rows: torch.Tensor
    """i64[M], global token of each local row; padded rows repeat token 0 and need no mask: their slot is -1."""
    gather_index: torch.Tensor
    """i64[P*M], the same on all ranks."""
    write_mask: torch.Tensor
    """bool[P*M], the same on all ranks."""
    row_request: torch.Tensor
    """i64[N], request of each attention row."""
    row_query_start_loc: torch.Tensor
    """i64[N+1]."""
    restore_index: torch.Tensor
    """i64[T], the same on all ranks: ``global = rank_major[restore_index]``."""
    sampled_local: torch.Tensor
    """i64[S], local rows that have logits, padded to one count on all ranks."""
    sampled_restore: torch.Tensor
    """i64[L], the same on all ranks: row of the gathered ``P*S`` rows for each logit row."""


@dataclass(frozen=True, eq=False)
class StepOutputs:
    """What a step returns; equal on all ranks."""

    sampled: torch.Tensor
    """i64[R, K+1], accepted drafts and the token after them; -1 padded."""
    num_sampled: torch.Tensor
    """i64[R], 0 for a request that is still prefilling."""
    num_rejected: torch.Tensor
    """i64[R], drafts of this step that were not accepted."""
    next_token: torch.Tensor
    """i64[R], last sampled token, or the next prompt token."""
    drafts: torch.Tensor
    """i64[R, K], for the next step."""
    draft_logits: torch.Tensor | None
    """[R, K, V] when the program keeps them."""
    logprobs: torch.Tensor
    """f64[R, K+1], of the sampled tokens under the target at temperature 1; 0 where there is none."""


INPUTS: tuple[str, ...] = tuple(field.name for field in fields(StepInputs))
PLAN_INPUTS: tuple[str, ...] = tuple(field.name for field in fields(StepPlanInputs))
"""Inputs of a sharded program, after those of every program."""
TABLE_BUFFER = "table_buffer"
"""Input: i32 rows whose address never changes; holds the block tables that the next body call reads."""
CACHES = "caches"
"""Input: the paged caches of the rank."""


def input_values(inputs: StepInputs) -> tuple[Any, ...]:
    """The tensors in the order of :data:`INPUTS`."""
    return tuple(getattr(inputs, name) for name in INPUTS)


def plan_values(plan: StepPlanInputs) -> tuple[torch.Tensor, ...]:
    """The tensors in the order of :data:`PLAN_INPUTS`."""
    return tuple(getattr(plan, name) for name in PLAN_INPUTS)


class PlanBuffers(LayoutBuffers):
    """The plan of a rank's sharded steps in buffers whose addresses never change: a load refills them.

    A :class:`StepPlanInputs` of it is a set of prefix views and belongs to the step that was loaded last. On CUDA a
    refill is queued on the current stream behind the steps that read the buffers; on CPU a step has ended by then.

    Args:
        pcp, rank, max_tokens, max_rows, device: see :class:`pcp_passes.plan.LayoutBuffers`.
        max_sampled: largest ``L``, rows with logits of a step; ``S`` is never larger.
    """

    def __init__(
        self, pcp: int, rank: int, *, max_tokens: int, max_rows: int, max_sampled: int, device: torch.device | str
    ) -> None:
        super().__init__(
            pcp, rank, max_tokens=max_tokens, max_rows=max_rows, device=device, starts=torch.int64
        )  # fmt: skip
        self.max_sampled = max_sampled
        self.local_rows = torch.zeros(max_tokens, dtype=torch.int64, device=self.device)
        self.sampled_local = torch.zeros(max_sampled, dtype=torch.int64, device=self.device)
        self.sampled_restore = torch.zeros(max_sampled, dtype=torch.int64, device=self.device)

    def load(
        self,
        layout: Layout,
        logit_rows: ArrayLike,
        *,
        padded_rows: int | None = None,
        padded_sampled: int | None = None,
    ) -> StepPlanInputs:
        """What ``layout`` says to this rank, until the next load.

        Args:
            layout: of the batch whose ``query_start_loc`` the step inputs hold.
            logit_rows: host copy of :attr:`StepInputs.logit_rows`; known from the schedule alone.
            padded_rows, padded_sampled: ``N`` and ``S`` of a graph bucket; by default the largest rank's.

        Raises:
            LayoutError: a row or bucket that does not fit the layout, or a layout that does not fit the buffers.
            ConfigError: the layout is replicated, so there is no rank-local part.
        """
        if layout.is_replicated:
            raise ConfigError(
                "Every rank holds every token of this batch (no prefill, decode='replicate'): it has no plan. "
                "Run the step program without one."
            )
        sampled = sampled_rows(layout, logit_rows, padded_rows=padded_sampled)
        if max(len(sampled.restore), sampled.padded_rows) > self.max_sampled:
            raise LayoutError(
                f"The step has {len(sampled.restore)} rows with logits, {sampled.padded_rows} of them on a rank; the "
                f"step plan holds {self.max_sampled}; raise max_sampled."
            )
        rows = self.load_layout(layout, layout.max_rows if padded_rows is None else padded_rows)
        per_rank, gathered = layout.padded_tokens, self.pcp * layout.padded_tokens
        first = self.rank * per_rank
        return StepPlanInputs(
            local_rows=self._upload(self.local_rows, layout.gather_index[first : first + per_rank]),
            gather_index=self.gather_index[:gathered],
            write_mask=self.write_mask[:gathered],
            row_request=self.row_request[: rows.num_padded_rows],
            row_query_start_loc=self.query_start_loc[: rows.num_padded_rows + 1],
            restore_index=self.restore_index[: layout.num_tokens],
            sampled_local=self._upload(self.sampled_local, sampled.rows[self.rank]),
            sampled_restore=self._upload(self.sampled_restore, sampled.restore),
        )


def plan_inputs(
    layout: Layout,
    rank: int,
    logit_rows: ArrayLike,
    device: torch.device | str = "cpu",
    *,
    padded_rows: int | None = None,
    padded_sampled: int | None = None,
) -> StepPlanInputs:
    """:meth:`PlanBuffers.load` into buffers of just this layout's size; arguments and errors are the same."""
    buffers = PlanBuffers(
        layout.pcp,
        rank,
        max_tokens=max(layout.padded_tokens, 1),
        max_rows=max(layout.max_rows, padded_rows or 0),
        max_sampled=max(len(np.asarray(logit_rows)), padded_sampled or 0, 1),
        device=device,
    )
    return buffers.load(layout, logit_rows, padded_rows=padded_rows, padded_sampled=padded_sampled)
