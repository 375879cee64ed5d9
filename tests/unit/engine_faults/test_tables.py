# SPDX-License-Identifier: Apache-2.0
"""Block tables and slots: whose they are, in which order, and what is left in a buffer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pcp_passes.errors import ConfigError, InvariantError
from pcp_passes.layout import Layout
from pcp_passes.paged import ops as paged_ops
from pcp_passes.passes.base import PassResult
from pcp_passes.passes.observers import VerifyObserver
from pcp_passes.step import StepInputs, StepPlanInputs, StepProgram, ops
from tests import steps
from tests.unit.engine_faults.world import ATOL, difference, engine_run, reference, replace_op, schedule, verdict


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a buffer held before must not matter: whatever fills it finds other requests' tables in it."""

    def gather(original: Any, pool: torch.Tensor, requests: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer.copy_(pool[torch.arange(len(buffer)) % len(pool)].flip(0))
        return original(pool, requests, buffer)

    replace_op(monkeypatch, ops.gather_block_tables, gather)


@pytest.mark.parametrize("pcp", [2, 4])
def test_draft_steps_read_block_tables_in_global_order(pcp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, wanted = steps.program(pcp), reference()
    host = steps.Host(program, steps.requests())
    poisoned(monkeypatch)
    orders: list[bool] = []

    def query(original: Any, tables: torch.Tensor, *rest: Any) -> Any:
        orders.append(torch.equal(tables, host.pool[batch.requests]))
        return original(tables, *rest)

    replace_op(monkeypatch, ops.draft_query, query)
    for scheduled in steps.MIXED:
        batch, _ = host.batch(scheduled)
        host.step(scheduled)
    assert orders and all(orders)
    assert steps.difference(host, wanted) < ATOL


def without_regather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pcp_passes.passes.steps.regather_block_tables.regather_block_tables",
        lambda graph: PassResult(0, ("sabotaged",)),
    )


@pytest.mark.parametrize("pcp", [2, 4])
def test_removing_the_regather_is_seen_by_the_result(pcp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = reference()
    without_regather(monkeypatch)
    assert difference(steps.program(pcp), wanted) > 1e-3


def test_removing_the_regather_is_seen_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    steps.program(2, observers=[VerifyObserver("final")])
    without_regather(monkeypatch)
    with pytest.raises(InvariantError, match="BUFFERS_IN_ORDER"):
        steps.program(2, observers=[VerifyObserver("final")])


def unexpanded(program: StepProgram) -> StepProgram:
    """Sabotage: the sharded calls get the slots of the global tokens, said to be what they are."""
    assert program.sharded is not None
    for node in program.sharded.graph.nodes:
        if ops.is_op(node, ops.attention_inputs) and node.args[1] == "rank_major":
            expanded = node.args[0]
            node.args = (expanded.args[0], "replicated", *node.args[2:])
    program.sharded.recompile()
    return program


def one_step(program: StepProgram) -> steps.Host:
    """Eight tokens on two ranks: the global tokens are as many as the gathered rows, 2 * 4."""
    host = steps.Host(program, steps.requests(lengths=(5, 3)))
    host.step([(0, 5), (1, 3)])
    return host


def by_count(op: str, layer: str, layout: str, rows: torch.Tensor, inputs: Any) -> None:
    """The heuristic: slots that are as many as the rows must be theirs."""
    if rows.shape[0] != inputs.slots.shape[0]:
        raise ConfigError(f"{op} of {layer}: one slot per row")


def test_the_layout_of_slots_is_a_tag_and_never_their_count() -> None:
    wanted, program = one_step(steps.program(1)), steps.program(2)
    inputs, layout = steps.Host(program, steps.requests(lengths=(5, 3))).batch([(0, 5), (1, 3)])
    assert len(inputs.slots) == 2 * layout.padded_tokens, "the counts of both layouts are equal here"
    assert steps.difference(one_step(program), wanted) < ATOL
    with pytest.raises(ConfigError, match="8 rank_major rows and 8 replicated slots"):
        one_step(unexpanded(steps.program(2)))


def test_a_heuristic_on_the_count_would_write_into_wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: with the heuristic in place of the tag, the same mistake is not refused, and the caches are wrong."""
    wanted = one_step(steps.program(1))
    monkeypatch.setattr(paged_ops, "require_layout", by_count)
    assert steps.difference(one_step(unexpanded(steps.program(2))), wanted) > 1e-3


LONG_THEN_SHORT = schedule((40, 3), steps=2, every=2, budget=64, max_tokens=4)


def test_padded_rows_never_keep_a_slot_of_an_earlier_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = engine_run(LONG_THEN_SHORT, 1)
    padded = []

    def watch(original: Any, slots: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made = original(slots, index, mask)
        padded.append(made[~mask].tolist())
        return made

    replace_op(monkeypatch, ops.expand_slots, watch)
    assert not verdict(lambda: engine_run(LONG_THEN_SHORT, 4), wanted)
    assert sum(map(len, padded)) > 0, "the short batch has padded rows"
    assert {slot for slots in padded for slot in slots} == {-1}


def test_a_reused_slot_buffer_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: one buffer for all batches; a padded row keeps what was in it."""
    wanted = engine_run(LONG_THEN_SHORT, 1)
    kept = torch.full((256,), -1)

    def reuse(original: Any, slots: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made = original(slots, index, mask)
        kept[: len(made)][mask] = made[mask]
        return kept[: len(made)].clone()

    replace_op(monkeypatch, ops.expand_slots, reuse)
    assert "that it does not own" in verdict(lambda: engine_run(LONG_THEN_SHORT, 4), wanted)


PLAN = tuple(name for name in ("local_rows", "gather_index", "write_mask", "row_request", "row_query_start_loc",
                               "sampled_local", "sampled_restore"))  # fmt: skip


@pytest.mark.parametrize("name", PLAN)
def test_every_tensor_of_the_plan_matters(name: str) -> None:
    class Broken(steps.Host):
        """Sabotage: one plan tensor of rank 1 is wrong."""

        def plans(self, inputs: StepInputs, layout: Layout) -> list[StepPlanInputs] | None:
            plans = super().plans(inputs, layout)
            if plans is not None:
                held = getattr(plans[1], name)
                wrong = ~held if held.dtype == torch.bool else held.roll(1)
                plans[1] = dataclasses.replace(plans[1], **{name: wrong})
            return plans

    assert difference(steps.program(2), reference()) < ATOL
    assert difference(steps.program(2), reference(), Broken) > 1e-3
