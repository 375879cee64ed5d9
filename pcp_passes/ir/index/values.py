# SPDX-License-Identifier: Apache-2.0
"""A tensor as a function of its index: evaluated at a point, simplified by the ranges of indices, read as a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pcp_passes.ir import predicates as p
from pcp_passes.ir.predicates import Cond, Expr, Lin, Sizes

HIDDEN = -1e9
"""A float mask hides a key when it adds at most this: below it ``exp`` of the difference to any seen logit is zero in
every dtype, for logits less than ``1e9 - 104`` apart. Float16 cannot hold it; its ``finfo.min`` is taken instead."""

HIDDEN_HALF = -65504.0


@dataclass(frozen=True)
class IndexValue:
    """``tensor[i0, i1, ...] == expr``, for all sizes.

    Attributes:
        shape: sizes of the dimensions, as closed forms of the graph's size symbols.
        expr: the closed form, simplified by ``0 <= i_d < shape[d]``.
    """

    shape: Sizes
    expr: Expr

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def at(self, position: Sequence[int], sizes: Mapping[Any, int]) -> p.Number | bool:
        """The element at one position, with each size symbol (sympy) given a number."""
        return _evaluate(self.expr, position, sizes)

    def __str__(self) -> str:
        return str(self.expr)


def simplify(shape: Sizes, expr: Expr) -> Expr:
    """Drop indices of dimensions of size 1, and decide the comparisons that hold, or fail, for every index."""
    units = {dim: p.ZERO for dim, size in enumerate(shape) if size == p.ONE}

    def lin(one: Lin) -> Lin:
        return _reduced(p.substitute(one, units), shape)

    def literal(one: Lin, kind: type[p.Ge] | type[p.Eq] | type[p.Ne]) -> Cond:
        return _decided(p.compare(lin(one), kind), shape)

    if isinstance(expr, Lin):
        return lin(expr)
    if isinstance(expr, p.Cases):
        return p.from_cases((p.map_cond(cond, literal), lin(value)) for cond, value in expr.cases)
    return p.map_cond(expr, literal)


def _decided(cond: Cond, shape: Sizes) -> Cond:
    if not isinstance(cond, (p.Ge, p.Eq, p.Ne)):
        return p.map_cond(cond, lambda lin, kind: _decided(p.compare(lin, kind), shape)) if cond.parts else cond
    if isinstance(cond, p.Ge):
        if never_negative(cond.lin, shape):
            return p.TRUE
        return p.FALSE if never_negative(_below(cond.lin), shape) else cond
    apart = any(never_negative(side, shape) for side in (_below(cond.lin), p.combine(cond.lin, p.ONE, -1)))
    return cond if not apart else p.FALSE if isinstance(cond, p.Eq) else p.TRUE


def _below(lin: Lin) -> Lin:
    """Non-negative exactly where ``lin`` is negative."""
    return p.combine(p.constant(-1), lin, -1)


def _reduced(lin: Lin, shape: Sizes) -> Lin:
    """Floors and maxima that are decided by the ranges: ``i // c`` of a dimension no longer than ``c`` is 0."""
    total = Lin(frozenset(), lin.const)
    for one, k in lin.terms:
        total = p.combine(total, _reduced_atom(one, shape), k)
    return total


def _reduced_atom(one: p.Atom, shape: Sizes) -> Lin:
    if isinstance(one, p.Floor):
        inner = _reduced(one.value, shape)
        fits = never_negative(p.combine(p.constant(one.divisor - 1), inner, -1), shape)
        return p.ZERO if fits and never_negative(inner, shape) else p.floor_div(inner, one.divisor)
    if isinstance(one, p.Max):
        members = [_reduced(member, shape) for member in sorted(one.members, key=str)]
        for top in members:
            if all(never_negative(p.combine(top, other, -1), shape) for other in members):
                return top
    return p.atom(one)


def never_negative(lin: Lin, shape: Sizes) -> bool:
    """Whether ``lin >= 0`` is certain for every index of the shape; ``False`` says nothing."""
    low = _bound(lin, shape, upper=False)
    if low is None or not isinstance(low.const, int):
        return low is not None and low.const >= 0
    least = low.const
    for one, k in low.terms:
        if not isinstance(one, p.Size) or k < 0 or not one.expr.is_nonnegative:
            return False
        least += k if one.expr.is_positive else 0
    return least >= 0


def _bound(lin: Lin, shape: Sizes, upper: bool) -> Lin | None:
    """A bound without indices. Sizes may cancel in it, which bounding them one by one would miss."""
    total = Lin(frozenset(), lin.const)
    for one, k in lin.terms:
        limit = _atom_bound(one, shape, upper == (k > 0))
        if limit is None:
            return None
        total = p.combine(total, limit, k)
    return total


def _atom_bound(one: p.Atom, shape: Sizes, upper: bool) -> Lin | None:
    if isinstance(one, p.Index):
        return p.combine(shape[one.dim], p.ONE, -1) if upper else p.ZERO
    if isinstance(one, p.Size):
        return p.atom(one)
    if isinstance(one, p.Max):
        if upper:
            return None
        bounds = [_bound(member, shape, upper=False) for member in sorted(one.members, key=str)]
        numbers = [bound for bound in bounds if bound is not None and p.is_constant(bound)]
        return max(numbers, key=lambda bound: bound.const, default=next((b for b in bounds if b is not None), None))
    # x // d lies between 0 and x for x >= 0.
    if not never_negative(one.value, shape):
        return None
    return _bound(one.value, shape, upper=True) if upper else p.ZERO


