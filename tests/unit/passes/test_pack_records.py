# SPDX-License-Identifier: Apache-2.0
"""pack-records: before and expected, what is left apart, one collective per layer, and what a wrong record would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from pcp_passes import paged
from pcp_passes.collectives import is_collective
from pcp_passes.engine.bodies import make_bodies, trace
from pcp_passes.ir import meta, rules
from pcp_passes.ir.printer import print_graph
from pcp_passes.paged.records import STORES
from pcp_passes.passes import PassContext
from pcp_passes.passes.bodies.pack_records import pack_records
from pcp_passes.simulate import simulate

ROWS, HEADS, LATENT, ROPE, KEY, TOPK = 12, 2, 32, 8, 16, 4
PCP, PAGE = 2, 4


class Full(nn.Module):
    """A layer with an indexer of its own, as a model's capture has it: the latent is written first."""

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, key: torch.Tensor, index_q: torch.Tensor
    ) -> torch.Tensor:
        dep = paged.kv_write(latent[:, None], rope[:, None], "target.0")
        chosen = paged.index_topk(index_q, index_q[..., 0], paged.index_write(key, "target.0"), "target.0", TOPK)
        return paged.mla_attend(q, dep, "target.0", scale=0.3, latent=LATENT, indices=chosen)


class Expected(nn.Module):
    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, key: torch.Tensor, index_q: torch.Tensor
    ) -> torch.Tensor:
        latent, rope, weights = latent[:, None], rope[:, None], index_q[..., 0]
        record = paged.pack_record(latent, rope, key, "fp8")
        dep = paged.record_write(record, "target.0", latent=LATENT, rope=ROPE, index=KEY)
        chosen = paged.index_topk(index_q, weights, dep, "target.0", TOPK)
        return paged.mla_attend(q, dep, "target.0", scale=0.3, latent=LATENT, indices=chosen)


class Early(Full):
    """Attention that reads the latent before the index key is written."""

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, key: torch.Tensor, index_q: torch.Tensor
    ) -> torch.Tensor:
        dep = paged.kv_write(latent[:, None], rope[:, None], "target.0")
        out = paged.mla_attend(q, dep, "target.0", scale=0.3, latent=LATENT)
        chosen = paged.index_topk(index_q, index_q[..., 0], paged.index_write(key, "target.0"), "target.0", TOPK)
        return out + chosen.sum(-1)[:, None, None]


class Dense(Full):
    """Ordinary keys and values."""

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, key: torch.Tensor, index_q: torch.Tensor
    ) -> torch.Tensor:
        k = q[..., :LATENT]
        return paged.kv_attend(k, paged.kv_write(k, k, "target.0"), "target.0")


class Shared(Full):
    """No indexer of its own."""

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, key: torch.Tensor, index_q: torch.Tensor
    ) -> torch.Tensor:
        dep = paged.kv_write(latent[:, None], rope[:, None], "target.0")
        return paged.mla_attend(q, dep, "target.0", scale=0.3, latent=LATENT, indices=index_q[:, 0, :TOPK].int() * 0)


