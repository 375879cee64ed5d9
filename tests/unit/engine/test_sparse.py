# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in the engine: records that ranks gather, schedules over FP8 caches, what is refused at start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pcp_kernels.ops import dsa_pack, index_prep
from pcp_passes import paged
from pcp_passes.collectives import is_collective
from pcp_passes.engine import bodies
from pcp_passes.engine.bodies import Model, make_bodies, prepare
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.requirements import require_kernels
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import ConfigError
from pcp_passes.ir import meta, rules
from pcp_passes.paged import records
from pcp_passes.passes import PassContext
from pcp_passes.passes.bodies.lower_sparse_index import LowerSparseIndex
from pcp_passes.sparse import backends
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step import StepProgram
from tests.engine_schedules import compare, fp8_program, glm_program, make_schedule, run_schedule


@pytest.mark.parametrize("seed", [4])
def test_schedules_over_fp8_caches(seed: int) -> None:
    """Byte for byte: a row is quantised by itself, in front of the gather."""
    schedule = make_schedule(seed, cache_dtype="fp8")
    wanted = run_schedule(schedule, 1, fp8_program)
    assert wanted.counts["accepted"] > 0 and {rows.dtype for rows in wanted.caches[0].values()} == {torch.uint8}
    for pcp in (2, 4):
        found = compare(run_schedule(schedule, pcp, fp8_program), wanted)
        assert not found.first and found.cache == 0, found


def test_a_rank_that_quantised_otherwise_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: scales four times as large, on the two ranks alone."""
    schedule = make_schedule(4, cache_dtype="fp8")
    wanted = run_schedule(schedule, 1, fp8_program)
    honest = records._fp8

    def larger(latent: torch.Tensor, rope: torch.Tensor, index: Any) -> torch.Tensor:
        record = honest(latent, rope, index)
        record[:, latent.shape[1] + 3] += 1  # the high byte of a scale: its exponent, by two
        return record

    monkeypatch.setattr(records, "_fp8", larger)
    assert compare(run_schedule(schedule, 2, fp8_program), wanted).first


def _generated(made: StepProgram) -> Any:
    """More keys than the indexer selects, 64."""
    engine = Engine(SimulatedExecutor(made, EngineOptions(max_len=160, num_blocks=32, budget=160, cache_dtype="fp8")))
    engine.add_request(range(1, 140), SamplingParams(max_tokens=6), "a")
    return engine.run()["a"]


def test_indexers_over_fp8_caches_are_packed_and_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One op each for keys and queries in every body, and what the model's own ops give; with other pairs not."""
    made = fp8_program(1, 3)
    given: Any = made.target, made.drafter.model
    for model, indexers in zip(given, (2, 1), strict=True):
        for body in model.bodies.values():
            names = [rules.op_name(node) for node in body.graph.nodes]
            assert names.count("pcp_kernels::dsa_pack") == names.count("pcp_kernels::index_prep") == indexers
            assert "aten::layer_norm" not in names
    found = _generated(glm_program(1, 0).storing("fp8"))
    spoilt = glm_program(1, 0).storing("fp8")
    target: Any = spoilt.target
    for node in target.bodies["replicated"].graph.nodes:
        if rules.op_name(node) == "pcp_kernels::index_prep":
            node.kwargs = {**node.kwargs, "rope": "half"}
    target.bodies["replicated"].recompile()
    monkeypatch.setattr(bodies, "LowerIndexPrologue", LowerSparseIndex)  # which has nothing left to do
    plain = glm_program(1, 0).storing("fp8")
    assert plain.fingerprint != glm_program(1, 0).fingerprint
    wanted = _generated(plain)
    assert found.tokens == wanted.tokens and found.logprobs == pytest.approx(wanted.logprobs, rel=0, abs=1e-9)
    assert _generated(spoilt).logprobs != pytest.approx(wanted.logprobs, rel=0, abs=1e-4)


def collectives(program: StepProgram) -> list[tuple[int, torch.dtype]]:
    assert isinstance(program.target, Model)
    held = [next(meta.tensors(n)) for n in program.target.bodies["sharded"].graph.nodes if is_collective(n)]
    return [(int(one.shape[1]), one.dtype) for one in held]


