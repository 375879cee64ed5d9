# SPDX-License-Identifier: Apache-2.0
"""lower-index-prologue: before and expected, what is left alone, equal bytes, and what a wrong one would do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from pcp_kernels import ops
from pcp_kernels.reference.pack import index_unpack
from pcp_kernels.reference.select import topk_paged
from pcp_passes import paged
from pcp_passes.engine.bodies import trace
from pcp_passes.errors import ConfigError
from pcp_passes.ir import rules
from pcp_passes.ir.copies import copy_graph_module
from pcp_passes.ir.parsing.parser import parse_graph
from pcp_passes.ir.printer import print_graph
from pcp_passes.paged import index
from pcp_passes.passes import PassContext, Pipeline, build_variants
from pcp_passes.passes.bodies.lower_index_prologue import lower_index_prologue
from pcp_passes.passes.bodies.pack_records import PackRecords
from pcp_passes.simulate import simulate

ROWS, HEADS, LATENT, ROPE, HIDDEN = 24, 4, 32, 8, 20
KEY, TURNED, TOPK, PAGE, FACTOR = 32, 16, 4, 4, 0.0442
EPS = 1e-6

Tensor = torch.Tensor
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(x [.., R], cos [.., R], sin [.., R])``, both angles twice R/2."""


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers writes it for GLM: first values of all pairs in front."""
    half = x.shape[-1] // 2
    cos, sin, a, b = cos[..., :half], sin[..., :half], x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers writes it for DeepSeek-V3.2."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves, as DeepSeek writes it."""
    (a, b), cos, sin = x.chunk(2, dim=-1), cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
    return torch.cat([a * cos - b * sin, sin * a + cos * b], dim=-1)


TURNS: dict[str, tuple[Turn, str]] = {
    "interleaved": (interleaved, "interleaved"), "halves": (halves, "half"), "chunks": (chunks, "half")
}  # fmt: skip


