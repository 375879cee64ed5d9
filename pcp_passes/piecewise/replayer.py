# SPDX-License-Identifier: Apache-2.0
"""What captures and replays: one interface for CUDA graphs and for the checker that stands in for them on a CPU.

A :class:`GraphKey` names what is captured. The first run of a key captures it; later runs replay. After
:meth:`Replayer.freeze` nothing is captured any more, and a key that never was is an error.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

from pcp_passes.errors import ConfigError, GraphError

logger = logging.getLogger(__name__)
Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., Any]


class GraphMode(str, Enum):
    """How a body call runs: as it is, its split form on a bucket of rows, or as one graph."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True)
class GraphKey:
    """A body call on a bucket, or with ``piece`` one captured piece of it."""

    role: str
    variant: str
    mode: GraphMode
    rows: int
    requests: int = 0
    """Attention rows of a bucket of a full graph; 0 where attention is no part of the graph."""
    piece: int = -1

    @property
    def call(self) -> GraphKey:
        """The body call that a piece belongs to."""
        return self if self.piece < 0 else replace(self, piece=-1)

    def __str__(self) -> str:
        bucket = f"{self.rows}x{self.requests}" if self.requests else str(self.rows)
        piece = "" if self.piece < 0 else f" piece {self.piece}"
        return f"{self.role}.{self.variant} {self.mode.value} {bucket}{piece}"


@dataclass(frozen=True, eq=False)
class Captured:
    """What was captured under a key, whichever way it is replayed."""

    outputs: Tensors
    """Written by each replay, at addresses that never change."""
    bytes: int
    """Memory that stays taken for it."""


Graph = TypeVar("Graph", bound=Captured)


