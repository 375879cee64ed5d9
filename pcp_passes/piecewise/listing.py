# SPDX-License-Identifier: Apache-2.0
"""What a split body consists of, in the order it runs, for reports: pieces, and eager calls with why they are eager."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from pcp_passes.ir import meta
from pcp_passes.ir.printer import type_text
from pcp_passes.ir.targets import target_text
from pcp_passes.piecewise.cuts import is_size, is_view, part_of, row_symbol, why_eager
from pcp_passes.piecewise.pieces import InputKind, is_hold, piece_at


@dataclass(frozen=True)
class PieceInput:
    """An input of a piece: the parent's name for it, where it comes from, its slot when it is held, and its type."""

    name: str
    kind: InputKind
    slot: str
    type: str


@dataclass(frozen=True)
class PieceEntry:
    """A piece: ``kernels`` counts the calls that compute, without views and sizes."""

    name: str
    key: str
    kernels: int
    nodes: int
    inputs: tuple[PieceInput, ...]
    results: tuple[str, ...]
    modules: tuple[str, ...]
    """Modules of the body that the first and the last kernel belong to."""


@dataclass(frozen=True)
class EagerEntry:
    """A call outside of pieces."""

    name: str
    op: str
    reason: str
    module: str
    source: str
    """``file.py:214``, or ``""``."""


def listing(gm: fx.GraphModule) -> tuple[PieceEntry | EagerEntry, ...]:
    """Pieces and eager calls of a split body; views, sizes, holds and parts of results are left out.

    Raises:
        Refusal: the body has no single token symbol.
    """
    symbol = row_symbol(gm.graph)
    found: list[PieceEntry | EagerEntry] = []
    for node in gm.graph.nodes:
        piece = piece_at(gm.graph, node)
        if piece is not None:
            found.append(_piece(gm.graph, node))
        elif node.op in ("call_function", "call_method") and part_of(node) is node and not _is_quiet(node):
            reason = why_eager(node, symbol) or "makes what is held lie row after row"
            op = target_text(node) if node.op == "call_function" else f"tensor.{node.target}"
            module = meta.info(node).layer or meta.module_path(node)
            found.append(EagerEntry(node.name, op, reason, module, meta.source_line(node)))
    return tuple(found)


def _is_quiet(node: fx.Node) -> bool:
    return is_hold(node) or is_size(node) or is_view(node)


def _piece(graph: fx.Graph, call: fx.Node) -> PieceEntry:
    piece = piece_at(graph, call)
    assert piece is not None, f"%{call.name} calls no piece"
    own = [node for node in piece.gm.graph.nodes if node.op in ("call_function", "call_method")]
    kernels = [node for node in own if part_of(node) is node and not _is_quiet(node)]
    operands = [operand for operand in call.args if isinstance(operand, fx.Node)]
    inputs = tuple(
        PieceInput(operand.name, kind, str(operand.args[1]) if is_hold(operand) else "", type_text(meta.value(operand)))
        for operand, kind in zip(operands, piece.kinds, strict=True)
    )
    results = tuple(type_text(value) for value in meta.value(call))
    ends = dict.fromkeys(meta.module_path(node) for node in (kernels[0], kernels[-1]))
    return PieceEntry(call.name, piece.key, len(kernels), len(own), inputs, results, tuple(ends))
