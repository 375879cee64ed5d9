# SPDX-License-Identifier: Apache-2.0
"""Writing the graph of one rank from its program: each node in the versions that are needed, reshards between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from pcp_passes.aten.decision import REPLICATE, Local, Rows, operands
from pcp_passes.aten.experts import LocalIota
from pcp_passes.aten.local_forms import counts_tokens
from pcp_passes.aten.picks import Pick
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement, Shard
from pcp_passes.ir.places import behind
from pcp_passes.ir.revalue import Revalue
from pcp_passes.ir.token_markers import restore_op, shard_op
from pcp_passes.passes.base import PassContext
from pcp_passes.passes.tokens.propagate_placements import effective
from pcp_passes.passes.tokens.rank_program import RankProgram

_ATEN: Any = torch.ops.aten


def write(graph: fx.Graph, program: RankProgram, ctx: PassContext, pass_name: str) -> int:
    """Rewrite ``graph`` in place as ``program`` says; returns the number of reshards and changed nodes."""
    writer = _Writer(graph, program, ctx, pass_name)
    for node in list(graph.nodes):
        writer.visit(node)
    graph.eliminate_dead_code()
    return writer.count


class _Writer:
    """State of one walk over the graph, in order: which node holds which version of a captured value."""

    def __init__(self, graph: fx.Graph, program: RankProgram, ctx: PassContext, pass_name: str) -> None:
        self.graph, self.program, self.ctx, self.pass_name = graph, program, ctx, pass_name
        self.whole: dict[fx.Node, fx.Node] = {}
        self.rows: dict[tuple[fx.Node, Placement], fx.Node] = {}
        self.sizes: dict[int, fx.Node] = {}
        self.iotas: dict[int, fx.Node] = {}
        self.revalue = Revalue(meta.value(program.plan.rows))
        self.count = 0

    def visit(self, node: fx.Node) -> None:
        program = self.program
        if node.op == "output":
            self._read(node, program.needs(node))
        elif node in (program.plan.rows, program.plan.restore) or node.op != "call_function":
            self.whole[node] = node
            if node is program.plan.rows:
                self.rows[node, Shard(0)] = node
            self._slices(node)
        elif node in program.local:
            self._local(node)
        else:
            self._replicated(node)

    def _local(self, node: fx.Node) -> None:
        program = self.program
        wanted = program.need_rows[node]
        whole = node in program.need_whole
        if whole and node in program.computed_whole:
            # Where no rows are wanted, the captured node itself becomes the whole version.
            self.whole[node] = self._copy_whole(node) if wanted else self._as_whole(node)
        if not wanted:
            return
        own = effective(node)
        self._read(node, program.needs(node), program.local[node])
        self.rows[node, own] = node
        if whole and node not in program.computed_whole:
            self.whole[node] = self._restore(node, own)
        self._slices(node)

    def _replicated(self, node: fx.Node) -> None:
        program = self.program
        moved = program.moved.get(node)
        whole = node in program.need_whole
        pick = program.pick(node)
        if whole and pick is not None:
            self.whole[node] = self._pick(node, pick)
            self._slices(node)
            return
        if moved is not None:
            wanted = next(iter(program.need_rows[node]))
            target = self._copy(node) if whole else node
            needs = list(zip(operands(node), moved.needs, strict=True))
            self._read(target, needs, moved)
            meta.set_placements(target, moved.out if isinstance(moved.out, tuple) else (moved.out,))
            self.rows[node, wanted] = target
            self.count += 1
        if whole:
            self._as_whole(node)
            self.whole[node] = node
            self._slices(node)

    def _as_whole(self, node: fx.Node) -> fx.Node:
        """Operands become their whole versions; the value stays the captured one."""
        before = operands(node)
        self._read(node, ((operand, REPLICATE) for operand in before))
        meta.set_placements(node, (REPLICATE,) * max(1, len(meta.placements(node))))
        return node

    def _copy(self, node: fx.Node) -> fx.Node:
        with self.graph.inserting_before(node):
            copy = self.graph.node_copy(node)
        meta.duplicate(node, copy)
        meta.set_created_by(copy, self.pass_name)
        return copy

    def _copy_whole(self, node: fx.Node) -> fx.Node:
        self.count += 1
        return self._as_whole(self._copy(node))

    def _read(self, node: fx.Node, needs: Any, local: Local | None = None) -> None:
        """Point the node's operands at the versions it needs, and its sizes at the rank's."""
        wanted = list(needs)
        order = iter(wanted)
        before = (node.args, node.kwargs)

        def version(operand: fx.Node) -> fx.Node:
            captured, need = next(order)
            return self._version(captured, need)

        args: Any = list(fx.node.map_arg(node.args, version))
        kwargs: Any = dict(fx.node.map_arg(node.kwargs, version))
        for position, sizes in (local.sizes if local else {}).items():
            args[position] = self._sized(sizes, args[position])
        node.args, node.kwargs = tuple(args), kwargs
        if node.op == "call_function":
            self.revalue(node)
        self.count += (node.args, node.kwargs) != before

    def _sized(self, sizes: Any, written: Any) -> Any:
        if not isinstance(sizes, (list, tuple)):
            return sizes
        now = list(written) if isinstance(written, (list, tuple)) and len(written) == len(sizes) else list(sizes)
        for index, size in enumerate(sizes):
            if isinstance(size, Rows):
                now[index] = self._size(size.outer * size.inner)
        return now

    def _size(self, count: int) -> fx.Node:
        """``M * count``, computed once, right after the inputs."""
        if count not in self.sizes:
            rows = self.program.plan.rows
            if count == 1:
                self.sizes[1] = self._early(_ATEN.sym_size.int, (rows, 0))
            else:
                self.sizes[count] = self._early(operator.mul, (self._size(1), count))
        return self.sizes[count]

    def _early(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        source = next(operand for operand in args if isinstance(operand, fx.Node))
        with self.graph.inserting_before(behind(source)):
            node = self.graph.call_function(target, args)
        return self._made(node, REPLICATE)

    def _made(self, node: fx.Node, where: Placement, serves: fx.Node | None = None) -> fx.Node:
        meta.adopt_lazily(node, serves, self.pass_name, where)
        self.revalue(node)
        return node

    def _version(self, captured: fx.Node, need: Any) -> fx.Node:
        if isinstance(need, LocalIota):
            return self._iota(need.inner)
        if need == REPLICATE:
            return self.whole.get(captured, captured)
        return self.rows[captured, need]

    def _iota(self, inner: int) -> fx.Node:
        if inner not in self.iotas:
            size = self._size(inner)
            device: Any = meta.tensor(self.program.plan.rows).device  # type: ignore[union-attr]
            with self.graph.inserting_before(size.next):
                made = self.graph.call_function(_ATEN.arange.default, (size,), {"device": torch.device(device.type)})
            self.iotas[inner] = self._made(made, Shard(0, 1, inner))
        return self.iotas[inner]

    def _restore(self, node: fx.Node, where: Placement) -> fx.Node:
        assert isinstance(where, Shard), f"%{node.name} is {where} and was to be restored"
        args = (node, self.program.plan.restore, where.dim, where.outer, where.inner, self.ctx.pcp, self.ctx.axis)
        with self.graph.inserting_after(node):
            made = self.graph.call_function(restore_op, args, name="restore")
        self.count += 1
        return self._made(made, REPLICATE, node)

    def _pick(self, node: fx.Node, pick: Pick) -> fx.Node:
        """Restore the picked rows alone, where the captured node stood."""
        source = operands(node)[0]
        own = effective(source)
        chosen = self._before(node, _ATEN.slice.Tensor, self.program.plan.restore, 0, pick.start, pick.end, pick.step)
        args = (self.rows[source, own], chosen, pick.dim, 1, 1, self.ctx.pcp, self.ctx.axis)
        made = self._before(node, restore_op, *args)
        return self._before(node, _ATEN.squeeze.dim, made, pick.dim) if pick.one else made

    def _before(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(node):
            made = self.graph.call_function(target, args)
        self.count += 1
        return self._made(made, REPLICATE, node)

    def _slices(self, node: fx.Node) -> None:
        """Rows of a whole value, in each placement they are wanted in."""
        for wanted in self._missing(node):
            if counts_tokens(node, self.program.plan) and wanted == Shard(0):
                self.rows[node, wanted] = self.program.plan.rows
                continue
            source = self.whole[node]
            args = (source, self.program.plan.rows, wanted.dim, wanted.outer, wanted.inner)
            with self.graph.inserting_before(behind(source)):
                made = self.graph.call_function(shard_op, args, name="shard")
            self.rows[node, wanted] = self._made(made, wanted, node)
            self.count += 1

    def _missing(self, node: fx.Node) -> Iterator[Shard]:
        for wanted in self.program.need_rows[node]:
            if (node, wanted) not in self.rows:
                assert isinstance(wanted, Shard), f"%{node.name} was to be taken as {wanted}"
                yield wanted
