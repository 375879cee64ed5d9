# SPDX-License-Identifier: Apache-2.0
"""The mesh against vLLM's own groups, and devices of vLLM's data-parallel children. No engine starts."""

from __future__ import annotations

import argparse
import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from pcp_passes.frontends.vllm import placement, plugin
from pcp_passes.mesh.axes import GROUPS, Mesh
from pcp_passes.mesh.devices import place

pytestmark = pytest.mark.vllm

MESHES = tuple(
    Mesh(external_dp=e, dp=dp, pp=pp, pcp=pcp, tp=tp)
    for e, dp, pp, pcp, tp in itertools.product((1, 2), (1, 2), (1, 2, 3), (1, 2, 3), (1, 2))
)


def _groups_of_vllm(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[tuple[int, ...]]]:
    """What ``initialize_model_parallel`` would make, with process groups left out."""
    import torch
    from vllm.distributed import parallel_state

    made: dict[str, set[tuple[int, ...]]] = {}

    def record(group_ranks: list[list[int]], *args: Any, group_name: str, **kwargs: Any) -> Any:
        made[group_name] = set(map(tuple, group_ranks))
        return SimpleNamespace(rank_in_group=0, world_size=len(group_ranks[0]))

    parallel = SimpleNamespace(
        data_parallel_size=mesh.dp, enable_elastic_ep=False, enable_eplb=False, use_all2all=False
    )
    config = SimpleNamespace(parallel_config=parallel, model_config=None, engram_config=None)
    with monkeypatch.context() as patch:
        for name, held in list(vars(parallel_state).items()):
            if name.isupper() and name.startswith("_") and held is None:  # _TP, _PCP, ...: groups not made yet
                patch.setattr(parallel_state, name, None)
        patch.setattr(parallel_state, "init_model_parallel_group", record)
        patch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0))
        patch.setattr("vllm.config.get_current_vllm_config", lambda: config)
        for name, value in (("is_initialized", True), ("get_world_size", mesh.world_size), ("get_rank", 0)):
            patch.setattr(torch.distributed, name, lambda *args, value=value: value)
        parallel_state.initialize_model_parallel(mesh.tp, mesh.pp, mesh.pcp, 1, "gloo")
    return made


def test_groups_are_those_that_vllm_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    for mesh in MESHES:
        made = _groups_of_vllm(mesh, monkeypatch)
        for name in GROUPS:
            assert set(mesh.groups(name)) == made[name], (mesh, name)


