# SPDX-License-Identifier: Apache-2.0
"""A graph as pieces of generated Python between the points where ranks meet, for running many ranks in lockstep.

Interpreting node by node costs more than the small ops of a test model. Between two *stops* (a collective, a marker of
one, or a call of a body that has its own) a rank can run straight on, so that stretch is one generated function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.errors import PcpError
from pcp_passes.ir.markers import is_marker
from pcp_passes.ir.token_markers import is_restore, is_restore_many


@dataclass(frozen=True)
class Segment:
    """Nodes up to a stop: ``run(*values of reads)`` gives the values of ``writes``."""

    run: Callable[..., Any] | None
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    stop: fx.Node | None
    """The node to meet the other ranks at; ``None`` at the end."""
    dead: tuple[fx.Node, ...]
    """Values that nothing reads after the stop."""


@dataclass(frozen=True)
class Segments:
    """A graph module cut at its stops."""

    gm: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    parts: tuple[Segment, ...]
    output: Any
    """Argument of the output node."""


def nested_module(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The module a node calls, when it is one whose graph holds stops of its own (it has ``nested``)."""
    if node.op != "call_module":
        return None
    module = gm.get_submodule(str(node.target))
    return module if hasattr(module, "nested") else None


def is_stop(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether ranks may meet at the node."""
    return is_collective(node) or is_marker(node) or nested_module(gm, node) is not None


def segments_of(gm: fx.GraphModule) -> Segments:
    """The module cut at its stops. Kept on the module: cut a graph when no pass will change it any more.

    Raises:
        PcpError: the graph holds a restore marker, which has no meaning before it is lowered.
    """
    known: dict[str, Any] = gm.__dict__
    found = known.get("_pcp_segments")
    if not isinstance(found, Segments) or found.gm is not gm:
        found = _cut(gm)
        known["_pcp_segments"] = found
    return found


def _cut(gm: fx.GraphModule) -> Segments:
    nodes = list(gm.graph.nodes)
    if any(is_restore(node) or is_restore_many(node) for node in nodes):
        raise PcpError("the graph holds restore markers: run the pass that lowers them before executing it")
    inputs = tuple(node for node in nodes if node.op == "placeholder")
    end = nodes[-1]
    last_use = {user: index for index, node in enumerate(nodes) for user in node.all_input_nodes}
    parts: list[Segment] = []
    run: list[fx.Node] = []
    held: list[fx.Node] = list(inputs)
    for index, node in enumerate(nodes):
        if node.op == "placeholder":
            continue
        if node is not end and not is_stop(gm, node):
            run.append(node)
            continue
        inside = set(run)
        reads = tuple(dict.fromkeys(r for n in run for r in n.all_input_nodes if r not in inside))
        writes = tuple(n for n in run if any(user not in inside for user in n.users))
        held += [*writes, *([node] if node is not end else [])]
        dead = tuple(n for n in held if last_use.get(n, -1) <= index)
        held = [n for n in held if last_use.get(n, -1) > index]
        parts.append(
            Segment(_compile(gm, run, reads, writes) if run else None, reads, writes,
                    None if node is end else node, dead if node is not end else ())
        )  # fmt: skip
        run = []
    return Segments(gm, inputs, tuple(parts), end.args[0])


def _compile(
    gm: fx.GraphModule, run: list[fx.Node], reads: tuple[fx.Node, ...], writes: tuple[fx.Node, ...]
) -> Callable[..., Any]:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in reads}
    for node in run:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in writes))
    return fx.GraphModule(gm, graph).forward
