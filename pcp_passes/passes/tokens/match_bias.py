# SPDX-License-Identifier: Apache-2.0
"""What is added to attention logits, read as the keys a query sees and ALiBi slopes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir import predicates as p
from pcp_passes.ir.index.algebra import broadcast, follow, unknown_source
from pcp_passes.ir.index.ops import Values, sizes
from pcp_passes.ir.index.values import EVERY_KEY, HIDDEN, IndexValue, Visible, both, visibility

_MOVES = frozenset(
    f"aten::{name}" for name in
    ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "slice", "select", "transpose", "permute",
     "clone", "contiguous", "detach", "alias", "_to_copy", "index")
)  # fmt: skip
_EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Bias:
    """``0`` for visible keys and hiding elsewhere, plus ``slope_factor * slopes[h] * (j - i)``.

    Attributes:
        visible: the keys a query sees.
        slopes: a tensor with one element per head and further dims of size 1; ``None`` without ALiBi.
        slope_factor: a constant factor of the slopes.
    """

    visible: Visible = EVERY_KEY
    slopes: fx.Node | None = None
    slope_factor: float = 1.0
    low: float = -math.inf
    """The largest number that hides a key."""

    def scaled(self, times: float) -> Bias | None:
        """The bias multiplied by a positive number; ``None`` when it would no longer hide."""
        low = self.low * times
        return replace(self, slope_factor=self.slope_factor * times, low=low) if low <= HIDDEN else None


@dataclass(frozen=True)
class _Sloped:
    """``factor * slopes[head] * lin``, with ``head`` and ``lin`` in the indices of a node."""

    slopes: fx.Node
    head: IndexValue
    lin: IndexValue
    factor: float = 1.0


def read_bias(node: fx.Node, values: Values) -> Bias | str:
    """Read a mask or bias ``[..., T queries, T keys]``; a string says why it is neither."""
    if node in values:
        return read_mask(node, values)
    terms = _terms(node, values)
    if terms is None:
        source = unknown_source(node, values)
        what = "an input" if source.op == "placeholder" else rules.op_name(source).replace("::", ".")
        return f"its mask %{node.name} is not known by position: %{source.name} ({what}) is not"
    whole = Bias()
    for term in terms:
        part = _alibi(node, term) if isinstance(term, _Sloped) else _mask(node, term)
        joined = part if isinstance(part, str) else join(whole, part)
        if isinstance(joined, str):
            return joined
        whole = joined
    return whole


def read_mask(node: fx.Node, values: Values, hides: bool = False) -> Bias | str:
    """Read a mask alone: a closed form of indices. ``hides``: a truth value that is true for hidden keys."""
    value = values[node]
    if hides:
        assert p.is_cond(value.expr), f"%{node.name} is no condition"
        value = replace(value, expr=p.negate(value.expr))  # type: ignore[arg-type]
    return _mask(node, value)


def _mask(node: fx.Node, value: IndexValue) -> Bias | str:
    held = meta.tensor(node)
    visible = visibility(value, half=held is not None and held.dtype == torch.float16)
    if visible is None:
        return f"its mask %{node.name} is {value}, which is no window of keys around the query"
    cases = () if p.is_cond(value.expr) else p.cases_of(value.expr)
    return Bias(visible, low=max((lin.const for _, lin in cases if lin != p.ZERO), default=-math.inf))


def join(one: Bias, other: Bias) -> Bias | str:
    """Two summands as one bias."""
    visible = both(one.visible, other.visible)
    if visible is None or (one.slopes is not None and other.slopes is not None):
        return "it has two masks, or two ALiBi biases, that do not join"
    low = max(one.low, other.low)
    return Bias(visible, one.slopes or other.slopes, one.slope_factor * other.slope_factor, low)


def _alibi(node: fx.Node, sloped: _Sloped) -> Bias | str:
    """A term of each row alone drops out of a softmax, so only the factor of the key's index counts."""
    head, key = sloped.lin.rank - 3, p.Index(sloped.lin.rank - 1)
    if not isinstance(sloped.lin.expr, p.Lin) or not isinstance(sloped.lin.expr.const, int):
        return f"its bias %{node.name} is slopes times {sloped.lin}, which is no ALiBi"
    per_key = dict(sloped.lin.expr.terms).pop(key, 0)
    others = p.combine(sloped.lin.expr, p.atom(key), -per_key)
    row = frozenset({p.Index(sloped.lin.rank - 2)})
    plain = all(isinstance(one, p.Size) or one in row for one, _ in others.terms)
    if not plain or per_key == 0 or sloped.head.expr != p.index(head):
        return f"its bias %{node.name} is slopes times {sloped.lin}, which is no ALiBi"
    return Bias(slopes=sloped.slopes, slope_factor=sloped.factor * per_key)


