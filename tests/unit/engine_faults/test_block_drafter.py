# SPDX-License-Identifier: Apache-2.0
"""The block drafter, which every rank runs whole: it must get every row of the target's states, in global order."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from pcp_passes.collectives import is_collective
from pcp_passes.layout import Layout
from pcp_passes.step import StepInputs, StepPlanInputs, ops
from tests import steps as small
from tests.unit.engine_faults.world import ATOL, difference, replace_op, run_mixed

PCP = 2


@cache
def reference() -> small.Host:
    return run_mixed(small.block_program(1))


@pytest.mark.parametrize("pcp", [2, 4])
def test_it_drafts_what_it_drafts_on_one_rank(pcp: int) -> None:
    assert difference(small.block_program(pcp), reference()) < ATOL


@pytest.mark.parametrize("index", range(2))
def test_every_restore_matters(index: int) -> None:
    """Sabotage: the target's sampled rows, or the auxiliary states, are this rank's own."""
    broken = small.block_program(PCP)
    assert broken.sharded is not None
    found = [node for node in broken.sharded.graph.nodes if is_collective(node)]
    assert len(found) == 2, "all auxiliary states travel together"
    node = found[index]
    with node.graph.inserting_before(node):
        own = node.graph.call_function(torch.cat, ([node.args[0]] * PCP,))
    node.replace_all_uses_with(own)
    node.graph.erase_node(node)
    broken.sharded.recompile()
    assert difference(broken, reference()) > 1e-3


class Unordered(small.Host):
    """Sabotage: restored states are in the order of the ranks."""

    def plans(self, inputs: StepInputs, layout: Layout) -> list[StepPlanInputs] | None:
        plans = super().plans(inputs, layout)
        return plans and [
            dataclasses.replace(plan, restore_index=torch.arange(len(plan.restore_index))) for plan in plans
        ]


def test_states_in_rank_major_order_are_seen() -> None:
    assert difference(small.block_program(PCP), reference(), Unordered) > 1e-3


def test_a_block_at_the_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: after a rejection the block still stands behind the last row instead of the last valid one."""
    wanted = reference()

    def stale(original: Any, cu_logits: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
        return original(cu_logits, torch.zeros_like(num_rejected))

    replace_op(monkeypatch, ops.last_valid, stale)
    assert difference(small.block_program(PCP), wanted) > 1e-3
