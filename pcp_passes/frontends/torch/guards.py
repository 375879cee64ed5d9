# SPDX-License-Identifier: Apache-2.0
"""When a compiled graph may serve a call.

Dynamo guards what *it* assumed. What a capture assumes on top is checked here, on every call:

- sizes other than the token count, and Python floats, are constants of the graph (:class:`CallKey`);
- the fresh shape environment may hold for some lengths only
  (:meth:`~pcp_passes.frontends.torch.fresh.FreshSpace.broken_guards`);
- an input may have been taken for what it held at capture: positions that count from 0, a mask of ones
  (:class:`ValueGuard`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.torch.capture import float_values, symbol_values
from pcp_passes.frontends.torch.inputs import Expression, GraphInput, TokenChoice
from pcp_passes.ir.index.algebra import Assumption, assumptions_wanted, holds, recognise


@dataclass(frozen=True)
class CallKey:
    """The constants of one call: sizes other than T by symbol name, and Python floats by position."""

    sizes: tuple[tuple[str, int], ...] = ()
    floats: tuple[tuple[int, float], ...] = ()


def read_call(inputs: Sequence[GraphInput], choice: TokenChoice, arguments: Sequence[Any]) -> tuple[int, CallKey]:
    """T and the constants of one call.

    Raises:
        ConfigError: the token dimensions of the arguments have different sizes.
    """
    sizes = symbol_values(inputs, arguments)
    tokens = {symbol: size for symbol, size in sizes.items() if symbol in choice.symbols}
    if len(set(tokens.values())) != 1:
        raise ConfigError(f"token dimensions differ in size: {_places(inputs, tokens)}. Give all the same tokens.")
    others = tuple((str(symbol), size) for symbol, size in sizes.items() if symbol not in choice.symbols)
    return next(iter(tokens.values())), CallKey(others, tuple(float_values(inputs, arguments).items()))


def _places(inputs: Sequence[GraphInput], tokens: Mapping[Expression, int]) -> str:
    return ", ".join(
        f"{given.source} has {tokens[size]} along dimension {dim}"
        for given in inputs
        for dim, size in enumerate(given.size)
        if size in tokens
    )


@dataclass(eq=False)
class ValueGuard:
    """An input is what the graph assumes it is.

    Attributes:
        index, name: the input.
        assumption: what it must hold.
        is_parameter: of a module; read again only when it has been written or replaced.
    """

    index: int
    name: str
    assumption: Assumption
    is_parameter: bool = False
    _seen: tuple[int, int] | None = None

    def broken(self, arguments: Sequence[Any]) -> str | None:
        """What does not hold for these arguments; ``None`` when it does."""
        tensor = arguments[self.index]
        state = (tensor.data_ptr(), tensor._version) if self.is_parameter and not tensor.is_inference() else None
        if state is not None and state == self._seen:
            return None
        if not holds(self.assumption, tensor):
            return f"{self.name} is {self.assumption}"
        self._seen = state
        return None


def value_guards(graph: fx.Graph, inputs: Sequence[GraphInput], arguments: Sequence[Any]) -> dict[str, ValueGuard]:
    """Assumptions that could decide a mask of ``graph`` and that hold for these arguments, by placeholder name."""
    wanted = assumptions_wanted(graph)
    found: dict[str, ValueGuard] = {}
    for node, given in zip(graph.find_nodes(op="placeholder"), inputs, strict=False):
        tensor = arguments[given.index]
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not node.users:
            continue
        best: Assumption | None = None
        if node.name in wanted:
            best = next((assumption for assumption in wanted[node.name] if holds(assumption, tensor)), None)
        elif given.is_parameter and not tensor.is_floating_point():
            best = recognise(tensor)
        if best is not None:
            found[node.name] = ValueGuard(given.index, given.source, best, given.is_parameter)
    return found
