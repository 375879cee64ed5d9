# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pcp_passes.collectives import all_gather_rows_op, is_collective
from pcp_passes.errors import InvariantError
from pcp_passes.ir import invariants, meta
from pcp_passes.ir.rules import CacheWrite, temporary_rule
from pcp_passes.passes import SHARDED, SHARDED_UNPACKED, LowerReshards, PassContext, PlaceRows
from pcp_passes.passes.bodies.lower_reshards import SPLIT, SQUEEZE, UNFLATTEN
from tests import toy, toy_runs
from tests.unit.ir.test_invariants import OF_BODIES

pytestmark = pytest.mark.unit
CTX = PassContext(4)
OPS = torch.ops.pcp_toy


def two_rows(x: torch.Tensor) -> torch.Tensor:
    return OPS.kv_cache_update(x + 1, x * 2, toy.LayerName("attn"))


def two_rows_packed(x: torch.Tensor) -> torch.Tensor:
    key, value = x + 1, x * 2
    layer = toy.LayerName("attn")
    flat_key, flat_value = torch.flatten(key, 1), torch.flatten(value, 1)
    rows = torch.ops.pcp.all_gather_rows(torch.cat([flat_key, flat_value], 1), 4, "pcp")
    key, value = SPLIT(rows, [16, 16], 1)
    key, value = UNFLATTEN(key, 1, [2, 8]), UNFLATTEN(value, 1, [2, 8])
    return OPS.kv_cache_update(key, value, layer)


def two_rows_apart(x: torch.Tensor) -> torch.Tensor:
    key, value = x + 1, x * 2
    layer = toy.LayerName("attn")
    key = torch.ops.pcp.all_gather_rows(key, 4, "pcp")
    value = torch.ops.pcp.all_gather_rows(value, 4, "pcp")
    return OPS.kv_cache_update(key, value, layer)


def flat_and_scalar(x: torch.Tensor) -> torch.Tensor:
    return OPS.kv_cache_update(x.flatten(1), x.sum((1, 2)), toy.LayerName("attn"))


def flat_and_scalar_packed(x: torch.Tensor) -> torch.Tensor:
    key, value = x.flatten(1), x.sum((1, 2))
    layer = toy.LayerName("attn")
    column = torch.unsqueeze(value, 1)
    rows = torch.ops.pcp.all_gather_rows(torch.cat([key, column], 1), 4, "pcp")
    key, value = SPLIT(rows, [16, 1], 1)
    return OPS.kv_cache_update(key, SQUEEZE(value, 1), layer)


def strided(x: torch.Tensor) -> torch.Tensor:
    return OPS.kv_cache_update(x[:, :1], x[:, 1:], toy.LayerName("attn"))


def strided_apart(x: torch.Tensor) -> torch.Tensor:
    key, value = x[:, :1], x[:, 1:]
    layer = toy.LayerName("attn")
    key = torch.ops.pcp.all_gather_rows(key.contiguous(), 4, "pcp")
    value = torch.ops.pcp.all_gather_rows(value.contiguous(), 4, "pcp")
    return OPS.kv_cache_update(key, value, layer)


@pytest.mark.parametrize(
    "steps, before, expected",
    [
        (SHARDED, two_rows, two_rows_packed),
        (SHARDED_UNPACKED, two_rows, two_rows_apart),
        (SHARDED, flat_and_scalar, flat_and_scalar_packed),
        (SHARDED_UNPACKED, strided, strided_apart),
    ],
)
def test_markers_become_collectives(steps, before, expected) -> None:
    after, results = toy_runs.apply(steps, toy_runs.traced(before, torch.randn(6, 2, 8)), CTX)
    assert toy_runs.structure(after) == toy_runs.structure(toy_runs.traced(expected, torch.randn(6, 2, 8)))
    assert results[-1].rewrites
    names = OF_BODIES - ({invariants.COALESCED} if steps is SHARDED_UNPACKED else set())
    invariants.check(names, after.graph, CTX)
    invariants.meta_fresh_full(after.graph, CTX)


def test_the_result_is_an_expression_of_the_same_symbol() -> None:
    after, _ = toy_runs.apply(SHARDED, toy_runs.captured()[1].gm, CTX)
    for node in filter(is_collective, after.graph.nodes):
        rows = meta.tensor(node.args[0]).shape[0]
        assert rows.node.expr.is_Symbol
        assert meta.tensor(node).shape[0].node.expr == 4 * rows.node.expr


def test_no_marker_gives_a_reason() -> None:
    _, results = toy_runs.apply(
        [PlaceRows(), LowerReshards()], toy_runs.traced(lambda x: x + 1, torch.randn(6, 4)), CTX
    )
    assert results[1].rewrites == 0
    assert "holds no reshard" in str(results[1].notes[0])


@pytest.mark.parametrize("kind", ["dense", "latent"])
@pytest.mark.parametrize("pcp", [2, 3, 4])
def test_lowered_ranks_equal_marked_ones_bit_for_bit(kind: str, pcp: int) -> None:
    world = toy.World(toy_runs.MIXED, pcp)
    gm = toy_runs.captured(kind)[1].gm
    marked, _ = toy_runs.apply(SHARDED[:-1], gm, PassContext(pcp))
    lowered, _ = toy_runs.apply(SHARDED, gm, PassContext(pcp))
    assert torch.equal(toy_runs.sharded(marked, world, kind).restored, toy_runs.sharded(lowered, world, kind).restored)


def test_sabotage_wrong_split_is_seen() -> None:
    world = toy.World(toy_runs.MIXED, 2)
    gm, _ = toy_runs.apply(SHARDED, toy_runs.captured()[1].gm, PassContext(2))
    cat = next(node for node in gm.graph.nodes if is_collective(node)).args[0]
    cat.update_arg(0, list(reversed(cat.args[0])))  # packed value first, unpacked key first
    gm.recompile()
    assert (toy_runs.sharded(gm, world).restored - toy_runs.unsharded(world)).abs().max() > 1e-2


def test_an_operand_of_another_row_count_is_found_before_any_run() -> None:
    def twice_the_rows(x: torch.Tensor) -> torch.Tensor:
        return OPS.kv_cache_update(x.view(-1, 8), x.view(-1, 8) + 1, toy.LayerName("attn"))

    after, _ = toy_runs.apply(SHARDED, toy_runs.traced(twice_the_rows, torch.randn(6, 2, 8)), CTX)
    with pytest.raises(InvariantError, match=r"EQUAL_COLLECTIVES.*\n.*\n.*required the bare token count"):
        invariants.equal_collectives(after.graph, CTX)


def test_a_rule_may_gather_one_operand_only() -> None:
    with temporary_rule("pcp_toy::kv_cache_update", CacheWrite(rows=(1,))):
        after, _ = toy_runs.apply(SHARDED, toy_runs.traced(two_rows, torch.randn(6, 2, 8)), CTX)
        assert [node.target for node in after.graph.nodes].count(all_gather_rows_op) == 1
        invariants.check(OF_BODIES, after.graph, CTX)
