# SPDX-License-Identifier: Apache-2.0
"""propagate-placements: say of every value whether ranks hold their rows of it, or all of it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from pcp_passes.aten import experts, table
from pcp_passes.aten.decision import REPLICATE, Call, Decision, Local, Mixes, multiple, operands
from pcp_passes.aten.plan_inputs import PlanInputs, plan_inputs
from pcp_passes.errors import Refusal
from pcp_passes.ir import meta, rules
from pcp_passes.ir.placements import Placement, Shard
from pcp_passes.ir.printer import print_node
from pcp_passes.passes.base import Note, PassContext, PassResult, note

Unknown = Literal["refuse", "replicate"]


@dataclass(frozen=True)
class PropagatePlacements:
    """Give every value a placement; change nothing.

    Why: everything starts replicated, as the inputs are. Rows begin where a token becomes activations: at an embedding,
    or at a floating-point input. From there each op's rule says whether it can stay on rows. One that mixes tokens, or
    has no rule, runs replicated on restored operands; its consumers take their rows of the result again. Integers
    (positions, masks) stay replicated: they are small, and a chain such as ``cumsum`` needs all of them.

    Options: ``replicate`` names modules that run replicated by request; ``unknown="replicate"`` also lets an op whose
    token behaviour cannot be known (it mutates, draws random numbers, has a data-dependent size) run replicated.

    Before::

        %embedding : f32[1, sT, 64] = aten.embedding(%weight, %input_ids)
        %cumsum : f32[1, sT, 64] = aten.cumsum(%embedding, 1)

    After::

        %embedding : f32[1, sT, 64] replicate rows shard(1) = aten.embedding(%weight, %input_ids)
        %cumsum : f32[1, sT, 64] replicate rows shard(1) = aten.cumsum(%embedding, 1)
    """

    replicate: tuple[str, ...] = ()
    unknown: Unknown = "refuse"

    name: ClassVar[str] = "propagate-placements"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset({"PLACED"})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return propagate_placements(graph, self.replicate, self.unknown)


def propagate_placements(graph: fx.Graph, replicate: Iterable[str] = (), unknown: Unknown = "refuse") -> PassResult:
    """Place every node of a captured graph.

    Raises:
        Refusal: an op writes its operand, draws random numbers, or has a data-dependent size; names all of them.
    """
    plan = plan_inputs(graph)
    refuse_unknown(graph, unknown)
    pinned: set[str] = set()
    named = tuple(replicate)
    while (culprit := _forward(graph, plan, named, pinned)) is not None:
        assert culprit not in pinned, f"the sort %{culprit} is replicated, and something is still tied to it"
        pinned.add(culprit)
    sharded = [n for n in graph.nodes if n is not plan.rows and any(not _whole(w) for w in meta.placements(n))]
    notes: list[str | Note] = [note(why, n) for n in graph.nodes if (why := meta.info(n).reason)]
    if not sharded:
        notes.append("nothing is sharded: no embedding or floating-point input has a token dimension")
    return PassResult(len(sharded), tuple(notes))


def effective(node: fx.Node) -> Placement:
    """How a consumer sees the node: its rows where it has any, else as it is placed."""
    held = meta.info(node)
    return held.rows or held.placement or REPLICATE


def call_of(node: fx.Node, plan: PlanInputs) -> Call:
    """The question to ask the table about a placed node."""
    members = operands(node)
    return Call(node, members, tuple(map(effective, members)), plan.tokens)


def runs_replicated(node: fx.Node, named: Iterable[str]) -> bool:
    """Whether the node belongs to a module that is to run replicated."""
    path = meta.module_path(node)
    return any(path == module or path.startswith(module + ".") for module in named)


def _whole(where: Placement) -> bool:
    return where == REPLICATE


def _forward(graph: fx.Graph, plan: PlanInputs, named: tuple[str, ...], pinned: set[str]) -> str | None:
    """Place all nodes; the name of a sort whose region does not hold ends it early."""
    for node in graph.nodes:
        meta.set_rows(node, None)
        if node.op == "output":
            tied = [t for n in operands(node) if (t := experts.tie_of(effective(n))) is not None]
            return tied[0].by if tied else None
        if node.op != "call_function":
            _place_input(node, plan)
            continue
        if node.target is _GETITEM:
            _place_member(node, plan)
            continue
        call = call_of(node, plan)
        if all(map(_whole, call.placed)):
            _place_start(node, plan)
            continue
        decision: Decision = (
            Mixes("runs replicated by request") if runs_replicated(node, named) else table.decide(call, pinned)
        )
        if isinstance(decision, Local):
            _place(node, decision.out)
            continue
        tie = next((t for where in call.placed if (t := experts.tie_of(where)) is not None), None)
        if tie is not None:
            return tie.by
        _fall_back(node, call, plan, decision.reason)
    return None


_GETITEM = operator.getitem


def _place(node: fx.Node, out: Placement | tuple[Placement, ...]) -> None:
    meta.set_placements(node, out if isinstance(out, tuple) else (out,))


def _place_input(node: fx.Node, plan: PlanInputs) -> None:
    """Inputs are replicated; consumers of a floating-point one take its rows."""
    _place(node, REPLICATE)
    held = meta.tensor(node)
    if node in (plan.rows, plan.restore):
        _place(node, Shard(0) if node is plan.rows else REPLICATE)
    elif held is not None and held.dtype.is_floating_point and (rows := _only_rows(held, plan)) is not None:
        meta.set_rows(node, rows)


def _place_member(node: fx.Node, plan: PlanInputs) -> None:
    source: Any = node.args[0]
    index: Any = node.args[1]
    held = meta.placements(source)
    _place(node, held[index] if len(held) > 1 else held[0])
    value = meta.tensor(node)
    rows = meta.info(source).rows
    if value is not None and isinstance(rows, Shard):
        meta.set_rows(node, _rows_like(value, rows, plan), None)


def _place_start(node: fx.Node, plan: PlanInputs) -> None:
    """Everything it reads is whole. An embedding of tokens is where rows begin."""
    value = meta.value(node)
    several = isinstance(value, (tuple, list)) and len(value) > 1
    _place(node, (REPLICATE,) * len(value) if several else REPLICATE)
    held = meta.tensor(node)
    if held is None or not held.dtype.is_floating_point or rules.op_name(node) not in _LOOKUPS:
        return
    index = [n for n in operands(node) if (t := meta.tensor(n)) is not None and not t.dtype.is_floating_point]
    rows = _only_rows(held, plan)
    if rows is not None and any(_only_rows(meta.tensor(n), plan) is not None for n in index):
        meta.set_rows(node, rows)


_LOOKUPS = frozenset({"aten::embedding", "aten::index", "aten::index_select"})


def _only_rows(held: torch.Tensor | None, plan: PlanInputs) -> Shard | None:
    """The one dimension of exactly T tokens; ``None`` where there is none, or a choice."""
    if held is None:
        return None
    dims = [dim for dim, size in enumerate(held.shape) if multiple(size, plan.tokens) == 1]
    others = [size for dim, size in enumerate(held.shape) if dim not in dims and isinstance(size, torch.SymInt)]
    return Shard(dims[0]) if len(dims) == 1 and not others else None


def _fall_back(node: fx.Node, call: Call, plan: PlanInputs, reason: str) -> None:
    """Replicated; rows are taken where the result has them in one place."""
    name = rules.op_name(node)
    if name in table.FORBIDDEN:
        raise Refusal(
            f"{name} cannot run on sharded rows, nor on restored ones: it {table.FORBIDDEN[name]}.",
            [("node", print_node(node)), *_where(node), ("next", "write it with reshape, transpose or expand")],
        )
    value = meta.value(node)
    several = isinstance(value, (tuple, list))
    _place(node, (REPLICATE,) * len(value) if several else REPLICATE)
    shards = [where for where in call.placed if isinstance(where, Shard)]
    first = value[0] if several and value else value
    rows = _rows_like(first, shards[0], plan) if isinstance(first, torch.Tensor) else None
    meta.set_rows(node, rows, reason)


def _rows_like(held: torch.Tensor, operand: Shard, plan: PlanInputs) -> Shard | None:
    """The operand's own dimension, where the result has as many rows there; else the only one with T tokens."""
    if held.dim() > operand.dim and multiple(held.shape[operand.dim], plan.tokens) == operand.outer * operand.inner:
        return operand
    return _only_rows(held, plan)


