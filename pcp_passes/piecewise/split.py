# SPDX-License-Identifier: Apache-2.0
"""The cutting algorithm of ``split-piecewise`` on graphs.

Kernels between two cuts, in the order of the body, are one piece. Views float: each piece copies those that it reads,
and what eager calls read stays in the parent. So only results of kernels cross a border, and none of them shares memory
with another. Sizes are computed again on each side, from the rows of a tensor that is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.ir import meta, rules
from pcp_passes.ir.copies import copy_graph_module
from pcp_passes.ir.printer import print_node
from pcp_passes.piecewise.cuts import COLLECTIVES, row_symbol
from pcp_passes.piecewise.emit import emit_pieces, tidy_parent
from pcp_passes.piecewise.holds import hold_inputs, hold_results, share_slots
from pcp_passes.piecewise.pieces import Collectives
from pcp_passes.piecewise.stretches import Stretches

if TYPE_CHECKING:
    from pcp_passes.passes.base import PassContext

NAME = "split-piecewise"


@dataclass(frozen=True)
class Cut:
    """What :func:`cut_body` did: the number of pieces, and why each eager kernel is one, in graph order."""

    pieces: int
    reasons: Mapping[fx.Node, str]


def cut_body(graph: fx.Graph, collectives: Collectives = "outside") -> Cut:
    """Cut ``graph`` in place; its owning module gets the pieces as ``piece_0``, ``piece_1``, ...

    Raises:
        ConfigError: ``collectives`` is unknown.
        Refusal: the graph has no single token symbol, writes into a tensor, calls a module (one that is split already
            calls pieces), or returns rows that are not those of one rank.
    """
    if collectives not in COLLECTIVES:
        raise ConfigError(f"collectives is {collectives!r}; required one of {', '.join(COLLECTIVES)}")
    _guard(graph)
    symbol = row_symbol(graph)
    _order(graph)
    rows = hold_inputs(graph, symbol, NAME)
    stretches = Stretches(graph, symbol, collectives)
    count = emit_pieces(graph, stretches, NAME)
    tidy_parent(graph, stretches, rows)
    hold_results(graph, symbol, NAME)
    share_slots(graph)
    return Cut(count, stretches.reasons)


def split_body(gm: fx.GraphModule, ctx: PassContext, collectives: Collectives = "outside") -> fx.GraphModule:
    """A split copy of a finished body: same inputs and results, shared parameters. ``gm`` is not changed.

    Raises:
        ConfigError, Refusal: as :func:`cut_body`.
    """
    from pcp_passes.passes.bodies.split_piecewise import split_pipeline  # it imports this module

    split = copy_graph_module(gm)
    split_pipeline(collectives).run(split, ctx)
    return split


def _guard(graph: fx.Graph) -> None:
    calls = graph.find_nodes(op="call_module")
    if calls:
        raise _refusal("the body calls modules; required a flat ATen graph that is not split yet", calls)
    writes = [node for node in graph.nodes if rules.mutated_arguments(node)]
    if writes:
        raise _refusal(
            "the body writes into tensors; required a functional graph, whose pieces can be replayed", writes
        )


def _refusal(rule: str, nodes: list[fx.Node]) -> Refusal:
    found = [("found", f"{print_node(node)}  {meta.source_line(node)}".rstrip()) for node in nodes[:8]]
    more = [("found", f"{len(nodes) - 8} more")] if len(nodes) > 8 else []
    return Refusal(f"split-piecewise: {rule}", [*found, *more, ("next", "split a body made by engine.bodies.capture")])


def _order(graph: fx.Graph) -> None:
    """Parameters in front of all calls, and the parts of several results right behind the call that makes them."""
    first: Any = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    behind_first = False
    for node in list(graph.nodes):
        behind_first |= node is first
        if behind_first and node.op == "get_attr":
            first.prepend(node)
    for node in list(graph.nodes):
        for part in reversed(list(node.users)):
            if isinstance(meta.value(node), (tuple, list)) and part.op == "call_function":
                node.append(part)
