# SPDX-License-Identifier: Apache-2.0
"""Programs of a symbolic token count, captured as functional ATen, compared with closed forms element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pcp_passes.ir import meta
from pcp_passes.ir import predicates as p
from pcp_passes.ir.index.algebra import analyse
from pcp_passes.ir.index.values import IndexValue


def captured(function: Callable[..., Any], *more: torch.Tensor, tokens: int = 5) -> fx.GraphModule:
    """``function(n, *more)`` with the token count ``n`` symbolic; the first input only brings the size."""

    def program(source: torch.Tensor, *rest: torch.Tensor) -> Any:
        return function(source.shape[0], *rest)

    gm: fx.GraphModule = make_fx(program, tracing_mode="symbolic", pre_dispatch=True)(torch.zeros(tokens), *more)
    return gm


def outcome(gm: fx.GraphModule, values: dict[fx.Node, IndexValue]) -> IndexValue | None:
    result = next(iter(reversed(gm.graph.nodes))).args[0]
    return values.get(result if isinstance(result, fx.Node) else result[0])  # type: ignore[index, arg-type]


def closed_form(function: Callable[..., Any], *more: torch.Tensor) -> str | None:
    gm = captured(function, *more)
    value = outcome(gm, analyse(gm.graph))
    return None if value is None else str(value)


class Recorder(fx.Interpreter):
    """Keeps the real value of every node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.held: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.held[n] = super().run_node(n)
        return self.held[n]


def wrong_elements(
    gm: fx.GraphModule, values: dict[fx.Node, IndexValue], tokens: int, *more: torch.Tensor
) -> list[str]:
    """Every element, of every node with a closed form, that is not what the closed form says."""
    symbol = meta.tensor(next(iter(gm.graph.nodes))).shape[0].node.expr  # type: ignore[union-attr]
    recorder = Recorder(gm)
    recorder.run(torch.zeros(tokens), *more)
    wrong = []
    for node, value in values.items():
        real = recorder.held[node]
        assert tuple(real.shape) == tuple(whole(size, symbol, tokens) for size in value.shape), node
        for at in itertools.product(*map(range, real.shape)):
            if real[at].item() != value.at(at, {symbol: tokens}):
                wrong.append(f"%{node.name}{at} is {real[at].item()} for T={tokens}, stated {value}")
    return wrong


def whole(size: p.Lin, symbol: Any, tokens: int) -> int:
    return int(IndexValue((), size).at((), {symbol: tokens}))
