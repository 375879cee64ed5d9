# SPDX-License-Identifier: Apache-2.0
"""torch.compile, end to end, over bodies with the lowered ops: Inductor, one graph for every row count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pcp_passes import paged
from pcp_passes.collectives import bound_axis
from pcp_passes.engine.bodies import make_bodies, prepare
from pcp_passes.passes import PassContext

HIDDEN, HEADS, LATENT, ROPE, KEY, TOPK, PAGE, LONGEST = 16, 2, 32, 8, 16, 4, 4, 32


class Layer(nn.Module):
    """A layer of sparse latent attention with ordinary ops around it, which Inductor fuses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, HIDDEN)
        self.kv = nn.Linear(HIDDEN, LATENT + ROPE + KEY, bias=False)
        self.q = nn.Linear(HIDDEN, HEADS * (LATENT + ROPE + KEY), bias=False)
        self.out = nn.Linear(HEADS * LATENT, HIDDEN, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + (positions[:, None] * 0.1).sin()
        for name in ("target.0", "target.1"):
            normed = F.layer_norm(x, (HIDDEN,))
            latent, rope, key = self.kv(normed).split([LATENT, ROPE, KEY], dim=-1)
            q, index_q = self.q(normed).unflatten(-1, (HEADS, -1)).split([LATENT + ROPE, KEY], dim=-1)
            dep = paged.kv_write(latent[:, None], rope[:, None], name)
            written = paged.index_write(F.silu(key), name)
            chosen = paged.index_topk(index_q, normed[:, :HEADS], written, name, TOPK)
            seen = paged.mla_attend(q, dep, name, scale=0.2, latent=LATENT, indices=chosen)
            x = x + self.out(seen.flatten(1))
        return x


def step(count: int, layout: Any, dtype: torch.dtype) -> tuple[paged.PagedCaches, paged.AttentionInputs]:
    positions = torch.arange(count)
    tables = torch.randperm(LONGEST // PAGE, generator=torch.Generator().manual_seed(1)).int()[None]
    slots = tables[0, positions // PAGE].long() * PAGE + positions % PAGE
    held = paged.AttentionInputs(slots, layout, tables, torch.tensor([0, count]), torch.tensor([count]), positions)
    return paged.PagedCaches(LONGEST // PAGE, PAGE, dtype), held


@pytest.mark.parametrize(
    "variant, store, dtype", [("replicated", "native", torch.float32), ("sharded", "fp8", torch.float8_e4m3fn)]
)
def test_inductor_runs_a_body(variant: str, store: Any, dtype: torch.dtype) -> None:
    """Also the sharded one with its gather, over an axis of one rank."""
    ids = torch.arange(8)
    module = Layer().eval().requires_grad_(False)
    body = make_bodies({"": prepare(module, (ids, ids))}, PassContext(1), store)[variant]
    layout = "rank_major" if variant == "sharded" else "replicated"
    torch._dynamo.reset()
    graphs: list[int] = []

    def inductor(gm: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(len(gm.graph.nodes))
        return compile_fx(gm, inputs)

    compiled = torch.compile(body, backend=inductor, dynamic=True, fullgraph=True)
    for count in (7, 20, 31):
        given = torch.arange(count) % 11, torch.arange(count)
        runs = []
        for run in (body, compiled):
            caches, inputs = step(count, layout, dtype)
            with torch.no_grad(), bound_axis("pcp", lambda x: x), paged.running(caches, inputs):
                runs.append((run(*given), caches))
        (expected, held), (found, other) = runs
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert held.tensors.keys() == other.tensors.keys() and len(held.tensors) == 4
        for name, rows in held.tensors.items():
            if rows.dtype == torch.uint8:
                assert (rows != other.tensors[name]).float().mean() < 0.01, name  # a rounding may fall otherwise
            else:
                torch.testing.assert_close(other.tensors[name], rows, rtol=0, atol=1e-5)
    assert len(graphs) == 1, "one graph serves every row count"


def test_a_selection_that_is_lost_would_be_seen() -> None:
    """Sabotage: without its index keys the same body attends elsewhere."""
    ids = torch.arange(8)
    body = make_bodies({"": prepare(Layer().eval().requires_grad_(False), (ids, ids))}, PassContext(1))["replicated"]
    given = torch.arange(20) % 11, torch.arange(20)
    found = []
    for zeroed in (False, True):
        caches, inputs = step(20, "replicated", torch.float32)
        if zeroed:
            for node in body.graph.find_nodes(op="call_function", target=torch.ops.pcp.pack_record.default):
                latent, rope, key, store = node.args
                with body.graph.inserting_before(node):
                    nothing = body.graph.call_function(torch.ops.aten.zeros_like.default, (key,))
                node.args = (latent, rope, nothing, store)
            body.recompile()
        with torch.no_grad(), paged.running(caches, inputs):
            found.append(body(*given))
    assert (found[0] - found[1]).abs().max() > 1e-3
