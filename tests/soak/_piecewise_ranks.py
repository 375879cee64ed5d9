# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_piecewise`` runs over gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pcp_passes.engine.ranks import GroupExecutor
from tests.engine_schedules import run_schedule
from tests.graph_schedules import PROGRAMS, draw, with_graphs
from tests.multiproc._engine_ranks import join

LIMIT_S = 1500


def trace(rank: int, world: int, folder: Path, runs: Sequence[tuple[str, int]]) -> None:
    """Run schedules ``(kind, seed)`` with graphs; save outputs, caches and summaries."""
    signal.alarm(LIMIT_S)
    group = join(rank, world, folder)
    found = []
    for kind, seed in runs:
        ran = run_schedule(
            with_graphs(draw(kind, seed), world), world, PROGRAMS[kind][0],
            lambda program, options: GroupExecutor(program, options, group),
        )  # fmt: skip
        found.append({"outputs": ran.outputs, "caches": ran.caches, "summary": ran.summary})
    torch.save(found, folder / f"partial.{rank}")
    os.replace(folder / f"partial.{rank}", folder / f"trace.{rank}")
    dist.barrier()
    dist.destroy_process_group()
