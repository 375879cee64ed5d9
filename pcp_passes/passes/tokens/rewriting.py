# SPDX-License-Identifier: Apache-2.0
"""What the passes that replace attention share: positions of token rows, new nodes, and values behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.revalue import Revalue

_ATEN: Any = torch.ops.aten
_VIEWS = ("aten::view", "aten::_unsafe_view")


class Positions:
    """``arange(T)`` on each device, made once, in front of the first node that needs it."""

    def __init__(self, graph: fx.Graph, pass_name: str) -> None:
        self._graph, self._pass_name = graph, pass_name
        self._made: dict[tuple[str, torch.device], fx.Node] = {}

    def of(self, rows: fx.Node, dim: int, before: fx.Node) -> fx.Node:
        """Positions of the token rows along ``dim`` of ``rows``, for use at ``before``."""
        held = meta.tensor(rows)
        assert held is not None
        size = held.shape[dim]
        key = (str(size), held.device)
        if key not in self._made:
            mode = fakes.fake_mode_of(held)
            assert mode is not None, f"%{rows.name} has no fake value"
            with self._graph.inserting_before(before):
                count = self._count(rows, dim, before)
                made = self._graph.call_function(_ATEN.arange.default, (count,), {"device": held.device})
            meta.set_value(made, fakes.call_on_fakes(mode, _ATEN.arange.default, (size,), {"device": held.device}))
            meta.set_created_by(made, self._pass_name)
            self._made[key] = made
        return self._made[key]

    def _count(self, rows: fx.Node, dim: int, before: fx.Node) -> fx.Node:
        """The token count from a node that holds it, or from an input: an activation will be cut to a rank's rows."""
        held = meta.tensor(rows)
        assert held is not None
        size = held.shape[dim]
        for node in self._graph.nodes:
            if node is before:
                break
            value = meta.value(node)
            if isinstance(value, torch.SymInt) and fakes.same_size(value, size):
                found: fx.Node = node
                return found
        inputs = self._graph.find_nodes(op="placeholder")
        for node in reversed([*inputs]):  # the plan's restore index is the last input, and is never cut
            tensor = meta.tensor(node)
            for place, length in enumerate(tensor.shape if tensor is not None else ()):
                if fakes.same_size(length, size):
                    return self._sized(node, place, length)
        return self._sized(rows, dim, size)

    def _sized(self, source: fx.Node, dim: int, size: Any) -> fx.Node:
        made = self._graph.call_function(_ATEN.sym_size.int, (source, dim))
        meta.set_value(made, size)
        meta.set_created_by(made, self._pass_name)
        return made


class Maker:
    """Nodes with values, in the name of the node they serve."""

    def __init__(self, graph: fx.Graph, serves: fx.Node, pass_name: str) -> None:
        self._graph, self._serves, self._pass_name = graph, serves, pass_name

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self._graph.call_function(target, args, kwargs)
        return meta.adopt(made, self._serves, self._pass_name)


def refresh(graph: fx.Graph, changed: set[fx.Node], pass_name: str) -> None:
    """Restate values behind ``changed`` while sizes or strides differ: our ops lay out rows before heads."""
    restate = Revalue([meta.value(node) for node in changed])
    for node in graph.nodes:
        if changed.isdisjoint(node.all_input_nodes) or node in changed or node.op == "output":
            continue
        before = _layouts(meta.value(node))
        try:
            restate(node)
        except (RuntimeError, ValueError):
            assert rules.op_name(node) in _VIEWS, f"%{node.name} does not take strides of another order"
            node.target = _ATEN.reshape.default
            meta.set_changed_by(node, pass_name)
            restate(node)
        if _layouts(meta.value(node)) != before:
            changed.add(node)


def _layouts(value: object) -> list[str]:
    return [f"{tuple(t.shape)} {tuple(t.stride())}" for t in fakes.tensors_in(value)]
