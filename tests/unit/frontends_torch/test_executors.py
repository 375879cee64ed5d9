# SPDX-License-Identifier: Apache-2.0
"""Who runs a graph: finding the group, and ranks that must agree on an output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.frontends.torch.executors import GroupExecutor, SimulatedExecutor, find_group
from pcp_passes.frontends.torch.fresh import fresh_space
from pcp_passes.frontends.torch.options import TorchOptions
from pcp_passes.frontends.torch.plan import build_plan


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_groups_are_found_by_object_mesh_name_and_description(world: dist.ProcessGroup) -> None:
    other = dist.new_group([0], group_desc="context")
    assert find_group(None) is world and find_group(other) is other
    assert find_group("context") is other and find_group(other.group_name) is other
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "pcp"))
    assert find_group(mesh["pcp"]) is mesh.get_group("pcp")
    with pytest.raises(ConfigError, match="required a process group, a one-dimensional device mesh, or"):
        find_group(mesh)
    with pytest.raises(ConfigError, match=r"no process group is called 'contest'; this process has 'context'"):
        find_group("contest")


def test_each_group_has_an_axis_of_its_own(world: dist.ProcessGroup) -> None:
    assert GroupExecutor.of(TorchOptions()).axis == "pcp"
    others = [dist.new_group([0]) for _ in range(2)]
    axes = [GroupExecutor.of(TorchOptions.parse({"group": group})).axis for group in others]
    assert len({"pcp", *axes}) == 3
    assert GroupExecutor.of(TorchOptions.parse({"axis": "cp"})).axis == "cp"


def ranks_graph(*, restored: bool) -> fx.GraphModule:
    """Returns this rank's rows, or (as a restored output would be) the same on all ranks."""
    graph = fx.Graph()
    x, rows, restore = (graph.placeholder(name) for name in ("x", "pcp_rows", "pcp_restore"))
    taken = graph.call_function(torch.index_select, (x, 0, rows))
    gathered = graph.call_function(torch.ops.pcp.all_gather_rows.default, (taken, 2, "pcp"))
    whole = graph.call_function(torch.index_select, (gathered, 0, restore))
    graph.output((whole if restored else taken,))
    return fx.GraphModule({}, graph)


def test_simulated_ranks_agree_on_their_outputs() -> None:
    executor, plan, x = SimulatedExecutor(2), build_plan(7, 2, "zigzag"), torch.randn(7, 3)
    x[2] = float("nan")
    program = executor.prepare(fresh_space(7, 4), ranks_graph(restored=True))
    (found,) = executor.run(program, [x], plan)
    assert torch.equal(found.nan_to_num(9.0), x.nan_to_num(9.0))
    assert [log.calls for log in executor.logs] == [1, 1]


def test_an_output_that_differs_between_ranks_is_an_error() -> None:
    executor, plan = SimulatedExecutor(2), build_plan(7, 2, "zigzag")
    program = executor.prepare(fresh_space(7, 4), ranks_graph(restored=False))
    with pytest.raises(PcpError, match="output %index_select of rank 1 differs from that of rank 0"):
        executor.run(program, [torch.randn(7, 3)], plan)


def test_the_axis_is_bound_for_the_call_only(world: dist.ProcessGroup) -> None:
    from pcp_passes import collectives

    seen: list[Any] = []
    executor, plan = GroupExecutor(world, "eager"), build_plan(7, 1, "zigzag")
    executor.run(lambda *_: seen.append(dict(collectives._axes)) or (), [torch.ones(7)], plan)
    assert seen == [{"pcp": world}] and "pcp" not in collectives._axes
