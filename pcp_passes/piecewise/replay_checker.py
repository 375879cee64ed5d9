# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph would do to a wrong program, shown on a CPU: the replayer of tests and of machines without a GPU.

A graph reads and writes addresses, so a replay under other ones is silently wrong, and its outputs share a memory pool
with other graphs, so they hold only until the next body call. The checker runs the function *of the capture* each time,
whatever it is given later, since a graph knows no other; and it runs it between fixed addresses. It refuses a replay
whose inputs moved or changed, refuses to capture over a tensor that nobody keeps in place, given or merely reached, and
poisons what a body call gave when the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from pcp_passes.errors import GraphError
from pcp_passes.host_reads import allowed
from pcp_passes.piecewise.reads import Reads
from pcp_passes.piecewise.replayer import Captured, Function, GraphKey, Replayer, Tensors, require_own
from pcp_passes.piecewise.replayer import storage_of as _storage

_POISON_BYTE = 0xFF
"""Every bit set is NaN in each floating type, and in the two parts of an FP8 record."""


@dataclass(frozen=True, eq=False)
class CheckedGraph(Captured):
    """Addresses of a capture."""

    inputs: Tensors
    """Other names of the same memory: it stays taken, so that no other tensor is ever seen at its address."""
    function: Function
    """What was captured, with whatever it has closed over."""


class ReplayChecker(Replayer[CheckedGraph]):
    """See the module. Reads values on the host, as a check on a CPU may.

    Args:
        max_bytes: see :class:`Replayer`.
        looks_inside: whether captured functions are watched for reads of memory that nothing keeps. A compiled artifact
            makes memory that no dispatch mode sees being made.
    """

    watches = True

    def __init__(self, max_bytes: int | None = None, looks_inside: bool = True) -> None:
        super().__init__(max_bytes)
        self.looks_inside = looks_inside
        self._owned: dict[int, torch.Tensor] = {}
        self._dirty: dict[int, torch.Tensor] = {}

    def own(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._owned[_storage(tensor)] = tensor

    def begin_call(self, key: GraphKey) -> None:
        super().begin_call(key)
        for tensor in self._dirty.values():
            poison(tensor)
        self._dirty.clear()

    @allowed("the checker stands for a GPU, where nothing looks at a tail")
    def filled(self, name: str, tail: torch.Tensor, pad: torch.Tensor | int) -> None:
        wrong = (tail != pad).nonzero()
        if len(wrong):
            raise GraphError(
                f"{name} holds {tail[tuple(wrong[0].tolist())].item()} in padding row {int(wrong[0][0])} of "
                f"{tail.shape[0]}, left by an earlier call; required {int(pad)} in every padding row.\n"
                "  next  fill the whole tail of the bucket whenever fewer rows are filled than it has"
            )

    def _capture(
        self, key: GraphKey, function: Function, inputs: Tensors, names: Sequence[str]
    ) -> tuple[CheckedGraph, Tensors]:
        homeless = [i for i, held in enumerate(inputs) if held.numel() and _storage(held) not in self._owned]
        if homeless:
            raise GraphError(
                f"{key} would capture {', '.join(_named(names, i) for i in homeless)} at an address that nothing "
                "keeps: neither a static buffer, nor a parameter, nor a result of a captured graph.\n"
                "  next  hold the value in front of the piece"
            )
        reads = Reads(inputs, self._owned)
        with reads if self.looks_inside else nullcontext():
            found = tuple(function(*inputs))
        reads.require_none(key)
        require_own(key, found, inputs)
        outputs = tuple(tensor.clone(memory_format=torch.preserve_format) for tensor in found)
        self.own(outputs)
        graph = CheckedGraph(
            outputs,
            sum(out.numel() * out.element_size() for out in outputs),
            tuple(tensor.detach() for tensor in inputs),
            function,
        )
        self._soil(outputs)
        return graph, outputs

    def _replay(self, key: GraphKey, graph: CheckedGraph, inputs: Tensors, names: Sequence[str]) -> Tensors:
        wrong = [
            f"{_named(names, i)} is {_place(found)}, required {_place(held)}"
            for i, (found, held) in enumerate(zip(inputs, graph.inputs, strict=False))
            if _differs(found, held)
        ]
        if len(inputs) != len(graph.inputs):
            wrong.append(f"found {len(inputs)} inputs, required {len(graph.inputs)}")
        if wrong:
            raise GraphError(
                f"{key} cannot be replayed, its inputs are not those of the capture: {'; '.join(wrong)}.\n"
                "  next  write new values into the tensor that was captured instead of making another one"
            )
        made = graph.function(*inputs)
        for i, (out, value) in enumerate(zip(graph.outputs, made, strict=True)):
            if value.shape != out.shape or value.dtype != out.dtype:
                raise GraphError(
                    f"{key} gives result {i} as {value.dtype}{list(value.shape)}, captured was "
                    f"{out.dtype}{list(out.shape)}.\n  next  capture one graph per shape"
                )
            out.copy_(value)
        self._soil(graph.outputs)
        return graph.outputs

    def _soil(self, outputs: Tensors) -> None:
        for out in outputs:
            self._dirty[_storage(out)] = out


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with what shows wherever it is read: NaN, an index that no table has, true."""
    if tensor.dtype == torch.bool or not (tensor.dtype.is_floating_point or tensor.dtype == torch.uint8):
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 2)
    else:
        tensor.view(torch.uint8).fill_(_POISON_BYTE)


def _differs(found: torch.Tensor, held: torch.Tensor) -> bool:
    return (
        found.data_ptr() != held.data_ptr() or found.shape != held.shape or found.stride() != held.stride()
        or found.dtype != held.dtype
    )  # fmt: skip


def _place(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()} at {tensor.data_ptr():#x}"


def _named(names: Sequence[str], index: int) -> str:
    return names[index] if index < len(names) else f"input {index}"