def refuse_unknown(graph: fx.Graph, unknown: Unknown) -> None:
    """Refuse ops whose token behaviour cannot be known."""
    found = [(node, why) for node in graph.nodes if (why := why_unknown(node, unknown))]
    if not found:
        return
    raise Refusal(
        f"{len(found)} op{'s' if len(found) > 1 else ''} of this graph cannot be sharded, and not be left replicated "
        "without being told to.",
        [
            *(pair for node, why in found for pair in (("node", print_node(node)), ("reason", why), *_where(node))),
            ("next", 'unknown="replicate" runs them on every rank, where that is right; or change the model'),
        ],
    )


def why_unknown(node: fx.Node, unknown: Unknown) -> str | None:
    """Why nothing can be said of a node, or ``None``."""
    if node.op != "call_function":
        return None
    if table.is_random(node):
        return "draws random numbers, which would differ between ranks (model.eval() turns dropout off)"
    if rules.mutated_arguments(node):
        return "writes one of its operands"
    if unknown == "replicate":
        return None
    if "auto_functionalized" in str(node.target):
        return "is a custom op that writes its operands"
    if any(map(_depends_on_data, meta.tensors(node))):
        return "has a size that depends on data"
    return None


def _depends_on_data(held: torch.Tensor) -> bool:
    from pcp_passes.ir.fakes import has_unbacked_symbol

    return any(map(has_unbacked_symbol, held.shape))


def _where(node: fx.Node) -> list[tuple[str, str]]:
    places = list(filter(None, (meta.module_path(node), meta.source_line(node))))
    return [("module", "  ".join(places))] if places else []