def _terms(node: fx.Node, values: Values) -> tuple[_Sloped | IndexValue, ...] | None:
    """The summands of a bias, in its own indices: masks, and products of one number per head with a closed form.

    Exact dtypes only: a half-precision product is rounded to steps that a kernel with exact slopes does not have.
    """
    if node in values:
        return (values[node],)
    held = meta.tensor(node)
    name = rules.op_name(node)
    if held is None or held.dtype not in _EXACT:
        return None
    if name in ("aten::mul", "aten::div"):
        return _product(node, values, name == "aten::div")
    if name == "aten::add" and rules.named_argument(node, "alpha") in (None, 1):
        operands = [rules.named_argument(node, name) for name in ("self", "other")]
        return _gathered(node, operands, values, lambda operand, part: broadcast(node, operand, {operand: part}))
    if name in _MOVES:
        known = {one: values[one] for one in node.all_input_nodes if one in values}
        source = rules.named_argument(node, "self")
        return _gathered(node, [source], values, lambda operand, part: follow(node, {**known, operand: part}))
    return None


def _gathered(
    node: fx.Node, operands: list[Any], values: Values, carry: Callable[[fx.Node, IndexValue], IndexValue | None]
) -> tuple[_Sloped | IndexValue, ...] | None:
    """The terms of the operands, carried into the indices of the node."""
    out: list[_Sloped | IndexValue] = []
    for operand in operands:
        terms = _terms(operand, values) if isinstance(operand, fx.Node) else None
        for term in terms or ():
            moved = carry(operand, term) if isinstance(term, IndexValue) else _carried(operand, term, carry)
            if moved is None:
                return None
            out.append(moved)
        if terms is None:
            return None
    return tuple(out)


def _carried(operand: fx.Node, term: _Sloped, carry: Callable[..., IndexValue | None]) -> _Sloped | None:
    head, lin = carry(operand, term.head), carry(operand, term.lin)
    return None if head is None or lin is None else replace(term, head=head, lin=lin)


def _product(node: fx.Node, values: Values, divides: bool) -> tuple[_Sloped | IndexValue, ...] | None:
    a, b = (rules.named_argument(node, name) for name in ("self", "other"))
    number = number_of(b, values)
    inner = _terms(a, values) if number and isinstance(a, fx.Node) else None
    if number and inner is not None and len(inner) == 1 and isinstance(inner[0], _Sloped):
        return (replace(inner[0], factor=inner[0].factor / number if divides else inner[0].factor * number),)
    held = meta.tensor(node)
    for vector, other in ((a, b), (b, a)) if not divides else ():
        dim = head_dim(vector) if vector not in values else None
        lin = broadcast(node, other, values) if dim is not None and other in values else None
        if held is not None and dim is not None and lin is not None:
            return (_Sloped(vector, IndexValue(sizes(held), p.index(held.dim() + dim)), lin),)
    return None


def head_dim(node: Any, *, exact: bool = True) -> int | None:
    """The dim (from the end) of the only size that is not 1; ``None`` for a tensor with several, or a symbolic one.

    ``exact`` refuses half-precision tensors as well.
    """
    held = meta.tensor(node)
    if held is None or (exact and held.dtype not in _EXACT):
        return None
    long = [dim for dim, size in enumerate(held.shape) if not fakes.same_size(size, 1)]
    fixed = len(long) == 1 and isinstance(held.shape[long[0]], int)
    return long[0] - held.dim() if fixed else None


def number_of(found: Any, values: Values) -> float | None:
    """A number: given as such, or a tensor whose every element is that number."""
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        return float(found)
    value = values.get(found) if isinstance(found, fx.Node) else None
    if value is None or not isinstance(value.expr, p.Lin) or not p.is_constant(value.expr):
        return None
    return float(value.expr.const)
