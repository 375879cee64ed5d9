# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_expert_ranks`` runs: bodies with dispatched experts over gloo, on meshes of one world."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pcp_passes.collectives import bound_axis, record_collectives
from pcp_passes.mesh.axes import Mesh
from tests.experts import World

CASES = {
    "dp2 pcp2": (Mesh(dp=2, pcp=2), (5, 3), False),
    "replicated": (Mesh(dp=2, pcp=2), (5, 3), True),
    "pcp4": (Mesh(pcp=4), (4,), False),
    "dp4": (Mesh(dp=4), (4, 1, 7, 2), False),
}
EXPERTS = 5


def world(name: str) -> World:
    mesh, rows, replicated = CASES[name]
    return World(mesh, rows, experts=EXPERTS, padding=0 if 1 in rows else 1, replicated=replicated)


def run(rank: int, ranks: int, folder: str) -> None:
    """Every case on this rank; saves its output and its log."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    found = {}
    for name in CASES:
        given = world(name)
        mine: dict[str, Any] = {}
        for axis, groups in given.groups.items():
            for members in groups:
                group = dist.new_group(list(members))
                if rank in members:
                    mine[axis] = group
        body = given.body()
        bound = bound_axis("pcp", mine["pcp"]), bound_axis("dp", mine["dp"])
        with torch.no_grad(), bound[0], bound[1], given.enter(rank), record_collectives() as log:
            out = body(*given.inputs[rank])
        found[name] = {"out": out, "log": [str(entry) for entry in log.entries], "bytes": log.bytes}
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
