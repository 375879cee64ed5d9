# SPDX-License-Identifier: Apache-2.0
"""Two long prefills beside a sustained stream: eight ranks give what one gives, and the stream does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.request import Entry, ScheduledBatch
from pcp_passes.step import StepInputs, StepOutputs, StepPlanInputs, ops
from tests.engine_schedules import Watched, compare, glm_program, run_schedule
from tests.soak.scenario import sustained_stream
from tests.unit.engine_faults.world import replace_op

PCP = 8


@pytest.mark.unit
def test_the_published_scenario_on_eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[Entry, ...]] = []
    original = Engine._issue

    def issue(engine: Engine, batch: ScheduledBatch) -> Any:
        batches.append(batch.entries)
        return original(engine, batch)

    given = sustained_stream()
    wanted = run_schedule(given, 1, glm_program)
    monkeypatch.setattr(Engine, "_issue", issue)
    found = run_schedule(given, PCP, glm_program)
    difference = compare(found, wanted)
    assert not difference.first, difference
    assert [len(found.outputs[name].tokens) for name in ("stream", "prefill-1", "prefill-2")] == [128, 8, 8]
    assert found.counts["accepted"] > 30, "the drafter is of use in the stream"
    mixed = [entries for entries in batches if len(entries) > 1 and any(entry.is_prefilling for entry in entries)]
    assert [max(entry.length for entry in entries) for entries in mixed] == [3073, 3073]
    assert all(entries[0].request.id == "stream" and entries[0].drafts > 0 for entries in mixed), "it goes on meanwhile"
    assert found.summary["largest_imbalance"] < 1.2


class Unwatched(Watched):
    """The run below is wrong on purpose, so nothing is checked step by step."""

    check_steps = False

    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        return super(Watched, self)._run(inputs, plans)


@pytest.mark.unit
def test_a_fault_at_one_shard_edge_in_thousands_of_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage, on a smaller scenario: the next token of a shard's last row is the shard's first."""
    given = sustained_stream(prefill=517, stream=24)
    wanted = run_schedule(given, 1, glm_program)
    assert not compare(run_schedule(given, 4, glm_program), wanted).first

    def rolled(original: Any, x: Any, rows: Any, buffer: Any) -> Any:
        first = int(buffer[0])
        made = original(x, rows, buffer)
        made[-1] = first
        return made

    replace_op(monkeypatch, ops.shard_into, rolled)
    assert compare(run_schedule(given, 4, glm_program, Unwatched), wanted).first
