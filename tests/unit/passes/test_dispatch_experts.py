# SPDX-License-Identifier: Apache-2.0
"""dispatch-experts: before and expected, rows that come home on every small mesh, and what a wrong order would do.

Float64. Measured: clean at most 1e-15; with a planted fault 17 or an error.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from pcp_passes.collectives import CollectiveLog, all_gather_rows_op
from pcp_passes.collectives_ragged import gather_ragged_op, reduce_ragged_op, reduce_rows_op
from pcp_passes.engine.bodies import make_bodies, prepare
from pcp_passes.engine.expert_shards import expert_layers, shard_experts
from pcp_passes.errors import ConfigError, InvariantError, PcpError, RankMismatch, Refusal
from pcp_passes.ir import invariants, rules
from pcp_passes.ir.printer import print_graph
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.peer_rows import PeerRows
from pcp_passes.paged import experts
from pcp_passes.passes import PassContext
from pcp_passes.passes.bodies.dispatch_experts import DISPATCHED, MADE, DispatchExperts
from pcp_passes.piecewise.cuts import reason_to_cut
from tests.experts import HIDDEN, TOPK, Layer, World, layer, model

pytestmark = pytest.mark.unit
CLEAN, FAULT = 1e-12, 1e-2
FOLDED = Mesh(dp=2, pcp=2, tp=2, fold_on_tp=True)
MESHES = [Mesh(pcp=2), Mesh(dp=2), Mesh(dp=2, pcp=2), FOLDED, Mesh(pcp=4)]
ROWS = (5, 3)


def world(mesh: Mesh, **options: Any) -> World:
    return World(mesh, ROWS[: mesh.dp], **options)


SHARDED = """
%mask_routed : i64[sM, 2] shard(0) = pcp.mask_routed(%index)
%pack_routed : u8[sM, 72] shard(0) = pcp.pack_routed(%hidden, %mask_routed, %weights)
%gather_ragged : u8[u0, 72] rank_major = pcp.gather_ragged(%pack_routed, 2, 'dp')
%all_gather_rows : u8[2*u0, 72] rank_major = pcp.all_gather_rows(%gather_ragged, 2, 'pcp')
%unpack_routed : (f64[2*u0, 6], i64[2*u0, 2], f32[2*u0, 2]) rank_major = pcp.unpack_routed(%all_gather_rows, LAYOUT)
%getitem : f64[2*u0, 6] rank_major = operator.getitem(%unpack_routed, 0)
%getitem_1 : i64[2*u0, 2] rank_major = operator.getitem(%unpack_routed, 1)
%getitem_2 : f32[2*u0, 2] rank_major = operator.getitem(%unpack_routed, 2)
%local_experts : f64[2*u0, 6] partial = pcp.local_experts(%getitem, %getitem_1, %getitem_2, 'target.experts', 'silu')
%reduce_rows : f64[u0, 6] partial = pcp.reduce_rows(%local_experts, True, 2, 'pcp')
%reduce_ragged : f64[sM, 6] shard(0) = pcp.reduce_ragged(%reduce_rows, %hidden, 2, 'dp')
"""
REPLICATED = """
%mask_routed : i64[sM, 2] replicate = pcp.mask_routed(%index)
%local_experts : f64[sM, 6] partial = pcp.local_experts(%hidden, %mask_routed, %weights, 'target.experts', 'silu')
%reduce_rows : f64[sM, 6] replicate = pcp.reduce_rows(%local_experts, False, 2, 'pcp')
"""


def lines(gm: fx.GraphModule) -> list[str]:
    """The statements, without inputs, parameters and the end."""
    return [text for text in print_graph(gm, comments=False).splitlines() if "= pcp." in text or "getitem" in text]


@pytest.mark.parametrize("dp, variant, expected", [(2, "sharded", SHARDED), (1, "replicated", REPLICATED)])
def test_before_and_expected(dp: int, variant: str, expected: str) -> None:
    before = model(4).over(PassContext(2)).bodies[variant]
    [line] = lines(before)
    assert "pcp.experts(%hidden, %index, %weights, %experts_gate_up_proj, %experts_down_proj, 'silu')" in line
    found = model(4).over(PassContext(2), dp=dp).bodies[variant]
    wanted = expected.strip().replace("LAYOUT", "'float64[6] int64[2] float32[2]'").splitlines()
    assert lines(found) == wanted
    assert not found.state_dict() and before.state_dict(), "the weights left the graph"
    assert expert_layers(found) == ("target.experts",)


def test_a_graph_without_experts_stays() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

    gm = make_bodies({"": prepare(Plain(), (torch.ones(4, 3),))}, PassContext(2), dp=2)["sharded"]
    assert not [n for n in gm.graph.nodes if n.target is gather_ragged_op]
    result = DispatchExperts(2).run(gm.graph, PassContext(2))
    assert result.rewrites == 0 and result.notes == ("the graph has no experts",)


def test_experts_without_parameters_are_refused() -> None:
    class Computed(Layer):
        def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            held = self.experts
            doubled = held.gate_up_proj * 2
            out: torch.Tensor = experts.experts_op(hidden, index, weights, doubled, held.down_proj, "silu")
            return out

    one = layer(4)
    module = Computed(one.experts.gate_up_proj, one.experts.down_proj, "silu")
    example = (torch.zeros(7, HIDDEN).double(), torch.zeros(7, TOPK).long(), torch.zeros(7, TOPK))
    with pytest.raises(Refusal, match="experts cannot be spread over ranks"):
        make_bodies({"": prepare(module, example)}, PassContext(2), dp=2)


# Rows come home.


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tagged_rows_return_to_their_owner(mesh: Mesh, replicated: bool) -> None:
    """Each row carries rank and place in its value, and each expert multiplies by its own number: exact in float64."""
    given = world(mesh, replicated=replicated, tagged=True)
    assert given.ranks == len(mesh.groups("ep")[0]), "one world is one ep group"
    for rank, out in enumerate(given.run()):
        hidden, index, weights = given.inputs[rank]
        wanted = hidden[:, 0] * (weights.double() * (index + 1)).sum(1)
        assert torch.equal(out[:, 0], wanted.masked_fill(given.calls[rank].padding, 0))


@pytest.mark.parametrize("count", [4, 5, 2])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_equals_all_experts_at_hand(mesh: Mesh, count: int) -> None:
    """4 ranks: 5 experts are 2, 2, 1 and none; 2 experts leave two ranks without."""
    for replicated in (False, True):
        given = world(mesh, experts=count, replicated=replicated)
        found = given.run()
        assert given.error(found) < CLEAN
        assert all(torch.isfinite(out).all() and out.dtype == torch.float64 for out in found)
        if replicated:
            for rank in range(given.ranks):
                assert torch.equal(found[rank], found[rank - rank % mesh.pcp]), "the same bits on all PCP ranks"


def test_shards_cover_the_experts_once() -> None:
    for count, ranks, wanted in ((5, 4, [2, 2, 1, 0]), (2, 4, [1, 1, 0, 0]), (4, 2, [2, 2])):
        shards = [shard_experts(model(count), rank, ranks)["target.experts"] for rank in range(ranks)]
        assert [shard.count for shard in shards] == wanted
        assert torch.equal(torch.cat([shard.down for shard in shards]), layer(count).experts.down_proj)
    held = layer(4, False).experts.down_proj.untyped_storage().data_ptr()
    assert shard_experts(model(4), 1, 2)["target.experts"].down.untyped_storage().data_ptr() == held
    own = shard_experts(model(4), 1, 2, copy=True)["target.experts"].down
    assert own.untyped_storage().data_ptr() != held
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        shard_experts(model(4), 2, 2)
    with pytest.raises(ConfigError, match=r"no experts target.9 were captured; there are target.experts"):
        shard_experts(model(4), 0, 2, layers=["target.9"])
    assert shard_experts(None, 0, 2) == {}


def test_ranks_with_the_same_shard_are_seen() -> None:
    given = world(Mesh(dp=2, pcp=2))
    given.caches[3].experts = given.caches[2].experts
    assert given.error(given.run()) > FAULT


def test_padded_rows_are_routed_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank computes for the real rows of all ranks alone, also where padding holds no number."""
    computed: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        computed.append(len(x))
        return torch.nn.functional.silu(x)

    monkeypatch.setitem(experts.ACTIVATIONS, "silu", counting)
    given = world(Mesh(dp=2, pcp=2), padding=2)
    for rank in (1, 3):
        for part in given.inputs[rank]:
            if part.is_floating_point():
                part[-2:] = torch.nan
    found = given.run()
    real = sum(int(call.query_start_loc[-1]) for call in given.calls)
    assert sum(computed) == real * TOPK == (5 + 3 + 3 + 1) * TOPK
    assert all(torch.isfinite(out).all() for out in found)
    computed.clear()
    given = world(Mesh(dp=2, pcp=2), padding=2)
    body = given.body()
    [mask] = [node for node in body.graph.nodes if rules.op_name(node) == "pcp::mask_routed"]
    mask.replace_all_uses_with(mask.args[0])
    body.recompile()
    given.run(body)
    assert sum(computed) == 2 * (5 + 3) * TOPK, "without the mask they are"


