# SPDX-License-Identifier: Apache-2.0
"""place-step: the plain step program as a program of P ranks, correct and naive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.ir import fakes, meta
from pcp_passes.ir.parsing.lexer import Size
from pcp_passes.ir.symbols import Symbols
from pcp_passes.ir.token_markers import restore_op, shard_op
from pcp_passes.passes.base import PassContext, PassResult
from pcp_passes.passes.steps.edits import after, given, insert
from pcp_passes.step import ops
from pcp_passes.step.calls import BodyCall
from pcp_passes.step.inputs import PLAN_INPUTS
from pcp_passes.step.invariants import BUFFERS_IN_ORDER, OPERANDS_FIT, RESTORES_LOWERED
from pcp_passes.step.placement import GLOBAL, LOCAL, PLAN_PLACEMENTS, body_of, row_operands


@dataclass(frozen=True)
class PlaceStep:
    """Choose a variant for every body call; shard what a sharded call reads, restore what it gives.

    Why: a call over all tokens of the step is worth sharding, a draft query of a few rows is not. Around each sharded
    call stands everything that makes it a drop-in for the replicated one, so the program is right at once, if wasteful;
    what two calls can share, or need not gather, is for the passes behind this one. One thing is wrong and checked
    (BUFFERS_IN_ORDER): block tables live in one buffer, for graphs are captured with its address, and it now holds
    rank-local rows where a replicated call expects the global ones.

    Before::

        %target : f32[sT, 64] replicate = module target.replicated(%input_ids, %positions, %attention_inputs, %caches)

    After::

        %shard : i64[sM] shard(0) = pcp.shard(%input_ids, %local_rows, 0, 1, 1)
        %shard_1 : i64[sM] shard(0) = pcp.shard(%positions, %local_rows, 0, 1, 1)
        %expanded_slots : i64[4*sM] rank_major = pcp_step.expand_slots(%slots, %gather_index, %write_mask)
        %row_inputs = pcp_step.attention_inputs(%expanded_slots, 'rank_major', %row_tables, ...)
        %target : f32[sM, 64] shard(0) = module target.sharded(%shard, %shard_1, %row_inputs, %caches)
        %restore : f32[sT, 64] replicate = pcp.restore(%target, %restore_index, 0, 1, 1, 4, 'pcp')
    """

    name: ClassVar[str] = "place-step"
    requires: ClassVar[frozenset[str]] = frozenset({OPERANDS_FIT})
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset({BUFFERS_IN_ORDER, RESTORES_LOWERED})

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return place_step(graph, ctx)


def place_step(graph: fx.Graph, ctx: PassContext) -> PassResult:
    """Add the plan's inputs and shard every body call over the tokens of the step that has a sharded variant."""
    add_plan(graph, ctx)
    tokens = meta.value(given(graph, "input_ids")).shape[0]
    calls = [node for node in graph.nodes if body_of(node) and _is_over(node, tokens) and _sibling(node)]
    for call in calls:
        _shard_call(graph, call, ctx)
    return PassResult(len(calls), () if calls else ("no body call over all tokens has a sharded variant",))


def add_plan(graph: fx.Graph, ctx: PassContext) -> None:
    """The plan's inputs, behind those of the plain program, with sizes ``sM``, ``sN`` and ``sS``."""
    mode = fakes.fake_mode_of(meta.value(given(graph, "input_ids")))
    assert mode is not None, "the plain program has no fake values"
    symbols = Symbols.within(mode, {"sM": 211, "sN": 223, "sS": 227})

    def size(name: str) -> Any:
        return symbols.value(Size(("name", name), name))

    rows, gathered = size("sM"), ctx.pcp * size("sM")
    tokens = meta.value(given(graph, "input_ids")).shape[0]
    sizes = {
        "local_rows": rows, "gather_index": gathered, "write_mask": gathered, "row_request": size("sN"),
        "row_query_start_loc": size("sN") + 1, "restore_index": tokens, "sampled_local": size("sS"),
        "sampled_restore": meta.value(given(graph, "logit_rows")).shape[0],
    }  # fmt: skip
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for name in PLAN_INPUTS:
        with graph.inserting_before(first):
            node = graph.placeholder(name)
        with mode:
            held = torch.empty((sizes[name],), dtype=torch.bool if name == "write_mask" else torch.int64)
        meta.set_aten_value(node, held)
        meta.set_placement(node, PLAN_PLACEMENTS[name])


