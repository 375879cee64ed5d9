# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_graph_ranks`` runs: an engine with graphs on one rank of a gloo group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.ranks import GroupExecutor
from pcp_passes.errors import PcpError
from tests import engine_schedules as schedules
from tests import steps as small
from tests.multiproc._engine_ranks import join

ROWS, REQUESTS = (2, 8, 24, 64), (1, 2, 6)


def schedule(seed: int, mode: str) -> schedules.Schedule:
    """A schedule with graphs, the same in the test and on the ranks."""
    made = schedules.make_schedule(seed, vocab=small.VOCAB)
    graphs = {"graph_mode": mode, "graph_rows": ROWS, "graph_requests": REQUESTS}
    return replace(made, options=replace(made.options, **graphs))


def trace(rank: int, world: int, folder: Path, runs: Sequence[tuple[int, str]]) -> None:
    """Run schedules ``(seed, mode)``, save what they gave; then one step for which rank 1 chooses another bucket."""
    group = join(rank, world, folder)
    found = []
    for seed, mode in runs:
        ran = schedules.run_schedule(
            schedule(seed, mode), world, schedules.small_program,
            lambda program, options: GroupExecutor(program, options, group),
        )  # fmt: skip
        found.append({"outputs": ran.outputs, "caches": ran.caches, "summary": ran.summary})
    torch.save({"runs": found, "told": astray(rank, group)}, folder / f"partial.{rank}")
    os.replace(folder / f"partial.{rank}", folder / f"trace.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def astray(rank: int, group: dist.ProcessGroup) -> str:
    """What a rank is told when the other one pads its step to a larger bucket."""
    options = EngineOptions(
        pcp=2, block_size=4, num_blocks=64, max_len=48, budget=16, graph_mode="piecewise", graph_rows=(4, 16),
        graph_requests=(16,),
    )  # fmt: skip
    engine = Engine(GroupExecutor(schedules.small_program(2, 2), options, group))
    planner = engine.executor.planner
    assert planner is not None
    original = planner.choose

    def choose(batch: Any, least_rows: int = 0) -> Any:
        """Rank 1 takes the global count for its own."""
        return original(batch, max(least_rows, batch.num_tokens) if rank else least_rows)

    planner.choose = choose  # type: ignore[method-assign]
    planner.require_smallest = lambda *given: None  # type: ignore[method-assign]
    engine.add_request(list(range(7)), SamplingParams(max_tokens=4))
    try:
        engine.run()
    except PcpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    return "ended"
