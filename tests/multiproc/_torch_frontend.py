# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_torch_frontend`` runs."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import pcp_passes
import pcp_passes.api  # here already: the processes are forked from one that has imported this module
from pcp_passes.collectives import record_collectives
from pcp_passes.errors import PcpError
from tests.unit.frontends_torch.decoders import decoder, tokens

LENGTHS = (48, 64, 33, 100, 7)
INNERS = ("eager", "inductor")
LAYERS = 1


def start(pcp: int, folder: Path, work: str) -> list[Any]:
    """Run ``work`` in ``pcp`` processes; what each rank returned. Raises when one of them fails."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    torch.multiprocessing.start_processes(enter, (pcp, str(folder), work), nprocs=pcp, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(pcp)]


def enter(rank: int, pcp: int, folder: str, work: str) -> None:
    """Join the group, run ``work``, save what it returns."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=pcp, timeout=timedelta(seconds=120)
    )
    works: dict[str, Callable[..., Any]] = {"run": _run, "subgroups": _subgroups, "disagree": _disagree}
    torch.save(works[work](rank, pcp), Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _run(rank: int, pcp: int) -> dict[str, Any]:
    """Every length through one compilation of each kind."""
    found: dict[str, Any] = {}
    for inner in INNERS:
        model = pcp_passes.context_parallel(decoder(LAYERS), tokens={"input_ids": 1}, inner=inner)
        with record_collectives() as log:
            logits = [model(tokens(count))["logits"] for count in LENGTHS]
        shapes = [entry.shape for entry in log.entries]
        found[inner] = {"logits": logits, "compilations": model.sharded.compilations, "shapes": shapes}
    for outputs in ("local", "last"):
        model = pcp_passes.context_parallel(decoder(LAYERS), tokens={"input_ids": 1}, inner="eager", outputs=outputs)
        found[outputs] = {"logits": model(tokens(33))["logits"], "rows": model.sharded.rows}
    return found


def _subgroups(rank: int, pcp: int) -> torch.Tensor:
    """Two groups of two ranks, each with a prompt of its own, at the same time."""
    groups = [dist.new_group([0, 1], group_desc="low"), dist.new_group([2, 3], group_desc="high")]
    model = pcp_passes.context_parallel(
        decoder(LAYERS), tokens={"input_ids": 1}, inner="eager", group=groups[rank // 2]
    )
    logits: torch.Tensor = model(tokens(20 + rank // 2, seed=rank // 2))["logits"]
    return logits


DIFFERENT: dict[str, dict[str, Any]] = {
    "options": {"layout": "contiguous"},
    "model": {"layers": 2},
    "tokens": {"count": 13},
    "absent": {},
}
"""What rank 1 does differently; ``absent`` comes last, since afterwards the ranks have posted unequally often."""


def _disagree(rank: int, pcp: int) -> dict[str, tuple[str, str, float]]:
    """Every rank must say so, soon, instead of hanging in a collective."""
    return {how: _outcome(how, **(DIFFERENT[how] if rank == 1 else {}), skip=rank == 1) for how in DIFFERENT}


def _outcome(
    how: str, *, layers: int = 1, layout: str = "zigzag", count: int = 12, skip: bool = False
) -> tuple[str, str, float]:
    absent = how == "absent"
    model = pcp_passes.context_parallel(
        decoder(layers), tokens={"input_ids": 1}, inner="eager", layout=layout, agreement_s=5 if absent else 60
    )
    began = time.monotonic()
    try:
        if not (absent and skip):
            model(tokens(count))
    except PcpError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0