# What is wrong is named.


def _swap(body: fx.GraphModule, first: Any, second: Any) -> None:
    """Exchange the ops, and the axes, of two collectives that follow each other."""
    [early] = [node for node in body.graph.nodes if node.target is first]
    [late] = [node for node in body.graph.nodes if node.target is second]
    mine, theirs = (early.target, early.args[1:]), (late.target, late.args[1:])
    early.target, early.args = theirs[0], (early.args[0], *theirs[1])
    late.target, late.args = mine[0], (late.args[0], *mine[1])
    body.recompile()


@pytest.mark.parametrize("rows", [(5, 3), (4, 4)])
@pytest.mark.parametrize(
    "swapped, says",
    [((gather_ragged_op, all_gather_rows_op), "brings .* rows and told its peers"),
     ((reduce_rows_op, reduce_ragged_op), "Combine in the reverse order of the dispatch")],
)  # fmt: skip
def test_another_order_is_named(rows: tuple[int, int], swapped: Any, says: str) -> None:
    given = World(Mesh(dp=2, pcp=2), rows)
    body = given.body()
    _swap(body, *swapped)
    with pytest.raises(RankMismatch, match=says):
        given.run(body)
    with pytest.raises(InvariantError, match=r"DISPATCHED.*\n.*\n.*went out over .* and home over"):
        invariants.check({DISPATCHED}, body.graph, PassContext(2))