def test_an_executor_gathers_what_its_caches_hold() -> None:
    """One collective for each of 4 layers, 2 of them with an indexer: 64 + 16 + 32 of float64, or bytes."""
    given = glm_program(2, 0)
    assert collectives(given) == [(112, torch.float64)] * 2 + [(80, torch.float64)] * 2
    made = {
        kind: SimulatedExecutor(given, EngineOptions(pcp=2, cache_dtype=kind)).program
        for kind in ("auto", "bf16", "fp8")
    }
    assert made["auto"] is given
    assert collectives(made["bf16"]) == [(112, torch.bfloat16)] * 2 + [(80, torch.bfloat16)] * 2
    assert collectives(made["fp8"]) == [(136, torch.uint8)] * 2 + [(100, torch.uint8)] * 2
    assert made["fp8"].storing("fp8") is made["fp8"] and made["fp8"].fingerprint != given.fingerprint


def test_the_workspace_changes_nothing() -> None:
    def generated(**options: Any) -> Any:
        sizes = EngineOptions(max_len=160, num_blocks=32, budget=160, **options)
        engine = Engine(SimulatedExecutor(glm_program(1, 0), sizes))
        engine.add_request(range(1, 140), SamplingParams(max_tokens=6), "a")
        return engine.run()["a"]

    one, other = generated(), generated(workspace_bytes=64 << 20, sparse_attention="reference")
    assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


