# SPDX-License-Identifier: Apache-2.0
"""What a split body calls: pieces, and the holds in front of them, printed as ``pcp_graph.hold``.

Without a runner a piece runs its graph and a hold gives its operand, so a split body is the body. Under a runner
(:func:`entered`) a piece is handed to :meth:`PieceRunner.run_piece`, and a hold to :meth:`PieceRunner.hold`, which
copies the value to where the captured piece reads it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import fx, nn

from pcp_passes.ir import meta
from pcp_passes.ir.printer import print_graph

NAMESPACE = "pcp_graph"
Collectives = Literal["outside", "inside"]
InputKind = Literal["parameter", "held", "made"]
"""Where a piece takes an input from: a parameter or constant, a hold, or the result of another piece."""


class PieceRunner(Protocol):
    """What runs the pieces of one rank."""

    def run_piece(self, piece: Piece, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The piece's results for ``args``, in the order of its inputs and outputs."""
        ...

    def hold(self, value: torch.Tensor, slot: str, dim: int | None) -> torch.Tensor:
        """``value`` at the fixed address of ``slot``; its rows stand in dimension ``dim`` (``None``: it has none)."""
        ...


_RUNNER: ContextVar[PieceRunner | None] = ContextVar("pcp_graph_runner", default=None)


def current() -> PieceRunner | None:
    """The runner that pieces and holds of this context are handed to."""
    return _RUNNER.get()


@contextmanager
def entered(runner: PieceRunner | None) -> Iterator[None]:
    """Hand pieces and holds to ``runner`` for the length of a ``with`` block."""
    token = _RUNNER.set(runner)
    try:
        yield
    finally:
        _RUNNER.reset(token)


class Hold:
    """``hold(value, slot, dim)``: the value, at the fixed address of ``slot`` where a runner gives it one."""

    def __init__(self) -> None:
        self.__name__ = "hold"
        self.__module__ = NAMESPACE  # the namespace under which the printer shows it

    def __call__(self, value: torch.Tensor, slot: str, dim: int | None) -> torch.Tensor:
        runner = _RUNNER.get()
        return value if runner is None else runner.hold(value, slot, dim)


hold = Hold()


def is_hold(node: fx.Node) -> bool:
    """Whether the node is a hold."""
    return node.op == "call_function" and node.target is hold


@dataclass(frozen=True)
class Slot:
    """A static buffer that holds of a split body write: contiguous, of ``shape`` with ``rows`` at ``dim``."""

    name: str
    shape: tuple[int | None, ...]
    """Sizes; ``None`` where the rows stand."""
    dtype: torch.dtype
    dim: int | None
    """Dimension of the rows; ``None`` for a value without rows."""

    @property
    def bytes_per_row(self) -> int:
        """Bytes that each row adds; 0 for a value without rows."""
        return 0 if self.dim is None else self._bytes

    @property
    def constant_bytes(self) -> int:
        """Bytes of a value without rows; 0 for a value with rows."""
        return self._bytes if self.dim is None else 0

    @property
    def _bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= 1 if size is None else size
        return count * self.dtype.itemsize


class Piece(nn.Module):
    """A stretch of a body without a cut, as one call: tensors in, a flat tuple of tensors out.

    Results are results of kernels: none is a view of an input or of another result.

    Args:
        gm: the stretch with every parameter and constant as an input; equal pieces of a body share it.
        key: :func:`piece_key` of its graph.
        index: place among the pieces of its body.
        kinds: for each input, where it comes from.
        rows: input and dimension that the row count is read from.
        collectives: whether the piece may hold any.
    """

    def __init__(
        self, gm: fx.GraphModule, key: str, index: int, kinds: tuple[InputKind, ...], rows: tuple[int, int],
        collectives: Collectives = "outside",
    ) -> None:  # fmt: skip
        super().__init__()
        self.gm = gm
        self.key = key
        self.index = index
        self.kinds = kinds
        self.rows = rows
        self.collectives: Collectives = collectives
        self.held = tuple(i for i, kind in enumerate(kinds) if kind == "held")
        self.parameter_inputs = tuple(i for i, kind in enumerate(kinds) if kind == "parameter")

    def forward(self, *args: torch.Tensor) -> Any:
        runner = _RUNNER.get()
        return self.gm(*args) if runner is None else runner.run_piece(self, args)

    def row_count(self, args: tuple[torch.Tensor, ...]) -> int:
        """Rows of a call with ``args``."""
        position, dim = self.rows
        return int(args[position].shape[dim])


def piece_key(graph: fx.Graph, symbol: Any) -> str:
    """SHA-256 (hex) of what a piece computes: its text, with the types of its inputs and no name of a parameter."""
    text = print_graph(graph, numbered=True, placements=False, comments=False)
    text = re.sub(rf"\b{re.escape(str(symbol))}\b", "rows", text)
    return hashlib.sha256(text.encode()).hexdigest()


def piece_at(graph: fx.Graph, node: fx.Node) -> Piece | None:
    """The piece a node calls, or ``None``."""
    if node.op != "call_module" or graph.owning_module is None:
        return None
    found = graph.owning_module.get_submodule(str(node.target))
    return found if isinstance(found, Piece) else None


def pieces_of(gm: fx.GraphModule) -> tuple[Piece, ...]:
    """The pieces of a split body, in the order they run; empty for a body that is not split."""
    return tuple(piece for node in gm.graph.nodes if (piece := piece_at(gm.graph, node)) is not None)


def slot_of(node: fx.Node, name: str | None = None) -> Slot:
    """The slot a hold writes; ``name`` instead of its own."""
    _, own, dim = node.args
    held = meta.tensor(node)
    assert held is not None, f"%{node.name} holds no tensor"
    shape = tuple(None if place == dim else int(size) for place, size in enumerate(held.shape))
    return Slot(str(own) if name is None else name, shape, held.dtype, dim)  # type: ignore[arg-type]


def static_slots(gm: fx.GraphModule) -> tuple[Slot, ...]:
    """The static buffers that the holds of a split body write, by name, in the order of their first hold."""
    found: dict[str, Slot] = {}
    for node in gm.graph.nodes:
        if is_hold(node):
            slot = slot_of(node)
            assert found.setdefault(slot.name, slot) == slot, (
                f"slot {slot.name} has two types: {found[slot.name]}, {slot}"
            )
    return tuple(found.values())
