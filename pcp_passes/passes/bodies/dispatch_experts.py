# SPDX-License-Identifier: Apache-2.0
"""dispatch-experts: rows travel to the ranks that hold their experts, and the sums travel back."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.collectives import all_gather_rows_op, is_collective, is_gather
from pcp_passes.collectives_ragged import gather_ragged_op, reduce_ragged_op, reduce_rows_op
from pcp_passes.errors import Refusal
from pcp_passes.ir import invariants, meta, rules
from pcp_passes.ir.invariants import LOWERED, ORDER_KNOWN, PADDING_DEFINED, PLACED, Offence, require
from pcp_passes.ir.placements import Partial, Placement, RankMajor
from pcp_passes.ir.printer import print_node
from pcp_passes.paged.routed import (
    LOCAL_EXPERTS,
    UNPACK_ROUTED,
    local_experts_op,
    mask_routed_op,
    pack_routed_op,
    record_layout,
    unpack_routed_op,
)
from pcp_passes.passes.base import Note, PassContext, PassResult, note

EXPERTS = "pcp::experts"
DISPATCHED = "DISPATCHED"
MADE = frozenset({PLACED, ORDER_KNOWN, PADDING_DEFINED, LOWERED})
"""What holds of both bodies of a capture, which the pass is for."""


@dataclass(frozen=True)
class DispatchExperts:
    """Replace experts that are whole on every rank by dispatch, the experts of this rank, and combine.

    Why: the experts of a layer are most of a model's weights, so over a mesh each rank holds a range of them, and a row
    needs several. Dispatch gathers the rows over ``dp``, whose replicas have other row counts, then over the PCP axis;
    combine sums and scatters over the PCP axis, then over ``dp``: the reverse, so each row comes home. What a row needs
    is one record of bytes, hence one collective per axis. Padded rows are routed to nobody before they travel. In the
    replicated body all PCP ranks have the same rows: nothing is gathered over that axis, and the sum stays on all of
    its ranks, in rank order, so it is the same on them to the last bit. The weights leave the graph, which therefore
    has the same text on every rank: the experts of a rank lie beside its caches.

    The sharded body on a mesh of DP=2 and PCP=2 is shown below. In the replicated one ``all_gather_rows`` is not there
    and ``reduce_rows`` does not scatter: ``pcp.reduce_rows(%local_experts, False, 2, 'pcp')``.

    Before::

        %experts = pcp.experts(%hidden, %index, %weights, %gate_up_proj, %down_proj, 'silu')

    After::

        %mask_routed : i64[s72, 2] shard(0) = pcp.mask_routed(%index)
        %pack_routed : u8[s72, 280] shard(0) = pcp.pack_routed(%hidden, %mask_routed, %weights)
        %gather_ragged : u8[u0, 280] rank_major = pcp.gather_ragged(%pack_routed, 2, 'dp')
        %all_gather_rows : u8[2*u0, 280] rank_major = pcp.all_gather_rows(%gather_ragged, 2, 'pcp')
        %unpack_routed = pcp.unpack_routed(%all_gather_rows, 'float32[64] int64[2] float32[2]')
        %local_experts : f32[2*u0, 64] partial = pcp.local_experts(..., 'target.decoder.layers.1.mlp.experts', 'silu')
        %reduce_rows : f32[u0, 64] partial = pcp.reduce_rows(%local_experts, True, 2, 'pcp')
        %reduce_ragged : f32[s72, 64] shard(0) = pcp.reduce_ragged(%reduce_rows, %hidden, 2, 'dp')
    """

    dp: int = 1
    """Replicas that share their experts."""
    dp_axis: str = "dp"
    model: str = "target"
    """In front of the names of experts, so that those of target and drafter differ."""

    name: ClassVar[str] = "dispatch-experts"
    requires: ClassVar[frozenset[str]] = frozenset({PLACED, LOWERED})
    establishes: ClassVar[frozenset[str]] = frozenset({DISPATCHED})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return dispatch_experts(graph, ctx, self.dp, self.dp_axis, self.model)


def dispatch_experts(graph: fx.Graph, ctx: PassContext, dp: int, dp_axis: str, model: str) -> PassResult:
    """Rewrite every ``pcp::experts`` of a made body.

    Raises:
        Refusal: experts whose matrices are not parameters of one module, or whose rows are not ``[N, H]``.
    """
    found = [node for node in graph.nodes if rules.op_name(node) == EXPERTS]
    notes: list[Note | str] = []
    for node in found:
        layer = experts_layer(node, model)
        notes.append(note(f"experts of {layer} over {dp} {dp_axis} x {ctx.pcp} {ctx.axis} ranks", node))
        _dispatch(graph, node, layer, ctx, dp, dp_axis)
    if found:
        graph.eliminate_dead_code()  # the weights, which other nodes do not read
    return PassResult(len(found), tuple(notes) or ("the graph has no experts",))


def has_experts(graphs: Iterable[fx.GraphModule]) -> bool:
    """Whether a graph calls experts that are whole on each rank."""
    return any(rules.op_name(node) == EXPERTS for gm in graphs for node in gm.graph.nodes)


def experts_layer(node: fx.Node, model: str) -> str:
    """Name of the experts that a ``pcp::experts`` node calls: ``"target.decoder.layers.1.mlp.experts"``."""
    held = [rules.argument(node, position) for position in (3, 4)]
    paths = [str(one.target) for one in held if isinstance(one, fx.Node) and one.op == "get_attr"]
    owners = {path.rpartition(".")[0] for path in paths}
    rows = meta.tensor(rules.argument(node, 0))
    if len(paths) != 2 or len(owners) != 1 or rows is None or rows.dim() != 2:
        raise Refusal(
            "experts cannot be spread over ranks",
            [("node", print_node(node)), ("module", meta.module_path(node)),
             ("required", "rows [N, H], and matrices that are two parameters of one module"),
             ("next", "run this model without expert parallelism")],
        )  # fmt: skip
    return f"{model}.{owners.pop()}"


def weight_of(gm: fx.GraphModule, node: fx.Node, position: int) -> torch.Tensor:
    """The matrices that a ``pcp::experts`` node of ``gm`` takes at an argument position."""
    owner, _, leaf = str(rules.argument(node, position).target).rpartition(".")
    held: torch.Tensor = getattr(gm.get_submodule(owner), leaf)
    return held


def _dispatch(graph: fx.Graph, experts: fx.Node, layer: str, ctx: PassContext, dp: int, dp_axis: str) -> None:
    hidden, index, weights, _, _, act = (rules.argument(experts, position) for position in range(6))
    home = meta.placement(experts)
    assert home is not None, f"%{experts.name} has no placement"
    sharded, where = ctx.variant == "sharded", home

    def make(placement: Placement, target: Any, *args: Any) -> fx.Node:
        name = target._opname if isinstance(target, torch._ops.OpOverload) else None
        node = graph.create_node("call_function", target, args, name=name)
        return meta.adopt(node, experts, DispatchExperts.name, placement, layer)

    with graph.inserting_before(experts):
        index = make(home, mask_routed_op, index)
        if dp > 1 or (sharded and ctx.pcp > 1):
            layout = record_layout(*(_held(part) for part in (hidden, index, weights)))
            record = make(home, pack_routed_op, hidden, index, weights)
            where = RankMajor()
            if dp > 1:
                record = make(where, gather_ragged_op, record, dp, dp_axis)
            if sharded and ctx.pcp > 1:
                record = make(where, all_gather_rows_op, record, ctx.pcp, ctx.axis)
            parts = make(where, unpack_routed_op, record, layout)
            rows, index, weights = (make(where, operator.getitem, parts, place) for place in range(3))
        else:
            rows = hidden
        out = make(Partial(), local_experts_op, rows, index, weights, layer, act)
        if ctx.pcp > 1:
            out = make(Partial() if dp > 1 else home, reduce_rows_op, out, sharded, ctx.pcp, ctx.axis)
        if dp > 1:
            out = make(home, reduce_ragged_op, out, hidden, dp, dp_axis)
    experts.replace_all_uses_with(out)
    graph.erase_node(experts)


def _held(node: fx.Node) -> torch.Tensor:
    held = meta.tensor(node)
    assert held is not None, f"%{node.name} has no value"
    return held


def dispatched(graph: fx.Graph, ctx: PassContext) -> None:
    """No experts are whole; rows come home on the way they went out, reversed, and are summed over every axis once."""
    require(DISPATCHED, "combine is the reverse of dispatch", _astray(graph, ctx))


def _astray(graph: fx.Graph, ctx: PassContext) -> Iterator[Offence]:
    for node in graph.nodes:
        if rules.op_name(node) == EXPERTS:
            yield node, "experts that need all weights of the layer on this rank"
        if rules.op_name(node) != LOCAL_EXPERTS:
            continue
        out, home = list(_gathers(node.args[0])), list(_reductions(node))
        ways = [(call.target is gather_ragged_op, *call.args[-2:]) for call in out]
        back = [(call.target is reduce_ragged_op, *call.args[-2:]) for call in home if _scatters(call)]
        if ways != back[::-1] or sorted(ways, reverse=True) != ways:
            yield node, f"rows went out over {_axes(out)} and home over {_axes(home)}"
        whole = [call for call in home if not _scatters(call)]
        replicated = ctx.variant == "replicated" and ctx.pcp > 1
        if len(whole) != replicated or (whole and whole[0] is not home[0]):
            yield node, f"{len(whole)} sums stay on all ranks; required {int(replicated)}, and first"


def _scatters(call: fx.Node) -> bool:
    return call.target is reduce_ragged_op or bool(call.args[1])


def _axes(calls: list[fx.Node]) -> str:
    return ", then ".join(f"{call.args[-1]} ({call.args[-2]})" for call in calls) or "no axis"


def _gathers(node: Any) -> Iterator[fx.Node]:
    """Of the rows of a node the gathers they went through, the first one first."""
    source = node
    if node.target is operator.getitem and rules.op_name(node.args[0]) == UNPACK_ROUTED:
        source = node.args[0].args[0]
    if is_collective(source):
        yield from _gathers(source.args[0])
        yield source


def _reductions(node: fx.Node) -> Iterator[fx.Node]:
    """The sums that a node's value goes through, the first one first."""
    for user in node.users:
        if is_collective(user) and not is_gather(user) and user.args[0] is node:
            yield user
            yield from _reductions(user)


invariants.INVARIANTS[DISPATCHED] = dispatched
