# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's CUDA graph wrapper that checks replays instead of making them. For tests only.

It captures and replays when vLLM's would, by running the piece, and refuses what a captured graph would have answered
wrongly: inputs that moved, late captures; between two bodies every graph's outputs are overwritten, as the pool that
they share allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from pcp_passes.errors import PcpError

#: What stale integers look like; floating-point outputs become NaN.
POISON = 1 << 30


class ReplayError(PcpError):
    """A replay that a captured graph would have answered from other memory than it was given."""


@dataclass(frozen=True)
class Argument:
    """What a graph holds on to of a tensor that it reads."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> Argument | int | None:
        """The tensor's description, the integer itself, ``None`` for what no graph reads."""
        if isinstance(value, torch.Tensor):
            return cls(value.data_ptr(), tuple(value.shape), tuple(value.stride()), value.dtype)
        return int(value) if isinstance(value, (int, torch.SymInt)) else None


@dataclass
class Capture:
    """One captured size of one piece: what went in, and the buffers that every replay fills again.

    ``fresh`` are the outputs that own their memory; the others are views of inputs. ``inputs`` are held, as no graph
    does: an allocator would hand out a freed input's address again, and hide that nobody keeps it.
    """

    arguments: list[Argument | int | None]
    inputs: tuple[Any, ...]
    output: Any
    fresh: list[torch.Tensor]
    hits: int = 0


@dataclass(eq=False)
class ReplayCheck:
    """Stands where ``vllm.compilation.cuda_graph.CUDAGraphWrapper`` stands on CUDA, with its constructor and calls.

    Attributes:
        graph_pool: vLLM's, which it exchanges while it measures.
        dropped: captures that :meth:`clear_graphs` has forgotten.

    Raises:
        ReplayError: at a replay, when an input moved or changed its shape.
        RuntimeError: vLLM's own, at a capture after the warm-up.
    """

    runnable: Callable[..., Any]
    vllm_config: Any
    runtime_mode: Any
    cudagraph_options: Any = None
    captures: dict[Any, Capture] = field(default_factory=dict)
    graph_pool: Any = None
    dropped: int = 0

    #: In the order in which vLLM made them: body by body, piece by piece.
    instances: ClassVar[list[ReplayCheck]] = []

    def __post_init__(self) -> None:
        ReplayCheck.instances.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("runnable"), name)

    def unwrap(self) -> Callable[..., Any]:
        """The piece itself."""
        return self.runnable

    def clear_graphs(self) -> None:
        """Forget every capture: vLLM measures with graphs that it does not keep."""
        self.dropped += len(self.captures)
        self.captures.clear()

    @property
    def body(self) -> str:
        """The compiled graph that the piece is of: ``backbone``, ``backbone_replicated``, ..."""
        return str(self.runnable.vllm_backend.prefix)  # type: ignore[attr-defined]

    @property
    def index(self) -> int:
        """The piece's place in its body."""
        return int(self.runnable.piecewise_compile_index)  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context, is_forward_context_available

        if not is_forward_context_available():
            return self.runnable(*args)
        context = get_forward_context()
        mode = context.cudagraph_runtime_mode
        if mode == CUDAGraphMode.NONE or mode != self.runtime_mode:
            return self.runnable(*args)
        if self.index == 0:
            # All graphs share one pool: whatever a graph left there may be gone when the next body runs.
            poison_all()
        found = self.captures.get(context.batch_descriptor)
        return self._replay(found, args) if found is not None else self._capture(context.batch_descriptor, args)

    def _capture(self, key: Any, args: tuple[Any, ...]) -> Any:
        from vllm.compilation.monitor import validate_cudagraph_capturing_enabled

        validate_cudagraph_capturing_enabled()
        arguments = [Argument.of(value) for value in args]
        output = self.runnable(*args)
        owned = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        fresh = [value for value in _tensors(output) if value.untyped_storage().data_ptr() not in owned]
        self.captures[key] = Capture(arguments, args, output, fresh)
        return output

    def _replay(self, capture: Capture, args: tuple[Any, ...]) -> Any:
        for number, (then, value) in enumerate(zip(capture.arguments, args, strict=True)):
            now = Argument.of(value)
            if now != then:
                raise ReplayError(
                    f"piece {self.index} of {self.body} was captured with {_said(then)} as its input {number} and is "
                    f"replayed with {_said(now)}; a graph would read the former. Keep that input in one buffer."
                )
        output = self.runnable(*args)
        owned = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        fresh = [value for value in _tensors(output) if value.untyped_storage().data_ptr() not in owned]
        for buffer, value in zip(capture.fresh, fresh, strict=True):
            buffer.copy_(value)
        capture.hits += 1
        return capture.output


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    values = output if isinstance(output, (tuple, list)) else (output,)
    return (value for value in values if isinstance(value, torch.Tensor))


def _said(argument: Argument | int | None) -> str:
    if not isinstance(argument, Argument):
        return f"the value {argument}"
    return f"{argument.dtype}{list(argument.shape)} of strides {list(argument.stride)} at {argument.address:#x}"


def poison_all() -> None:
    """Overwrite what every captured piece left in its outputs."""
    for piece in ReplayCheck.instances:
        for capture in piece.captures.values():
            for buffer in capture.fresh:
                buffer.fill_(float("nan") if buffer.is_floating_point() else POISON)


def captured() -> list[dict[str, Any]]:
    """Per piece and captured size: ``body``, ``piece``, ``rows`` and how often it was replayed (``hits``)."""
    return [
        {"body": piece.body, "piece": piece.index, "rows": key.num_tokens, "hits": capture.hits}
        for piece in ReplayCheck.instances
        for key, capture in piece.captures.items()
    ]


def report(worker: Any) -> list[dict[str, Any]]:
    """:func:`captured`, as a function that a session runs on a worker."""
    return captured()
