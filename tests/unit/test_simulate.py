# SPDX-License-Identifier: Apache-2.0
from functools import cache
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import fx

from pcp_passes.collectives import CollectiveLog, is_collective
from pcp_passes.errors import ConfigError, RankMismatch
from pcp_passes.passes import SHARDED, PassContext, build_variants
from pcp_passes.simulate import simulate, simulate_segments
from tests import toy, toy_runs

pytestmark = pytest.mark.unit
GATHER = torch.ops.pcp.all_gather_rows.default


def gathering(pcp: int, axis: str = "pcp", times: int = 1) -> fx.GraphModule:
    """``x -> gather(x + 1)``, repeated on the rank's first rows."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(times):
        x = graph.call_function(torch.add, (x, 1))
        rows = graph.call_function(GATHER, (x, pcp, axis))
    graph.output((rows, x))
    return fx.GraphModule({}, graph)


def test_rows_are_exchanged_in_rank_order_and_owned_by_each_rank() -> None:
    inputs = [[torch.full((2, 3), float(rank))] for rank in range(3)]
    outputs = simulate(gathering(3), inputs)
    wanted = torch.tensor([1.0, 1, 2, 2, 3, 3])[:, None].expand(6, 3)
    assert all(torch.equal(rows, wanted) for rows, _ in outputs)
    outputs[0][0].zero_()
    assert torch.equal(outputs[1][0], wanted)
    assert [float(own[0, 0]) for _, own in outputs] == [1, 2, 3]


def test_each_rank_has_its_own_state() -> None:
    world = toy.World(toy_runs.MIXED, 3)
    body = build_variants(toy_runs.captured()[1].gm, PassContext(3))["sharded"]
    found = toy_runs.sharded(body, world)
    storages = {cache.untyped_storage().data_ptr() for step in found.steps for cache in step.caches.values()}
    assert len(storages) == 6
    assert not toy._steps, "every context was left again"


def test_shared_state_is_seen_when_ranks_are_not_separated() -> None:
    """Sabotage of the hook: all ranks run with the metadata of rank 0."""
    world = toy.World(toy_runs.MIXED, 2)
    model, capture = toy_runs.captured()
    body = build_variants(capture.gm, PassContext(2))["sharded"]
    step = world.rank_step(0, model, torch.float32)
    inputs = [capture.bind(*world.rank_tokens(rank)) for rank in range(2)]
    outputs = simulate(body, inputs, rank_context=lambda rank: toy.running(step))
    restored = torch.cat([output[0] for output in outputs])[world.restore]
    assert (restored - toy_runs.unsharded(world)).abs().max() > 1e-2


@pytest.mark.parametrize("pcp", [2, 3, 4])
@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_all_ranks_issue_the_same_collectives_whatever_the_length(pcp: int, kind: str) -> None:
    body = build_variants(toy_runs.captured(kind)[1].gm, PassContext(pcp))["sharded"]
    for length in (1, 2, 2 * pcp - 1, 2 * pcp, 2 * pcp + 1):
        world = toy.World([toy.Request(0, length)], pcp)
        found = toy_runs.sharded(body, world, kind)
        width = toy_runs.captured(kind)[0].cache_width
        assert [entry.shape for entry in found.logs[0].entries] == [(world.rows, width)] * 2
        assert all(log.entries == found.logs[0].entries for log in found.logs)
        torch.testing.assert_close(found.restored, toy_runs.unsharded(world, kind), rtol=0, atol=1e-5)


def test_a_rank_without_a_real_row_takes_part() -> None:
    world = toy.World([toy.Request(4, 1)], 4)
    assert sum(all(row < 0 for row in rows) for rows in world.rank_rows) == 3
    body = build_variants(toy_runs.captured()[1].gm, PassContext(4))["sharded"]
    found = toy_runs.sharded(body, world)
    torch.testing.assert_close(found.restored, toy_runs.unsharded(world), rtol=0, atol=1e-5)


def test_unequal_rows_are_named_with_rank_node_and_shapes() -> None:
    inputs = [[torch.ones(2, 3)], [torch.ones(2, 3)], [torch.ones(4, 3)]]
    with pytest.raises(RankMismatch) as raised:
        simulate(gathering(3), inputs)
    text = str(raised.value)
    assert text.startswith("rank 2 diverges from rank 0")
    assert "rank 2  pcp::all_gather_rows(torch.float32[4, 3], axis 'pcp') at %all_gather_rows_default" in text
    assert "Pad every rank to the same row count" in text


def test_unequal_dtypes_are_named() -> None:
    with pytest.raises(RankMismatch, match=r"float64\[2, 3\]"):
        simulate(gathering(2), [[torch.ones(2, 3)], [torch.ones(2, 3, dtype=torch.float64)]])


def test_a_rank_that_issues_fewer_collectives_is_named() -> None:
    graphs = [gathering(2, times=2), gathering(2, times=1)]
    with pytest.raises(RankMismatch, match="rank 1 diverges from rank 0") as raised:
        simulate(graphs, [[torch.ones(2, 3)]] * 2)
    assert "rank 1  has finished" in str(raised.value)


def test_another_axis_is_a_divergence() -> None:
    with pytest.raises(RankMismatch, match="axis 'tp'"):
        simulate([gathering(2), gathering(2, axis="tp")], [[torch.ones(2, 3)]] * 2)


def test_a_body_without_its_gather_diverges() -> None:
    world = toy.World(toy_runs.MIXED, 2)
    model, capture = toy_runs.captured()
    good, bad = (toy_runs.apply(SHARDED, capture.gm, PassContext(2))[0] for _ in range(2))
    gather = next(filter(is_collective, bad.graph.nodes))
    with bad.graph.inserting_before(gather):
        copies = bad.graph.call_function(torch.cat, ([gather.args[0]] * 2,))
    gather.replace_all_uses_with(copies)
    bad.graph.erase_node(gather)
    bad.recompile()
    steps = [world.rank_step(rank, model, torch.float32) for rank in range(2)]
    inputs = [capture.bind(*world.rank_tokens(rank)) for rank in range(2)]
    logs: list[CollectiveLog] = []
    with pytest.raises(RankMismatch, match="rank 1 diverges from rank 0"):
        simulate([good, bad], inputs, rank_context=lambda rank: toy.running(steps[rank]), logs=logs)
    assert [log.calls for log in logs] == [1, 1], "both met at the second layer once"


def test_a_graph_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="gathers over 4 ranks, but inputs were given for 2"):
        simulate(gathering(4), [[torch.ones(2, 3)]] * 2)


def test_missing_inputs_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank 0 has 0 inputs; required one for %x too"):
        simulate(gathering(1), [[]])
    with pytest.raises(ConfigError, match="found 1 graphs and inputs for 2 ranks"):
        simulate([gathering(2)], [[torch.ones(1)]] * 2)
    with pytest.raises(ConfigError, match="for 0 ranks"):
        simulate(gathering(2), [])


def test_an_error_inside_a_rank_comes_through() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.matmul, (x, x)))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        simulate(fx.GraphModule({}, graph), [[torch.ones(2, 3)]])


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    pcp=st.integers(2, 5),
    requests=st.lists(
        st.builds(toy.Request, context=st.integers(0, 9), new=st.integers(1, 13)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**20),
)
def test_any_batch_equals_the_unsharded_run(pcp: int, requests: list[toy.Request], seed: int) -> None:
    world = toy.World(requests, pcp, seed)
    found = toy_runs.sharded(_body(pcp), world, dtype=torch.float64)
    wanted = toy_runs.unsharded(world, dtype=torch.float64)
    torch.testing.assert_close(found.restored, wanted, rtol=0, atol=toy_runs.TOLERANCE[torch.float64])
    assert all(log.entries == found.logs[0].entries for log in found.logs)


@cache
def _body(pcp: int) -> fx.GraphModule:
    return build_variants(toy_runs.captured(dtype=torch.float64)[1].gm, PassContext(pcp))["sharded"]


# Several axes.

GRID = {"pcp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)]}


def gathers(*axes: str) -> fx.GraphModule:
    """Gathers over one axis after another; each rank's rows come first in none of them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for axis in axes:
        x = graph.call_function(GATHER, (x, 2, axis))
    graph.output(x)
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("run", [simulate, simulate_segments])
def test_groups_of_several_axes_meet_apart(run: Any) -> None:
    inputs = [[torch.full((1 + rank // 2, 1), float(rank))] for rank in range(4)]
    logs: list[CollectiveLog] = []
    found = run(gathers("pcp"), inputs, groups=GRID, logs=logs)
    assert [out.flatten().tolist() for out in found] == [[0, 1], [0, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    assert [log.entries[0].shape for log in logs] == [(1, 1), (1, 1), (2, 1), (2, 1)]
    equal = [[torch.full((1, 1), float(rank))] for rank in range(4)]
    found = run(gathers("dp", "pcp"), equal, groups=GRID)
    assert [out.flatten().tolist() for out in found] == [[0, 2, 1, 3]] * 4
    assert found[0].flatten().tolist() != run(gathers("pcp", "dp"), equal, groups=GRID)[0].flatten().tolist()
    backwards = {**GRID, "pcp": [(1, 0), (2, 3)]}
    assert run(gathers("pcp"), equal, groups=backwards)[0].flatten().tolist() == [1, 0]


def test_groups_need_not_be_at_the_same_collective() -> None:
    """Two pairs with other graphs, of other lengths."""
    graphs = [gathers("pcp")] * 2 + [gathers("pcp", "pcp", "pcp")] * 2
    found = simulate_segments(graphs, [[torch.ones(1)]] * 4, groups=GRID)
    assert [len(out) for out in found] == [2, 2, 8, 8]


def test_a_deadlock_names_every_waiting_rank() -> None:
    graphs = [gathers("pcp"), gathers("dp"), gathers("dp"), gathers("pcp")]
    with pytest.raises(RankMismatch, match="no group of ranks can go on") as raised:
        simulate(graphs, [[torch.ones(1)]] * 4, groups=GRID)
    text = str(raised.value)
    for rank, other, axis in ((0, 1, "pcp"), (1, 3, "dp"), (2, 0, "dp"), (3, 2, "pcp")):
        assert f"rank {rank}  pcp::all_gather_rows(torch.float32[1], axis '{axis}')" in text
        assert f"waits for rank {other}" in text
    with pytest.raises(RankMismatch, match=r"waits for rank 1(?s:.*)rank 1  has finished"):
        simulate([gathers("pcp"), gathers(), gathers("dp"), gathers("pcp")], [[torch.ones(1)]] * 4, groups=GRID)


def test_a_divergence_inside_one_group_is_named() -> None:
    inputs = [[torch.ones(1)], [torch.ones(1)], [torch.ones(3)], [torch.ones(2)]]
    with pytest.raises(RankMismatch, match="rank 3 diverges from rank 2") as raised:
        simulate(gathers("pcp"), inputs, groups=GRID)
    assert "rank 0" not in str(raised.value)


def test_groups_that_are_no_partition_are_refused() -> None:
    with pytest.raises(ConfigError, match="required each of 4 ranks in one of them"):
        simulate(gathers("pcp"), [[torch.ones(1)]] * 4, groups={"pcp": [(0, 1), (1, 2)]})
    with pytest.raises(ConfigError, match=r"over axis 'dp', but groups were given for \['pcp'\] only"):
        simulate(gathers("dp"), [[torch.ones(1)]] * 4, groups={"pcp": GRID["pcp"]})
    with pytest.raises(ConfigError, match="gathers over 2 ranks, but inputs were given for 4"):
        simulate(gathers("pcp"), [[torch.ones(1)]] * 4, groups={"pcp": [(0, 1, 2, 3)]})
