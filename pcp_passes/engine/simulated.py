# SPDX-License-Identifier: Apache-2.0
"""The executor that holds all ranks of a replica in one process, and how several replicas run a step together.

Stages run one after another, each on all its ranks in lockstep. Nothing is shared between them but what real ranks
would send: rank-local rows to the next stage, and the round state from the last stage to all others, which apply it
when a later step needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from pcp_passes.collectives import CollectiveLog
from pcp_passes.distributed.stages.round_state import RoundForm
from pcp_passes.distributed.stages.round_transport import Mailbox
from pcp_passes.distributed.stages.rounds import RoundReceiver, RoundSender
from pcp_passes.engine.executor import OpenStep, Rank
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.programs import ProgramExecutor
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.engine.stage_rounds import StageRounds
from pcp_passes.engine.stats import StepRecord
from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.mesh.peer_rows import DP_AXIS
from pcp_passes.piecewise.sync_check import if_wanted
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs
from pcp_passes.step.program import StepProgram

Executed = tuple["StepOutputs | None", StepRecord]


class SimulatedExecutor(ProgramExecutor):
    """All ranks of one replica in this process, each with its own state and caches.

    Args:
        program: for ``options.pcp`` ranks.
        options: of the engine.
        device: of all ranks.
        replica: place on the dp axis. The replicas of one process step through a
            :class:`~pcp_passes.engine.fleet.Fleet`.
    """

    needs_fleet = True

    def __init__(
        self, program: StepProgram, options: EngineOptions, *, device: torch.device | str = "cpu", replica: int = 0
    ) -> None:
        super().__init__(program, options, range(options.pcp), device, replica=replica)
        if options.graph_collectives == "inside":
            raise ConfigError(
                "graph_collectives='inside' needs a process group whose back end can be captured (nccl), and the "
                "simulator exchanges rows in this process; set graph_collectives='outside'."
            )
        self.senders: list[RoundSender] = []
        """Of the last stage, by pcp rank; empty with one stage."""
        if options.pp > 1:
            self._connect_stages()
        self._make_graphs()

    def _connect_stages(self) -> None:
        form = RoundForm(self.steps)
        for index in range(self.options.pcp):
            box = Mailbox(self.options.pp - 1)
            self.senders.append(RoundSender(box.source, form))
            for rank in self.ranks:
                if rank.index == index and rank.stage < self.options.pp - 1:
                    rank.rounds = StageRounds(RoundReceiver(box.receivers[rank.stage], form), rank.state)

    def ranks_of(self, stage: int) -> list[Rank]:
        """Of one stage, in pcp order."""
        return [rank for rank in self.ranks if rank.stage == stage]

    def _run_step(self, step: OpenStep) -> tuple[StepOutputs | None, CollectiveLog]:
        return _run_together([self], [step])[0] if self.stages else super()._run_step(step)

    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        memories = [rank.memory for rank in self.ranks]
        if self.options.pcp == 1:
            return [self.program.run(memories[0], inputs[0])], CollectiveLog()
        logs: list[CollectiveLog] = []
        return self.program.simulate(memories, inputs, plans or None, logs=logs), logs[0]

    def _finish(self, ranks: Sequence[Rank], step: OpenStep, outputs: Sequence[StepOutputs]) -> None:
        """The last stage after a step: its own state, and the round for the others."""
        self._apply(ranks, step, outputs)
        if step.real:
            for sender, mine in zip(self.senders, outputs, strict=False):
                sender.send(step.batch.step, len(step.batch.entries), mine.sampled, mine.drafts)


def execute_together(executors: Sequence[SimulatedExecutor], batches: Sequence[ScheduledBatch]) -> list[Executed]:
    """One lockstep step of all replicas, each with its own loaded and joined batch; results in their order.

    Raises:
        RankMismatch: ranks diverge, or ranks of a replica sampled different tokens.
        PcpError: a replica did not agree on its batch, or replicas would run different programs.
    """
    steps = [executor._open(batch) for executor, batch in zip(executors, batches, strict=True)]
    with if_wanted():
        found = _run_together(executors, steps)
    return [
        (outputs, executor._record(step.loaded, log))
        for executor, step, (outputs, log) in zip(executors, steps, found, strict=True)
    ]


def _run_together(
    executors: Sequence[SimulatedExecutor], steps: Sequence[OpenStep]
) -> list[tuple[StepOutputs | None, CollectiveLog]]:
    """Stage after stage, on the ranks of all replicas at once."""
    if len({bool(step.plans) for step in steps}) > 1:
        raise PcpError(
            "replicas of one lockstep step would run different programs, sharded and not: "
            f"{[bool(step.plans) for step in steps]}; let all join the same agreement."
        )
    pcp, count = executors[0].options.pcp, len(executors)
    groups = {
        "pcp": [range(first, first + pcp) for first in range(0, pcp * count, pcp)],
        DP_AXIS: [range(index, pcp * count, pcp) for index in range(pcp)],
    }
    totals = [CollectiveLog() for _ in executors]
    wires: Sequence[tuple[torch.Tensor, ...]] = [()] * (pcp * count)
    results: list[StepOutputs | None] = [None] * count
    for stage in executors[0].stages:
        ranks = [executor.ranks_of(stage.index) for executor in executors]
        inputs = [
            executor._prepare(rank, step)
            for executor, step, mine in zip(executors, steps, ranks, strict=True)
            for rank in mine
        ]
        here = slice(stage.index * pcp, (stage.index + 1) * pcp)
        plans = [plan for step in steps for plan in step.plans[here]] or None
        logs: list[CollectiveLog] = []
        memories = [rank.memory for mine in ranks for rank in mine]
        found = stage.simulate(memories, inputs, plans, wires, groups=groups, logs=logs)
        for place, (executor, step, mine) in enumerate(zip(executors, steps, ranks, strict=True)):
            own = found[place * pcp : (place + 1) * pcp]
            totals[place].entries += logs[place * pcp].entries
            if stage.is_last:
                outputs = cast("Sequence[StepOutputs]", own)
                executor._finish(mine, step, outputs)
                results[place] = outputs[0]
            elif step.real:
                for rank in mine:
                    assert rank.rounds is not None, "a stage before the last without rounds"
                    rank.rounds.stash(step.batch)
        if not stage.is_last:
            wires = cast("Sequence[tuple[torch.Tensor, ...]]", found)
    return list(zip(results, totals, strict=True))