def _is_over(call: fx.Node, tokens: Any) -> bool:
    held = meta.tensor(row_operands(call)[0])
    return held is not None and fakes.same_size(held.shape[0], tokens)


def _sibling(call: fx.Node) -> str | None:
    """The sharded variant of a replicated call's model."""
    path = f"{str(call.target).rpartition('.')[0]}.sharded"
    assert call.graph.owning_module is not None
    try:
        module = call.graph.owning_module.get_submodule(path)
    except AttributeError:
        return None
    return path if isinstance(module, BodyCall) and str(call.target).endswith(".replicated") else None


def _shard_call(graph: fx.Graph, call: fx.Node, ctx: PassContext) -> None:
    local_rows = given(graph, "local_rows")
    rows = [insert(call, shard_op, (x, local_rows, 0, 1, 1), PlaceStep.name, "shard") for x in row_operands(call)]
    inputs = _local_inputs(call)
    call.target = _sibling(call) or ""
    call.args = (*rows, inputs, call.args[-1])
    meta.set_changed_by(call, PlaceStep.name)
    body = body_of(call)
    assert body is not None
    meta.set_aten_value(call, body.fake(meta.value(local_rows).shape[0], meta.value(rows[0])))
    meta.set_placement(call, LOCAL)
    parts = list(call.users) if isinstance(meta.value(call), tuple) else []
    for part in parts:
        meta.set_aten_value(part, meta.value(call)[part.args[1]])
        meta.set_placement(part, LOCAL)
        _restore(graph, part, ctx, last=parts[-1])
    if not parts:
        _restore(graph, call, ctx, last=call)


def _restore(graph: fx.Graph, local: fx.Node, ctx: PassContext, last: fx.Node) -> None:
    """Behind ``last``, so that the parts of one call stay together."""
    args = (local, given(graph, "restore_index"), 0, 1, 1, ctx.pcp, ctx.axis)
    readers = list(local.users)
    whole = insert(after(last), restore_op, args, PlaceStep.name, "restore")
    for reader in readers:
        reader.replace_input_with(local, whole)


def _local_inputs(call: fx.Node) -> fx.Node:
    """Attention inputs of this rank's rows, made from the same sources as the global ones."""
    whole = call.args[-2]
    assert isinstance(whole, fx.Node) and ops.is_op(whole, ops.attention_inputs), "a body call without inputs"
    slots, layout, tables, _, _, positions = whole.args
    assert layout == "replicated" and isinstance(tables, fx.Node), "inputs that are rank-local already"
    assert ops.is_op(tables, ops.gather_block_tables) and meta.placement(tables) == GLOBAL, "tables of another origin"
    pool, requests, buffer = tables.args
    graph = call.graph

    def make(target: Any, *args: Any, name: str) -> fx.Node:
        return insert(call, target, args, PlaceStep.name, name)

    starts = given(graph, "row_query_start_loc")
    expanded = make(
        ops.expand_slots, slots, given(graph, "gather_index"), given(graph, "write_mask"), name="expanded_slots"
    )
    owners = make(ops.select_rows, requests, given(graph, "row_request"), name="row_requests")
    rows = make(ops.gather_block_tables, pool, owners, buffer, name="row_tables")
    where = make(shard_op, positions, given(graph, "local_rows"), 0, 1, 1, name="shard")
    lengths = make(ops.row_lengths, where, starts, name="row_lengths")
    return make(ops.attention_inputs, expanded, "rank_major", rows, starts, lengths, where, name="row_inputs")
