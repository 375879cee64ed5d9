# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a graph are closed forms of their own index: positions, segment numbers, masks.

An abstract interpretation over functional ATen. ``arange(T)`` is ``i0``; views move indices; a comparison of two such
tensors is a condition on indices; and so a mask that a model builds in fifty ops is read as ``i3 <= i2``, for every T.
Only what is proved has a value: an op outside the table, an operand without a value, an index in a dtype that cannot
count, all give none. Large activations are never looked at: they have no operand with a value.

Models hand in some of these tensors. The caller may state what a placeholder holds (:data:`Assumption`), and must then
check it at run time with :func:`holds`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from pcp_passes.errors import ConfigError
from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir import predicates as p
from pcp_passes.ir.index.moves import MOVES
from pcp_passes.ir.index.ops import POINTWISE, Call, Handler, Values, settled, sizes
from pcp_passes.ir.index.sources import SOURCES, of_constant
from pcp_passes.ir.index.values import IndexValue, simplify
from pcp_passes.ir.predicates import Unknown

Assumption = str
"""What a tensor holds, in words that survive a dump:

- ``iota``: each element is its index along the last dim;
- ``ones``, ``zeros``;
- ``tril``: true, or 1, where column <= row, else 0;
- ``window N``: true, or 1, where column <= row < column + N, else 0.
"""

_HANDLERS: dict[str, Handler] = {f"aten::{name}": handler for name, handler in (SOURCES | POINTWISE | MOVES).items()}
_WINDOW = re.compile(r"window ([1-9]\d*)")
_EMBEDDINGS = ("aten::embedding",)
_VIEWS = ("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::_assert_tensor_metadata")


def analyse(graph: fx.Graph, assume: Mapping[str, Assumption] | None = None) -> dict[fx.Node, IndexValue]:
    """The closed form of every node that has one.

    Args:
        graph: functional ATen with example values; not changed.
        assume: placeholder name to what it holds. The caller checks it at run time (:func:`holds`).

    Raises:
        ConfigError: ``assume`` names no placeholder of the graph, or an assumption its tensor cannot meet.
    """
    assume = dict(assume or {})
    values: dict[fx.Node, IndexValue] = {}
    for node in graph.nodes:
        value = _assumed(node, assume.pop(node.name)) if node.op == "placeholder" and node.name in assume else None
        if node.op == "call_function":
            value = transfer(node, values)
        elif node.op == "get_attr":
            value = _attribute(node)
        if value is not None:
            values[node] = value
    if assume:
        names = ", ".join(node.name for node in graph.nodes if node.op == "placeholder")
        raise ConfigError(f"assume names {', '.join(map(repr, assume))}; required a placeholder of the graph: {names}")
    return values


def transfer(node: fx.Node, values: Values) -> IndexValue | None:
    """The closed form of a node's tensor, given those of its operands; ``None`` when there is none."""
    handler = _HANDLERS.get(rules.op_name(node))
    held = meta.tensor(node) if handler is not None else None
    if handler is None or held is None:
        return None
    shape = sizes(held)
    try:
        return _value(held, shape, handler(Call(node, values, shape, held.dtype)))
    except Unknown:
        return None


def follow(node: fx.Node, values: Values) -> IndexValue | None:
    """:func:`transfer` of an op that moves elements, without rounding: where its operand's elements go."""
    handler = _HANDLERS.get(rules.op_name(node))
    held = meta.tensor(node)
    if handler is None or held is None:
        return None
    shape = sizes(held)
    try:
        return IndexValue(shape, simplify(shape, handler(Call(node, values, shape, held.dtype))))
    except Unknown:
        return None


def broadcast(node: fx.Node, operand: fx.Node, values: Values) -> IndexValue | None:
    """The closed form of an operand of an element-by-element op, in the indices of the result."""
    held = meta.tensor(node)
    assert held is not None, f"%{node.name} is no tensor"
    shape = sizes(held)
    try:
        return IndexValue(shape, simplify(shape, Call(node, values, shape, held.dtype).lifted(operand)))
    except Unknown:
        return None


def _value(tensor: torch.Tensor, shape: tuple[p.Lin, ...], expr: p.Expr) -> IndexValue:
    return IndexValue(shape, settled(simplify(shape, expr), tensor.dtype))


def _attribute(node: fx.Node) -> IndexValue | None:
    held: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        held = getattr(held, part, None)
    if not isinstance(held, torch.Tensor) or isinstance(held, torch.nn.Parameter):
        return None
    try:
        return _value(held, sizes(held), of_constant(held))
    except Unknown:
        return None


