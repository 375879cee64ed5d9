# SPDX-License-Identifier: Apache-2.0
"""Printed text read back: the same text, the same values, the same numbers; and what may not be read."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from pcp_passes.collectives import bound_axis
from pcp_passes.errors import InvariantError
from pcp_passes.ir import fakes, invariants, meta
from pcp_passes.ir.parsing.parser import Parsed, parse_graph
from pcp_passes.ir.placements import Replicate, Shard
from pcp_passes.ir.printer import graph_fingerprint, print_graph
from pcp_passes.ir.revalue import type_key
from pcp_passes.passes import REPLICATED, SHARDED, Event, PassContext, body_pipeline
from pcp_passes.passes.tokens.pipeline import TokenOptions, token_pipeline
from pcp_passes.simulate import simulate
from tests import toy, toy_runs

CTX = PassContext(4)
STANDING = body_pipeline().ensures | invariants.ALWAYS
"""What holds of a sharded body."""


def functional_aten(function: Any, *args: torch.Tensor) -> fx.GraphModule:
    """Functional pre-dispatch ATen of a function: what the PyTorch front end rewrites."""
    from torch._functorch.aot_autograd import aot_export_module

    gm, _ = toy.trace(function, *args)
    values = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        exported, _ = aot_export_module(
            fx.GraphModule(gm, gm.graph), values, trace_joint=False, pre_dispatch=True, decompositions={}
        )
    return exported


class Attention(nn.Module):
    """A decoder layer as Hugging Face writes it: an explicit mask, grouped keys, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, width, bias=False) for width in (16, 8, 8))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        q, k, v = (p(self.norm(x)).view(1, rows, -1, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = (y[:, :, None].expand(1, 1, 2, rows, 8).reshape(1, 2, rows, 8) for y in (k, v))
        index = torch.arange(rows, device=x.device)
        mask = (index[None] <= index[:, None]) & (index[:, None] - index[None] < 5)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])
        return x + mixed.transpose(1, 2).reshape(rows, 16)


class Experts(nn.Module):
    """Top-2 experts with a sort: sizes that are multiples of the token count."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        order = chosen.view(-1).sort().indices
        rows = x[order // 2]
        out = torch.bmm(rows[:, None], self.up[chosen.view(-1)[order]])[:, 0]
        out = out * weights.view(-1)[order][:, None]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return out[inverse].view(-1, 2, 16).sum(1)


GRAPHS = ["dense", "latent", "attention", "experts"]


def captured(name: str) -> fx.GraphModule:
    if name in toy_runs.KINDS:
        return toy_runs.captured(name)[1].gm
    torch.manual_seed(3)
    model = {"attention": Attention, "experts": Experts}[name]().requires_grad_(False)
    return functional_aten(model, torch.randn(12, 16))


def stages() -> Iterator[Any]:
    for kind in toy_runs.KINDS:
        for steps in [SHARDED[:count] for count in range(1, len(SHARDED) + 1)] + [REPLICATED]:
            yield pytest.param(kind, steps, id=f"{kind}-{steps[-1].name}-{len(steps)}")


def recorded(node: fx.Node) -> meta.NodeInfo:
    """What is recorded of a node; a tuple of one placement says what the placement alone says."""
    known = meta.info(node)
    return replace(known, results=known.results if len(known.results) > 1 else ())


def require_equal(parsed: Parsed, graph: fx.Graph) -> None:
    """Text, fingerprint, values down to strides, and everything this package records of a node."""
    assert print_graph(parsed.graph) == print_graph(graph)
    assert graph_fingerprint(parsed.graph) == graph_fingerprint(graph)
    for read, was in zip(parsed.graph.nodes, graph.nodes, strict=True):
        assert list(map(type_key, meta.tensors(read))) == list(map(type_key, meta.tensors(was))), was.name
        assert recorded(read) == recorded(was), was.name
        if was.op != "placeholder":
            assert (meta.module_path(read), meta.source_line(read)) == (meta.module_path(was), meta.source_line(was))


@pytest.mark.parametrize("name", GRAPHS)
def test_a_captured_graph_survives_the_round_trip(name: str) -> None:
    gm = captured(name)
    parsed = parse_graph(print_graph(gm))
    require_equal(parsed, gm.graph)
    assert parsed.stated == () and parsed.unknown == ()


@pytest.mark.parametrize("kind, steps", list(stages()))
def test_a_graph_between_passes_survives_the_round_trip(kind: str, steps: Any) -> None:
    ctx = PassContext(4, variant="replicated" if steps is REPLICATED else "sharded")
    gm, _ = toy_runs.apply(steps, toy_runs.captured(kind)[1].gm, ctx)
    require_equal(parse_graph(print_graph(gm)), gm.graph)


class RoundTrip:
    """Reads back the text of every stage."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    def observe(self, event: Event) -> None:
        text = print_graph(event.graph)
        require_equal(parse_graph(text), event.graph)
        self.seen[event.name] = text


