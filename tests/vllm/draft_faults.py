# SPDX-License-Identifier: Apache-2.0
"""Faults put into the drafter's part of a running engine, one at a time; :func:`undo` removes whatever is in place."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from pcp_passes import collectives
from pcp_passes.frontends.vllm import drafting
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.frontends.vllm.drafting import DraftHooks
from pcp_passes.plan import StepPlan

_ORIGINAL: dict[str, Any] = {
    "prepare": DraftHooks.prepare_draft_prefill,
    "expand": StepPlan.expand_slots,
    "first": drafting._of_first_rank,
}


def undo(worker: Any) -> None:
    """Back to the real code."""
    runner = worker.model_runner
    DraftHooks.prepare_draft_prefill = _ORIGINAL["prepare"]
    StepPlan.expand_slots = _ORIGINAL["expand"]
    drafting.all_gather_rows = collectives.all_gather_rows
    drafting._of_first_rank = _ORIGINAL["first"]
    vars(runner.block_tables).pop("gather_block_tables", None)
    for model in (runner.model, runner.speculator.model):
        vars(model).pop("compute_logits", None)


def edges_not_shifted(worker: Any) -> None:
    """Where a rank's part of a request ends before the request does, the drafter sees the target's token again instead
    of the globally next one."""

    def prepare(self: Any, batch: Any, input_ids: torch.Tensor) -> None:
        before = self._plan.input_ids.clone()
        _ORIGINAL["prepare"](self, batch, input_ids)
        if self.draft_prefill_batch is None:
            return
        view = self._plan.view()
        ends = view.query_start_loc[1:].long() - 1
        requests_end = batch.seq_lens.index_select(0, view.row_request)
        edges = ends[(view.seq_lens > 0) & (view.seq_lens < requests_end)]
        view.input_ids[edges] = before[edges]

    DraftHooks.prepare_draft_prefill = prepare


def tables_not_gathered_again(worker: Any) -> None:
    """The later passes get whatever block tables are there, which is none of the current requests'."""
    tables = worker.model_runner.block_tables
    gather = type(tables).gather_block_tables

    def skipping(idx_mapping: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and "out" not in kwargs:  # the drafter's call
            for table in tables.input_block_tables:
                table.zero_()
            return None
        return gather(tables, idx_mapping, *args, **kwargs)

    tables.gather_block_tables = skipping


def drafts_not_restored(worker: Any) -> None:
    """Each rank samples from its own rows of the first pass."""
    drafting.all_gather_rows = lambda rows, pcp, axis: torch.cat([rows] * pcp)


def slots_by_shape(worker: Any) -> None:
    """Slots that are as many as the gathered rows are taken to be in their order already."""

    def expand(self: StepPlan, slots: torch.Tensor) -> torch.Tensor:
        expanded = _ORIGINAL["expand"](self, slots)
        if self.layout.num_tokens == expanded.shape[1]:
            expanded.copy_(slots[:, : expanded.shape[1]])
        return expanded

    StepPlan.expand_slots = expand


def noise(worker: Any) -> None:
    """The logits of every rank but the first are off."""
    if runtimes.current().rank == 0:  # type: ignore[union-attr]
        return
    runner = worker.model_runner
    generator = torch.Generator().manual_seed(1)
    for model in (runner.model, runner.speculator.model):
        compute = type(model).compute_logits

        def noisy(hidden: torch.Tensor, *args: Any, model: Any = model, compute: Any = compute) -> torch.Tensor:
            logits = compute(model, hidden, *args)
            return logits + torch.randn(logits.shape, generator=generator)

        model.compute_logits = noisy


def broadcast_dropped(worker: Any) -> None:
    """The collective runs, and each rank goes on with its own rows."""

    def own(rows: torch.Tensor, runtime: Any) -> torch.Tensor:
        _ORIGINAL["first"](rows, runtime)
        return rows

    drafting._of_first_rank = own


def freeze_in_a_draft_step(worker: Any) -> None:
    """Rank 1 stops in the second replicated pass that it runs."""
    if runtimes.current().rank != 1:  # type: ignore[union-attr]
        return
    speculator = worker.model_runner.speculator
    generate = type(speculator)._generate_draft
    calls: list[None] = []

    def stopping(*args: Any, **kwargs: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        generate(speculator, *args, **kwargs)

    speculator._generate_draft = stopping


def qualified(name: str) -> str:
    """The name by which a session calls one of these functions."""
    return f"{__name__}:{name}"
