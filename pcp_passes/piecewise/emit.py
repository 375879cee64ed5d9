# SPDX-License-Identifier: Apache-2.0
"""Making the pieces of a body: graphs with every outside value as an input, and the parent that calls them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from pcp_passes.errors import Refusal
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement, Replicate
from pcp_passes.ir.printer import print_node
from pcp_passes.piecewise.cuts import expression, is_size, part_of, row_dims
from pcp_passes.piecewise.holds import SHARED, insert_hold
from pcp_passes.piecewise.pieces import InputKind, Piece, is_hold, piece_key
from pcp_passes.piecewise.stretches import Stretches

_SYM_SIZE: Any = torch.ops.aten.sym_size.int


def emit_pieces(graph: fx.Graph, cut: Stretches, pass_name: str) -> int:
    """Call a piece in front of the first member of each stretch; members that are read outside become its parts.

    Returns:
        number of pieces.
    """
    owner = graph.owning_module
    assert owner is not None, "a graph that is split needs a module to hang the pieces on"
    known: dict[str, fx.GraphModule] = {}
    holds: dict[fx.Node, fx.Node] = {}
    for index, members in enumerate(cut.pieces):
        first = members[0]
        inputs = list(dict.fromkeys(b for node in members for b in cut.reads(node) if cut.outside(b, index)))
        results = [node for node in members if cut.leaves(node)]
        operands: list[fx.Node] = []
        kinds: list[InputKind] = []
        for base in inputs:
            kind = _kind(base, cut)
            if kind == "held" and not is_hold(base):
                if base not in holds:
                    holds[base] = insert_hold(graph, base, SHARED, cut.symbol, first, pass_name)
                operands.append(holds[base])
            else:
                operands.append(base)
            kinds.append(kind)
        copy = _Copy(inputs, operands, cut.symbol)
        made = copy.piece(members, results)
        key = piece_key(made, cut.symbol)
        if key not in known:  # equal pieces of one body share a module, and what is compiled for it
            known[key] = fx.GraphModule(nn.Module(), made)
        name = f"piece_{index}"
        owner.add_submodule(name, Piece(known[key], key, index, tuple(kinds), copy.rows, cut.collectives))
        with graph.inserting_before(first):
            call = graph.create_node("call_module", name, tuple(operands))
        _describe(call, first, results, pass_name)
        for place, node in enumerate(results):
            node.op, node.target, node.args, node.kwargs = "call_function", operator.getitem, (call, place), {}
    return len(cut.pieces)


def _kind(base: fx.Node, cut: Stretches) -> InputKind:
    if base.op == "get_attr":
        return "parameter"
    return "made" if base in cut.piece_of else "held"


def _describe(call: fx.Node, serves: fx.Node, results: list[fx.Node], pass_name: str) -> None:
    where: list[Placement | None] = [meta.placement(node) for node in results]
    stated = [place for place in where if place is not None]
    meta.adopt_lazily(call, serves, pass_name, stated[0] if stated else Replicate())
    if len(stated) == len(where):
        meta.set_placements(call, stated)
    meta.set_value(call, tuple(meta.value(node) for node in results))


class _Copy:
    """The graph of one piece while it is made."""

    def __init__(self, inputs: list[fx.Node], operands: list[fx.Node], symbol: Any) -> None:
        self.graph = fx.Graph()
        self.symbol = symbol
        self._copies: dict[fx.Node, Any] = {}
        self._sizes: dict[Any, fx.Node] = {}
        self._inputs: list[fx.Node] = []
        rows: list[tuple[int, int]] = []
        for position, (base, operand) in enumerate(zip(inputs, operands, strict=True)):
            own = self.graph.placeholder(f"in_{position}")
            meta.set_aten_value(own, meta.value(operand))
            self._copies[base] = own
            self._inputs.append(own)
            held = meta.tensor(operand)
            assert held is not None, f"%{operand.name} has no tensor value"
            rows += [(position, dim) for dim in row_dims(held, symbol)]
        self.rows = rows[0]

    def piece(self, members: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
        """Members in order, each behind the views it is the first to read."""
        for node in members:
            self._of(node)
        self.graph.output(tuple(self._of(node) for node in results))
        return self.graph

    def _of(self, node: fx.Node) -> Any:
        if node in self._copies:
            return self._copies[node]
        if is_size(node):
            return self._size(node)
        args = fx.node.map_arg(node.args, self._of)
        kwargs = fx.node.map_arg(node.kwargs, self._of)
        own = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        meta.duplicate(node, own)
        self._copies[node] = own
        return own

    def _size(self, node: fx.Node) -> Any:
        size = meta.value(node)
        found = expression(size)
        if not isinstance(size, torch.SymInt) or found.is_Integer:
            return size if not isinstance(size, torch.SymInt) else int(found)
        if found not in self._sizes:
            self._sizes[found] = self._make_size(node, found)
            meta.set_aten_value(self._sizes[found], size)
        return self._sizes[found]

    def _make_size(self, node: fx.Node, found: Any) -> fx.Node:
        if found == self.symbol:
            position, dim = self.rows
            with self.graph.inserting_after(self._inputs[-1]):
                return self.graph.call_function(_SYM_SIZE, (self._inputs[position], dim))
        factor = multiple(found, self.symbol)
        if factor is not None:
            return self.graph.call_function(operator.mul, (self._rows(node), factor))
        if node.target is _SYM_SIZE:
            raise _strange(node, self.symbol)
        return self.graph.call_function(node.target, fx.node.map_arg(node.args, self._of))  # type: ignore[arg-type]

    def _rows(self, node: fx.Node) -> fx.Node:
        if self.symbol not in self._sizes:
            own = self._make_size(node, self.symbol)
            held = meta.tensor(self._inputs[self.rows[0]])
            assert held is not None
            meta.set_aten_value(own, held.shape[self.rows[1]])
            self._sizes[self.symbol] = own
        return self._sizes[self.symbol]


def multiple(found: Any, symbol: Any) -> int | None:
    """The constant k where a size is k times the rows."""
    factor = found / symbol
    return int(factor) if factor.is_Integer else None


def _strange(node: fx.Node, symbol: Any) -> Refusal:
    return Refusal(
        "split-piecewise: a size cannot be computed from the rows of the body",
        [("found", f"{print_node(node)}  {meta.source_line(node)}".rstrip()),
         ("next", f"write it as arithmetic on the row count ({symbol})")],
    )  # fmt: skip


def tidy_parent(graph: fx.Graph, cut: Stretches, rows: tuple[fx.Node, int]) -> None:
    """Drop what now lives in pieces or nowhere, and compute the sizes that are left from ``rows``."""
    _erase_unread(graph, cut)
    sizes = [node for node in graph.nodes if node.op == "call_function" and is_size(node) and _is_backed(node, cut)]
    held, dim = rows
    plain = next((node for node in sizes if expression(meta.value(node)) == cut.symbol), None)
    if plain is None and any(node.target is _SYM_SIZE for node in sizes):
        with graph.inserting_after(held):
            plain = graph.call_function(_SYM_SIZE, (held, dim))
        tensor = meta.tensor(held)
        assert tensor is not None
        meta.set_value(plain, tensor.shape[dim])
    for node in sizes:
        size = expression(meta.value(node))
        if node is plain:
            continue
        if size == cut.symbol:
            node.replace_all_uses_with(plain)
        elif node.target is _SYM_SIZE:
            factor = multiple(size, cut.symbol)
            if factor is None:
                raise _strange(node, cut.symbol)
            node.target, node.args = operator.mul, (plain, factor)
    if plain is not None:
        plain.target, plain.args, plain.kwargs = _SYM_SIZE, (held, dim), {}
        last = next(node for node in reversed(graph.nodes) if is_hold(node) and node.args[1] != SHARED)
        last.append(plain)
    _erase_unread(graph, cut)


def _is_backed(node: fx.Node, cut: Stretches) -> bool:
    return part_of(node) not in cut.reasons


def _erase_unread(graph: fx.Graph, cut: Stretches) -> None:
    """Eager calls stay, read or not: they are as the body has them."""
    for node in reversed(graph.nodes):
        calls = node.op in ("call_function", "call_method") and node not in cut.reasons
        if calls and not node.users:
            graph.erase_node(node)