def doubled(angles: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([angles, angles], dim=-1)
    return both.cos() * 1.0, both.sin() * 1.0


@dataclass(frozen=True)
class Parts:
    """What a near miss spells otherwise."""

    key: Turn = halves
    query: Turn = halves
    angles: Callable[[Tensor], tuple[Tensor, Tensor]] = doubled
    rest: Callable[[Tensor], Tensor] = lambda x: x[..., TURNED:]
    weigh: Callable[[Tensor], Tensor] = lambda w: (w.float() if w.dtype != torch.float64 else w) * 0.25 * (FACTOR * 4)


class Layer(nn.Module):
    """An indexer over a batch of one, and its attention."""

    def __init__(self, parts: Parts, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.parts = parts
        self.wk, self.wq, self.ww, self.norm_weight, self.norm_bias = (
            nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype), requires_grad=False)
            for size in ((KEY, HIDDEN), (HEADS * KEY, HIDDEN), (HEADS, HIDDEN), (KEY,), (KEY,))
        )
        self.freq: Tensor
        self.register_buffer("freq", torch.logspace(0, -2, TURNED // 2, dtype=torch.float64))

    def angles(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.parts.angles(positions[None, :, None].double() * self.freq)
        return cos.to(like.dtype), sin.to(like.dtype)

    def forward(self, x: Tensor, positions: Tensor, q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        parts, batch = self.parts, x[None]
        cos, sin = self.angles(positions, x)
        k = F.layer_norm(F.linear(batch, self.wk), (KEY,), self.norm_weight, self.norm_bias, EPS)
        k = torch.cat([parts.key(k[..., :TURNED], cos, sin), parts.rest(k)], dim=-1)
        queries = F.linear(batch, self.wq).view(1, x.shape[0], HEADS, KEY)
        turned, passed = torch.split(queries, [TURNED, KEY - TURNED], dim=-1)
        queries = torch.cat([parts.query(turned, cos.unsqueeze(2), sin.unsqueeze(2)), passed], dim=-1)
        dep = paged.kv_write(latent[:, None], rope[:, None], "target.0")
        written = paged.index_write(k[0], "target.0")
        weights = parts.weigh(F.linear(batch, self.ww))[0]
        chosen = paged.index_topk(queries[0], weights, written, "target.0", TOPK)
        return paged.mla_attend(q, dep, "target.0", scale=0.3, latent=LATENT, indices=chosen)


class Expected(Layer):
    def forward(self, x: Tensor, positions: Tensor, q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        batch = x[None]
        cos, sin = self.angles(positions, x)
        k = F.linear(batch, self.wk)
        queries = F.linear(batch, self.wq).view(1, x.shape[0], HEADS, KEY)
        latent, rope = latent[:, None], rope[:, None]
        latent, rope, k = latent.select(1, 0), rope.select(1, 0), k.select(0, 0)
        cos = torch.ops.aten.slice.Tensor(cos.select(0, 0), 1, 0, TURNED // 2)
        sin = torch.ops.aten.slice.Tensor(sin.select(0, 0), 1, 0, TURNED // 2)
        norm = self.norm_weight, self.norm_bias, EPS
        record = ops.dsa_pack(latent, rope, k, *norm, cos, sin, rope="half", rounding="fp32")
        dep = paged.record_write(record, "target.0", latent=LATENT, rope=ROPE, index=KEY)
        weights = F.linear(batch, self.ww)
        queries, weights = queries.select(0, 0), weights.select(0, 0)
        queries, weights = ops.index_prep(queries, weights, cos, sin, rope="half", factor=FACTOR)
        chosen = paged.index_topk(queries, weights, dep, "target.0", TOPK)
        return paged.mla_attend(q, dep, "target.0", scale=0.3, latent=LATENT, indices=chosen)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HIDDEN,), (HEADS, LATENT + ROPE), (LATENT,), (ROPE,))
    x, *rest = (torch.randn(ROWS, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return (x, torch.arange(ROWS), *rest)


@functools.cache
def _packed(parts: Parts, dtype: torch.dtype) -> fx.GraphModule:
    gm = trace(Layer(parts, dtype), inputs(dtype))
    Pipeline((PackRecords("fp8"),)).run(gm, PassContext(1))
    return gm


def packed(parts: Parts, dtype: torch.dtype = torch.float64) -> fx.GraphModule:
    return copy_graph_module(_packed(parts, dtype))


def lowered(parts: Parts, dtype: torch.dtype = torch.float64) -> fx.GraphModule:
    gm = packed(parts, dtype)
    result = lower_index_prologue(gm.graph)
    assert result.rewrites == 1, result.notes
    gm.recompile()
    return gm


def text(gm: fx.GraphModule) -> str:
    return print_graph(gm, numbered=True, placements=False, comments=False)


def test_before_and_expected() -> None:
    gm = lowered(Parts())
    assert text(gm) == text(trace(Expected(Parts()), inputs()))
    assert print_graph(parse_graph(print_graph(gm)).graph) == print_graph(gm), "a dump can be read back"


@dataclass(frozen=True)
class Seen:
    """What a body leaves and asks: bytes of the caches by slot, FP8 queries, weights with their scales, the output."""

    latent: Tensor
    key: Tensor
    query: Tensor
    weights: Tensor
    out: Tensor


def step(first: int, count: int, layout: Any) -> tuple[paged.PagedCaches, paged.AttentionInputs]:
    positions = torch.arange(first, first + count)
    slots = torch.arange(ROWS) if layout == "rank_major" else positions
    tables = torch.arange(ROWS // PAGE, dtype=torch.int32)[None]
    ends = torch.tensor([0, count]), torch.tensor([first + count])
    held = paged.AttentionInputs(slots, layout, tables, *ends, positions)
    return paged.PagedCaches(ROWS // PAGE, PAGE, torch.float8_e4m3fn), held


def run(gm: fx.GraphModule, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float64, pcp: int = 1) -> Seen:
    """One request of all rows, on ``pcp`` ranks in order."""
    asked: list[tuple[Tensor, Tensor]] = []
    honest = topk_paged

    def watched(q: Tensor, weights: Tensor, *rest: Any, **named: Any) -> Tensor:
        asked.append((q, weights))
        return honest(q, weights, *rest, **named)

    bodies = build_variants(gm, PassContext(pcp))
    rows = ROWS // pcp
    steps = [step(rank * rows, rows, "replicated" if pcp == 1 else "rank_major") for rank in range(pcp)]
    given = [tuple(x[rank * rows : (rank + 1) * rows] for x in inputs(dtype)) for rank in range(pcp)]
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(index, "topk_paged", watched)
        if pcp == 1:
            with paged.running(*steps[0]):
                found = [bodies["replicated"](*given[0])]
        else:
            found = simulate(bodies["sharded"], given, rank_context=lambda rank: paged.running(*steps[rank]))
    held = [{name: caches.by_slot(f"target.0.{name}") for name in ("latent", "index")} for caches, _ in steps]
    for other in held[1:]:
        assert all(torch.equal(other[name], rows) for name, rows in held[0].items()), "ranks hold different bytes"
    q, weights = (torch.cat(parts) for parts in zip(*asked, strict=True))
    return Seen(held[0]["latent"], held[0]["index"], q.view(torch.uint8), weights.double(), torch.cat(found))


def in_order(seen: Seen, rope: str) -> Seen:
    """With the turned values of keys and queries as the model's own ops leave them."""
    if rope == "half":
        return seen
    moved = [*range(0, TURNED, 2), *range(1, TURNED, 2)]
    rest = list(range(TURNED, KEY))
    key = seen.key[..., moved + rest + list(range(KEY, KEY + 4))]
    return Seen(seen.latent, key, seen.query[..., moved + rest], seen.weights, seen.out)


def difference(found: Seen, wanted: Seen) -> dict[str, float]:
    """Shares of bytes that differ, and the largest relative errors."""
    error = ((found.weights - wanted.weights).abs() / wanted.weights.abs()).max()
    return {
        **{name: float((getattr(found, name) != getattr(wanted, name)).double().mean()) for name in BYTES},
        "weights": float(error),
        "out": float((found.out - wanted.out).abs().max()),
    }


BYTES = ("latent", "key", "query")
EQUAL = dict.fromkeys(BYTES, 0.0)
FLOAT = 2.0**-22
"""Weights are rounded to fp32 before the factor, and not after its two halves."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", TURNS)
def test_the_bytes_are_those_of_the_models_own_ops(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, rope = TURNS[name]
    parts = Parts(turn, turn)
    found = in_order(run(lowered(parts, dtype), monkeypatch, dtype), rope)
    apart = difference(found, run(packed(parts, dtype), monkeypatch, dtype))
    assert apart.pop("weights") < FLOAT
    assert apart == {**EQUAL, "out": 0.0}, "the same keys are selected"


@pytest.mark.parametrize("name", ["interleaved", "halves"])
def test_bf16_is_at_most_a_step_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm and RoPE of the model round to bf16 each, the kernel once; a pair's error is that of its longer value."""
    turn, rope = TURNS[name]
    parts = Parts(turn, turn)
    found = in_order(run(lowered(parts, torch.bfloat16), monkeypatch, torch.bfloat16), rope)
    wanted = run(packed(parts, torch.bfloat16), monkeypatch, torch.bfloat16)
    (keys, scale), (own, own_scale) = (index_unpack(seen.key, KEY) for seen in (found, wanted))
    assert scale is not None and own_scale is not None and torch.equal(scale, own_scale)
    keys, own = keys.float(), own.float()
    assert 0 < (keys != own).float().mean() < 0.15
    step_size = torch.maximum(keys.abs(), own.abs()) / 8 + 2.0**-9
    pair = own[:, :TURNED].unflatten(1, (2, -1)).norm(dim=1).repeat(1, 2)
    turned = (keys - own)[:, :TURNED].abs()
    assert (turned <= step_size[:, :TURNED] + pair * 2.0**-8).all()
    assert ((keys - own)[:, TURNED:].abs() <= step_size[:, TURNED:]).all()
    assert difference(found, wanted)["weights"] < FLOAT


@pytest.mark.parametrize("name", ["interleaved", "halves"])
def test_ranks_hold_and_ask_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, _ = TURNS[name]
    gm = lowered(Parts(turn, turn))
    alone = run(gm, monkeypatch)
    for pcp in (2, 4):
        apart = difference(run(gm, monkeypatch, pcp=pcp), alone)
        assert apart.pop("out") < 1e-12 and apart.pop("weights") < FLOAT and apart == EQUAL


def trigonometry(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos(), angles.sin()


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], -x[..., :half]), dim=-1) * sin


def crossed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin, a, b = cos[..., :half], sin[..., :half], x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, a * cos + b * sin], dim=-1)


@pytest.mark.parametrize(
    "parts, says",
    [
        (Parts(key=backwards), "x * cos + cat([-b, a]) * sin"),
        (Parts(query=backwards), "x * cos + cat([-b, a]) * sin"),
        (Parts(key=crossed), "turn as a * cos - b * sin and b * cos + a * sin"),
        (Parts(key=interleaved), "its queries turn 16 values, half, and its keys 16, interleaved"),
        (Parts(angles=lambda f: trigonometry(torch.cat([f, 2 * f], -1))), "angles of R values are those of R/2, twice"),
        (Parts(angles=lambda f: trigonometry(torch.cat([f[:, :1]] * 2, -1))), "each row has angles of its own"),
        (Parts(rest=lambda x: x[..., TURNED:].flip(-1)), "not turned are the values behind the first R"),
        (Parts(rest=lambda x: x[..., : KEY - TURNED]), "not turned are the values behind the first R"),
        (Parts(key=lambda x, cos, sin: x), "x * cos + cat([-b, a]) * sin"),
        (Parts(rest=lambda x: x[..., TURNED:].half().view(torch.bfloat16).double()), "not turned are the values"),
    ],
)
def test_near_misses_stay_and_say_where(parts: Parts, says: str) -> None:
    gm = packed(parts)
    before = text(gm)
    result = lower_index_prologue(gm.graph)
    assert result.rewrites == 0 and text(gm) == before
    [found] = result.notes
    assert says in str(found) and str(found).startswith("%"), found


def test_a_key_that_nothing_here_scores_stays() -> None:
    """Its values may be read by another body, which has to find them in its own order."""
    gm = packed(Parts())
    [chosen] = [node for node in gm.graph.nodes if rules.op_name(node) == "pcp::index_topk"]
    [attend] = chosen.users
    attend.kwargs = {**attend.kwargs, "indices": None}
    gm.graph.eliminate_dead_code()
    before = text(gm)
    result = lower_index_prologue(gm.graph)
    assert "nothing here scores its index key" in str(result.notes[0]) and text(gm) == before


@pytest.mark.parametrize("store", ["native", "bf16"])
def test_other_stores_are_left_to_inductor(store: Any) -> None:
    gm = trace(Layer(Parts()), inputs())
    Pipeline((PackRecords(store),)).run(gm, PassContext(1))
    before = text(gm)
    result = lower_index_prologue(gm.graph)
    assert result.rewrites == 0 and text(gm) == before
    assert result.notes == ("no record with an index key is packed to FP8",)


def spoil(gm: fx.GraphModule, op: str, **options: Any) -> fx.GraphModule:
    """Other keyword arguments of an op; ``eps`` is positional."""
    [node] = [node for node in gm.graph.nodes if rules.op_name(node) == f"pcp_kernels::{op}"]
    node.args = tuple(options.pop("eps", held) if held == EPS else held for held in node.args)
    node.kwargs = {**node.kwargs, **options}
    gm.recompile()
    return gm


@pytest.mark.parametrize(
    "op, options, seen",
    [
        ("dsa_pack", {"rope": "half"}, {"key"}),
        ("dsa_pack", {"eps": 0.1}, {"key"}),
        ("dsa_pack", {"rounding": "bf16"}, {"key"}),
        ("dsa_pack", {"hadamard": True}, {"key"}),
        ("index_prep", {"rope": "half"}, {"query", "weights"}),
        ("index_prep", {"factor": 1.0}, {"weights"}),
    ],
)
def test_what_would_be_seen(op: str, options: Any, seen: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage, also of what no selection can show, as a factor common to all keys."""
    parts = Parts(interleaved, interleaved)
    found = in_order(run(spoil(lowered(parts), op, **options), monkeypatch), "interleaved")
    apart = difference(found, run(packed(parts), monkeypatch))
    del apart["out"]
    assert seen == {name for name, much in apart.items() if much > (FLOAT if name == "weights" else 0)}, apart


def test_prepared_queries_need_records() -> None:
    q = torch.zeros(2, HEADS, KEY).to(torch.float8_e4m3fn)
    _, held = step(0, 2, "replicated")
    with pytest.raises(ConfigError, match=r"FP8 queries for index keys of torch\.float32"):
        index.best_keys(
            q, torch.zeros(2, HEADS), torch.zeros(6, PAGE, 1, KEY), held, TOPK, page=PAGE, workspace_bytes=64 << 20
        )


@pytest.mark.parametrize("model_type, rope", [("glm_moe_dsa", "interleaved"), ("deepseek_v32", "half")])
def test_indexers_of_transformers(model_type: str, rope: str) -> None:
    """Every one of the layers that have an indexer, with its factor."""
    pytest.importorskip("transformers")
    from tests.unit.transformers.test_targets import target

    gm = copy_graph_module(target(model_type).captured[""])
    Pipeline((PackRecords("fp8"),)).run(gm, PassContext(1))
    result = lower_index_prologue(gm.graph)
    names = [rules.op_name(node) for node in gm.graph.nodes]
    assert result.rewrites == names.count("pcp_kernels::dsa_pack") == names.count("pcp::index_topk") == 2
    assert all(f"RoPE of 8 values, {rope}" in str(one) for one in result.notes)
    for node in gm.graph.nodes:
        if rules.op_name(node) == "pcp_kernels::index_prep":
            assert node.kwargs["factor"] == pytest.approx((2 * 12) ** -0.5) and node.kwargs["rope"] == rope
