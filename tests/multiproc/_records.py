# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_records`` runs: the sharded body of a sparse layer over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pcp_passes import paged
from pcp_passes.collectives import bound_axis, record_collectives
from pcp_passes.engine.bodies import make_bodies, trace
from pcp_passes.passes import PassContext
from tests.unit.passes import test_pack_records as layer

STORES = ("native", "fp8")


def run(rank: int, pcp: int, folder: str) -> None:
    """Both kinds of records on this rank; saves its output, its caches, and what it sent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=pcp)
    half = layer.ROWS // pcp
    given = [x[rank * half : (rank + 1) * half] for x in layer.inputs()]
    captured, found = {"": trace(layer.Full(), layer.inputs())}, {}
    for store in STORES:
        body = make_bodies(captured, PassContext(pcp), store)["sharded"]  # type: ignore[arg-type]
        caches, inputs = layer.step(rank * half, half, "rank_major", layer.CACHES[store])
        group: Any = dist.group.WORLD
        with torch.no_grad(), bound_axis("pcp", group), paged.running(caches, inputs), record_collectives() as log:
            out = body(*given)
        found[store] = {"out": out, "caches": caches.tensors, "calls": log.calls, "bytes": log.bytes}
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
