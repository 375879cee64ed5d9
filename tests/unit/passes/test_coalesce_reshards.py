# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pcp_passes.collectives import CollectiveLog
from pcp_passes.ir import invariants, meta
from pcp_passes.ir.markers import reshard_many_op, reshard_op
from pcp_passes.ir.placements import RankMajor
from pcp_passes.passes import CoalesceReshards, GatherCacheWrites, PassContext, PlaceRows
from tests import toy, toy_runs

pytestmark = pytest.mark.unit
STEPS = (PlaceRows(), GatherCacheWrites(), CoalesceReshards())
CTX = PassContext(4)
OPS = torch.ops.pcp_toy
MARK = ("shard", "rank_major", 4, "pcp")


def before(x: torch.Tensor) -> torch.Tensor:
    return OPS.kv_cache_update(x + 1, x * 2, toy.LayerName("attn"))


def expected(x: torch.Tensor) -> torch.Tensor:
    key, value = x + 1, x * 2
    layer = toy.LayerName("attn")
    rows = torch.ops.pcp.reshard_many([key, value], *MARK)
    return OPS.kv_cache_update(rows[0], rows[1], layer)


def test_the_operands_of_one_write_ride_in_one_collective() -> None:
    after, results = toy_runs.apply(STEPS, toy_runs.traced(before, torch.randn(6, 2, 8)), CTX)
    assert toy_runs.structure(after) == toy_runs.structure(toy_runs.traced(expected, torch.randn(6, 2, 8)))
    assert results[2].rewrites == 1
    invariants.coalesced(after.graph, CTX)
    invariants.meta_fresh_full(after.graph, CTX)


def test_parts_of_a_pack_are_placed() -> None:
    after, _ = toy_runs.apply(STEPS, toy_runs.traced(before, torch.randn(6, 2, 8)), CTX)
    (packed,) = [node for node in after.graph.nodes if node.target is reshard_many_op]
    assert meta.placement(packed) == RankMajor()
    assert [meta.placement(part) for part in packed.users] == [RankMajor(), RankMajor()]
    assert [str(meta.tensor(part).shape[0]) for part in packed.users] == [
        f"4*{meta.tensor(packed.args[0][0]).shape[0]}"
    ] * 2


def test_operands_of_different_dtypes_stay_apart_with_a_reason() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(())
        return OPS.mla_kv_cache_update(x.flatten(1), x.to(torch.bfloat16), "attn", "auto", scale)

    gm = toy_runs.traced(mixed, torch.randn(6, 2, 8))
    after, results = toy_runs.apply(STEPS, gm, CTX)
    assert results[2].rewrites == 0
    assert "2 collectives: the operands differ in dtype (f32, bf16)" in str(results[2].notes[0])
    assert [node.target for node in after.graph.nodes].count(reshard_op) == 2
    invariants.coalesced(after.graph, CTX)


def test_one_operand_twice_needs_no_pack() -> None:
    def same(x: torch.Tensor) -> torch.Tensor:
        return OPS.kv_cache_update(x, x, toy.LayerName("attn"))

    after, _ = toy_runs.apply(STEPS, toy_runs.traced(same, torch.randn(6, 2, 8)), CTX)
    invariants.well_formed(after.graph, CTX)
    invariants.coalesced(after.graph, CTX)


def test_nothing_to_pack_gives_a_reason() -> None:
    _, results = toy_runs.apply(STEPS, toy_runs.traced(lambda x: x + 1, torch.randn(6, 4)), CTX)
    assert results[2].rewrites == 0
    assert "could share a collective" in str(results[2].notes[0])


@pytest.mark.parametrize("kind", ["dense", "latent"])
@pytest.mark.parametrize("pcp", [2, 3])
def test_packed_ranks_equal_the_unsharded_run_bit_for_bit_with_the_unpacked_ones(kind: str, pcp: int) -> None:
    world = toy.World(toy_runs.MIXED, pcp)
    gm = toy_runs.captured(kind)[1].gm
    packed, _ = toy_runs.apply(STEPS, gm, PassContext(pcp))
    apart, _ = toy_runs.apply(STEPS[:2], gm, PassContext(pcp))
    one, two = (toy_runs.sharded(body, world, kind) for body in (packed, apart))
    assert torch.equal(one.restored, two.restored)
    torch.testing.assert_close(one.restored, toy_runs.unsharded(world, kind), rtol=0, atol=1e-5)


def test_sabotage_parts_swapped_is_seen() -> None:
    world = toy.World(toy_runs.MIXED, 2)
    gm, _ = toy_runs.apply(STEPS, toy_runs.captured()[1].gm, PassContext(2))
    packed = next(node for node in gm.graph.nodes if node.target is reshard_many_op)
    for part in list(packed.users):
        part.update_arg(1, 1 - part.args[1])
    gm.recompile()
    assert (toy_runs.sharded(gm, world).restored - toy_runs.unsharded(world)).abs().max() > 1e-2


def test_the_log_lists_every_operand_of_a_pack() -> None:
    world = toy.World(toy_runs.MIXED, 2)
    gm, _ = toy_runs.apply(STEPS, toy_runs.captured()[1].gm, PassContext(2))
    logs: list[CollectiveLog] = toy_runs.sharded(gm, world).logs
    assert [entry.shape for entry in logs[0].entries] == [(world.rows, 2, 8)] * 4
