# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_engine_ranks`` runs: an engine on one rank of a gloo group."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.ranks import GroupExecutor
from pcp_passes.errors import PcpError
from pcp_passes.step import ops
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs
from tests import engine_schedules as schedules
from tests import steps as small
from tests.multiproc._workers import LIFETIME_S, mark

HEARTBEAT_S = 4.0


def join(rank: int, world: int, folder: Path) -> dist.ProcessGroup:
    """A gloo group of all ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    return group


def trace(rank: int, world: int, folder: Path, seeds: Sequence[int], which: str) -> None:
    """Run schedules; save outputs, caches and bytes per step."""
    group = join(rank, world, folder)
    program_of, vocab = PROGRAMS[which]
    found = []
    for seed in seeds:
        records: list[Any] = []
        schedule = schedules.make_schedule(seed, vocab=vocab)
        ran = schedules.run_schedule(
            schedule, world, program_of, functools.partial(_Recording, group=group, records=records)
        )
        found.append({"outputs": ran.outputs, "caches": ran.caches, "summary": ran.summary, "bytes": records})
    torch.save(found, folder / f"partial.{rank}")
    os.replace(folder / f"partial.{rank}", folder / f"trace.{rank}")
    dist.barrier()
    dist.destroy_process_group()


PROGRAMS: dict[str, tuple[schedules.ProgramOf, int]] = {
    "small": (schedules.small_program, small.VOCAB),
    "glm": (schedules.glm_program, schedules.VOCAB),
}


class _Recording(GroupExecutor):
    """Keeps the bytes that each step sent."""

    def __init__(self, program: Any, options: EngineOptions, group: dist.ProcessGroup, records: list[int]) -> None:
        super().__init__(program, options, group)
        self.records = records

    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        outputs, log = super()._run(inputs, plans)
        self.records.append(log.bytes)
        return outputs, log


OPTIONS = EngineOptions(pcp=2, block_size=4, num_blocks=64, max_len=48, budget=16, silence_s=HEARTBEAT_S)


def lost_in_a_draft_step(rank: int, world: int, folder: Path, victim: int, heartbeat: bool) -> None:
    """``victim`` stops for good in the middle of a draft step of a sharded batch; the others wait for it in gloo.

    The second draft is sampled between the two passes of the drafter: the next thing is a collective of the next step.
    """
    group = join(rank, world, folder)
    program = small.program(world, 3)
    options = replace(OPTIONS, pcp=world, decode="owner")
    executor = GroupExecutor(program, options, group, reason_file=folder / f"reason.{rank}")
    if not heartbeat:
        assert executor.heartbeat is not None
        executor.heartbeat.stop()
    engine = Engine(executor)
    engine.add_request([i % small.VOCAB for i in range(20)], SamplingParams(max_tokens=12))
    seen = 0

    def entered(op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == 5:  # step 2 of the engine, draft 2 of 3
                mark(folder, "ready", rank)
                if rank == victim:
                    time.sleep(LIFETIME_S)
            return op(*args)

        return run

    ops.sample_draft.function = entered(ops.sample_draft.function)
    engine.run()


def drifting(rank: int, world: int, folder: Path, check: bool) -> None:
    """Rank 1 verifies other tokens than rank 0, as after a near tie that fell differently."""
    group = join(rank, world, folder)
    executor = GroupExecutor(small.program(world, 3), replace(OPTIONS, pcp=world, check_ranks=check), group)
    engine = Engine(executor)
    engine.add_request([i % small.VOCAB for i in range(12)], SamplingParams(max_tokens=20))
    honest = ops.verify.function

    def verify(logits: torch.Tensor, *rest: Any) -> Any:
        return honest(-logits if rank == 1 else logits, *rest)

    ops.verify.function = verify
    told = "ended"
    try:
        engine.run()
    except PcpError as error:
        told = f"{type(error).__name__}: {error}"
    engine.close()
    mark(folder, "told", rank, told)


def disagreeing(rank: int, world: int, folder: Path, what: str) -> None:
    """One rank differs from the others in ``what``."""
    group = join(rank, world, folder)
    program = small.program(world, 3 if what != "steps" or rank == 0 else 2)
    options = replace(OPTIONS, pcp=world)
    if what == "options" and rank == 1:
        options = replace(options, budget=32)
    if what == "weights" and rank == 1:
        next(program.plain.parameters()).data.mul_(1.5)
    told = "agreed"
    try:
        GroupExecutor(program, options, group, agreement_s=20.0).close()
    except PcpError as error:
        told = f"{type(error).__name__}: {error}"
    mark(folder, "told", rank, told)
    dist.destroy_process_group()
