# SPDX-License-Identifier: Apache-2.0
"""The shape environment of a capture: two symbols, and guards that are ours to evaluate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache

from pcp_passes.frontends.torch import fresh
from pcp_passes.frontends.torch.capture import capture
from pcp_passes.frontends.torch.fresh import compile_in, fake_plan, fresh_space, propagate, substitute
from pcp_passes.ir.printer import print_graph
from tests.unit.frontends_torch.decoders import decoder, tokens, traced


def test_symbols_are_called_t_and_m() -> None:
    space = fresh_space(12, 6)
    assert (str(space.tokens), str(space.rows)) == ("sT", "sM")
    rows, restore = fake_plan(space, torch.device("cpu"))
    assert [str(size) for size in (*rows.shape, *restore.shape)] == ["sM", "sT"]
    assert rows.dtype == restore.dtype == torch.int64


@pytest.mark.parametrize(("count", "rows"), [(1, 2), (2, 1), (0, 0)])
def test_sizes_below_two_are_our_bug(count: int, rows: int) -> None:
    with pytest.raises(AssertionError, match="sizes below 2 are constants"):
        fresh_space(count, rows)


def test_no_guard_no_restriction() -> None:
    space = fresh_space(12, 6)
    assert space.broken_guards(10**6, 10**5) == () and space.specialised() == ()


def test_guards_of_both_symbols_are_evaluated() -> None:
    space = fresh_space(12, 6)
    assert bool(space.tokens <= 64) and bool(space.tokens == 2 * space.rows)
    assert space.broken_guards(64, 32) == ()
    assert space.broken_guards(66, 33) == ("T <= 64",)
    (broken,) = space.broken_guards(63, 32)
    assert "T" in broken and "M" in broken


def test_a_guard_over_an_expression() -> None:
    space = fresh_space(12, 6)
    assert bool(torch.sym_min(space.tokens, 16) == space.tokens)
    assert space.broken_guards(16, 8) == ()
    assert space.broken_guards(17, 9) != ()


def test_ranges_count_as_guards() -> None:
    space = fresh_space(12, 6)
    assert space.broken_guards(1, 6) == ("2 <= T <= int_oo",)
    assert space.broken_guards(12, 1) == ("2 <= M <= int_oo",)


def test_what_became_a_constant_is_said_with_its_place() -> None:
    space = fresh_space(12, 6)
    assert int(space.tokens) == 12
    (why,) = space.specialised()
    assert why.startswith("T = 12") and "test_fresh.py" in why
    assert space.broken_guards(13, 7) != () and space.broken_guards(12, 6) == ()


def test_sizes_of_one_call() -> None:
    space = fresh_space(12, 6)
    assert space.size_at(space.tokens * 2 + space.rows, 10, 3) == 23
    assert space.size_at(7, 10, 3) == 7 and not space.shape_env.guards


def test_dynamos_expressions_are_translated() -> None:
    ids = tokens(12)
    graph, _ = traced(decoder(), ids, marked=[(ids, 1)])
    symbol = next(given.value for given in graph.inputs if given.kind == "size")
    space = fresh_space(12, 6)
    assert str(substitute(2 * symbol + 1, {symbol: space.tokens})) == "2*sT + 1"
    assert substitute(5, {}) == 5


def captured() -> tuple[Any, list[Any]]:
    ids = tokens(12)
    graph, given = traced(decoder(1), ids, marked=[(ids, 1)])
    return capture(graph, given, rows=6), given


def test_propagation_states_every_value_anew() -> None:
    found, _ = captured()
    before = print_graph(found.gm)
    for node in found.gm.graph.nodes:
        if node.op != "placeholder":
            node.meta.pop("val", None)
    propagate(found.space, found.gm, [node.meta["val"] for node in found.gm.graph.find_nodes(op="placeholder")])
    assert print_graph(found.gm) == before


def test_one_compilation_serves_all_lengths_and_leaves_the_graph() -> None:
    found, given = captured()
    before = print_graph(found.gm)
    program = compile_in(found.space, found.gm)
    assert print_graph(found.gm) == before
    for count in (12, 33, 5):
        arguments = [
            count if source.kind == "size" else tokens(count) if source.last_name == "input_ids" else argument
            for source, argument in zip(found.inputs, given, strict=True)
        ]
        assert found.space.broken_guards(count, 6) == ()
        wanted = decoder(1)(tokens(count))["logits"]
        torch.testing.assert_close(program(count, 6, *arguments)[0], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_guards_added_by_the_compiler_are_seen(start: str) -> None:
    """An op whose shape rule asks about the length is first looked at while compiling, and not at all when the
    compiler finds its earlier result in a cache."""
    with fresh_inductor_cache():
        for _ in range(2 if start == "warm" else 1):
            torch.compiler.reset()
            space = fresh_space(12, 6)
            graph = fx.Graph()
            with space.fake_mode:
                value = torch.empty(space.tokens)
            x = graph.placeholder("x")
            x.meta["val"] = value
            graph.output((graph.call_function(torch.ops.pcp_test_fresh.short.default, (x,)),))
            assert not space.shape_env.guards
            program = compile_in(space, fx.GraphModule({}, graph))
    assert torch.equal(program(20, 10, torch.ones(20))[0], torch.ones(20))
    assert space.broken_guards(64, 6) == () and space.broken_guards(65, 6) == ("T <= 64",)


def test_the_package_is_part_of_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our ops are opaque to Inductor: a result cached by another version of them must not be found."""
    hits = []
    with fresh_inductor_cache():
        for sources in ("one", "one", "other"):
            monkeypatch.setattr(fresh, "source_hash", lambda sources=sources: sources)
            torch.compiler.reset()
            counters.clear()
            x = torch.ones(12)
            graph, given = traced(lambda x: x + 1, x, marked=[(x, 0)])
            found = capture(graph, given, rows=6)
            compile_in(found.space, found.gm)
            hits.append(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
    assert hits[0] == hits[2] == 0 and hits[1] > 0


_LIBRARY = torch.library.Library("pcp_test_fresh", "FRAGMENT")
_LIBRARY.define("short(Tensor x) -> Tensor")
_LIBRARY.impl("short", lambda x: x.clone(), "CompositeExplicitAutograd")


@torch.library.register_fake("pcp_test_fresh::short", lib=_LIBRARY)
def _short(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0] if x.shape[0] <= 64 else 64)
