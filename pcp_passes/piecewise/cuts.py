# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a body stay outside captured pieces, each with the reason a person reads.

Three kinds of calls are told apart: *sizes* (a row count, or arithmetic on one), *views* (they move no data), and
*kernels*. A kernel is inside a piece unless :func:`reason_to_cut` says why its op may not be, or its values do not fit
a border (:func:`odd_size`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.errors import Refusal
from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.markers import is_marker
from pcp_passes.ir.printer import print_node, type_text
from pcp_passes.piecewise.pieces import Collectives as Collectives

COLLECTIVES: tuple[Collectives, ...] = ("outside", "inside")

HOST_READS: dict[str, str] = {
    "pcp::experts": "without a grouped product it reads the loads of its experts on the host",
    "pcp::mask_routed": "reads the rows of the running call",
    "aten::_local_scalar_dense": "reads a value of the device on the host",
    "aten::item": "reads a value of the device on the host",
}
"""Ops that wait for the device or read the state of the call, beside those of the attention family."""

RAGGED: dict[str, str] = dict.fromkeys(
    ("pcp::gather_ragged", "pcp::reduce_ragged"), "a collective whose sizes are those of the step on every replica"
)
"""Collectives that no captured piece can hold, whatever the back end."""

_TORCH_VIEWS = frozenset(
    "contiguous detach expand expand_as flatten narrow permute reshape reshape_as select split split_with_sizes squeeze"
    " swapaxes t transpose unflatten unsqueeze view view_as".split()
)
"""Views by name, for the PyTorch functions and methods that lowering inserts and that carry no schema."""

NO_ROWS = "no operand has rows: it makes constants, once a call"


def reason_to_cut(node: fx.Node, collectives: Collectives = "outside") -> str | None:
    """Why the op of ``node`` may not be inside a captured piece; ``None`` when it may.

    Args:
        node: a call of a body.
        collectives: ``"inside"`` where the back end of the collectives can be captured.
    """
    rule, name = rules.rule_of(node), rules.op_name(node)
    if isinstance(rule, rules.CacheWrite):
        return "writes the cache at the slots of the step"
    if isinstance(rule, rules.LocalQuery):
        what = "scores the cached index keys" if name.endswith("topk") else "attends over the cache"
        return f"{what} at the lengths and block tables of the step"
    if name in HOST_READS:
        return HOST_READS[name]
    if is_marker(node):
        return "a reshard that is not lowered yet"
    if name in RAGGED:
        return RAGGED[name]
    if is_collective(node):
        return None if collectives == "inside" else "a collective: no captured piece waits for other ranks"
    if rules.layer_of(node) is not None:
        return "takes the name of its layer, so that no two layers could share the piece"
    sizes = [meta.value(node), *(size for tensor in meta.tensors(node) for size in tensor.shape)]
    if any(map(fakes.has_unbacked_symbol, sizes)):
        return "the size of its result depends on data"
    return None


def is_size(node: fx.Node) -> bool:
    """Whether the node is a size: a row count, or arithmetic on one."""
    value = meta.value(node)
    if rules.op_name(node) in HOST_READS or fakes.has_unbacked_symbol(value):
        return False
    return isinstance(value, (int, torch.SymInt, torch.SymFloat, torch.SymBool))


def is_view(node: fx.Node) -> bool:
    """Whether the node's value may share memory with an operand: it runs no kernel, or at most a copy."""
    target: Any = node.target
    if target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node), f"%{node.name} indexes no node"
        return is_view(source) or isinstance(meta.value(source), torch.Tensor)
    if isinstance(target, torch._ops.OpOverload):
        if rules.op_name(node) == "aten::_unsafe_view":  # states no alias, and makes one
            return True
        return any(
            result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns
        )
    return rules.op_name(node).partition("::")[2] in _TORCH_VIEWS


def part_of(node: fx.Node) -> fx.Node:
    """The call that computed a value: of a part of several results the call itself."""
    while node.target is operator.getitem and not isinstance(meta.value(source := node.args[0]), torch.Tensor):  # type: ignore[arg-type]
        assert isinstance(source, fx.Node), f"%{node.name} indexes no node"
        node = source
    return node


def base_of(node: fx.Node) -> fx.Node:
    """What a view looks at, through every view in between; a value that is no view itself."""
    while node.op in ("call_function", "call_method") and is_view(node):
        operand = next((n for n in node.all_input_nodes if meta.holds_tensor(n)), None)
        assert operand is not None, f"view %{node.name} looks at no tensor"
        node = operand
    return node


def row_symbol(graph: fx.Graph) -> Any:
    """The expression of the one token symbol of a body.

    Raises:
        Refusal: no input has rows, inputs have rows of several counts, or an input is a size.
    """
    inputs = graph.find_nodes(op="placeholder")
    sizes = [node for node in inputs if is_size(node)]
    if sizes:
        raise _refusal("an input is a size: the rows of a piece are those of its tensors", sizes)
    found = {
        expression(size): node
        for node in inputs
        for tensor in meta.tensors(node)
        for size in tensor.shape
        if fakes.has_token_symbol(size)
    }
    if len(found) != 1 or not next(iter(found)).is_Symbol:
        raise _refusal("a body that can be split has inputs of one token symbol", inputs)
    return next(iter(found))


def row_dims(tensor: torch.Tensor, symbol: Any) -> tuple[int, ...]:
    """The dimensions whose size is the token symbol itself."""
    return tuple(dim for dim, size in enumerate(tensor.shape) if expression(size) == symbol)


def odd_size(tensor: torch.Tensor, symbol: Any) -> str | None:
    """Why a value may not cross the border of a piece: a size neither the rows nor a constant; else ``None``."""
    strange = [size for size in tensor.shape if fakes.has_token_symbol(size) and expression(size) != symbol]
    if strange:
        return f"{type_text(tensor)} has a size of {strange[0]}: only the rows of this rank cross the border of a piece"
    if len(row_dims(tensor, symbol)) > 1:
        return f"{type_text(tensor)} has its rows in two dimensions"
    return None


def odd_value(node: fx.Node, symbol: Any) -> str | None:
    """:func:`odd_size` of any tensor of a node's value."""
    return next((why for tensor in meta.tensors(node) if (why := odd_size(tensor, symbol))), None)


def expression(size: object) -> Any:
    """A size as an expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def why_eager(node: fx.Node, symbol: Any) -> str | None:
    """Why a kernel of a split body is outside its pieces; ``None`` when there is no reason."""
    call = part_of(node)
    reason = reason_to_cut(call)
    if reason is not None:
        return reason
    operands = [base_of(n) for n in call.all_input_nodes if meta.holds_tensor(n)]
    odd = next((why for n in (call, *operands) if (why := odd_value(n, symbol))), None)
    if odd is not None:
        return odd
    return None if any(has_rows(n, symbol) for n in operands) else NO_ROWS


def has_rows(node: fx.Node, symbol: Any) -> bool:
    """Whether a tensor of the node's value has token rows."""
    return any(row_dims(tensor, symbol) for tensor in meta.tensors(node))


def _refusal(rule: str, nodes: list[fx.Node]) -> Refusal:
    return Refusal(
        f"split-piecewise: {rule}",
        [*(("found", print_node(node)) for node in nodes),
         ("next", "capture the body with pcp_passes.engine.bodies.capture, which makes one symbol for its rows")],
    )  # fmt: skip
