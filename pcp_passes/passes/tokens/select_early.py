# SPDX-License-Identifier: Apache-2.0
"""select-early: a few tokens of a result are computed from a few tokens of its operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from pcp_passes.aten.decision import REPLICATE, Local, Rows, multiple, operands, tensor_of
from pcp_passes.aten.local_forms import local_form
from pcp_passes.aten.picks import SLICE, pick_of
from pcp_passes.aten.plan_inputs import PlanInputs, plan_inputs
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Shard
from pcp_passes.ir.places import behind
from pcp_passes.ir.revalue import Revalue
from pcp_passes.passes.base import PassContext, PassResult


@dataclass(frozen=True)
class SelectEarly:
    """Move a slice of tokens in front of the op that made them.

    Why: when only the last token's logits are wanted, the output projection is for one row, not for all. Every op that
    can run on a rank's rows can run on any rows, so the rule table says where a slice may pass. It stops where a value
    has another reader. The rows that travel to all ranks at the end are then as few.

    Before::

        %linear : f32[1, sT, 256] = aten.linear(%x, %weight)
        %slice_1 : f32[1, 1, 256] = aten.slice.Tensor(%linear, 1, -1, 9223372036854775807)

    After::

        %slice_tensor : f32[1, 1, 64] replicate = aten.slice.Tensor(%x, 1, -1, 9223372036854775807)
        %linear_default : f32[1, 1, 256] = aten.linear(%slice_tensor, %weight)
    """

    name: ClassVar[str] = "select-early"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return select_early(graph)


def select_early(graph: fx.Graph) -> PassResult:
    """Move every slice of a constant number of tokens as far up as the table allows."""
    plan = plan_inputs(graph)
    revalue = Revalue(meta.value(plan.rows))
    taken: dict[object, fx.Node] = {}
    waiting = [node for node in graph.nodes if _is_slice(node, plan)]
    count = 0
    while waiting:
        chosen = waiting.pop()
        # Slices of one value are one slice, so a residual stream ends with one reader again.
        readers = list(chosen.all_input_nodes[0].users)
        twins = sorted(n for n in readers if n.target is SLICE and n.args == chosen.args)
        chosen = twins[0]  # the others' readers stand behind it
        for twin in twins[1:]:
            twin.replace_all_uses_with(chosen)
            graph.erase_node(twin)
        waiting = [node for node in waiting if node not in twins]
        moved = _move(graph, chosen, plan, revalue, taken)
        if moved is not None:
            count += 1
            waiting += [node for node in moved if node not in waiting]
    if not count:
        return PassResult(0, ("no slice of a constant number of tokens follows an op that it can pass",))
    graph.eliminate_dead_code()
    return PassResult(count)


def _is_slice(node: fx.Node, plan: PlanInputs) -> bool:
    return node.target is SLICE and _along(node, plan) is not None


def _along(node: fx.Node, plan: PlanInputs) -> Shard | None:
    """The token dimension of a slice's operand, when that is what it slices."""
    source: Any = node.args[0]
    held = meta.tensor(source)
    dim = node.args[1] if len(node.args) > 1 else 0
    if held is None or not isinstance(dim, int):
        return None
    where = Shard(dim % held.dim())
    known = pick_of(node, where) is not None
    return where if known and multiple(held.shape[where.dim], plan.tokens) == 1 else None


def _move(
    graph: fx.Graph, chosen: fx.Node, plan: PlanInputs, revalue: Revalue, taken: dict[object, fx.Node]
) -> list[fx.Node] | None:
    """Replace ``slice(op(x))`` by ``op(slice(x))``; the slices that are new, or ``None`` when it stays."""
    producer: Any = chosen.args[0]
    where = _along(chosen, plan)
    if producer.op != "call_function" or len(producer.users) > 1 or where is None:
        return None
    found = local_form(producer, where, plan)
    if found is None or isinstance(found.out, tuple) or any(not _plain(need) for need in found.needs):
        return None
    order = iter(zip(operands(producer), found.needs, strict=True))
    new: list[fx.Node] = []

    def version(operand: fx.Node) -> fx.Node:
        _, need = next(order)
        if need == REPLICATE:
            return operand
        assert isinstance(need, Shard)
        key = (operand, need.dim, chosen.args[2:])
        known = taken.get(key)
        if known is None or known._erased:
            with graph.inserting_before(behind(operand)):
                known = graph.call_function(SLICE, (operand, need.dim, *chosen.args[2:]))
            meta.adopt_lazily(known, producer, SelectEarly.name, REPLICATE)
            revalue(known)
            taken[key] = known
        new.append(known)
        return known

    with graph.inserting_before(producer):
        args: Any = list(fx.node.map_arg(producer.args, version))
        kwargs: Any = fx.node.map_arg(producer.kwargs, version)
        _resize(args, found, tensor_of(chosen).shape[where.dim])
        moved = graph.call_function(producer.target, tuple(args), dict(kwargs))
    meta.duplicate(producer, moved)
    revalue(moved)
    chosen.replace_all_uses_with(moved)
    graph.erase_node(chosen)
    graph.erase_node(producer)
    return new


def _plain(need: Any) -> bool:
    return need == REPLICATE or (isinstance(need, Shard) and need.outer * need.inner == 1)


def _resize(args: list[Any], found: Local, count: Any) -> None:
    for position, sizes in found.sizes.items():
        if not isinstance(sizes, (list, tuple)):
            args[position] = sizes
            continue
        args[position] = [
            count * size.outer * size.inner if isinstance(size, Rows) else now
            for size, now in zip(sizes, args[position], strict=True)
        ]
