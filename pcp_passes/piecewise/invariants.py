# SPDX-License-Identifier: Apache-2.0
"""Invariants of split bodies, under their names in :data:`pcp_passes.ir.invariants.INVARIANTS`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.ir import fakes, invariants, meta
from pcp_passes.ir.invariants import Offence, require
from pcp_passes.ir.printer import type_text
from pcp_passes.piecewise.cuts import (
    expression,
    is_size,
    is_view,
    odd_size,
    odd_value,
    part_of,
    reason_to_cut,
    row_symbol,
    why_eager,
)
from pcp_passes.piecewise.holds import last_read
from pcp_passes.piecewise.pieces import Piece, is_hold, piece_at, slot_of

if TYPE_CHECKING:
    from pcp_passes.passes.base import PassContext

PIECEWISE = "PIECEWISE"
CAPTURABLE = "CAPTURABLE"

OF_SPLITS: frozenset[str] = frozenset({PIECEWISE, CAPTURABLE})
"""What holds of a split body. A body that is not split need be neither, and is no graph to be captured at all."""


def piecewise(graph: fx.Graph, ctx: PassContext) -> None:
    """In a split body: pieces hold no cut, read parameters, pieces and holds only, and return results of kernels.

    No size crosses the border of a piece but the rows and constants; inputs and results of the body go through holds;
    and a slot is written again only when its value has been read.
    """
    symbol = row_symbol(graph)
    offences: list[Offence] = []
    for node in graph.nodes:
        piece = piece_at(graph, node)
        if piece is not None:
            offences += [(node, why) for why in (*_operands(graph, node, piece), *_inside(piece, symbol))]
        else:
            offences += [(node, why) for why in _outside(graph, node, symbol)]
    require(PIECEWISE, "pieces hold no cut and read what has a fixed address", [*offences, *_late_reads(graph)])


def _operands(graph: fx.Graph, call: fx.Node, piece: Piece) -> Iterator[str]:
    if len(call.args) != len(piece.kinds) or call.kwargs:
        yield f"called with {len(call.args)} operands; required {len(piece.kinds)}"
        return
    for place, (operand, kind) in enumerate(zip(call.args, piece.kinds, strict=True)):
        found = _kind(graph, operand)
        if found is None:
            yield f"operand {place}, {operand}, is no parameter, no result of a piece and not held"
        elif found != kind:
            yield f"operand {place}, {operand}, is {found}; the piece was made for one that is {kind}"


def _kind(graph: fx.Graph, operand: Any) -> str | None:
    if not isinstance(operand, fx.Node):
        return None
    if operand.op == "get_attr":
        return "parameter"
    if is_hold(operand):
        return "held"
    source = operand.args[0] if operand.target is operator.getitem else None
    return "made" if isinstance(source, fx.Node) and piece_at(graph, source) is not None else None


def _inside(piece: Piece, symbol: Any) -> Iterator[str]:
    nodes = list(piece.gm.graph.nodes)
    for node in nodes[:-1]:
        if node.op == "placeholder":
            held = meta.tensor(node)
            why = "a size enters" if held is None else odd_size(held, symbol)
            if why:
                yield f"input %{node.name} of the piece: {why}"
            continue
        reason = reason_to_cut(node, piece.collectives) if node.op != "get_attr" else "a parameter that is not an input"
        if reason is not None:
            yield f"%{node.name} in the piece: {reason}"
        symbols = {
            name
            for t in meta.tensors(node)
            for s in t.shape
            if fakes.has_token_symbol(s)
            for name in expression(s).free_symbols
        }
        if symbols - {symbol}:
            yield f"%{node.name} in the piece has sizes of another symbol: {type_text(meta.value(node))}"
    results = nodes[-1].args[0]
    if not isinstance(results, tuple):
        yield "the piece returns no flat tuple"
        return
    for place, result in enumerate(results):
        held = meta.tensor(result)
        if held is None:
            yield f"result {place} of the piece is no tensor: parts of several results belong into their own piece"
        elif result.op in ("placeholder", "get_attr") or is_view(result):
            yield f"result {place} of the piece shares memory with what it was made from"
        elif (why := odd_size(held, symbol)) and not (piece.collectives == "inside" and is_collective(part_of(result))):
            yield f"result {place} of the piece: {why}"


def _outside(graph: fx.Graph, node: fx.Node, symbol: Any) -> Iterator[str]:
    if node.op == "output":
        for result in node.all_input_nodes:
            if not is_hold(result):
                yield f"result %{result.name} is not held"
        return
    if node.op == "placeholder":
        readers = [user.name for user in node.users if not is_hold(user) and not _is_copy(user)]
        if readers and meta.holds_tensor(node):
            yield f"read by {', '.join(f'%{name}' for name in readers)} without a hold"
        return
    if is_hold(node):
        why = odd_value(node, symbol)
        if why:
            yield why
        held = meta.tensor(node)
        if held is not None and not fakes.is_row_major(held):
            yield f"the held rows do not lie one after another: strides {tuple(held.stride())}"
        return
    if node.op not in ("call_function", "call_method") or is_size(node) or is_view(node):
        return
    source = part_of(node)
    if piece_at(graph, source) is None and not _is_copy(node) and why_eager(source, symbol) is None:
        yield "outside of every piece for no reason"


def _is_copy(node: fx.Node) -> bool:
    """The copy that a pass puts in front of a hold."""
    return node.target is torch.ops.aten.clone.default and all(map(is_hold, node.users))


def _late_reads(graph: fx.Graph) -> Iterator[Offence]:
    order = {node: place for place, node in enumerate(graph.nodes)}
    last: dict[str, fx.Node] = {}
    for node in order:
        if not is_hold(node):
            continue
        slot = slot_of(node)
        before = last.get(slot.name)
        if before is not None and slot_of(before) != slot:
            yield node, f"slot {slot.name} holds another type in %{before.name}"
        if before is not None and last_read(before, order.__getitem__) > order[node]:
            yield node, f"writes slot {slot.name} before the last call that reads %{before.name} from it"
        last[slot.name] = node


def capturable(graph: fx.Graph, ctx: PassContext) -> None:
    """A CUDA graph can hold each piece of a split body, or any other graph as a whole, as far as is known without one.

    See :mod:`pcp_passes.piecewise.capturable`.
    """
    from pcp_passes.piecewise.capturable import offences  # imports the frontends, which import the passes

    owner = graph.owning_module
    assert isinstance(owner, fx.GraphModule), "a graph without its module has no parameters to look at"
    require(CAPTURABLE, "a CUDA graph can hold it", offences(owner))


invariants.INVARIANTS[PIECEWISE] = piecewise
invariants.INVARIANTS[CAPTURABLE] = capturable