def _evaluate(expr: Expr, at: Sequence[int], sizes: Mapping[Any, int]) -> p.Number | bool:
    if isinstance(expr, Lin):
        return _number(expr, at, sizes)
    if isinstance(expr, p.Cases):
        held = [lin for cond, lin in expr.cases if _evaluate(cond, at, sizes)]
        assert len(held) == 1, f"{len(held)} cases hold at {tuple(at)} in {expr}"
        return _number(held[0], at, sizes)
    if isinstance(expr, p.And):
        return all(_evaluate(part, at, sizes) for part in expr.parts)
    if isinstance(expr, p.Or):
        return any(_evaluate(part, at, sizes) for part in expr.parts)
    value = _number(expr.lin, at, sizes)
    return value >= 0 if isinstance(expr, p.Ge) else value == 0 if isinstance(expr, p.Eq) else value != 0


def _number(lin: Lin, at: Sequence[int], sizes: Mapping[Any, int]) -> p.Number:
    return lin.const + sum(k * _atom_value(one, at, sizes) for one, k in lin.terms)


def _atom_value(one: p.Atom, at: Sequence[int], sizes: Mapping[Any, int]) -> p.Number:
    if isinstance(one, p.Index):
        return at[one.dim]
    if isinstance(one, p.Size):
        return int(one.expr.subs(dict(sizes)))
    if isinstance(one, p.Floor):
        return _number(one.value, at, sizes) // one.divisor
    return max(_number(member, at, sizes) for member in one.members)


@dataclass(frozen=True)
class Visible:
    """Which keys ``j`` a query ``i`` sees: ``i - j <= left``, ``j - i <= right`` and ``i // chunk == j // chunk``.

    A negative ``left`` or ``right`` and a ``chunk`` of 0 do not limit: causal is ``(-1, 0, 0)``.
    """

    left: int = -1
    right: int = -1
    chunk: int = 0

    def __str__(self) -> str:
        parts = [f"j >= i - {self.left}"] if self.left >= 0 else []
        parts += ["j <= i" if not self.right else f"j <= i + {self.right}"] if self.right >= 0 else []
        parts += [f"j // {self.chunk} == i // {self.chunk}"] if self.chunk else []
        return " and ".join(parts) or "every key"


EVERY_KEY = Visible()


def shown(value: IndexValue, *, half: bool = False) -> Cond | None:
    """Where a mask lets attention through: where a condition holds, or where a float mask adds 0.

    ``half`` accepts float16's lowest number as hiding. ``None`` when a float mask holds more than 0 and hiding numbers.
    """
    if not isinstance(value.expr, (Lin, p.Cases)):
        return value.expr
    limit = HIDDEN_HALF if half else HIDDEN
    through: Cond = p.FALSE
    for cond, lin in p.cases_of(value.expr):
        if lin == p.ZERO:
            through = cond
        elif not p.is_constant(lin) or lin.const > limit:
            return None
    return through


def visibility(value: IndexValue, *, half: bool = False) -> Visible | None:
    """Read a mask ``[..., T queries, T keys]`` as a window around the diagonal within chunks.

    A truth value is true where a query may attend; a number is 0 there and at most :data:`HIDDEN` elsewhere. ``None``
    when the mask is anything else, depends on a further dimension, or hides a query's own key.
    """
    cond = shown(value, half=half) if value.rank >= 2 else None
    if cond is None or isinstance(cond, p.Or):
        return None
    query, key = p.index(value.rank - 2), p.index(value.rank - 1)
    seen = Visible()
    for part in cond.parts if isinstance(cond, p.And) else (cond,):
        limit = _limit(part, query, key)
        if limit is None:
            return None
        joined = both(seen, limit)
        if joined is None:
            return None
        seen = joined
    return seen


def _limit(cond: Cond, query: Lin, key: Lin) -> Visible | None:
    if isinstance(cond, p.Ge):
        left, right = (p.combine(cond.lin, side, -1) for side in (p.combine(key, query, -1), p.combine(query, key, -1)))
        if p.is_constant(left) and left.const >= 0:
            return Visible(left=int(left.const))
        if p.is_constant(right) and right.const >= 0:
            return Visible(right=int(right.const))
        return None
    if isinstance(cond, p.Eq):
        for one, _ in cond.lin.terms:
            chunk = one.divisor if isinstance(one, p.Floor) else 1
            if chunk > 1 and cond == p.eq(p.combine(p.floor_div(query, chunk), p.floor_div(key, chunk), -1)):
                return Visible(chunk=chunk)
        if cond == p.eq(p.combine(query, key, -1)):
            return Visible(left=0, right=0)
    return None


def both(one: Visible, other: Visible) -> Visible | None:
    """Two limits at once; ``None`` when both have chunks that do not nest."""
    small, large = sorted((one.chunk, other.chunk))
    if small and large % small:
        return None
    return Visible(_nearer(one.left, other.left), _nearer(one.right, other.right), small or large)


def _nearer(one: int, other: int) -> int:
    return max(one, other) if min(one, other) < 0 else min(one, other)
