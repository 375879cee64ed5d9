# SPDX-License-Identifier: Apache-2.0
"""The only accessor of ``node.meta``.

Two kinds of entries are touched: the value the tracer left (``example_value`` in Dynamo graphs, ``val`` in ATen graphs)
and our own :class:`NodeInfo` under one key. Module path and source line are read, never written, except that a new node
inherits those of the node it serves.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import fakes
from pcp_passes.ir.placements import Placement

_VALUE_KEYS = ("example_value", "val")
_INFO_KEY = "pcp_passes"
_TRACER_ONLY = frozenset({"grapharg"})
_INHERITED = ("nn_module_stack", "stack_trace")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class NodeInfo:
    """What this package knows about a node."""

    placement: Placement | None = None
    layer: str | None = None
    """Name of the attention layer the node serves (cache writes, attention, and what is inserted for them)."""
    created_by: str | None = None
    """Name of the pass that inserted the node; ``None`` for a captured node."""
    changed_by: str | None = None
    """Name of the pass that gave a captured node another target."""
    results: tuple[Placement, ...] = ()
    """Placement of each result, for an op with several."""
    rows: Placement | None = None
    """Of a replicated value of token rows: how its consumers take them."""
    reason: str | None = None
    """Why the node runs replicated although an operand is sharded."""


def info(node: fx.Node) -> NodeInfo:
    """Our record of ``node`` (empty for a node nothing has looked at yet)."""
    found = node.meta.get(_INFO_KEY)
    return found if isinstance(found, NodeInfo) else NodeInfo()


def placement(node: fx.Node) -> Placement | None:
    """Placement of the node's value; ``None`` before placements are recorded and for values that are not tensors."""
    return info(node).placement


def set_placement(node: fx.Node, where: Placement) -> None:
    """Record where the node's rows live."""
    node.meta[_INFO_KEY] = replace(info(node), placement=where)


def placements(node: fx.Node) -> tuple[Placement, ...]:
    """Placement of each result of an op with several; one entry for an op with one; empty where none is stated."""
    found = info(node).placement
    return () if found is None else (info(node).results or (found,))


def set_placements(node: fx.Node, where: Sequence[Placement]) -> None:
    """Record where the rows of each result live."""
    node.meta[_INFO_KEY] = replace(info(node), placement=where[0], results=tuple(where))


def set_rows(node: fx.Node, rows: Placement | None, reason: str | None = None) -> None:
    """Record how consumers take the rows of a replicated value, and why it is replicated."""
    node.meta[_INFO_KEY] = replace(info(node), rows=rows, reason=reason)


def set_layer(node: fx.Node, layer: str) -> None:
    """Record the attention layer the node serves."""
    node.meta[_INFO_KEY] = replace(info(node), layer=layer)


def set_changed_by(node: fx.Node, pass_name: str) -> None:
    """Record the pass that gave a captured node another target."""
    node.meta[_INFO_KEY] = replace(info(node), changed_by=pass_name)


def restore(node: fx.Node, new: object, known: NodeInfo, module: str = "", source: str = "") -> None:
    """Give a node read back from text what the text says: value, record, module path, and ``file.py:214``."""
    node.meta["val"] = new
    node.meta[_INFO_KEY] = known
    if module:
        node.meta["nn_module_stack"] = {module: (module, torch.nn.Module)}
    if source:
        file, _, line = source.rpartition(":")
        node.meta["stack_trace"] = f'  File "{file}", line {line}, in captured\n'


def carry_over(captured: fx.Node, copy: fx.Node) -> None:
    """Give the copy of a node the entries of the captured one, without those only its tracer may hold."""
    copy.meta = {key: held for key, held in captured.meta.items() if key not in _TRACER_ONLY}


def value(node: fx.Node) -> Any:
    """The tracer's example value: fake tensors, ``SymInt``, opaque objects; ``None`` when there is none."""
    for key in _VALUE_KEYS:
        if key in node.meta:
            return node.meta[key]
    return None


def has_value(node: fx.Node) -> bool:
    """Whether the tracer, or a pass, stated a value (which may be ``None``, for an op that returns nothing)."""
    return any(key in node.meta for key in _VALUE_KEYS)


def set_value(node: fx.Node, new: object) -> None:
    """State the node's value under the key its neighbours use."""
    key = next((k for n in (node, *node.all_input_nodes) for k in _VALUE_KEYS if k in n.meta), _VALUE_KEYS[0])
    node.meta[key] = new