def test_both_orders_exchanged_need_rows_of_another_count() -> None:
    """Gathers and sums exchanged alike are no cycle that closes: the counts are those of one PCP rank."""
    given = World(Mesh(dp=2, pcp=2), (4, 4))
    body = given.body()
    _swap(body, gather_ragged_op, all_gather_rows_op)
    _swap(body, reduce_rows_op, reduce_ragged_op)
    with pytest.raises(RankMismatch, match="replica 0 brings 8 rows and told its peers 4"):
        given.run(body)


def test_a_sum_that_stays_on_all_ranks_of_a_sharded_body_is_seen() -> None:
    given = world(Mesh(pcp=2))
    body = given.body()
    [call] = [node for node in body.graph.nodes if node.target is reduce_rows_op]
    call.args = (call.args[0], False, *call.args[2:])
    body.recompile()
    with pytest.raises(InvariantError, match="1 sums stay on all ranks; required 0"):
        invariants.check({DISPATCHED}, body.graph, PassContext(2))
    assert {len(out) for out in given.run(body)} == {2 * ROWS[0]}


def test_rows_that_a_replica_did_not_tell_are_named() -> None:
    given = world(Mesh(dp=2, pcp=2))
    for rank in (2, 3):
        given.caches[rank].peers = PeerRows((5, 4), (1, 1), 1)
    with pytest.raises(RankMismatch, match=r"replica 1 brings 3 rows and told its peers 4 .*all replicas \(5, 4\)"):
        given.run()
    told = world(Mesh(dp=2, pcp=2))
    for rank in (0, 1):
        told.caches[rank].peers = PeerRows((5, 4), (1, 1), 0)
    with pytest.raises(RankMismatch, match=r"rank 2 diverges from rank 0(?s:.*)\[9, 72\](?s:.*)\[8, 72\]"):
        told.run()


def test_missing_side_state_is_named() -> None:
    given = world(Mesh(dp=2))
    given.caches[1].peers = None
    with pytest.raises(ConfigError, match=r"the step has no peer rows. Set PagedCaches.peers"):
        given.run()
    given = world(Mesh(dp=2))
    given.caches[0].peers = PeerRows((5, 3, 2), (1, 1, 1), 0)
    with pytest.raises(ConfigError, match="the peer rows are of 3 replicas"):
        given.run()
    given = world(Mesh(pcp=2))
    given.caches[1].experts = {}
    with pytest.raises(ConfigError, match=r"holds no experts of 'target.experts' \(it has none\)"):
        given.run()
    with pytest.raises(PcpError, match="called outside a step"), torch.no_grad():
        given.body()(*given.inputs[0])


