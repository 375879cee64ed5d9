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
from numpy.typing import ArrayLike, NDArray

from pcp_passes.errors import ConfigError
from pcp_passes.layout import Layout, sampled_rows
from pcp_passes.plan import upload


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


def plan_inputs(
    layout: Layout,
    rank: int,
    logit_rows: ArrayLike,
    device: torch.device | str = "cpu",
    *,
    padded_rows: int | None = None,
    padded_sampled: int | None = None,
) -> StepPlanInputs:
    """What ``layout`` says to ``rank``.

    Args:
        layout: of the batch whose ``query_start_loc`` the step inputs hold.
        logit_rows: host copy of :attr:`StepInputs.logit_rows`; known from the schedule alone.
        device: where the tensors go.
        padded_rows, padded_sampled: ``N`` and ``S`` of a graph bucket; by default the largest rank's.

    Raises:
        LayoutError: a rank, row or bucket that does not fit the layout.
        ConfigError: the layout is replicated, so there is no rank-local part.
    """
    if layout.is_replicated:
        raise ConfigError(
            "Every rank holds every token of this batch (no prefill, decode='replicate'): it has no plan. "
            "Run the step program without one."
        )
    rows = layout.rows(rank, padded_rows=layout.max_rows if padded_rows is None else padded_rows)
    sampled = sampled_rows(layout, logit_rows, padded_rows=padded_sampled)
    first, per_rank = rank * layout.padded_tokens, layout.padded_tokens
    request = np.zeros(rows.num_padded_rows, dtype=np.int64)
    request[: rows.num_rows] = rows.row_request

    def to_device(array: NDArray[np.generic]) -> torch.Tensor:
        return upload(array.astype(np.int64) if array.dtype == np.int32 else array, device)

    return StepPlanInputs(
        local_rows=to_device(layout.gather_index[first : first + per_rank]),
        gather_index=to_device(layout.gather_index),
        write_mask=to_device(layout.write_mask),
        row_request=to_device(request),
        row_query_start_loc=to_device(rows.query_start_loc),
        restore_index=to_device(layout.restore_index),
        sampled_local=to_device(sampled.rows[rank]),
        sampled_restore=to_device(sampled.restore),
    )
