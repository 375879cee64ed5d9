# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_transformers_ranks`` runs: models of transformers, several lengths, one compilation."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import pcp_passes
import pcp_passes.api  # here already: the processes are forked from one that has imported this module
from pcp_passes.zoo import models

LENGTHS = (48, 33, 64, 7)


def start(name: str, pcp: int, inner: str, folder: Path) -> list[dict[str, Any]]:
    """Run one model on ``pcp`` processes; logits of each length and the number of compilations, by rank."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    arguments = (pcp, name, inner, str(folder))
    torch.multiprocessing.start_processes(enter, arguments, nprocs=pcp, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(pcp)]


def enter(rank: int, pcp: int, name: str, inner: str, folder: str) -> None:
    """Join the group, run every length, save what came out."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=pcp, timeout=timedelta(seconds=200)
    )
    model = pcp_passes.context_parallel(models.build(name), tokens={"input_ids": 1}, inner=inner)
    logits = []
    for length in LENGTHS:
        logits.append(models.logits_of(model(**models.make_inputs(model.module, length))))
    torch.save({"logits": logits, "compilations": model.sharded.compilations}, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