def test_a_draft_query_has_rows_per_request() -> None:
    given = World(Mesh(dp=2, pcp=2), (6, 2), padding=0, replicated=True)
    for rank in range(4):
        given.caches[rank].peers = PeerRows((9, 9), (3, 1), rank // 2)
        given.calls[rank] = replace(given.calls[rank], per_request=2)
    assert given.error(given.run()) < CLEAN
    given.calls[2] = replace(given.calls[2], per_request=0)
    with pytest.raises(RankMismatch, match="replica 1 brings 2 rows and told its peers 9"):
        given.run()


# What is recorded, and what the rest of the package makes of the graph.


def test_logs_are_equal_within_each_group() -> None:
    logs: list[CollectiveLog] = []
    given = world(Mesh(dp=2, pcp=2))
    given.run(logs=logs)
    found = [str(entry) for entry in logs[0].entries]
    assert found == [
        "pcp::gather_ragged(torch.uint8[8, 72], axis 'dp')", "pcp::all_gather_rows(torch.uint8[8, 72], axis 'pcp')",
        "pcp::reduce_rows(torch.float64[16, 6], axis 'pcp')", "pcp::reduce_ragged(torch.float64[8, 6], axis 'dp')",
    ]  # fmt: skip
    assert all(log.entries == logs[0].entries for log in logs)
    assert [log.entries[0].bytes for log in logs] == [5 * 72, 5 * 72, 3 * 72, 3 * 72], "of this rank's own rows"


@pytest.mark.parametrize("pcp, dp", [(2, 2), (2, 1), (1, 2)])
def test_invariants_hold_and_pieces_are_cut(pcp: int, dp: int) -> None:
    made = model(4).over(PassContext(pcp), dp=dp)
    for variant, body in made.bodies.items():
        names = invariants.ALWAYS | MADE | {DISPATCHED, invariants.EQUAL_COLLECTIVES}
        names |= {invariants.CONFLICT_FREE} if variant == "sharded" else set()
        ctx = PassContext(pcp, variant=variant)  # type: ignore[arg-type]
        invariants.check(names, body.graph, ctx)
        invariants.meta_fresh_full(body.graph, ctx)
        whole = model(4).over(PassContext(pcp)).bodies[variant]
        with pytest.raises(InvariantError, match="need all weights of the layer"):
            invariants.check({DISPATCHED}, whole.graph, ctx)
        for node in body.graph.nodes:
            name = rules.op_name(node)
            if name in ("pcp::mask_routed", "pcp::gather_ragged", "pcp::local_experts", "pcp::reduce_ragged"):
                assert reason_to_cut(node, "inside"), f"%{node.name}"
            if name in ("pcp::all_gather_rows", "pcp::reduce_rows"):
                assert reason_to_cut(node) and reason_to_cut(node, "inside") is None


def test_ragged_rows_on_the_axis_of_equal_ones_are_an_offence() -> None:
    body = world(Mesh(dp=2, pcp=2)).body()
    [gather] = [node for node in body.graph.nodes if node.target is gather_ragged_op]
    gather.args = (*gather.args[:2], "pcp")
    with pytest.raises(InvariantError, match="over 'pcp', whose ranks bring equal rows"):
        invariants.check({invariants.EQUAL_COLLECTIVES}, body.graph, PassContext(2))
    given = world(Mesh(dp=2))
    body = given.body()
    [gather] = [node for node in body.graph.nodes if node.target is gather_ragged_op]
    gather.args = (*gather.args[:2], "nowhere")
    with pytest.raises(ConfigError, match="a collective over axis 'nowhere', but groups were given for"):
        given.run(body)


def test_text_is_the_same_for_every_rank_and_reads_back() -> None:
    from pcp_passes.ir.parsing.parser import parse_graph

    body = model(4).over(PassContext(2), dp=2).bodies["sharded"]
    text = print_graph(body)
    assert print_graph(model(4).over(PassContext(2), dp=2).bodies["sharded"]) == text
    again = parse_graph(text)
    assert [n.target for n in again.graph.nodes if n.op == "call_function" and n.target is not operator.getitem] == [
        n.target for n in body.graph.nodes if n.op == "call_function" and n.target is not operator.getitem
    ]