def set_aten_value(node: fx.Node, new: object) -> None:
    """State the value of a node of an ATen graph that has no operand to learn the key from."""
    node.meta["val"] = new


def forget_unbacked(node: fx.Node) -> None:
    """Drop the symbols a tracer bound to data-dependent sizes: another environment makes its own."""
    node.meta.pop("unbacked_bindings", None)


def duplicate(node: fx.Node, copy: fx.Node) -> None:
    """Give the copy of a node everything the node has."""
    copy.meta = dict(node.meta)


def tensor(node: object) -> torch.Tensor | None:
    """The node's value when it is a single tensor."""
    found = value(node) if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """Every tensor of the node's value."""
    return fakes.tensors_in(value(node))


def holds_tensor(node: fx.Node) -> bool:
    """Whether the node's value is or contains a tensor."""
    return any(True for _ in tensors(node))


def compute_value(node: fx.Node) -> Any:
    """Run one node on its operands' example values; the graph is not touched.

    The operands' own fake mode is used: inside a ``torch.compile`` backend the ambient mode is another object, and
    mixing the two is an error. Raises ``AssertionError`` when no operand carries a fake tensor.
    """
    args: Any = fx.map_arg(node.args, value)
    kwargs: Any = fx.map_arg(node.kwargs, value)
    mode = fakes.fake_mode_of([value(n) for n in node.all_input_nodes])
    if node.op == "call_method":
        return _method(node, mode, args, kwargs)
    assert node.op == "call_function", f"no value can be computed for a {node.op} node (%{node.name})"
    if node.target is operator.getitem and not isinstance(args[0], torch.Tensor):
        return args[0][args[1]]
    assert mode is not None, f"%{node.name} has no fake tensor operand to take a fake mode from"
    return fakes.call_on_fakes(mode, node.target, args, kwargs)


def _method(node: fx.Node, mode: Any, args: Any, kwargs: Any) -> Any:
    assert mode is not None, f"%{node.name} has no fake tensor operand to take a fake mode from"
    return fakes.call_on_fakes(mode, getattr(args[0], str(node.target)), args[1:], kwargs)


def adopt(
    node: fx.Node, serves: fx.Node, pass_name: str, where: Placement | None = None, layer: str | None = None
) -> fx.Node:
    """Give a new node everything a captured one has: value, placement, origin, and the source of the node it serves."""
    for key in _INHERITED:
        if key in serves.meta:
            node.meta[key] = serves.meta[key]
    node.meta[_INFO_KEY] = NodeInfo(where, layer, pass_name)
    set_value(node, compute_value(node))
    return node


def adopt_lazily(node: fx.Node, serves: fx.Node | None, pass_name: str, where: Placement) -> None:
    """:func:`adopt` without a value: for a caller that states it otherwise."""
    for key in _INHERITED:
        if serves is not None and key in serves.meta:
            node.meta[key] = serves.meta[key]
    node.meta[_INFO_KEY] = NodeInfo(where, info(serves).layer if serves is not None else None, pass_name)


def set_created_by(node: fx.Node, pass_name: str) -> None:
    """Record the pass that inserted a copy of a captured node."""
    node.meta[_INFO_KEY] = replace(info(node), created_by=pass_name)


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that made the node (``model.layers.3.mlp``), or ``""``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    last = next(reversed(stack.values()))
    return _clean_path(str(last[0] if isinstance(last, tuple) else last))


def source_line(node: fx.Node) -> str:
    """``file.py:214`` of the innermost frame that made the node, or ``""``. Directories are left out."""
    trace = node.meta.get("stack_trace") or getattr(node, "stack_trace", None)
    frames = _FRAME.findall(trace) if isinstance(trace, str) else []
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def _clean_path(path: str) -> str:
    """Dynamo spells a module as Python source; users know it by its dotted name."""
    path = re.sub(r"L\['(\w+)'\]", r"\1", path)
    path = re.sub(r"\._modules\b", "", path)
    path = re.sub(r"\[['\"]?([\w.]+)['\"]?\]", r".\1", path)
    path = re.sub(r"__(?:getitem|call)__\w*", "", path)
    return path.removeprefix("self.").strip(".") if path != "self" else ""
