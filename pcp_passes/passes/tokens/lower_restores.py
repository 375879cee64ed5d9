# SPDX-License-Identifier: Apache-2.0
"""lower-restores: markers of token rows become selections and one collective each."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.aten.consistency import ROWS_CONSISTENT, SIZES_SHARED
from pcp_passes.aten.plan_inputs import plan_inputs
from pcp_passes.collectives import all_gather_rows_op
from pcp_passes.ir import meta
from pcp_passes.ir.fakes import is_row_major
from pcp_passes.ir.invariants import LOWERED
from pcp_passes.ir.placements import Placement, RankMajor, Replicate, Shard
from pcp_passes.ir.revalue import Revalue
from pcp_passes.ir.token_markers import is_restore, is_restore_many, is_shard
from pcp_passes.passes.base import PassContext, PassResult

_ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class LowerRestores:
    """Turn ``restore`` into ``pcp::all_gather_rows`` and ``shard`` into ``index_select``.

    Why: the collective knows rows, one after another; the graph knows dimensions. The tokens are brought to the front
    and everything else behind them, operands of one restore side by side; after the gather, one ``index_select`` gives
    global order, and views give each part its shape again.

    Before::

        %restore : f32[1, 4, sT, 16] replicate = pcp.restore(%k, %pcp_restore, 2, 1, 1, 4, 'pcp')

    After::

        %permute : f32[sM, 1, 4, 16] shard(0) = aten.permute(%k, [2, 0, 1, 3])
        %flatten : f32[sM, 64] shard(0) = aten.flatten.using_ints(%permute, 1, 3)
        %all_gather_rows : f32[4*sM, 64] rank_major = pcp.all_gather_rows(%flatten, 4, 'pcp')
        %index_select_1 : f32[sT, 64] replicate = aten.index_select(%all_gather_rows, 0, %pcp_restore)
        %reshape : f32[sT, 1, 4, 16] replicate = aten.reshape(%index_select_1, [-1, 1, 4, 16])
        %permute_1 : f32[1, 4, sT, 16] replicate = aten.permute(%reshape, [1, 2, 0, 3])
    """

    name: ClassVar[str] = "lower-restores"
    requires: ClassVar[frozenset[str]] = frozenset({ROWS_CONSISTENT})
    establishes: ClassVar[frozenset[str]] = frozenset({LOWERED, SIZES_SHARED})
    breaks: ClassVar[frozenset[str]] = frozenset({ROWS_CONSISTENT})  # it speaks of markers

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return lower_restores(graph)


def lower_restores(graph: fx.Graph) -> PassResult:
    """Lower every marker of the graph."""
    lowering = _Lowering(graph)
    renewed: set[fx.Node] = set()
    count = 0
    for node in list(graph.nodes):
        if is_restore(node):
            (whole,) = lowering.restore(node, [node.args[2:5]])
            renewed |= lowering.replace(node, whole)
        elif is_restore_many(node):
            renewed |= _lower_many(lowering, node)
        elif is_shard(node):
            renewed |= lowering.take(node)
        else:
            continue
        graph.erase_node(node)
        count += 1
    lowering.renew(renewed)
    graph.eliminate_dead_code()  # sizes that a marker read and its lowering does not
    return PassResult(count, () if count else ("the graph holds no marker",))


def _lower_many(lowering: _Lowering, node: fx.Node) -> set[fx.Node]:
    renewed: set[fx.Node] = set()
    parts = {part.args[1]: part for part in node.users}
    places = list(zip(*node.args[2:5], strict=True))
    for index, whole in enumerate(lowering.restore(node, places)):
        if index in parts:
            renewed |= lowering.replace(parts[index], whole)
            lowering.graph.erase_node(parts[index])
    return renewed


class _Lowering:
    """Emits ordinary ops in front of the marker they replace."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.revalue = Revalue(meta.value(plan_inputs(graph).rows))

    def emit(self, marker: fx.Node, where: Placement, target: Any, *args: Any) -> fx.Node:
        name = target._opname if isinstance(target, torch._ops.OpOverload) else None
        with self.graph.inserting_before(marker):
            node = self.graph.create_node("call_function", target, args, name=name)
        meta.adopt_lazily(node, marker, LowerRestores.name, where)
        self.revalue(node)
        return node

    def restore(self, marker: fx.Node, places: list[Any]) -> list[fx.Node]:
        """Gather the operands of one marker together; a whole value for each, in order."""
        rows: Any = marker.args[0]
        rows = list(rows) if isinstance(rows, (list, tuple)) else [rows]
        index: Any = marker.args[1]
        pcp, axis = marker.args[-2:]
        fronts = [self._front(marker, row, *place) for row, place in zip(rows, places, strict=True)]
        flat = [self._flat(marker, front) for front in fronts]
        packed = flat[0] if len(flat) == 1 else self.emit(marker, Shard(0), _ATEN.cat.default, flat, 1)
        if not isinstance(_held(index).shape[0], torch.SymInt):
            packed, index = self._few(marker, packed, index)
        if not is_row_major(_held(packed)):
            packed = self.emit(marker, Shard(0), _ATEN.clone.default, packed)
        gathered = self.emit(marker, RankMajor(), all_gather_rows_op, packed, pcp, axis)
        whole = self.emit(marker, Replicate(), _ATEN.index_select.default, gathered, 0, index)
        if len(flat) == 1:
            pieces = [whole]
        else:
            widths = [_held(row).shape[1] for row in flat]
            assert all(isinstance(width, int) for width in widths), "packed rows of a width that is not constant"
            split = self.emit(marker, Replicate(), _ATEN.split_with_sizes.default, whole, widths, 1)
            pieces = [self.emit(marker, Replicate(), operator.getitem, split, i) for i in range(len(flat))]
        return [
            self._back(marker, piece, front, *place) for piece, front, place in zip(pieces, fronts, places, strict=True)
        ]

    def _few(self, marker: fx.Node, rows: fx.Node, index: Any) -> tuple[fx.Node, fx.Node]:
        """Every rank offers its row of the wanted numbers; whose it is, is known from the index alone."""
        wanted = _held(index).shape[0]
        size = self.emit(marker, Replicate(), _ATEN.sym_size.int, rows, 0)
        place = self.emit(marker, Replicate(), _ATEN.remainder.Scalar, index, size)
        owner = self.emit(marker, Replicate(), _ATEN.floor_divide.default, index, size)
        offered = self.emit(marker, Shard(0), _ATEN.index_select.default, rows, 0, place)
        first = self.emit(marker, Replicate(), _ATEN.mul.Tensor, owner, wanted)
        device = _held(index).device.type
        with self.graph.inserting_before(marker):
            count = self.graph.call_function(_ATEN.arange.default, (wanted,), {"device": torch.device(device)})
        meta.adopt_lazily(count, marker, LowerRestores.name, Replicate())
        self.revalue(count)
        return offered, self.emit(marker, Replicate(), _ATEN.add.Tensor, first, count)

    def _front(self, marker: fx.Node, row: fx.Node, dim: int, outer: int, inner: int) -> fx.Node:
        """``[M, everything else]``, dimensions kept apart."""
        where = Shard(dim, outer, inner)
        if outer * inner != 1:
            row = self.emit(marker, where, _ATEN.unflatten.int, row, dim, [outer, -1, inner])
            dim += 1
        if dim == 0:
            return row
        order = [dim, *(d for d in range(_held(row).dim()) if d != dim)]
        return self.emit(marker, Shard(0), _ATEN.permute.default, row, order)

    def _flat(self, marker: fx.Node, front: fx.Node) -> fx.Node:
        held = _held(front)
        if held.dim() == 2:
            return front
        if held.dim() == 1:
            return self.emit(marker, Shard(0), _ATEN.unsqueeze.default, front, 1)
        return self.emit(marker, Shard(0), _ATEN.flatten.using_ints, front, 1, held.dim() - 1)

    def _sizes(self, marker: fx.Node, front: fx.Node) -> list[Any]:
        """Sizes behind the rows; one that holds tokens as well (scores of all keys) is read from the operand."""
        return [
            self.emit(marker, Replicate(), _ATEN.sym_size.int, front, dim) if isinstance(size, torch.SymInt) else size
            for dim, size in enumerate(_held(front).shape[1:], start=1)
        ]

    def _back(self, marker: fx.Node, piece: fx.Node, front: fx.Node, dim: int, outer: int, inner: int) -> fx.Node:
        merged = outer * inner != 1
        at = dim + 1 if merged else dim
        whole = piece
        if _held(front).dim() != 2:
            whole = self.emit(marker, Replicate(), _ATEN.reshape.default, piece, [-1, *self._sizes(marker, front)])
        if at:
            order = list(range(1, _held(front).dim()))
            order.insert(at, 0)
            whole = self.emit(marker, Replicate(), _ATEN.permute.default, whole, order)
        if merged:
            whole = self.emit(marker, Replicate(), _ATEN.flatten.using_ints, whole, dim, dim + 2)
        return whole

    def take(self, marker: fx.Node) -> set[fx.Node]:
        """This rank's rows of a whole value."""
        x, rows, dim, outer, inner = marker.args
        where = Shard(dim, outer, inner)  # type: ignore[arg-type]
        if where.outer * where.inner == 1:
            taken = self.emit(marker, where, _ATEN.index_select.default, x, dim, rows)
        else:
            apart = self.emit(marker, Replicate(), _ATEN.unflatten.int, x, dim, [outer, -1, inner])
            chosen = self.emit(marker, where, _ATEN.index_select.default, apart, where.dim + 1, rows)
            taken = self.emit(marker, where, _ATEN.flatten.using_ints, chosen, where.dim, where.dim + 2)
        return self.replace(marker, taken)

    def replace(self, marker: fx.Node, made: fx.Node) -> set[fx.Node]:
        """Let readers of the marker read what was made; they are returned, for its strides are its own."""
        readers = set(marker.users)
        marker.replace_all_uses_with(made)
        return readers

    def renew(self, stale: set[fx.Node]) -> None:
        """State values anew where an operand's strides have changed."""
        for node in self.graph.nodes:
            if node not in stale or node.op != "call_function":
                continue
            before = _strides(node)
            self.revalue(node)
            if _strides(node) != before:
                stale |= set(node.users)


def _strides(node: fx.Node) -> list[str]:
    return [str(tuple(held.stride())) for held in meta.tensors(node)]


def _held(node: fx.Node) -> torch.Tensor:
    held = meta.tensor(node)
    assert held is not None, f"%{node.name} holds no single tensor"
    return held
