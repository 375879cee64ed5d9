# SPDX-License-Identifier: Apache-2.0
"""Graphs: what moves, is stale, overwritten, or of another shape than what was captured is named, not replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from pcp_passes.engine import graphs as graphs_module
from pcp_passes.engine.dummies import dummy_batch
from pcp_passes.engine.executor import Executor
from pcp_passes.engine.graphs import GraphPlanner
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.piecewise.runner import BodyRunner
from pcp_passes.piecewise.static import Buffer
from pcp_passes.step import StepProgram, ops
from tests.engine_schedules import Schedule, Trace, Watched, run_schedule, small_program
from tests.unit.engine_faults.world import engine_run, replace_op, schedule, verdict

GIVEN = schedule((17, 5, 9, 1), every=1, max_tokens=8)
"""Two sharded prefills of 20 and of 12 tokens: rows of a rank 10 and 7, tokens of all ranks up to 20."""


@cache
def wanted() -> Trace:
    return engine_run(GIVEN, 1)


def graphed(mode: str) -> Schedule:
    options = replace(GIVEN.options, graph_mode=mode, graph_rows=(2, 8, 16, 32), graph_requests=(2, 4, 8))
    return replace(GIVEN, options=options)


def run(mode: str = "piecewise", executor: Callable[[StepProgram, EngineOptions], Executor] = Watched) -> str:
    return verdict(lambda: run_schedule(graphed(mode), 2, small_program, executor), wanted())


@pytest.mark.parametrize("mode", ["piecewise", "full_decode_only", "full_and_piecewise"])
def test_clean(mode: str) -> None:
    assert run(mode) == ""


class Reallocates(Watched):
    """Sabotage: after the warm-up, the buffer of one input is made anew before each step."""

    buffer = "target ids"

    def load(self, batch: ScheduledBatch, least_rows: int = 0) -> Any:
        if not batch.dummy:
            for rank in self.ranks:
                assert rank.runner is not None
                found = [held for held in rank.runner.static.buffers() if held.name == self.buffer]
                assert found, f"no buffer {self.buffer}"
                found[0].flat = found[0].flat.clone()
        return super().load(batch, least_rows)


@pytest.mark.parametrize(
    "mode, buffer, named",
    [
        ("piecewise", "target ids", "target.sharded piecewise 16 piece 0"),
        ("full_and_piecewise", "seq_lens", "seq_lens"),
    ],
)
def test_an_input_buffer_that_is_reallocated_between_steps(mode: str, buffer: str, named: str) -> None:
    class Made(Reallocates):
        pass

    Made.buffer = buffer
    found = run(mode, Made)
    assert "cannot be replayed, its inputs are not those of the capture" in found and named in found


def test_a_bucket_chosen_by_the_global_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "dispatch_tokens", lambda batch, pcp, **_: batch.num_tokens)
    assert "was given a bucket of 32 rows; required 16, the smallest that holds the fullest rank" in run()


def test_a_dispatch_by_the_global_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same fault in what the runner is told, under a layout that is right."""
    original = GraphPlanner.choose

    def globally(self: GraphPlanner, batch: Any, least_rows: int = 0) -> Any:
        choice = original(self, batch, least_rows)
        rows = self.buckets.choose_rows(max(batch.num_tokens, least_rows))
        assert rows is not None
        return replace(choice, dispatch=replace(choice.dispatch, rows=rows))

    monkeypatch.setattr(GraphPlanner, "choose", globally)
    assert "choose the bucket by the largest rank's rows, not by the tokens of all ranks" in run()


def test_a_pad_slot_of_a_longer_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the static set of a replicated call: the tail of the slots is not reset."""
    original = Buffer._pad
    monkeypatch.setattr(Buffer, "_pad", lambda self, tail: None if self.name == "slots" else original(self, tail))
    found = run("full_and_piecewise")
    assert "slots holds" in found and "left by an earlier call; required -1" in found


def test_a_pad_row_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the rank-major slots of a sharded call: rows up to the bucket keep the slot of the token they repeat."""
    replace_op(monkeypatch, ops.expand_slots, lambda original, slots, index, mask: slots.index_select(0, index))
    assert run() != ""


def test_a_host_read_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unwatched(Watched):
        check_steps = False

        def _run(self, inputs: Any, plans: Any) -> Any:
            return super(Watched, self)._run(inputs, plans)

    def compared() -> str:
        found = verdict(lambda: run_schedule(graphed("full_and_piecewise"), 2, small_program, Unwatched), wanted())
        return found if found.startswith("HostSync") else ""

    monkeypatch.setenv("PCP_SYNC_CHECK", "1")
    assert compared() == ""

    def reading(original: Any, cu_logits: Any, rejected: Any) -> Any:
        return original(cu_logits, rejected + 0 * rejected.sum().item())

    replace_op(monkeypatch, ops.last_valid, reading)
    assert "test_graph_buckets.py" in compared() and "rejected.sum().item()" in compared(), "with its source line"


@pytest.mark.parametrize("mode", ["piecewise", "full_and_piecewise"])
def test_a_draft_step_that_writes_over_the_metadata_of_another_call(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the inputs of the next draft step are filled in while a replicated call still has to read its own."""
    original = BodyRunner.bind

    def early(self: BodyRunner, call: Any, rows: Any, inputs: Any) -> Any:
        bound = original(self, call, rows, inputs)
        if bound is not None and not call.sharded:
            count, requests = self.static.attention.positions.rows, self.static.requests_max
            self.static.attention.fill(inputs, "the next draft step", count, requests)
        return bound

    monkeypatch.setattr(BodyRunner, "bind", early)
    found = run(mode)
    assert "runs under the attention inputs of" in found and "the next draft step has written over them since" in found


def test_a_dummy_batch_of_other_shapes_than_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: warm-up runs one token on each rank, not the rows of the bucket."""

    def small_ones(self: GraphPlanner) -> Iterator[tuple[ScheduledBatch, int]]:
        for _ in self.buckets.rows:
            yield dummy_batch(2), 0

    monkeypatch.setattr(GraphPlanner, "warm_up", small_ones)
    assert "target.sharded piecewise 16 runs after the warm-up but was never captured" in run()