class Sparse(nn.Module):
    """One layer of the given sizes."""

    def __init__(self, heads: int = 8, dim: int = 128, topk: int = 64, latent: int = 512, rope: int = 64) -> None:
        super().__init__()
        self.heads, self.dim, self.topk, self.latent, self.rope = heads, dim, topk, latent, rope
        self.embed = nn.Embedding(8, 8)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        wide = x.repeat(1, (self.latent + self.rope) // 8)
        dep = paged.kv_write(wide[:, None, : self.latent], wide[:, None, self.latent :], "target.0")
        key = x.repeat(1, self.dim // 8)
        q = key[:, None].expand(-1, self.heads, -1)
        written = paged.index_write(key, "target.0")
        chosen = paged.index_topk(q, x[:, :1].expand(-1, self.heads), written, "target.0", self.topk)
        out = paged.mla_attend(
            wide[:, None].expand(-1, 2, -1), dep, "target.0", scale=1.0, latent=self.latent, indices=chosen
        )
        return x + out.sum((1, 2))[:, None]


def program(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> StepProgram:
    module = Sparse(**sizes).to(dtype).eval().requires_grad_(False)
    ids = torch.arange(8)
    captured = {"": prepare(module, (ids, ids))}
    target = Model(
        "target", make_bodies(captured, PassContext(1)), nn.Linear(8, 8, dtype=dtype), 8, 8, ("target.0",), dtype,
        captured=captured,
    )  # fmt: skip
    return StepProgram(target, NoDrafter(), pcp=1)


def start(made: StepProgram, device: str, **options: Any) -> None:
    SimulatedExecutor(made, EngineOptions(**{"block_size": 64, **options}), device=device)


@pytest.mark.parametrize(
    "sizes, options, says",
    [
        ({"dim": 96}, {}, r"dim: found 96; supported: 32, 64, 128"),
        ({"heads": 12}, {}, r"heads: found 12; supported: .*8, 16, 32, 64"),
        ({"topk": 40}, {}, r"topk: found 40; supported: multiples of 16 from 16 to 2048"),
        ({}, {"block_size": 24}, r"page: found 24; supported: 16, 32, 64, 128"),
        ({"dtype": torch.float64}, {}, r"store: found 'fp64'; supported: fp8, bf16, fp16, fp32"),
    ],
)
def test_what_no_kernel_serves_is_refused_on_cuda(sizes: Any, options: Any, says: str) -> None:
    """Before a tensor is made, so it needs no CUDA device. The references of a CPU serve all of it."""
    made = program(**sizes)
    with pytest.raises(ConfigError, match=rf"(?s)have no kernel for cuda.*{says}.*or run on CPU"):
        start(made, "cuda", **options)
    start(made, "cpu", **options)


def test_every_fault_is_named_once() -> None:
    with pytest.raises(ConfigError) as caught:
        start(program(dim=96, topk=40), "cuda", block_size=24)
    said = str(caught.value)
    assert [said.count(f"{name}: found") for name in ("dim", "topk", "page")] == [1, 1, 1]


@pytest.mark.parametrize("card, refused", [(None, False), ((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_fp8_on_a_card_without_it_is_refused(monkeypatch: pytest.MonkeyPatch, card: Any, refused: bool) -> None:
    """Attention would fall back to the reference; scores of keys have none there."""
    monkeypatch.setattr(backends, "capability", lambda: card)
    graphs = [body.graph for body in program().target.bodies.values()]
    checked = lambda kind: require_kernels(  # noqa: E731
        graphs, EngineOptions(block_size=64, cache_dtype=kind), torch.bfloat16, torch.device("cuda")
    )
    checked("bf16")
    if not refused:
        checked("fp8")
        return
    with pytest.raises(ConfigError, match=r"compute capability 8\.0; supported: 8\.9"):
        checked("fp8")


def prologue(rope_dim: int, heads: int) -> fx.Graph:
    """A body's key and query preparation, as ``lower-index-prologue`` makes them."""

    def body(latent, rope, k, q, w, cos, sin):
        record = dsa_pack(latent, rope, k, cos=cos, sin=sin, rope="half", store="fp8")
        return record, index_prep(q, w, cos, sin, rope="half", store="fp8")

    sizes = [(4, 32), (4, 8), (4, 128), (4, heads, 128), (4, heads), (4, rope_dim // 2), (4, rope_dim // 2)]
    traced = make_fx(body, tracing_mode="fake")(*(torch.randn(size) for size in sizes))
    return traced.graph


@pytest.mark.parametrize(
    "rope_dim, heads, says", [(64, 8, ""), (48, 8, "rope_dim: found 48; supported"), (64, 12, "heads: found 12")]
)
def test_a_prologue_without_a_kernel_is_refused_on_cuda(rope_dim: int, heads: int, says: str) -> None:
    graph, options = prologue(rope_dim, heads), EngineOptions(block_size=64, cache_dtype="fp8")
    require_kernels([graph], options, torch.bfloat16, torch.device("cpu"))
    if not says:
        require_kernels([graph], options, torch.bfloat16, torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match=says):
        require_kernels([graph], options, torch.bfloat16, torch.device("cuda"))


def test_fp8_latents_without_a_kernel_are_refused_on_cuda() -> None:
    """Dense latent attention has no indexer to be asked about, and packs its records all the same."""
    pack = lambda latent, rope: records.pack_record(latent, rope, None, "fp8")  # noqa: E731
    options = EngineOptions(cache_dtype="fp8")
    for latent, fits in ((64, True), (96, False)):
        graph = make_fx(pack, tracing_mode="fake")(torch.randn(4, latent), torch.randn(4, 16)).graph
        require_kernels([graph], options, torch.bfloat16, torch.device("cpu"))
        if fits:
            require_kernels([graph], options, torch.bfloat16, torch.device("cuda"))
            continue
        with pytest.raises(ConfigError, match="latent: found 96; supported"):
            require_kernels([graph], options, torch.bfloat16, torch.device("cuda"))


def test_sizes_that_kernels_serve_pass() -> None:
    graphs = [body.graph for body in program().target.bodies.values()]
    for kind in ("auto", "bf16", "fp8"):
        options = EngineOptions(block_size=64, cache_dtype=kind)
        require_kernels(graphs, options, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("name", ["flashmla", "triton"])
def test_a_back_end_that_cannot_run_here_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no sparse attention by '{name}'.*Available: reference.*{name}: it needs"):
        start(program(), "cpu", sparse_attention=name)
    assert not backends.available(backends.Request("cpu", torch.bfloat16, torch.bfloat16, 2, 512, 64))["reference"]
