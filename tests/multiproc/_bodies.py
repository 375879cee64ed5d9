# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_lowered_body`` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.compile_fx import compile_fx

from pcp_passes.collectives import all_gather_rows, bound_axis, record_collectives
from pcp_passes.passes import PassContext, build_variants
from pcp_passes.passes.observers import VerifyObserver
from tests import toy, toy_runs

WORLDS = (toy_runs.MIXED, (toy.Request(0, 23), toy.Request(2, 1)), (toy.Request(7, 1), toy.Request(2, 1)))
"""Three steps with different row counts, the last with a rank that has no real row."""


def run(rank: int, pcp: int, folder: str, kind: str) -> None:
    """Run every world through the eager and the Inductor body over gloo; save what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=pcp)
    model = toy.decoder(toy_runs.KINDS[kind])
    found: dict[str, Any] = {}
    with bound_axis("pcp", dist.group.WORLD), torch.no_grad():
        for name, compiler in (("eager", lambda body, inputs: body.forward), ("inductor", compile_fx)):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=_backend(pcp, compiler), fullgraph=True)
            found[name] = [_step(compiled, toy.World(world, pcp), model, rank) for world in WORLDS]
        found["dtypes"] = {dtype: _gather(rank, pcp, dtype) for dtype in DTYPES}
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32, torch.uint8)


def _gather(rank: int, pcp: int, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.arange(6).view(2, 3) + 10 * rank
    return all_gather_rows(rows.to(dtype), pcp, "pcp").to(torch.float64)


def _backend(pcp: int, compiler: Callable[..., Any]) -> Callable[..., Any]:
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compiler(build_variants(gm, PassContext(pcp), [VerifyObserver("every")])["sharded"], inputs)

    return backend


def _step(compiled: Callable[..., Any], world: toy.World, model: toy.Decoder, rank: int) -> dict[str, Any]:
    ids, positions = world.rank_tokens(rank)
    torch._dynamo.mark_dynamic(ids, 0)
    torch._dynamo.mark_dynamic(positions, 0)
    step = world.rank_step(rank, model, torch.float32)
    with toy.running(step), record_collectives() as log:
        hidden = compiled(ids, positions)
    return {"hidden": hidden, "caches": step.caches, "shapes": [entry.shape for entry in log.entries]}