@pytest.mark.parametrize("mesh", [Mesh(pp=2, pcp=2), Mesh(dp=2, pcp=2), Mesh(dp=4, pp=2, pcp=2, tp=2)])
def test_sizes_and_local_devices_are_those_of_vllm(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of engines that one front end starts, vLLM counts PCP itself."""
    from vllm.config import ParallelConfig
    from vllm.v1.engine import utils

    parallel = ParallelConfig(
        pipeline_parallel_size=mesh.pp, prefill_context_parallel_size=mesh.pcp, tensor_parallel_size=mesh.tp,
        data_parallel_size=mesh.dp, distributed_executor_backend="mp",
    )  # fmt: skip
    assert (parallel.world_size, parallel.world_size_across_dp) == (mesh.engine_size, mesh.world_size)
    monkeypatch.setattr(utils, "current_platform", SimpleNamespace(device_id_to_physical_device_id=lambda n: n))
    table = place(mesh, 1, mesh.world_size)
    for replica in range(mesh.dp):
        given = utils.get_physical_gpu_ids_for_local_dp_rank("CUDA_VISIBLE_DEVICES", replica, parallel.world_size)
        assert given == list(table.devices(replica, 0))


@pytest.fixture
def launcher() -> Any:
    """vLLM's launcher of several ports, as it was installed."""
    module: Any = importlib.import_module(placement.MODULE)
    original = getattr(module._build_device_ids, "__pcp_passes_original__", module._build_device_ids)
    before, module._build_device_ids = module._build_device_ids, original
    yield module
    module._build_device_ids = before


def _arguments(mesh: Mesh, **given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        tensor_parallel_size=mesh.tp, pipeline_parallel_size=mesh.pp, prefill_context_parallel_size=mesh.pcp,
        data_parallel_size=mesh.dp, data_parallel_size_local=mesh.dp, data_parallel_start_rank=None, node_rank=0,
        port=8000, **{"device_ids": None, "additional_config": {"pcp_passes": {}}, **given},
    )  # fmt: skip


def _children(module: Any, args: argparse.Namespace) -> list[list[Any]]:
    """Devices of each child, as the supervisor hands them out."""
    return [
        module._build_vllm_dp_server_args(args, local_rank).device_ids
        for local_rank in range(args.data_parallel_size_local)
    ]


@pytest.mark.parametrize(
    "mesh", [Mesh(dp=2, pcp=2), Mesh(dp=2, pp=2, pcp=2), Mesh(dp=4, pcp=2), Mesh(dp=2, pcp=2, tp=2)]
)
def test_children_of_the_launcher_get_the_devices_of_the_placement(launcher: Any, mesh: Mesh) -> None:
    args = _arguments(mesh)
    stock = _children(launcher, args)
    assert stock[1][0] < mesh.engine_size, "this vLLM counts PCP by itself: the hook may go"
    placement.count_pcp(launcher)
    placement.count_pcp(launcher)  # vLLM loads plugins several times
    found = _children(launcher, args)
    table = place(mesh, 1, mesh.world_size)
    assert found == [list(table.devices(replica, 0)) for replica in range(mesh.dp)]
    assert args.tensor_parallel_size == mesh.tp, "the arguments themselves are left alone"
    named = _children(launcher, _arguments(mesh, device_ids=[10 + n for n in range(mesh.world_size)]))
    assert named == [[10 + device for device in devices] for devices in found]
    with pytest.raises(ValueError, match="--device-ids has 3 entries"):
        _children(launcher, _arguments(mesh, device_ids=[0, 1, 2]))


def test_the_plugin_installs_it(launcher: Any) -> None:
    assert not hasattr(launcher._build_device_ids, "__pcp_passes_original__")
    plugin.register()
    assert _children(launcher, _arguments(Mesh(dp=2, pcp=2))) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("config", [None, {}, {"pcp_passes": {"mode": "off"}}])
def test_engines_that_ask_for_nothing_are_left_alone(launcher: Any, config: Any) -> None:
    args = _arguments(Mesh(dp=2, pcp=2), additional_config=config)
    stock = _children(launcher, args)
    placement.count_pcp(launcher)
    assert _children(launcher, args) == stock == [[0], [1]]


def test_a_launcher_that_counts_pcp_is_left_alone() -> None:
    def counts(args: argparse.Namespace, local_rank: int) -> list[int]:
        size = args.tensor_parallel_size * args.pipeline_parallel_size * args.prefill_context_parallel_size
        return list(range(local_rank * size, (local_rank + 1) * size))

    module: Any = SimpleNamespace(_build_device_ids=counts)
    placement.count_pcp(module)
    assert module._build_device_ids is counts


def _affinity(monkeypatch: pytest.MonkeyPatch, nic: str = "", **given: Any) -> str | None:
    monkeypatch.setenv("VLLM_GPU_NIC_PCIE_MAPPING", nic)
    sizes = {"data_parallel_size": 2, "prefill_context_parallel_size": 2, "distributed_executor_backend": "mp"}
    parallel = SimpleNamespace(**{**sizes, "data_parallel_backend": "mp", "numa_bind": False, **given})
    return placement.device_affinity(SimpleNamespace(parallel_config=parallel))


def test_bindings_that_forget_pcp_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two functions of vLLM give the first worker of the second replica the second device of the first."""
    from vllm.utils import numa_utils
    from vllm.v1.executor import vllm_net_devices

    parallel = SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=2, nnodes_within_dp=1,
        distributed_executor_backend="mp", data_parallel_backend="mp", data_parallel_rank_local=1,
    )  # fmt: skip
    right = place(Mesh(dp=2, pcp=2), 1, 4).devices(1, 0)[0]
    config: Any = SimpleNamespace(parallel_config=parallel)
    assert numa_utils._get_gpu_index(parallel, 0) != right, "this vLLM counts PCP by itself: the refusal may go"
    assert vllm_net_devices._dp_adjusted_local_rank(0, config) != right, "as above"
    assert _affinity(monkeypatch) is None
    told = _affinity(monkeypatch, nic="0000:1a:00.0=0000:1b:00.0", numa_bind=True)
    assert told is not None
    assert "numa_bind=true (NUMA nodes) and VLLM_GPU_NIC_PCIE_MAPPING" in told
    assert _affinity(monkeypatch, numa_bind=True) is not None
    for alone in ({"data_parallel_size": 1}, {"prefill_context_parallel_size": 1}, {"data_parallel_backend": "ray"}):
        assert _affinity(monkeypatch, numa_bind=True, **alone) is None
