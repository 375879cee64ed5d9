# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.aten.plan_inputs import plan_inputs
from pcp_passes.ir import invariants, meta
from pcp_passes.ir.copies import copy_graph_module
from pcp_passes.ir.token_markers import is_restore, is_shard
from pcp_passes.passes import PassContext
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.localize_attention import LocalizeAttention
from pcp_passes.passes.tokens.normalize import Normalize
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements
from tests.graphs import ATEN, Given, Program, after, expected, formula, given, traced, worst
from tests.unit.aten import models

pytestmark = pytest.mark.unit
CTX = PassContext(4)
DEAR = 1e-6
PCP: Any = torch.ops.pcp
Tensor = torch.Tensor
X, W = given("T", 6), given(6, 6)
IDS = given(1, "T", dtype=torch.int64, high=9)


def marked(program: Program, pcp: int = 4, balance: float = DEAR, outputs: str = "global") -> fx.GraphModule:
    steps = (Normalize(), LocalizeAttention(), PropagatePlacements(), InsertReshards(balance, outputs))
    return after(program, steps, PassContext(pcp))[0]


# Before and expected


def mixes(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu((a @ b).view(-1, 2, 3).cumsum(0)) * 2


def mixes_expected(a: Tensor, b: Tensor, rows: Tensor, restore: Tensor) -> Tensor:
    local = PCP.shard(a, rows, 0, 1, 1) @ b
    local = ATEN.reshape.default(local, [rows.shape[0], 2, 3])
    whole = PCP.restore(local, restore, 0, 1, 1, 4, "pcp").cumsum(0)
    done = torch.relu(PCP.shard(whole, rows, 0, 1, 1)) * 2
    return PCP.restore(done, restore, 0, 1, 1, 4, "pcp")


def positions(a: Tensor, b: Tensor) -> Tensor:
    """What every rank could compute whole is computed for its rows alone."""
    angles = (torch.arange(a.shape[1]) * 2).to(b.dtype).unsqueeze(1) * torch.ones(a.shape[1], 1, dtype=b.dtype)
    return torch.nn.functional.embedding(a, b) * angles.cos()


def positions_expected(a: Tensor, b: Tensor, rows: Tensor, restore: Tensor) -> Tensor:
    ones = torch.ones((rows.shape[0], 1), dtype=b.dtype, device=torch.device("cpu"), pin_memory=False)
    angles = (rows * 2).to(b.dtype).unsqueeze(1) * ones
    local = torch.nn.functional.embedding(PCP.shard(a, rows, 1, 1, 1), b) * angles.cos()
    return PCP.restore(local, restore, 1, 1, 1, 4, "pcp")


def merged(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.view(-1).clone(), a.t().reshape(2, -1).clone()


def merged_expected(a: Tensor, rows: Tensor, restore: Tensor) -> tuple[Tensor, Tensor]:
    local = PCP.shard(a, rows, 0, 1, 1)
    count = rows.shape[0]
    flat = ATEN.reshape.default(local, [count * 6]).clone()
    turned = ATEN.reshape.default(local.t(), [2, count * 3]).clone()
    return PCP.restore(flat, restore, 0, 1, 6, 4, "pcp"), PCP.restore(turned, restore, 1, 3, 1, 4, "pcp")


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Given, ...]]] = {
    "mixes": (mixes, mixes_expected, (X, W)),
    "positions": (positions, positions_expected, (IDS, given(9, 6))),
    "merged": (merged, merged_expected, (X,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_before_and_expected(name: str) -> None:
    before, wanted, inputs = PROGRAMS[name]
    gm = marked(traced(before, *inputs))
    assert formula(gm) == expected(wanted, *inputs)
    invariants.meta_fresh_full(gm.graph, CTX)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("pcp", [1, 2, 3, 4])
def test_ranks_equal_the_captured_program(name: str, pcp: int) -> None:
    before, _, inputs = PROGRAMS[name]
    program = traced(before, *inputs)
    assert worst(program, marked(program, pcp), pcp) < 1e-12


def test_outputs_may_stay_on_their_ranks() -> None:
    gm = marked(traced(mixes, X, W), outputs="local")
    (end,) = gm.graph.find_nodes(op="output")
    (result,) = end.args[0]
    assert str(meta.placement(result)) == "shard(0)"
    assert len([node for node in gm.graph.nodes if is_restore(node)]) == 1, "only the scan's operand"


def test_what_nothing_reads_is_not_moved() -> None:
    gm = marked(traced(lambda a, b: ((a @ b).cumsum(0) * 0, torch.relu(b))[1], X, W))
    assert not [node for node in gm.graph.nodes if is_restore(node) or is_shard(node)]


def test_a_whole_graph_gives_a_reason() -> None:
    steps = (Normalize(), PropagatePlacements(), InsertReshards())
    _, results = after(traced(lambda a: a * 2, given(6, 6)), steps, CTX)
    assert results[-1].rewrites == 0
    assert results[-1].notes == ("every value is replicated",)


def test_notes_say_what_is_gathered() -> None:
    steps = (Normalize(), PropagatePlacements(), InsertReshards(DEAR))
    _, results = after(traced(mixes, X, W), steps, CTX)
    assert any("gathers %view: 576 bytes" in str(note) for note in results[-1].notes), results[-1].notes


# Sabotage: every reshard of two decoders broken in turn

RANKS = 3


@cache
def decoder(kind: str) -> tuple[Program, fx.GraphModule]:
    if kind == "experts":
        pytest.importorskip("tests.unit.aten.moe", reason="transformers has the grouped product that runs on CPU")
    program = models.decoder(kind)
    return program, marked(program, RANKS)


def _local_restore_index(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """For each token, a row of this rank instead of the right rank's."""
    plan = plan_inputs(graph)
    size = graph.call_function(ATEN.sym_size.int, (plan.rows, 0))
    return graph.call_function(ATEN.remainder.Scalar, (plan.restore, size))


def dropped(graph: fx.Graph, node: fx.Node) -> None:
    """No communication: a rank takes its own rows for those of the others."""
    with graph.inserting_before(node):
        index = _local_restore_index(graph, node)
        own = graph.call_function(PCP.shard.default, (node.args[0], index, *node.args[2:5]))
    node.replace_all_uses_with(own)
    graph.erase_node(node)


def turned(graph: fx.Graph, node: fx.Node) -> None:
    """The restore index backwards."""
    with graph.inserting_before(node):
        index = graph.call_function(ATEN.flip.default, (node.args[1], [0]))
    node.update_arg(1, index)


def rank_major(graph: fx.Graph, node: fx.Node) -> None:
    """Rows as they came, rank after rank."""
    plan = plan_inputs(graph)
    with graph.inserting_before(node):
        size = graph.call_function(ATEN.sym_size.int, (plan.restore, 0))
        index = graph.call_function(ATEN.arange.default, (size,))
    node.update_arg(1, index)


def shifted(graph: fx.Graph, node: fx.Node) -> None:
    """The rows of the next tokens."""
    plan = plan_inputs(graph)
    with graph.inserting_before(node):
        size = graph.call_function(ATEN.sym_size.int, (plan.restore, 0))
        later = graph.call_function(ATEN.add.Tensor, (plan.rows, 1))
        rows = graph.call_function(ATEN.remainder.Scalar, (later, size))
    node.update_arg(1, rows)


def first_rows(graph: fx.Graph, node: fx.Node) -> None:
    """The first rows, whoever's they are."""
    plan = plan_inputs(graph)
    with graph.inserting_before(node):
        rows = graph.call_function(ATEN.remainder.Scalar, (plan.rows, 2))
    node.update_arg(1, rows)


@pytest.mark.parametrize("kind", models.KINDS)
def test_the_decoder_equals_the_captured_one(kind: str) -> None:
    program, gm = decoder(kind)
    assert worst(program, gm, RANKS) < 1e-12
    assert sum(map(is_restore, gm.graph.nodes)) == 5, "keys and values of two layers, and the logits"
    assert sum(map(is_shard, gm.graph.nodes)) >= 1


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("sabotage, which", [
    (dropped, is_restore), (turned, is_restore), (rank_major, is_restore), (shifted, is_shard), (first_rows, is_shard),
])  # fmt: skip
def test_each_broken_reshard_is_seen(kind: str, sabotage: Any, which: Any) -> None:
    program, sound = decoder(kind)
    count = sum(map(which, sound.graph.nodes))
    for number in range(count):
        gm = copy_graph_module(sound)
        node = [node for node in gm.graph.nodes if which(node)][number]
        sabotage(gm.graph, node)
        gm.recompile()
        assert worst_run(program, gm) > 1e-3, f"%{node.name} broken by {sabotage.__name__} was not seen"


@pytest.mark.parametrize("kind", models.KINDS)
def test_the_rows_of_positions_are_needed(kind: str) -> None:
    """The plan's rows are positions too: rotary angles and what a query sees. Shifted there alone, it is seen."""
    program, sound = decoder(kind)
    gm = copy_graph_module(sound)
    plan = plan_inputs(gm.graph)
    readers = [node for node in plan.rows.users if not is_shard(node) and node.target is not ATEN.sym_size.int]
    assert readers
    first = next(node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))
    with gm.graph.inserting_before(first):
        later = gm.graph.call_function(ATEN.add.Tensor, (plan.rows, 1))
    for node in readers:
        node.replace_input_with(plan.rows, later)
    gm.recompile()
    assert worst_run(program, gm) > 1e-3


def worst_run(program: Program, gm: fx.GraphModule) -> float:
    """Worst over one length, without lowering: a broken graph has no values to lower by."""
    from tests.graphs import step_plan

    tokens = 9
    arguments = program.arguments(tokens)
    rows, restore = step_plan(tokens, RANKS)
    (wanted,) = program.gm(*arguments)
    found = 0.0
    for (one,) in in_lockstep(gm, [[*arguments, own, restore] for own in rows]):
        found = max(found, float((one - wanted).abs().nan_to_num(9e9).max()))
    return found


def in_lockstep(gm: fx.GraphModule, inputs: list[list[Tensor]]) -> list[Any]:
    """Run a marked graph on all ranks, node by node; a restore is worked out from its definition."""
    ranks = [fx.Interpreter(gm, garbage_collect_values=False) for _ in inputs]
    results: list[Any] = []
    for rank, given_ in zip(ranks, inputs, strict=True):
        rank.args_iter = iter(given_)
    for node in gm.graph.nodes:
        if is_restore(node):
            _, index, dim, outer, inner, *_ = node.args
            parts = [rank.env[node.args[0]].unflatten(dim, (outer, -1, inner)) for rank in ranks]
            for rank in ranks:
                whole = torch.cat(parts, dim + 1).index_select(dim + 1, rank.env[index])
                rank.env[node] = whole.flatten(dim, dim + 2)
            continue
        for rank in ranks:
            rank.env[node] = rank.run_node(node)
        if node.op == "output":
            results = [rank.env[node] for rank in ranks]
    return results


def test_the_sound_graph_runs_in_lockstep_too() -> None:
    program, gm = decoder("dense")
    assert worst_run(program, gm) < 1e-12
