# SPDX-License-Identifier: Apache-2.0
"""Replicas and spread experts in vLLM, as far as no engine is needed: routes, row exchange over gloo, refusals."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import cpu_experts
from pcp_passes.frontends.vllm.cpu_experts import gather_rows, local_experts, reduce_rows, unroute_padding
from pcp_passes.frontends.vllm.data_parallel import refuse_fold_on_tp, spread_experts
from pcp_passes.piecewise.sync_check import SyncCheck

WEIGHTS = torch.tensor([[0.5, 0.5], [0.7, 0.3], [0.9, 0.1]])
EXPERTS = torch.tensor([[0, 3], [2, 1], [-1, -1]], dtype=torch.int32)
#: This rank has experts 2 and 3 of four.
EXPERT_MAP = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)


def test_experts_elsewhere_weigh_nothing() -> None:
    weights, local = local_experts(WEIGHTS, EXPERTS, EXPERT_MAP)
    assert local.dtype == torch.int32
    assert local.tolist() == [[0, 1], [0, 0], [0, 0]]
    assert torch.equal(weights, torch.tensor([[0.0, 0.5], [0.7, 0.0], [0.0, 0.0]]))


def test_all_experts_here_keep_their_numbers() -> None:
    weights, local = local_experts(WEIGHTS[:2], EXPERTS[:2], None)
    assert torch.equal(weights, WEIGHTS[:2]) and torch.equal(local, EXPERTS[:2])


def test_every_route_is_served_by_exactly_one_rank() -> None:
    """Summed over the ranks' maps, weights are the router's own; a map that is ignored serves all of them twice."""
    other = torch.tensor([0, 1, -1, -1], dtype=torch.int32)
    total = sum(local_experts(WEIGHTS, EXPERTS, mine)[0] for mine in (EXPERT_MAP, other))
    assert torch.equal(torch.as_tensor(total), WEIGHTS.where(EXPERTS >= 0, 0))
    ignored = sum(local_experts(WEIGHTS, EXPERTS, None)[0] for _ in range(2))
    assert not torch.equal(torch.as_tensor(ignored), WEIGHTS.where(EXPERTS >= 0, 0))


def test_padded_rows_are_not_routed() -> None:
    padding = torch.tensor([False, True, False, True])
    weights, experts = unroute_padding(WEIGHTS, EXPERTS, padding)
    assert experts.tolist() == [[0, 3], [-1, -1], [-1, -1]]
    assert torch.equal(weights[1], torch.zeros(2)) and torch.equal(weights[0], WEIGHTS[0])
    assert unroute_padding(WEIGHTS, EXPERTS, None)[1] is EXPERTS


def test_only_layers_that_dispatch_become_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(moe_forward="plain", moe_forward_shared="with a shared expert")
    monkeypatch.setattr(torch.ops, "vllm", ops, raising=False)

    def opaque(dispatches: bool, dp: int, shared: object) -> Any:
        parallel = SimpleNamespace(use_all2all_kernels=dispatches, dp_size=dp)
        config = SimpleNamespace(moe_parallel_config=parallel)
        return cpu_experts._opaque(SimpleNamespace(moe_config=config, _shared_experts=shared))

    assert opaque(False, 1, None) is None
    assert opaque(True, 1, None) == "plain"
    assert opaque(True, 2, object()) == "with a shared expert"
    assert opaque(False, 2, None) == "plain"


def test_repairs_are_made_once() -> None:
    class Communicator:
        def dispatch(self, *args: Any, **kwargs: Any) -> None: ...

    module = ModuleType("made_up")
    vars(module)["CpuCommunicator"] = Communicator
    cpu_experts._repair_communicator(module)
    first = vars(Communicator)["dispatch"]
    cpu_experts._repair_communicator(module)
    assert vars(Communicator)["dispatch"] is first
    assert {"all_gatherv", "reduce_scatterv"} <= vars(Communicator).keys()


# Refusals.


def _refused(
    monkeypatch: pytest.MonkeyPatch,
    *,
    experts: bool = True,
    cpu: bool = True,
    quantization: str = "",
    method: str = "",
    **parallel: Any,
) -> str | None:
    platforms = ModuleType("vllm.platforms")
    vars(platforms)["current_platform"] = SimpleNamespace(is_cpu=lambda: cpu)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    asked = {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": False, "tensor_parallel_size": 1}
    asked |= parallel
    speculative = SimpleNamespace(method=method) if method else None
    model = SimpleNamespace(is_moe=experts, quantization=quantization or None)
    sizes = SimpleNamespace(**asked)
    config = SimpleNamespace(parallel_config=sizes, model_config=model, speculative_config=speculative)
    return spread_experts(config)


@pytest.mark.parametrize(
    ("asked", "fragments"),
    [
        ({"enable_expert_parallel": False}, ("data_parallel_size=2 without", "set enable_expert_parallel to true")),
        ({"enable_eplb": True}, ("enable_eplb=true", "drop it")),
        ({"quantization": "fp8"}, ("'fp8'", "use an unquantized checkpoint")),
        ({"tensor_parallel_size": 2}, ("tensor_parallel_size=2", "never run", "one of them to 1")),
        ({"method": "dspark"}, ("'dspark'", "data_parallel_size=2", "never run", "use 'mtp'")),
        ({"method": "mtp"}, ()),
        ({"tensor_parallel_size": 2, "data_parallel_size": 1}, ()),
        ({"tensor_parallel_size": 2, "cpu": False}, ()),
        ({"method": "dspark", "data_parallel_size": 1}, ()),
        ({}, ()),
        ({"data_parallel_size": 1}, ()),
        ({"data_parallel_size": 1, "enable_expert_parallel": False, "quantization": "fp8"}, ()),
        ({"quantization": "fp8", "cpu": False}, ()),
        ({"experts": False, "enable_expert_parallel": False, "enable_eplb": True}, ()),
    ],
)
def test_spread_experts(asked: dict[str, Any], fragments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found = _refused(monkeypatch, **asked)
    assert (found is None) == (not fragments)
    assert all(fragment in str(found) for fragment in fragments)


def test_folding_is_refused_by_the_table() -> None:
    refuse_fold_on_tp(None)
    refuse_fold_on_tp({"fold_on_tp": False})
    with pytest.raises(ConfigError, match=r"pcp_passes.fold_on_tp=true: .*vLLM's groups cannot express; leave it out"):
        refuse_fold_on_tp({"fold_on_tp": True})


# Rows over gloo.

WORLD, WIDTH = 4, 64
Exchanged = dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]
#: (dp, pcp) flattened: a replica's count once per PCP rank; with one replica idle, and all alike.
SIZES = ((5, 5, 2, 2), (0, 0, 1, 1), (3, 3, 3, 3))


def _rows(rank: int, count: int) -> torch.Tensor:
    """Rows tagged with their owner and place; the values need all of float32, so that the order of sums shows."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(count, WIDTH, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (count, 1), generator=generator
    )
    rows[:, 0] = torch.arange(count) + 100.0 * rank
    return rows


