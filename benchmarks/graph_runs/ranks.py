# SPDX-License-Identifier: Apache-2.0
"""Two ranks as two processes on one device over gloo, the collectives outside the pieces and through the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graph_runs.models import Size, make_program
from graph_runs.serve import Workload, serve, workload
from pcp_passes.collectives import bind_axis
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.ranks import GroupExecutor
from pcp_passes.step.program import StepProgram

WORLD = 2


def staged(group: dist.ProcessGroup) -> Any:
    """A gather of device rows by way of the host: gloo gathers host memory."""

    def gather(x: torch.Tensor) -> torch.Tensor:
        host = x.cpu().contiguous()
        out = torch.empty((group.size() * host.shape[0], *host.shape[1:]), dtype=host.dtype)
        parts = list(out.view(torch.uint8).flatten().chunk(group.size())) if out.numel() else []
        if parts:
            dist.all_gather(parts, host.view(torch.uint8).flatten(), group=group)
        return out.to(x.device)

    return gather


def rank_main(rank: int, folder: Path, size: Size, way: str, device: torch.device, quick: bool) -> None:
    """What a rank's process runs; leaves ``result.<rank>`` in ``folder``."""
    store = dist.FileStore(str(folder / "rendezvous"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    group = dist.group.WORLD
    assert group is not None

    def make(program: StepProgram, options: EngineOptions) -> GroupExecutor:
        executor = GroupExecutor(program, options, group, device=device)
        bind_axis(program.axis, staged(group))
        return executor

    program = make_program(size, WORLD, device)
    found = serve(program, work(size, device, quick), way, device, make)
    torch.save(asdict(found) | {"outputs": found.outputs}, folder / f"partial.{rank}")
    os.replace(folder / f"partial.{rank}", folder / f"result.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def work(size: Size, device: torch.device, quick: bool) -> Workload:
    """The workload of the ranks, and of the one rank that they are compared with."""
    return workload(size, WORLD, device, quick)


def start(script: str, way: str, device: torch.device, quick: bool, size_name: str, limit_s: float) -> list[Any]:
    """Run both ranks to the end; their results. Raises RuntimeError with the end of what a rank said otherwise."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, script, "--rank-folder", name, "--way", way, "--device", device.type]
        command += ["--model", size_name, *(["--quick"] if quick else [])]
        logs = [(folder / f"log.{rank}").open("w") for rank in range(WORLD)]
        children = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=logs[rank], stderr=subprocess.STDOUT)
            for rank in range(WORLD)
        ]
        try:
            deadline = time.monotonic() + limit_s
            for child in children:
                child.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            raise RuntimeError(f"the ranks did not end within {limit_s:.0f} s") from late
        finally:
            for child, log in zip(children, logs, strict=True):
                child.kill()
                child.wait()
                log.close()
        said = [(folder / f"log.{rank}").read_text(errors="replace")[-1500:] for rank in range(WORLD)]
        codes = [child.returncode for child in children]
        if any(codes):
            raise RuntimeError(f"ranks ended with {json.dumps(codes)}:\n" + "\n".join(said))
        return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(WORLD)]