def _assumed(node: fx.Node, assumption: Assumption) -> IndexValue:
    held = meta.tensor(node)
    found = f"assume[{node.name!r}] is {assumption!r}"
    window = _WINDOW.fullmatch(assumption)
    if window is None and assumption not in ("iota", "ones", "zeros", "tril"):
        raise ConfigError(f"{found}; required one of iota, ones, zeros, tril, window N")
    if held is None or held.dim() < (2 if window or assumption == "tril" else 1):
        raise ConfigError(f"{found}, but the input is no tensor with enough dimensions; leave it out")
    gap = p.combine(p.index(held.dim() - 2), p.index(held.dim() - 1), -1)
    exprs: dict[str, p.Expr] = {"iota": p.index(held.dim() - 1), "ones": p.ONE, "zeros": p.ZERO, "tril": p.ge(gap)}
    expr = exprs.get(assumption) or p.all_of((p.ge(gap), p.ge(p.combine(p.constant(_width(assumption) - 1), gap, -1))))
    try:
        return _value(held, sizes(held), expr)
    except Unknown as error:
        raise ConfigError(f"{found}, which its dtype {held.dtype} cannot hold; leave it out") from error


def _width(assumption: Assumption) -> int:
    window = _WINDOW.fullmatch(assumption)
    assert window is not None, f"{assumption!r} is no window"
    return int(window.group(1))


def holds(assumption: Assumption, tensor: torch.Tensor) -> bool:
    """Whether a real tensor is what an assumption says. Reads its elements (on a GPU: waits for them)."""
    if assumption in ("ones", "zeros"):
        return bool((tensor == (assumption == "ones")).all())
    columns = torch.arange(tensor.shape[-1], device=tensor.device)
    if assumption == "iota":
        return bool((tensor == columns).all())
    gap = torch.arange(tensor.shape[-2], device=tensor.device)[:, None] - columns
    inside = gap >= 0 if assumption == "tril" else (gap >= 0) & (gap < _width(assumption))
    return bool((tensor == inside.to(tensor.dtype)).all())


def recognise(tensor: torch.Tensor) -> Assumption | None:
    """The assumption a real tensor meets, if any: for a module's constant buffers (position tables, causal masks)."""
    if tensor.dim() == 0 or not tensor.numel() or tensor.is_complex() or tensor.is_meta:
        return None
    if tensor.shape[-1] > 1:
        if not tensor.is_floating_point() and tensor.dtype != torch.bool and holds("iota", tensor):
            return "iota"
        if tensor.dim() >= 2 and tensor.shape[-2] > 1:
            seen = int(tensor[(0,) * (tensor.dim() - 2)][:, 0].to(torch.bool).sum())  # rows that see the first key
            for one in ("tril", f"window {seen}") if seen else ():
                if holds(one, tensor):
                    return one
    return next((one for one in ("ones", "zeros") if holds(one, tensor)), None)


def assumptions_wanted(graph: fx.Graph) -> dict[str, tuple[Assumption, ...]]:
    """Token inputs for which an assumption could decide a mask: name to the assumptions worth checking, best first.

    These are integer or truth-valued placeholders of one or two dims whose last is symbolic and which select no
    embedding; whether an assumption helps is seen by running :func:`analyse` with it.
    """
    wanted: dict[str, tuple[Assumption, ...]] = {}
    for node in graph.find_nodes(op="placeholder"):
        held = meta.tensor(node)
        if held is None or held.is_floating_point() or held.is_complex() or held.dim() not in (1, 2) or not node.users:
            continue
        if not fakes.has_token_symbol(held.shape[-1]) or _selects_embedding(node):
            continue
        wanted[node.name] = ("ones",) if held.dtype == torch.bool else ("iota", "ones")
    return wanted


def _selects_embedding(node: fx.Node) -> bool:
    """Whether the node, or a view of it, is the index of an embedding that is not a table of positions.

    Position tables are read by positions, which are worth assuming; token tables are not. They are told apart by what
    else the placeholder feeds: token ids feed nothing but the table.
    """
    users = list(node.users)
    while len(users) == 1 and rules.op_name(users[0]) in _VIEWS:
        users = list(users[0].users)
    return bool(users) and all(rules.op_name(user) in _EMBEDDINGS for user in users)


def unknown_source(node: fx.Node, values: Values) -> fx.Node:
    """The first node that keeps ``node`` from having a closed form: one without, all of whose operands have one."""
    while True:
        blocking = [one for one in node.all_input_nodes if one not in values and meta.tensor(one) is not None]
        if not blocking:
            return node
        node = blocking[0]