class Replayer(ABC, Generic[Graph]):
    """Captures and replays functions of tensors at fixed addresses. One per rank.

    Attributes:
        captures, hits: how often each key was captured, and replayed.
        uncaptured: body calls that run without a graph because the bound was reached.

    Args:
        max_bytes: bound on what captured graphs keep; ``None`` sets none. A body call that exceeds it is dropped as a
            whole when it ends, and runs uncaptured from then on, since a graph cannot follow a piece without one: so
            capture the largest bucket first, and what is dropped is small.

    Raises:
        ConfigError: a bound below 0.
    """

    watches = False
    """Whether a run compares everything that a whole graph reads, caches and parameters too."""

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ConfigError(f"the bound on captured bytes is {max_bytes}; required 0 or more, or None for no bound.")
        self.max_bytes = max_bytes
        self.captures: Counter[GraphKey] = Counter()
        self.hits: Counter[GraphKey] = Counter()
        self.uncaptured: set[GraphKey] = set()
        self.frozen = False
        self._graphs: dict[GraphKey, Graph] = {}
        self._replaying: GraphKey | None = None
        self._grown = False

    @property
    def captured_bytes(self) -> int:
        """Bytes that all captured graphs keep."""
        return sum(graph.bytes for graph in self._graphs.values())

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every captured key, in the order of capture."""
        return tuple(self._graphs)

    def freeze(self) -> None:
        """From now on nothing is captured; a key without a graph is an error."""
        self.frozen = True

    def release(self) -> None:
        """Drop every graph, and capture no more. Graphs with collectives inside must go before their process group."""
        self.frozen = True
        self._graphs.clear()

    def begin_call(self, key: GraphKey) -> None:
        """A body call begins: what graphs of this rank gave before is no longer valid."""
        self._replaying, self._grown = None, False

    def end_call(self, key: GraphKey) -> None:
        """A body call is through; it is dropped if its capture took what graphs keep over the bound.

        Not before: until a rank is through it runs what it captures twice, once to warm up, and a piece may hold a
        collective. Ranks that judge by their own bytes would issue different numbers of them.
        """
        if self._grown and self.max_bytes is not None and self.captured_bytes > self.max_bytes:
            self._drop(key.call)

    def forget(self, call: GraphKey) -> None:
        """Drop what an interrupted capture of a body call left: see :meth:`run` for why it is of no use."""
        for key in [key for key in self._graphs if key.call == call]:
            del self._graphs[key]
            del self.captures[key]
        self._grown = False

    def filled(self, name: str, tail: torch.Tensor, pad: torch.Tensor | int) -> None:
        """The padding rows ``tail`` of buffer ``name`` have just been filled with ``pad``."""

    def has(self, key: GraphKey) -> bool:
        """Whether the key was captured."""
        return key in self._graphs

    def own(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors whose addresses hold for as long as the replayer lives: buffers and parameters."""

    def run(self, key: GraphKey, function: Function, inputs: Tensors, names: Sequence[str] = ()) -> Tensors:
        """Capture or replay ``function(*inputs)``, a tuple of tensors that are valid until the next body call begins.

        Args:
            key: of the graph.
            function: tensors to a tuple of tensors; it reads nothing else that changes.
            inputs: at the addresses of the capture.
            names: of the inputs, for messages; ``input 3`` and so on without.

        Raises:
            GraphError: a key without a graph after :meth:`freeze`; inputs that a graph cannot take; or a capture in a
                body call that replayed another piece already, whose results the shared pool would give away.
        """
        if key in self._graphs:
            return self.replay(key, inputs, names)
        if key.call in self.uncaptured:
            return tuple(function(*inputs))
        if self.frozen:
            buckets = ", ".join(sorted({str(k.call) for k in self._graphs if (k.role, k.mode) == (key.role, key.mode)}))
            raise GraphError(
                f"{key} runs after the warm-up but was never captured; captured are {buckets or 'no such graphs'}.\n"
                "  next  capture it in the warm-up, or let the dispatcher choose one of the captured buckets"
            )
        if self._replaying == key.call:
            raise GraphError(
                f"{key} would be captured after other pieces of its body call were replayed: their results lie in the "
                "pool without being kept, and the capture could take their place.\n"
                "  next  capture a body call as a whole; forget() what an interrupted capture left"
            )
        graph, outputs = self._capture(key, function, inputs, names)
        self._graphs[key] = graph
        self.captures[key] += 1
        self._grown = True
        return outputs

    def replay(self, key: GraphKey, inputs: Tensors, names: Sequence[str] = ()) -> Tensors:
        """:meth:`run` of a key that :meth:`has` a graph, for callers that need not make its function first."""
        self.hits[key] += 1
        self._replaying = key.call
        return self._replay(key, self._graphs[key], inputs, names)

    def _drop(self, call: GraphKey) -> None:
        if not self.uncaptured:
            logger.warning("%s takes captured graphs over %d bytes; it runs uncaptured", call, self.max_bytes)
        self.uncaptured.add(call)
        self.forget(call)

    @abstractmethod
    def _capture(
        self, key: GraphKey, function: Function, inputs: Tensors, names: Sequence[str]
    ) -> tuple[Graph, Tensors]:
        """Capture; the graph, and the outputs of one run at its addresses."""

    @abstractmethod
    def _replay(self, key: GraphKey, graph: Graph, inputs: Tensors, names: Sequence[str]) -> Tensors:
        """Replay; the outputs."""


def require_own(key: GraphKey, outputs: Tensors, inputs: Tensors) -> None:
    """Whether a captured function gave tensors of its own.

    Raises:
        GraphError: a result shares memory with an input, which is written again while the result still counts.
    """
    given = {storage_of(tensor) for tensor in inputs if tensor.numel()}
    for index, tensor in enumerate(outputs):
        if tensor.numel() and storage_of(tensor) in given:
            raise GraphError(
                f"{key} gives result {index} as a view of an input; required a tensor of its own, as a graph writes "
                "it.\n  next  make the view outside the captured function"
            )


def storage_of(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor lies in."""
    return tensor.untyped_storage().data_ptr()
