# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pcp_passes.ir import meta
from pcp_passes.ir.markers import reshard_op
from pcp_passes.ir.placements import RankMajor
from pcp_passes.passes import GatherCacheWrites, PassContext, PlaceRows, body_pipeline, copy_graph_module
from tests import toy, toy_runs

pytestmark = pytest.mark.unit
STEPS = (PlaceRows(), GatherCacheWrites())
CTX = PassContext(4)


def dense_before(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.pcp_toy.kv_cache_update(k, v, toy.LayerName("model.layers.0.attn"))


def dense_expected(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k = torch.ops.pcp.reshard(k, "shard", "rank_major", 4, "pcp")
    v = torch.ops.pcp.reshard(v, "shard", "rank_major", 4, "pcp")
    return torch.ops.pcp_toy.kv_cache_update(k, v, toy.LayerName("model.layers.0.attn"))


def latent_before(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    scale = torch.ones(())
    return torch.ops.pcp_toy.mla_kv_cache_update(kv_c, k_pe, "layers.0", "auto", scale)


def latent_expected(kv_c: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    scale = torch.ones(())
    kv_c = torch.ops.pcp.reshard(kv_c, "shard", "rank_major", 4, "pcp")
    k_pe = torch.ops.pcp.reshard(k_pe, "shard", "rank_major", 4, "pcp")
    return torch.ops.pcp_toy.mla_kv_cache_update(kv_c, k_pe, "layers.0", "auto", scale)


@pytest.mark.parametrize(
    "before, expected, shapes",
    [
        (dense_before, dense_expected, ((6, 2, 8), (6, 2, 8))),
        (latent_before, latent_expected, ((6, 12), (6, 1, 4))),
    ],
)
def test_every_row_operand_of_a_cache_write_is_gathered(before, expected, shapes) -> None:
    def tokens() -> list[torch.Tensor]:
        return [torch.randn(shape) for shape in shapes]

    after, results = toy_runs.apply(STEPS, toy_runs.traced(before, *tokens()), CTX)
    assert toy_runs.structure(after) == toy_runs.structure(toy_runs.traced(expected, *tokens()))
    assert results[1].rewrites == 2


def test_markers_carry_value_placement_and_layer() -> None:
    after, _ = toy_runs.apply(STEPS, toy_runs.captured()[1].gm, CTX)
    markers = [node for node in after.graph.nodes if node.target is reshard_op]
    assert [meta.info(node).layer for node in markers] == [f"model.layers.{i}.self_attn.attn" for i in (0, 0, 1, 1)]
    for node in markers:
        assert meta.placement(node) == RankMajor()
        assert meta.tensor(node).shape == (4 * meta.tensor(node.args[0]).shape[0], 2, 8)
        assert meta.info(node).created_by == "gather-cache-writes"


def test_attention_keeps_its_rank_local_rows() -> None:
    after, _ = toy_runs.apply(STEPS, toy_runs.captured()[1].gm, CTX)
    attends = [n for n in after.graph.nodes if "attention_with_output" in str(n.target)]
    assert len(attends) == 2
    assert all(operand.target is not reshard_op for node in attends for operand in node.args[:3])


def test_no_cache_write_gives_a_reason() -> None:
    _, results = toy_runs.apply(STEPS, toy_runs.traced(lambda x: x + 1, torch.randn(6, 4)), CTX)
    assert results[1].rewrites == 0
    assert "nothing to gather" in str(results[1].notes[0])


@pytest.mark.parametrize("kind", ["dense", "latent"])
@pytest.mark.parametrize("pcp", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gathered_ranks_equal_the_unsharded_run(kind: str, pcp: int, dtype: torch.dtype) -> None:
    world = toy.World(toy_runs.MIXED, pcp)
    after, _ = toy_runs.apply(STEPS, toy_runs.captured(kind, dtype=dtype)[1].gm, PassContext(pcp))
    found = toy_runs.sharded(after, world, kind, dtype)
    wanted = toy_runs.unsharded(world, kind, dtype)
    torch.testing.assert_close(found.restored, wanted, rtol=0, atol=toy_runs.TOLERANCE[dtype])
    real = slice(toy.BLOCK, None)
    for step in found.steps[1:]:
        for layer, cache in step.caches.items():
            assert torch.equal(cache[real], found.steps[0].caches[layer][real]), "caches differ between ranks"


def _drop_one(gm, world) -> None:
    """The gather of one operand replaced by P copies of the rank's own rows."""
    marker = next(node for node in gm.graph.nodes if node.target is reshard_op)
    with gm.graph.inserting_before(marker):
        copies = gm.graph.call_function(torch.cat, ([marker.args[0]] * world.pcp,))
    marker.replace_all_uses_with(copies)
    gm.graph.erase_node(marker)


def _reverse_rows(gm, world) -> None:
    """Rank-major order turned round."""
    marker = next(node for node in gm.graph.nodes if node.target is reshard_op)
    with gm.graph.inserting_after(marker):
        flipped = gm.graph.call_function(torch.flip, (marker, (0,)))
    marker.replace_all_uses_with(flipped, delete_user_cb=lambda user: user is not flipped)


@pytest.mark.parametrize("break_it", [_drop_one, _reverse_rows])
@pytest.mark.parametrize("pcp", [2, 4])
def test_sabotage_of_the_gather_is_seen(break_it, pcp: int) -> None:
    world = toy.World(toy_runs.MIXED, pcp)
    after, _ = toy_runs.apply(STEPS, toy_runs.captured()[1].gm, PassContext(pcp))
    break_it(after, world)
    after.recompile()
    difference = (toy_runs.sharded(after, world).restored - toy_runs.unsharded(world)).abs().max()
    assert difference > 1e-2


def test_sabotage_of_the_restore_is_seen() -> None:
    world = toy.World(toy_runs.MIXED, 2)
    after, _ = toy_runs.apply(STEPS, toy_runs.captured()[1].gm, PassContext(2))
    found = toy_runs.sharded(after, world)
    as_it_came = found.hidden[: len(world.restore)]
    assert (as_it_came - toy_runs.unsharded(world)).abs().max() > 1e-2


def _wrong_pad_slot(steps: list[toy.Step]) -> None:
    for step in steps:
        pads = step.slot_mapping == toy.PAD_SLOT
        assert pads.any()
        step.slot_mapping[pads] = int(step.block_table[0, 0]) * toy.BLOCK  # a slot that a request owns


def _short_lengths(steps: list[toy.Step]) -> None:
    for step in steps:
        step.seq_lens = [n - 1 if n > 1 else n for n in step.seq_lens]


@pytest.mark.parametrize("change", [_wrong_pad_slot, _short_lengths])
def test_sabotage_of_the_step_is_seen(change) -> None:
    world = toy.World(toy_runs.MIXED, 3)
    after, _ = toy_runs.apply(STEPS, toy_runs.captured()[1].gm, PassContext(3))
    difference = toy_runs.sharded(after, world, change=change).restored - toy_runs.unsharded(world)
    assert difference.abs().max() > 1e-2


def test_the_captured_graph_is_left_alone() -> None:
    gm = toy_runs.captured()[1].gm
    before = toy_runs.structure(gm)
    body_pipeline().run(copy_graph_module(gm), CTX)
    assert toy_runs.structure(gm) == before
