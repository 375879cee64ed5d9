# SPDX-License-Identifier: Apache-2.0
"""lower-reshards: markers become collectives, with the packing spelled out in ordinary ops."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.collectives import all_gather_rows_op
from pcp_passes.ir import meta
from pcp_passes.ir.invariants import CONFLICT_FREE, EQUAL_COLLECTIVES, LOWERED
from pcp_passes.ir.markers import is_marker, is_packed, marker_rows
from pcp_passes.ir.placements import Placement, RankMajor, Shard
from pcp_passes.passes.base import PassContext, PassResult

#: What takes the gathered pack apart. They are ATen overloads so that a piecewise splitter, which cuts at overloads by
#: name, can keep them out of the compiled pieces: a piece whose inputs have P*M rows would be sized by the wrong count.
_ATEN: Any = torch.ops.aten
SPLIT, UNFLATTEN, SQUEEZE = _ATEN.split_with_sizes.default, _ATEN.unflatten.int, _ATEN.squeeze.dim

_Emit = Callable[..., fx.Node]


@dataclass(frozen=True)
class LowerReshards:
    """Turn every reshard into ``pcp::all_gather_rows``.

    Why: markers are for the passes; this is the last one, so everything before it sees *what* moves and not *how*. A
    packed reshard is written out as flatten, cat, gather, split and unflatten: ordinary ops, which Inductor fuses with
    the producers of the rows. The parts after the gather are views with a row stride of the whole pack.

    Before::

        %reshard_many = pcp.reshard_many([%k, %v], 'shard', 'rank_major', 4, 'pcp')
        %getitem = operator.getitem(%reshard_many, 0)
        %getitem_1 = operator.getitem(%reshard_many, 1)

    After::

        %flatten = torch.flatten(%k, 1)
        %flatten_1 = torch.flatten(%v, 1)
        %cat = torch.cat([%flatten, %flatten_1], 1)
        %all_gather_rows = pcp.all_gather_rows(%cat, 4, 'pcp')
        %split_with_sizes = aten.split_with_sizes(%all_gather_rows, [64, 64], 1)
        %getitem_2 = operator.getitem(%split_with_sizes, 0)
        %getitem_3 = operator.getitem(%split_with_sizes, 1)
        %unflatten = aten.unflatten.int(%getitem_2, 1, [2, 32])
        %unflatten_1 = aten.unflatten.int(%getitem_3, 1, [2, 32])
    """

    name: ClassVar[str] = "lower-reshards"
    requires: ClassVar[frozenset[str]] = frozenset({CONFLICT_FREE})
    establishes: ClassVar[frozenset[str]] = frozenset({LOWERED, EQUAL_COLLECTIVES})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return lower_reshards(graph)


def lower_reshards(graph: fx.Graph) -> PassResult:
    """Lower every marker of the graph; results keep shape, dtype and row order, not strides."""
    markers = [node for node in graph.nodes if is_marker(node)]
    for marker in markers:
        (_lower_many if is_packed(marker) else _lower_one)(graph, marker)
    return PassResult(len(markers), () if markers else ("the graph holds no reshard",))


def _emitter(graph: fx.Graph, marker: fx.Node) -> _Emit:
    layer = meta.info(marker).layer

    def emit(where: Placement, target: Any, *args: Any) -> fx.Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        # Without this an overload's node would carry its suffix: `all_gather_rows_default`.
        name = target._opname if isinstance(target, torch._ops.OpOverload) else None
        node = graph.create_node(op, target, args, name=name)
        return meta.adopt(node, marker, LowerReshards.name, where, layer)

    return emit


def _lower_one(graph: fx.Graph, marker: fx.Node) -> None:
    """One operand travels as it is; a strided one (a slice of a fused projection) is copied first."""
    emit = _emitter(graph, marker)
    (rows,) = marker_rows(marker)
    with graph.inserting_before(marker):
        if not _held(rows).is_contiguous():
            rows = emit(Shard(0), "contiguous", rows)
        gathered = emit(RankMajor(), all_gather_rows_op, rows, *marker.args[3:])
    marker.replace_all_uses_with(gathered)
    graph.erase_node(marker)


def _lower_many(graph: fx.Graph, marker: fx.Node) -> None:
    emit = _emitter(graph, marker)
    rows = marker_rows(marker)
    inner = [tuple(_held(row).shape[1:]) for row in rows]
    widths = [math.prod(sizes) for sizes in inner]
    parts = {_index(user): user for user in marker.users}
    with graph.inserting_before(marker):
        flat = [_flatten(emit, row, sizes) for row, sizes in zip(rows, inner, strict=True)]
        packed = emit(Shard(0), torch.cat, flat, 1)
        gathered = emit(RankMajor(), all_gather_rows_op, packed, *marker.args[3:])
        split = emit(RankMajor(), SPLIT, gathered, widths, 1)
        pieces = {index: emit(RankMajor(), operator.getitem, split, index) for index in parts}
        for index, part in parts.items():
            part.replace_all_uses_with(_unflatten(emit, pieces[index], inner[index]))
            graph.erase_node(part)
    graph.erase_node(marker)


def _index(part: fx.Node) -> int:
    index = part.args[1]
    assert part.target is operator.getitem and isinstance(index, int), f"%{part.name} is no part of a packed reshard"
    return index


def _flatten(emit: _Emit, row: fx.Node, inner: tuple[Any, ...]) -> fx.Node:
    if len(inner) == 1:
        return row
    return emit(Shard(0), torch.flatten, row, 1) if inner else emit(Shard(0), torch.unsqueeze, row, 1)


def _unflatten(emit: _Emit, part: fx.Node, inner: tuple[Any, ...]) -> fx.Node:
    if len(inner) == 1:
        return part
    return emit(RankMajor(), UNFLATTEN, part, 1, list(inner)) if inner else emit(RankMajor(), SQUEEZE, part, 1)


def _held(row: fx.Node) -> torch.Tensor:
    held = meta.tensor(row)
    assert held is not None, f"%{row.name} has no tensor value"
    return held
