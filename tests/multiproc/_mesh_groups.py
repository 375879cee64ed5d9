# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_mesh_groups`` runs: the groups of several meshes over one gloo world."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pcp_passes.distributed.process_groups import ORDER, MeshGroups
from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import Mesh
from tests.multiproc._workers import mark

WORLD = 4
MESHES = (
    Mesh(dp=2, pcp=2),
    Mesh(pp=2, pcp=2),
    Mesh(dp=2, pp=2),
    Mesh(pp=4),
    Mesh(dp=2, pcp=2, tp=2, fold_on_tp=True),
    Mesh(pcp=2, tp=2),
)


def run(rank: int, world: int, folder: Path) -> None:
    """For each mesh: who answers in each group, in the group's order; and what a wrong mesh says."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"before": _refused(Mesh(pcp=WORLD))}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found["wrong"] = _refused(Mesh(pcp=3))
    found["meshes"] = [_answers(mesh) for mesh in MESHES]
    dist.barrier()
    dist.destroy_process_group()
    mark(folder, "result", rank, json.dumps(found))


def _refused(mesh: Mesh) -> str:
    try:
        MeshGroups.create(mesh)
    except ConfigError as error:
        return str(error)
    return ""


def _answers(mesh: Mesh) -> dict[str, Any]:
    groups = MeshGroups.create(mesh, timeout=datetime.timedelta(seconds=30))
    answers: dict[str, Any] = {"coordinates": str(groups.coordinates), "one tp": groups.tp is groups.pcp is not None}
    for name, _ in ORDER:
        group = getattr(groups, name)
        if group is None:
            answers[name] = None
            continue
        out = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(out, torch.tensor([groups.rank]), group=group)
        answers[name] = [int(one) for one in out]
    answers["apart"] = len({id(g) for name, _ in ORDER if (g := getattr(groups, name)) is not None})
    # A receive that waits on the wires while round states pass on their own communicator.
    if groups.pp is not None:
        answers["beside"] = _beside(groups)
    groups.close()
    groups.close()
    answers["closed"] = groups.pp is None and groups.dp_cpu is None
    return answers


def _beside(groups: MeshGroups) -> int:
    """The last stage sends a wire to the first after a broadcast that the first posts in between."""
    first, *_, last = groups.ranks("pp")
    wire, told = torch.tensor([7 if groups.rank == last else 0]), torch.tensor([groups.rank])
    waiting = dist.irecv(wire, src=last, group=groups.pp) if groups.rank == first else None
    dist.broadcast(told, src=last, group=groups.pp_cpu)
    if groups.rank == last:
        dist.send(wire, dst=first, group=groups.pp)
    if waiting is not None:
        waiting.wait()
        assert int(wire) == 7
    return int(told)
