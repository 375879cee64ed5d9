# SPDX-License-Identifier: Apache-2.0
"""Ranks that would wait for ever, or abort: prompts about as long as there are ranks, and ranks without rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pcp_passes.errors import RankMismatch
from pcp_passes.layout import Layout
from pcp_passes.step import StepInputs, StepPlanInputs, ops
from tests import steps
from tests.unit.engine_faults.world import replace_op

PCP = 4
LENGTHS = (1, 2, 2 * PCP - 1, 2 * PCP, 2 * PCP + 1)


def prefill(pcp: int, lengths: tuple[int, ...], host: type[steps.Host] = steps.Host) -> steps.Host:
    """One step that prefills prompts of these lengths."""
    made = host(steps.program(pcp), steps.requests(lengths=lengths))
    made.step([(index, length) for index, length in enumerate(lengths)])
    return made


@pytest.mark.parametrize("lengths", [*((n,) for n in LENGTHS), LENGTHS, (1, 1, 1)])
def test_every_rank_issues_the_same_collectives_and_the_result_is_that_of_one_rank(lengths: tuple[int, ...]) -> None:
    found = prefill(PCP, lengths)
    assert found.logs[0].entries, "a prefill gathers"
    for log in found.logs[1:]:
        assert log.entries == found.logs[0].entries
    assert steps.difference(found, prefill(1, lengths)) < 1e-9


class Unpadded(steps.Host):
    """Sabotage: each rank offers only the sampled rows that it has."""

    def plans(self, inputs: StepInputs, layout: Layout) -> list[StepPlanInputs] | None:
        padded = super().plans(inputs, layout)
        assert padded is not None
        own = layout.restore_index[inputs.logit_rows.numpy()] // layout.padded_tokens
        return [
            dataclasses.replace(plan, sampled_local=plan.sampled_local[: int((own == rank).sum())])
            for rank, plan in enumerate(padded)
        ]


def test_a_gather_of_unequal_rows_is_refused_before_it_hangs() -> None:
    with pytest.raises(RankMismatch, match="diverges"):
        prefill(PCP, (2, 9), Unpadded)


def test_a_rank_may_have_no_row_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps.Host(steps.program(PCP), steps.requests(lengths=(1, 3)))
    _, layout = made.batch([(0, 1)])
    assert layout.per_rank_tokens.tolist().count(0) == PCP - 1
    assert steps.difference(prefill(PCP, (1,)), prefill(1, (1,))) < 1e-9

    def unguarded(original: Any, positions: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return positions.index_select(0, starts[1:] - 1) + 1

    replace_op(monkeypatch, ops.row_lengths, unguarded)
    with pytest.raises((IndexError, RuntimeError), match=r"index out of range|out of bounds"):
        prefill(PCP, (1,))
