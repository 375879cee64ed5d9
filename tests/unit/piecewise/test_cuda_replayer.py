# SPDX-License-Identifier: Apache-2.0
"""The order in which the CUDA replayer asks for streams, captures and replays, with a stand-in that records it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.ranks import GroupExecutor
from pcp_passes.errors import ConfigError, GraphError
from pcp_passes.piecewise import cuda
from pcp_passes.piecewise.cuda import CudaReplayer
from pcp_passes.piecewise.replayer import GraphKey, GraphMode

LARGE, SMALL = (GraphKey("target", "replicated", GraphMode.FULL, 4 * n, n) for n in (4, 2))


class Device:
    """Records calls of ``torch.cuda``. A graph reserves memory for what its first capture of the pool needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.reserved = 1000
        self.pool_bytes = 0
        self.pools = 0
        device, calls = self, self.calls

        class Stream:
            def __init__(self, name: Any = "side") -> None:
                self.name = name

            def wait_stream(self, other: Any) -> None:
                calls.append(f"{self.name if isinstance(self.name, str) else 'side'} waits")

        class Graph:
            def replay(self) -> None:
                calls.append("replay")

        @contextmanager
        def graph(made: Any, pool: Any, stream: Any, capture_error_mode: str) -> Any:
            calls.append(f"capture in {pool}, {capture_error_mode}")
            yield
            need = device.need
            device.reserved += max(need - device.pool_bytes, 0)
            device.pool_bytes = max(need, device.pool_bytes)
            calls.append("captured")

        @contextmanager
        def on_stream(stream: Any) -> Any:
            calls.append("on side")
            yield

        self.need = 100
        for name, value in {
            "graph_pool_handle": self.new_pool, "Stream": Stream, "current_stream": lambda _: Stream("main"),
            "stream": on_stream, "synchronize": lambda _: calls.append("synchronize"), "empty_cache": lambda: None,
            "memory_reserved": lambda _: self.reserved, "CUDAGraph": Graph, "graph": graph,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(cuda, "unowned", lambda tensor: tensor.detach())

    def new_pool(self) -> str:
        self.pools += 1
        return "the pool" if self.pools == 1 else f"pool {self.pools}"


def test_warm_up_then_capture_then_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    replayer = CudaReplayer(None, torch.device("cuda"))
    x = torch.zeros(4)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        device.calls.append("run")
        return (x + 1,)

    (strong,) = replayer.run(LARGE, function, (x,))
    assert device.calls == [
        "side waits", "on side", "run", "main waits", "synchronize",
        "capture in the pool, thread_local", "run", "captured", "replay",
    ]  # fmt: skip
    device.calls.clear()
    (again,) = replayer.run(LARGE, function, (x,))
    assert device.calls == ["replay"], "nothing runs on the host but the replay"
    assert again is not strong and again.data_ptr() == strong.data_ptr(), (
        "the pool's memory, not kept alive by the graph"
    )
    assert (replayer.captures[LARGE], replayer.hits[LARGE]) == (1, 1)


def test_buckets_share_one_pool_so_smaller_ones_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    replayer = CudaReplayer(120, torch.device("cuda"))
    x = torch.zeros(4)
    for key, need in ((LARGE, 100), (SMALL, 50)):
        device.need = need
        replayer.run(key, lambda x: (x + 1,), (x,))
    assert replayer.captured_bytes == 100 and replayer.keys == (LARGE, SMALL)
    device.need = 150
    third = GraphKey("drafter", "replicated", GraphMode.FULL, 4, 4)
    replayer.run(third, lambda x: (x + 1,), (x,))
    replayer.end_call(third)
    assert replayer.uncaptured == {third} and replayer.captured_bytes == 100
    device.calls.clear()
    assert replayer.run(third, lambda x: (x + 1,), (x,))[0].tolist() == [1.0] * 4 and not device.calls


def test_nothing_is_captured_after_the_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    replayer = CudaReplayer(None, torch.device("cuda"))
    replayer.freeze()
    with pytest.raises(GraphError, match="never captured"):
        replayer.run(LARGE, lambda x: (x,), (torch.zeros(1),))
    assert not device.calls


def test_inputs_that_moved_are_refused_before_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    replayer = CudaReplayer(None, torch.device("cuda"))
    x, weight = torch.zeros(4), torch.ones(4)
    replayer.run(LARGE, lambda x, w: (x + w,), (x, weight), ("target ids", "weight"))
    device.calls.clear()
    with pytest.raises(GraphError, match=r"full 16x4 cannot be replayed.*: weight moved"):
        replayer.run(LARGE, lambda x, w: (x + w,), (x, weight.clone()), ("target ids", "weight"))
    with pytest.raises(GraphError, match="1 of 2 moved"):
        replayer.run(LARGE, lambda x, w: (x + w,), (x,))
    assert not device.calls


def test_a_view_of_an_input_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    replayer = CudaReplayer(None, torch.device("cuda"))
    with pytest.raises(GraphError, match="gives result 0 as a view of an input"):
        replayer.run(LARGE, lambda x: (x[:2],), (torch.zeros(4),))


def test_a_pool_that_all_graphs_left_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator asserts that a pool which it is given again is in use."""
    device = Device(monkeypatch)
    replayer = CudaReplayer(50, torch.device("cuda"))
    x = torch.zeros(4)
    replayer.run(LARGE, lambda x: (x + 1,), (x,))
    replayer.end_call(LARGE)
    assert replayer.uncaptured == {LARGE} and not replayer.keys
    device.pool_bytes, device.need = 0, 40
    replayer.run(SMALL, lambda x: (x + 1,), (x,))
    pools = [call for call in device.calls if call.startswith("capture in")]
    assert pools == ["capture in the pool, thread_local", "capture in pool 2, thread_local"]


def test_a_capture_without_a_warm_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first run makes, such as caches, would lie in the graph and be made anew by each replay."""
    Device(monkeypatch)
    with pytest.raises(ConfigError, match="found 0 runs before a capture"):
        CudaReplayer(None, torch.device("cuda"), warmups=0)


def test_graphs_that_hold_collectives_go_before_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    replayer = CudaReplayer(None, torch.device("cuda"))
    x = torch.zeros(4)
    replayer.run(LARGE, lambda x: (x + 1,), (x,))
    executor = GroupExecutor.__new__(GroupExecutor)
    executor.ranks = [SimpleNamespace(runner=SimpleNamespace(replayer=replayer))]  # type: ignore[list-item]
    executor._guard = executor.heartbeat = None
    for collectives, left in (("outside", 1), ("inside", 0)):
        executor.options = EngineOptions(graph_mode="piecewise", graph_collectives=collectives)
        executor.close()
        assert len(replayer.keys) == left
    with pytest.raises(GraphError, match="never captured"):
        replayer.run(LARGE, lambda x: (x + 1,), (x,))