def _exchange(rank: int, store: dist.Store) -> Exchanged:
    group: Any = dist.ProcessGroup(store, rank, WORLD)
    gloo = dist.ProcessGroupGloo(store, rank, WORLD, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    found = {}
    for sizes in SIZES:
        gathered = gather_rows(_rows(rank, sizes[rank]), sizes, group)
        parts = _rows(10 + rank, 1).expand(sum(sizes), WIDTH) if len(set(sizes)) == 1 else gathered * (rank + 0.1)
        found[sizes] = (gathered, reduce_rows(parts, sizes, rank, group))
    return found


@pytest.fixture(scope="module")
def exchanged() -> list[Exchanged]:
    """Each rank is a thread with a gloo group of its own."""
    store = dist.HashStore()
    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(_exchange, range(WORLD), [store] * WORLD))


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_arrive_by_owner_and_return_to_them(sizes: tuple[int, ...], exchanged: list[Exchanged]) -> None:
    wanted = torch.cat([_rows(rank, size) for rank, size in enumerate(sizes)])
    starts = [sum(sizes[:rank]) for rank in range(WORLD)]
    for rank, found in enumerate(exchanged):
        gathered, reduced = found[sizes]
        assert torch.equal(gathered, wanted)
        assert reduced.shape == (sizes[rank], WIDTH)
        if len(set(sizes)) > 1:
            total = wanted * 0.1 + wanted * 1.1 + wanted * 2.1 + wanted * 3.1
            assert torch.equal(reduced, total[starts[rank] :][: sizes[rank]])


def test_equal_rows_have_equal_sums_on_every_rank(exchanged: list[Exchanged]) -> None:
    """Copies of a row on several ranks: each rank adds the same parts in the same order, to the last bit."""
    first = exchanged[0][SIZES[2]][1]
    assert all(torch.equal(found[SIZES[2]][1], first) for found in exchanged)
    parts = [_rows(10 + rank, 1)[0] for rank in range(WORLD)]
    assert torch.equal(first[0], parts[0] + parts[1] + parts[2] + parts[3])


def test_the_order_of_a_sum_shows() -> None:
    """So the equality above means something."""
    parts = [_rows(10 + rank, 1)[0] for rank in range(WORLD)]
    forward, backward = sum(parts[1:], parts[0]), sum(parts[-2::-1], parts[-1])
    assert not torch.equal(forward, backward)


def test_rows_that_were_not_agreed_on_are_not_padded() -> None:
    with pytest.raises(AssertionError, match="2 rows where the ranks agreed on 3"):
        gather_rows(_rows(0, 2), (3, 3), SimpleNamespace(rank=lambda: 0))  # type: ignore[arg-type]


# What a step reads on the host, as the server's workers list it.


def _listed(act: Any) -> Counter[str]:
    from tests.vllm.replica_worker import by_package

    found: Counter[str] = Counter()
    with SyncCheck(found):
        act()
    return by_package(found)


def _compiled(path: str) -> Any:
    scope: dict[str, Any] = {"x": torch.ones(2)}
    exec(compile("def act():\n    return x.tolist()\n", path, "exec"), scope)
    return scope["act"]


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("/site-packages/pcp_passes/frontends/planted.py", "pcp_passes/frontends/planted.py"),
        ("/lib/site-packages/vllm/planted.py", "vllm/planted.py"),
        ("<eval_with_key>.7", "graph"),
    ],
)
def test_a_read_is_listed_by_where_it_is_made(file: str, place: str) -> None:
    assert _listed(_compiled(file)) == {f"{place}: Tensor.tolist": 1}


def test_a_step_without_reads_lists_nothing() -> None:
    assert not _listed(lambda: torch.ones(2).sum())
