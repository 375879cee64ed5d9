# SPDX-License-Identifier: Apache-2.0
"""A body call's results stay what they are while the program reads them; whole graphs read nothing on the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from pcp_passes.paged.state import AttentionInputs
from pcp_passes.piecewise import prepare as preparing
from pcp_passes.piecewise.prepare import body_calls, late_results, prepare
from pcp_passes.piecewise.replayer import GraphMode
from pcp_passes.piecewise.runner import StepDispatch
from pcp_passes.step import StepProgram, ops
from tests import graph_steps, steps

PIECEWISE, FULL = GraphMode.PIECEWISE, GraphMode.FULL


def test_a_full_call_takes_the_forms_that_read_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU both forms give the same, so what runs is watched, at capture and at replay."""
    host = graph_steps.GraphHost(steps.program(1), steps.requests(), mode=PIECEWISE, decode_mode=FULL)
    runner, seen, original = host.runners[0], Counter[GraphMode](), AttentionInputs.key_slots

    def reading(self: AttentionInputs, block_size: int) -> Any:
        assert runner._now is not None
        seen[runner._now.key.mode] += 1
        return original(self, block_size)

    monkeypatch.setattr(AttentionInputs, "key_slots", reading)
    for _ in range(2):
        host.requests = steps.requests()
        for scheduled in steps.MIXED:
            host.step(scheduled)
    assert any(key.mode is FULL and key.role == "target" for key in runner.hits)
    assert seen[PIECEWISE], "between pieces it may read; else this looks at the wrong form"
    assert not seen[FULL], "a whole graph reads on the host"


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
@pytest.mark.parametrize("late", [True, False])
def test_results_that_are_read_late_are_copied(mode: GraphMode, late: bool) -> None:
    """Two calls of the drafter, one after the other: the second writes over the slot of the first's result."""
    host = graph_steps.GraphHost(steps.program(1), steps.requests())
    runner, call = host.runners[0], host.prepared.body("drafter", "replicated").call
    runner.prepared = replace(runner.prepared, late=frozenset({"drafter"} if late else ()))
    inputs, _ = host.batch([(0, 3)])
    attention = ops.attention_inputs(
        inputs.slots, "replicated", host.pool[:1], inputs.query_start_loc, inputs.seq_lens, inputs.positions
    )
    for replays in range(2):
        runner.begin(StepDispatch(mode, rows=4, requests=1, draft_mode=mode))
        hidden = torch.ones(3, steps.HIDDEN, dtype=torch.float64)
        first = call(inputs.input_ids, inputs.positions, hidden, attention, host.states[0].caches)
        kept = first[0] if isinstance(first, tuple) else first
        before = kept.clone()
        runner.begin(runner.dispatch)
        call(inputs.input_ids, inputs.positions, -3 * hidden, attention, host.states[0].caches)
        assert torch.equal(kept, before) == late, f"after {replays} replays"


def program_read_late(*, after_second_draft: bool) -> StepProgram:
    """The small program, whose target result something reads once more: behind the drafts, or before them."""
    made = steps.program(1)
    graph = made.plain.graph
    target, rows = (next(node for node in graph.nodes if node.name == name) for name in ("target", "logit_rows"))
    end = next(iter(reversed(graph.nodes)))
    where = end if after_second_draft else body_calls(graph, "drafter")[0]
    with graph.inserting_before(where):
        reader = graph.call_function(ops.select_rows, (target, rows))
    end.args = ((*end.args[0], reader),) if after_second_draft else end.args
    return made


def test_a_late_reader_alone_keeps_the_targets_result_out_of_the_drafters_operand() -> None:
    """No result of a role is late here, so only the check of the hand-over itself can say no."""
    for late in (False, True):
        made = program_read_late(after_second_draft=late)
        assert not prepare(made).late
        assert not any(late_results(made.plain.graph, role) for role in preparing.ROLES)
        assert bool(prepare(made).shared) == (not late)