@pytest.mark.parametrize("name", ["attention", "experts"])
def test_a_graph_of_all_tokens_survives_the_round_trip_between_passes(name: str) -> None:
    lines = print_graph(captured(name)).splitlines(keepends=True)
    rows = next(line for line in lines if ": sym " in line).split()[3]
    inputs = max(index for index, line in enumerate(lines) if line.endswith("= input\n")) + 1
    lines[inputs:inputs] = ["%pcp_rows : i64[sM] = input\n", f"%pcp_restore : i64[{rows}] = input\n"]
    observer = RoundTrip()
    pipeline = token_pipeline(TokenOptions(), [observer])
    pipeline.run_graph(parse_graph("".join(lines)).graph, PassContext(2))
    assert list(observer.seen) == ["captured", *(step.name for step in pipeline.passes)]
    assert "pcp.all_gather_rows(" in observer.seen["lower-restores"]
    assert ("sorted(sort" in observer.seen["propagate-placements"]) == (name == "experts")


def test_values_live_in_an_environment_of_their_own_with_the_symbols_of_the_text() -> None:
    gm = captured("dense")
    parsed = parse_graph(print_graph(gm))
    read, was = (fakes.fake_mode_of([meta.value(n) for n in g.nodes]) for g in (parsed.graph, gm.graph))
    assert read is not was and read.shape_env is not was.shape_env
    rows = next(n for n in parsed.graph.nodes if n.name == "l_ids_")
    assert fakes.is_plain_symbol(meta.tensor(rows).shape[0])


def test_views_share_storage_and_copies_do_not() -> None:
    nodes = {n.name: n for n in parse_graph(print_graph(captured("dense"))).graph.nodes}
    key = {name: fakes.storage_key(meta.tensor(nodes[name])) for name in ("output", "output_1", "output_2", "view_4")}
    assert key["output"] == key["output_1"] == key["view_4"] != key["output_2"]


def test_a_parsed_capture_computes_what_the_capture_does() -> None:
    model, capture = toy_runs.captured()
    world = toy.World(toy_runs.MIXED, 2)
    parsed = parse_graph(print_graph(capture.gm)).module()
    with toy.running(world.unsharded(model, torch.float32)):
        found = parsed(*capture.bind(world.ids, world.positions))[0]
    assert torch.equal(found, toy_runs.unsharded(world))