def inputs(rows: int = ROWS, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, LATENT + ROPE), (LATENT,), (ROPE,), (KEY,), (HEADS, KEY))
    return tuple(torch.randn(rows, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)


def text(gm: fx.GraphModule) -> str:
    return print_graph(gm, numbered=True, placements=False, comments=False)


def collectives(body: fx.GraphModule) -> list[torch.Tensor]:
    return [held for node in body.graph.nodes if is_collective(node) for held in meta.tensors(node)]


def test_before_and_expected() -> None:
    gm = trace(Full(), inputs())
    result = pack_records(gm.graph, "fp8")
    gm.recompile()
    assert result.rewrites == 1 and "a record of 32 + 8 + 16: 72 bytes" in str(result.notes[0])
    assert text(gm) == text(trace(Expected(), inputs()))


@pytest.mark.parametrize("store, width, size", [("native", 56, 8), ("bf16", 56, 2), ("fp8", 32 + 4 + 16 + 20, 1)])
def test_one_collective_per_layer(store: Any, width: int, size: int) -> None:
    captured = {"": trace(Full(), inputs())}
    before = text(captured[""])
    [gathered] = collectives(make_bodies(captured, PassContext(PCP), store)["sharded"])
    assert gathered.shape[1] == width and gathered.dtype.itemsize == size
    assert text(captured[""]) == before, "the capture is read again"
    [alone] = collectives(make_bodies({"": trace(Shared(), inputs())}, PassContext(PCP), store)["sharded"])
    assert alone.shape[1] == {"native": 40, "bf16": 40, "fp8": 52}[store]


def test_published_sizes() -> None:
    like = torch.zeros(1, 512), torch.zeros(1, 64), torch.zeros(1, 128)
    sizes = {store: paged.pack_record(*(x.bfloat16() for x in like), store).nbytes for store in STORES}
    assert sizes == {"native": 1152 + 256, "bf16": 1152 + 256, "fp8": 656 + 132}


@pytest.mark.parametrize("module, says", [(Early(), "left apart"), (Dense(), "the graph writes no latent cache")])
def test_what_stays(module: nn.Module, says: str) -> None:
    gm = trace(module, inputs())
    before = text(gm)
    result = pack_records(gm.graph, "fp8")
    assert result.rewrites == 0 and says in " ".join(map(str, result.notes)) and text(gm) == before


# One request of 12 tokens; two ranks of 6 rows each, in order.


def step(first: int, count: int, layout: Any, dtype: torch.dtype) -> tuple[paged.PagedCaches, paged.AttentionInputs]:
    positions = torch.arange(first, first + count)
    slots = torch.arange(ROWS) if layout == "rank_major" else positions
    tables = torch.arange(ROWS // PAGE, dtype=torch.int32)[None]
    held = paged.AttentionInputs(
        slots, layout, tables, torch.tensor([0, count]), torch.tensor([first + count]), positions
    )
    return paged.PagedCaches(ROWS // PAGE, PAGE, dtype), held


CACHES = {"native": torch.float64, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def run(store: Any, held: Any, change: Any = None) -> tuple[list[paged.PagedCaches], torch.Tensor]:
    """Caches of a single rank and of two, made by bodies of ``store`` over caches of ``held``; the two outputs."""
    bodies = make_bodies({"": trace(Full(), inputs())}, PassContext(PCP), store)
    alone, whole = step(0, ROWS, "replicated", CACHES[held])
    with torch.no_grad(), paged.running(alone, whole):
        expected = bodies["replicated"](*inputs())
    body, half = bodies["sharded"], ROWS // PCP
    if change is not None:
        change(body)
    steps = [step(rank * half, half, "rank_major", CACHES[held]) for rank in range(PCP)]
    given = [tuple(x[rank * half : (rank + 1) * half] for x in inputs()) for rank in range(PCP)]
    with torch.no_grad():
        found = simulate(body, given, rank_context=lambda rank: paged.running(*steps[rank]))
    return [alone, *(caches for caches, _ in steps)], torch.stack([expected, torch.cat(found)])


@pytest.mark.parametrize(
    "store, held", [("native", "native"), ("bf16", "bf16"), ("fp8", "fp8"), ("native", "fp8"), ("native", "bf16")]
)
def test_ranks_hold_the_bytes_of_one(store: str, held: str) -> None:
    """Packed before the gather, or on the way into the cache: a row is quantised by itself."""
    caches, (expected, found) = run(store, held)
    for name, rows in caches[0].tensors.items():
        assert rows.any() and rows.dtype == (torch.uint8 if held == "fp8" else CACHES[held])
        for other in caches[1:]:
            assert torch.equal(rows.view(torch.uint8), other.tensors[name].view(torch.uint8)), name
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_fp8_is_near_and_says_so() -> None:
    (_, exact), (_, narrow) = run("native", "native")[1], run("fp8", "fp8")[1]
    assert 1e-4 < (exact - narrow).abs().median() < 0.1


def _swap(body: fx.GraphModule) -> None:
    """Sabotage: the rope key where the latent belongs."""
    [pack] = [node for node in body.graph.nodes if rules.op_name(node) == "pcp::pack_record"]
    latent, rope, *rest = pack.args
    pack.args = (rope, latent, *rest)
    body.recompile()


def _forget_gather(body: fx.GraphModule) -> None:
    """Sabotage: each rank writes its own rows twice."""
    [gather] = [node for node in body.graph.nodes if is_collective(node)]
    with body.graph.inserting_before(gather):
        own = body.graph.call_function(torch.ops.aten.repeat.default, (gather.args[0], [PCP, 1]))
    gather.replace_all_uses_with(own)
    body.recompile()


@pytest.mark.parametrize("sabotage", [_swap, _forget_gather])
def test_what_would_be_seen(sabotage: Any) -> None:
    caches, (expected, found) = run("native", "native", sabotage)
    assert not torch.equal(caches[0].tensors["target.0.latent"], caches[1].tensors["target.0.latent"])
    assert (found - expected).abs().max() > 1e-3
