# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs behind the interface of :mod:`pcp_passes.piecewise.replayer` (written against torch 2.11 to 2.13).

All graphs of a rank share one memory pool. A result is freed to the pool when the body that reads it is through, and
the next capture may take its place: right, because replays come in the order of the captures within a body call, and
nothing that a graph gave is read after the next body call begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pcp_passes.errors import ConfigError, GraphError
from pcp_passes.piecewise.replayer import Captured, Function, GraphKey, Replayer, Tensors, require_own


@dataclass(frozen=True, eq=False)
class CudaGraph(Captured):
    """A captured graph; its outputs name memory of the pool without keeping it."""

    graph: torch.cuda.CUDAGraph
    addresses: tuple[int, ...]
    """Of the inputs: the graph reads there, whatever a replay is given."""


class CudaReplayer(Replayer[CudaGraph]):
    """Warm-up, capture, replay.

    Args:
        max_bytes: bound on memory reserved for captured graphs.
        device: of the rank.
        warmups: runs before a capture, on a stream of their own: they compile, tune and allocate what lives longer than
            the graph (libraries' workspaces, caches).

    Raises:
        ConfigError: no warm-up: what lives longer would be allocated in the graph, and made anew by each replay.
    """

    def __init__(self, max_bytes: int | None, device: torch.device, warmups: int = 1) -> None:
        super().__init__(max_bytes)
        if warmups < 1:
            raise ConfigError(f"found {warmups} runs before a capture; required at least one.")
        self.device, self.warmups = device, warmups
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device)

    def _capture(
        self, key: GraphKey, function: Function, inputs: Tensors, names: Sequence[str]
    ) -> tuple[CudaGraph, Tensors]:
        if not self._graphs:  # a pool that all graphs have left takes no other: the allocator asserts that it is in use
            self._pool = torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(self.warmups):
                function(*inputs)
        here.wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # as the capture does first: else what it gives back hides what it takes
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a process group's watchdog, may query events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = tuple(function(*inputs))
        require_own(key, outputs, inputs)
        taken = max(torch.cuda.memory_reserved(self.device) - before, 0)
        graph.replay()
        return CudaGraph(tuple(map(unowned, outputs)), taken, graph, _addresses(inputs)), outputs

    def _replay(self, key: GraphKey, graph: CudaGraph, inputs: Tensors, names: Sequence[str]) -> Tensors:
        found = _addresses(inputs)  # about 0.1 us each; a replay is some 10 us of the host's time
        if found != graph.addresses:
            pairs = enumerate(zip(found, graph.addresses, strict=False))
            moved = [names[i] if i < len(names) else f"input {i}" for i, (now, then) in pairs if now != then]
            raise GraphError(
                f"{key} cannot be replayed, its inputs are not those of the capture: "
                f"{', '.join(moved) or f'{len(found)} of {len(graph.addresses)}'} moved.\n"
                "  next  write new values into the tensor that was captured instead of making another one"
            )
        graph.graph.replay()
        return graph.outputs


def _addresses(inputs: Tensors) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in inputs)


class _Address:
    """Memory as the CUDA array interface describes it: torch reads it in place and does not own it."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 2}


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides, without keeping the memory: it stays the pool's to reuse."""
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    raw = torch.as_tensor(_Address(tensor.data_ptr(), reach * tensor.element_size()), device=tensor.device)
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
