# SPDX-License-Identifier: Apache-2.0
"""Prologue, body, epilogue: the graph of one rank in three.

* The *prologue* depends on no parameter and no activation: positions, masks, and this rank's rows of the inputs.
* The *epilogue* brings outputs into global order; nothing but outputs follows it.
* The *body* is everything between: the part worth compiling, and the only one that a CUDA graph would hold.

Global sizes enter the body through the restore index alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from pcp_passes.aten.plan_inputs import plan_inputs
from pcp_passes.ir import meta
from pcp_passes.passes.tokens.lower_restores import LowerRestores


@dataclass(frozen=True, eq=False)
class Parts:
    """The three graphs. Each takes the captured inputs and the plan it reads, then values of the graphs before it.

    Attributes:
        prologue, body, epilogue: graphs that return a tuple.
        prologue_inputs, body_inputs, epilogue_inputs: for each of their placeholders, a position among the captured
            inputs with the plan, then the prologue's results, then the body's.
        outputs: for each output of the whole, such a position, or the constant it is.
    """

    prologue: fx.GraphModule
    body: fx.GraphModule
    epilogue: fx.GraphModule
    prologue_inputs: tuple[int, ...]
    body_inputs: tuple[int, ...]
    epilogue_inputs: tuple[int, ...]
    outputs: tuple[Any, ...]

    def run(self, arguments: Sequence[Any], body: Any = None) -> tuple[Any, ...]:
        """Run all three on the whole graph's inputs; ``body`` may be a compiled form of :attr:`body`."""
        held = list(arguments)
        held += self.prologue(*(held[i] for i in self.prologue_inputs))
        held += (body or self.body)(*(held[i] for i in self.body_inputs))
        held += self.epilogue(*(held[i] for i in self.epilogue_inputs))
        return tuple(held[at.index] if isinstance(at, Held) else at for at in self.outputs)


@dataclass(frozen=True)
class Held:
    """An output that is the value at a position."""

    index: int


def split_parts(gm: fx.GraphModule) -> Parts:
    """Split a lowered graph; ``gm`` is not changed, and parameters stay inputs."""
    nodes = list(gm.graph.nodes)
    end = nodes[-1]
    first = _prologue(nodes, gm.graph)
    last = _epilogue(nodes, first)
    calls = [node for node in nodes if node.op not in ("placeholder", "output")]
    middle = [node for node in calls if node not in first and node not in last]
    position = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
    pieces: list[tuple[fx.GraphModule, tuple[int, ...]]] = []
    for members in ([n for n in calls if n in first], middle, [n for n in calls if n in last]):
        piece, read, made = _piece(gm, members)
        pieces.append((piece, tuple(position[node] for node in read)))
        for node in made:
            position[node] = len(position)
    returned: Any = end.args[0]
    outputs = tuple(Held(position[o]) if isinstance(o, fx.Node) else o for o in returned)
    (prologue, a), (body, b), (epilogue, c) = pieces
    return Parts(prologue, body, epilogue, a, b, c, outputs)


def _prologue(nodes: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    rows = plan_inputs(graph).rows
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "get_attr":
            continue
        if node.op == "call_function" and all(
            _free(operand, found) or _takes(node, rows) for operand in node.all_input_nodes
        ):
            found.add(node)
    return found


def _free(operand: fx.Node, found: set[fx.Node]) -> bool:
    if operand.op != "placeholder":
        return operand in found
    held = meta.tensor(operand)
    return held is None or not (held.dtype.is_floating_point or held.dtype.is_complex)


def _takes(node: fx.Node, rows: fx.Node) -> bool:
    """Whether a node takes this rank's rows of a floating-point input."""
    return rows in node.all_input_nodes and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def _epilogue(nodes: Sequence[fx.Node], first: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        ours = node.op == "call_function" and meta.info(node).created_by == LowerRestores.name
        if ours and node not in first and node.users and all(u.op == "output" or u in found for u in node.users):
            found.add(node)
    return found


def _piece(gm: fx.GraphModule, members: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """A graph of ``members``; what it reads from outside, and those of its values that are read outside."""
    inside = set(members)
    read = list(dict.fromkeys(n for node in members for n in node.all_input_nodes if n not in inside))
    made = [node for node in members if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in read:
        copies[node] = graph.placeholder(node.name)
        meta.duplicate(node, copies[node])
    for node in members:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        meta.duplicate(node, copies[node])
    graph.output(tuple(copies[node] for node in made))
    return fx.GraphModule(gm, graph), read, made