@pytest.mark.parametrize("name", ["attention", "experts"])
def test_a_parsed_aten_graph_computes_what_the_capture_does(name: str) -> None:
    gm = captured(name)
    generator = torch.Generator().manual_seed(1)
    inputs = [
        20 if isinstance(value, torch.SymInt) else
        torch.randn([s if isinstance(s, int) else 20 for s in value.shape], generator=generator)
        for value in (n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder")
    ]  # fmt: skip
    (expected,), (found,) = gm(*inputs), parse_graph(print_graph(gm)).module()(*inputs)
    assert torch.equal(found, expected)
    assert expected.abs().max() > 0.1


def test_a_parsed_body_runs_on_simulated_ranks() -> None:
    world = toy.World(toy_runs.MIXED, 2)
    gm, _ = toy_runs.apply(SHARDED, captured("dense"), PassContext(2))
    found = toy_runs.sharded(parse_graph(print_graph(gm)).module(), world)
    assert torch.equal(found.hidden, toy_runs.sharded(gm, world).hidden)


def test_passes_run_on_a_parsed_graph_as_on_the_capture() -> None:
    gm = captured("latent")
    parsed = parse_graph(print_graph(gm)).module()
    (was, _), (read, _) = (toy_runs.apply(SHARDED, module, CTX) for module in (gm, parsed))
    assert graph_fingerprint(read) == graph_fingerprint(was)
    invariants.check(STANDING, read.graph, CTX)
    invariants.meta_fresh_full(read.graph, CTX)


def edited(old: str, new: str, steps: Any = SHARDED) -> Parsed:
    text = print_graph(toy_runs.apply(steps, captured("dense"), CTX)[0])
    assert old in text
    return parse_graph(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "old, new, check",
    [
        ("32] rank_major = pcp.all_gather_rows", "33] rank_major = pcp.all_gather_rows", "meta_fresh"),
        ("pcp.all_gather_rows(%cat, 4, 'pcp')", "pcp.all_gather_rows(%cat, 4, 'tp')", "equal_collectives"),
        ("torch.zeros(", "torch.empty(", "padding_defined"),
        ("] rank_major = pcp.all_gather_rows", "] shard(0) = pcp.all_gather_rows", "order_known"),
        ("return (%mul_24,)", "return (%unflatten,)", "no_partial_out"),
    ],
)  # fmt: skip
def test_sabotage_in_the_text_is_seen_by_the_invariants(old: str, new: str, check: str) -> None:
    invariants.check(STANDING, edited(old, old).graph, CTX)
    with pytest.raises(InvariantError, match=check.upper()):
        getattr(invariants, check)(edited(old, new).graph, CTX)


# -- arguments, types and expressions of every kind


class Ref:
    """Stands for the input in a drawn argument."""


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
LITERALS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), FLOATS, st.builds(complex, FLOATS, FLOATS),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.just(Ellipsis), st.just(Ref()),
    st.sampled_from([torch.float32, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]),
    st.sampled_from([torch.strided, torch.contiguous_format, torch.preserve_format]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
)  # fmt: skip
KEYS = st.one_of(st.text(max_size=4), st.integers(-9, 9), st.booleans())
PARTS = st.one_of(st.none(), st.integers(-9, 9), st.just(Ref()))
ARGUMENTS = st.recursive(
    st.one_of(LITERALS, st.builds(slice, PARTS, PARTS, PARTS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)
KEYWORDS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)


def placed(argument: Any, node: fx.Node) -> Any:
    if isinstance(argument, Ref):
        return node
    if isinstance(argument, (list, tuple)):
        return type(argument)(placed(member, node) for member in argument)
    if isinstance(argument, dict):
        return {key: placed(member, node) for key, member in argument.items()}
    if isinstance(argument, slice):
        return slice(*(placed(part, node) for part in (argument.start, argument.stop, argument.step)))
    return argument


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(args=st.lists(ARGUMENTS, max_size=4), kwargs=st.dictionaries(KEYWORDS, ARGUMENTS, max_size=3))
def test_arguments_of_every_kind_survive_the_round_trip(args: list[Any], kwargs: dict[str, Any]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = {key: placed(argument, x) for key, argument in kwargs.items()}
    graph.output(graph.call_function(torch.add, tuple(placed(argument, x) for argument in args), given))
    text = print_graph(graph)
    read = parse_graph(text).graph
    assert print_graph(read) == text
    assert print_graph(graph, numbered=True) == print_graph(read, numbered=True)


POINTWISE = [torch.ops.aten.relu.default, torch.ops.aten.neg.default, torch.relu, "sigmoid", "contiguous"]
PAIRWISE = [torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, operator.sub, torch.maximum]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_graphs_of_every_shape_survive_the_round_trip(data: st.DataObject) -> None:
    inputs = "%n : sym s7 = input\n%x : f32[s7, 6] = input\n%y : f32[s7, 6] strides(1, s7) = input\n"
    graph = parse_graph(inputs + "return %x").graph
    end = next(iter(reversed(graph.nodes)))
    pool = [node for node in graph.nodes if meta.tensor(node) is not None]
    for index in range(data.draw(st.integers(1, 8))):
        a, b = (data.draw(st.sampled_from(pool)) for _ in range(2))
        with graph.inserting_before(end):
            kind = data.draw(st.sampled_from(["one", "two", "view", "cut"]))
            if kind == "one":
                target: Any = data.draw(st.sampled_from(POINTWISE))
                node = graph.call_method(target, (a,)) if isinstance(target, str) else graph.call_function(target, (a,))
            elif kind == "two" and meta.tensor(a).shape == meta.tensor(b).shape:
                node = graph.call_function(data.draw(st.sampled_from(PAIRWISE)), (a, b))
            elif kind == "view":
                node = graph.call_function(torch.ops.aten.transpose.int, (a, 0, 1))
            else:
                wide = graph.call_function(torch.cat, ([a, a], data.draw(st.sampled_from([0, 1]))))
                meta.adopt(wide, a, "make", Shard(0))
                node = wide
        where = data.draw(st.sampled_from([None, Replicate(), Shard(1), Shard(0, 4, index + 1)]))
        maker, layer = data.draw(st.sampled_from(["make", "other-pass"])), data.draw(st.sampled_from([None, "l.0"]))
        meta.adopt(node, a, maker, where, layer)
        pool.append(node)
    end.args = ((pool[-1], [pool[0]]),)
    read = parse_graph(print_graph(graph))
    assert print_graph(read.graph) == print_graph(graph)
    for was, now in zip(graph.nodes, read.graph.nodes, strict=True):
        assert list(map(type_key, meta.tensors(now))) == list(map(type_key, meta.tensors(was))), was.name
        assert was.op == "output" or meta.info(now) == meta.info(was)


def test_collectives_of_a_parsed_body_reach_the_bound_group() -> None:
    text = "%x : f32[s0, 4] = input\n%g : f32[2*s0, 4] = pcp.all_gather_rows(%x, 2, 'pcp')\nreturn %g"
    module = parse_graph(text).module()
    x = torch.randn(3, 4)
    with bound_axis("pcp", lambda rows: torch.cat([rows, rows + 1])):
        assert torch.equal(module(x), torch.cat([x, x + 1]))
    a, b = simulate(module, [[x], [x + 1]])
    assert torch.equal(a, b) and torch.equal(a, torch.cat([x, x + 1]))
