# SPDX-License-Identifier: Apache-2.0
"""The graph of one rank, checked against the rule table: every placement follows from its operands'.

``insert-reshards`` writes the graph from a program; this reads the graph alone. A reshard that is missing, doubled,
along another dimension or with another index gives an operand a placement that its op's rule does not take.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pcp_passes.aten import table
from pcp_passes.aten.decision import REPLICATE, Call, Local, expression, operands
from pcp_passes.aten.experts import LocalIota
from pcp_passes.aten.plan_inputs import PlanInputs, has_plan, plan_inputs
from pcp_passes.collectives import is_collective
from pcp_passes.ir import invariants, meta
from pcp_passes.ir.placements import Placement, Shard
from pcp_passes.ir.token_markers import is_restore, is_restore_many, is_shard, shard_of

if TYPE_CHECKING:
    from pcp_passes.passes.base import PassContext

ROWS_CONSISTENT = "ROWS_CONSISTENT"
SIZES_SHARED = "SIZES_SHARED"

_CREATES = tuple(
    getattr(torch.ops.aten, name).default for name in ("arange", "zeros", "ones", "full")
) + (torch.ops.aten.empty.memory_format,)  # fmt: skip


def rows_consistent(graph: fx.Graph, ctx: PassContext) -> None:
    """Placements of a marked graph follow from the rule table, operand by operand; a graph without a plan has none."""
    if not has_plan(graph):
        return
    plan = plan_inputs(graph)
    offences = ((node, why) for node in graph.nodes if (why := _inconsistent(node, plan, ctx)) is not None)
    invariants.require(ROWS_CONSISTENT, "every placement follows from the operands' by the op's rule", offences)


def sizes_shared(graph: fx.Graph, ctx: PassContext) -> None:
    """What a rank gives to a collective has sizes that all ranks know: constants, T and M (of a graph with a plan)."""
    if not has_plan(graph):
        return
    plan = plan_inputs(graph)
    invariants.require(SIZES_SHARED, "sizes of a collective's operand are made of T, M and constants", (
        (node, f"operand %{operand.name} has another size")
        for node in graph.nodes if is_collective(node)
        for operand in operands(node)
        if not _symbols(meta.tensor(operand)) <= {plan.tokens, plan.local}
    ))  # fmt: skip


def _symbols(held: torch.Tensor | None) -> set[Any]:
    sizes = () if held is None else held.shape
    return {symbol for size in sizes for symbol in expression(size).free_symbols}


def _inconsistent(node: fx.Node, plan: PlanInputs, ctx: PassContext) -> str | None:
    if node.op == "output":
        tied = [n for n in operands(node) if not isinstance(_at(n), (Shard, type(REPLICATE)))]
        return f"returns %{tied[0].name}, which is {_at(tied[0])}" if tied else None
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    if is_restore(node) or is_restore_many(node):
        return next(_wrong_restores(node, plan, ctx), None)
    if is_shard(node):
        source, rows = operands(node)
        if rows is not plan.rows or _at(source) != REPLICATE or _at(node) != shard_of(node):
            return f"takes rows %{rows.name} of %{source.name}, which is {_at(source)}"
        return None
    members = operands(node)
    placed = tuple(map(_at, members))
    if all(where == REPLICATE for where in placed):
        stated = _at(node)
        return None if stated == REPLICATE or node.target in _CREATES else f"is {stated}, but nothing it reads is rows"
    if meta.value(node) is not None and not meta.holds_tensor(node):
        return None  # a size of local rows
    found = table.decide(Call(node, members, placed, plan.local))
    if not isinstance(found, Local):
        return f"reads rows, but {found.reason}"
    outs = found.out if isinstance(found.out, tuple) else (found.out,)
    if outs != meta.placements(node):
        return f"is {', '.join(map(str, meta.placements(node)))}, but its operands give {', '.join(map(str, outs))}"
    wrong = [(m, need) for m, need, at in zip(members, found.needs, placed, strict=True) if not _meets(need, at)]
    return f"%{wrong[0][0].name} is {_at(wrong[0][0])}; required {wrong[0][1]}" if wrong else None


def _wrong_restores(node: fx.Node, plan: PlanInputs, ctx: PassContext) -> Iterator[str]:
    rows: Any = node.args[0]
    many = isinstance(rows, (list, tuple))
    places: Any = list(zip(*node.args[2:5], strict=True)) if many else [node.args[2:5]]
    for row, (dim, outer, inner) in zip(rows if many else [rows], places, strict=True):
        if _at(row) != Shard(dim, outer, inner):
            yield f"restores %{row.name}, which is {_at(row)}, as {Shard(dim, outer, inner)}"
    if tuple(node.args[5:]) != (ctx.pcp, ctx.axis):
        yield f"gathers over {node.args[5:]}; required {(ctx.pcp, ctx.axis)}"
    index: Any = node.args[1]
    while index is not plan.restore:
        if index.target is not torch.ops.aten.slice.Tensor:
            yield f"takes its order from %{index.name}, not from %{plan.restore.name}"
            return
        index = index.args[0]


def _at(node: fx.Node) -> Placement:
    held = meta.placements(node)
    return held[0] if held else REPLICATE


def _meets(need: Placement, at: Placement) -> bool:
    return at == Shard(0, 1, need.inner) if isinstance(need, LocalIota) else need == at


invariants.INVARIANTS[ROWS_CONSISTENT] = rows_consistent
invariants.INVARIANTS[SIZES_SHARED] = sizes_shared
