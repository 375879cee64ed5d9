# SPDX-License-Identifier: Apache-2.0
"""Closed forms of tensors that are functions of their own index: integers, conditions, and choices between integers.

``i0, i1, ...`` are the indices of a tensor's dimensions, sizes are symbols of the graph. Three kinds of closed form:

- :class:`Lin`: ``c + sum(k * atom)``; an atom is an index, a size, ``floor(lin / d)`` or ``max(lin, ...)``;
- :class:`Cond`: comparisons of a :class:`Lin` with zero under ``and`` and ``or`` (``not`` is pushed into the leaves);
- :class:`Cases`: ``((cond, lin), ...)`` with conditions of which exactly one holds, such as ``0`` here, ``-inf`` there.

Every constructor returns a normal form, so equal strings of operations often meet in equal objects; where they do not,
nothing is concluded. Integers are taken as exact: the index algebra lets only dtypes in that can count the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

Number = int | float
Sizes = Sequence["Lin"]
"""Sizes of a tensor's dimensions, as closed forms without indices."""

MAX_CASES = 8
MAX_LITERALS = 64


class Unknown(Exception):
    """No closed form; caught by the index algebra, never by a user."""


@dataclass(frozen=True)
class Index:
    """The index along one dimension of the tensor."""

    dim: int

    def __str__(self) -> str:
        return f"i{self.dim}"


@dataclass(frozen=True)
class Size:
    """A size of the graph: a product of its size symbols, as a sympy expression."""

    expr: Any

    def __str__(self) -> str:
        return str(self.expr)


@dataclass(frozen=True)
class Floor:
    """``value // divisor``, rounded down, for a positive divisor."""

    value: Lin
    divisor: int

    def __str__(self) -> str:
        return f"({self.value})//{self.divisor}"


@dataclass(frozen=True)
class Max:
    """The largest member."""

    members: frozenset[Lin]

    def __str__(self) -> str:
        return f"max({', '.join(sorted(map(str, self.members)))})"


Atom = Index | Size | Floor | Max


@dataclass(frozen=True)
class Lin:
    """``const + sum(coefficient * atom)``. The constant may be a float only when there are no atoms."""

    terms: frozenset[tuple[Atom, int]]
    const: Number

    def __str__(self) -> str:
        text = ""
        for atom, k in sorted(self.terms, key=lambda term: (term[1] < 0, str(term[0]))):
            factor = str(atom) if abs(k) == 1 else f"{abs(k)}*{atom}"
            text += f" - {factor}" if k < 0 else f" + {factor}"
        if self.const or not text:
            text += f" - {-self.const}" if self.const < 0 and text else f" + {self.const}"
        return text.removeprefix(" + ").replace(" - ", "-", 1) if text.startswith(" - ") else text.removeprefix(" + ")


@dataclass(frozen=True)
class Ge:
    """``lin >= 0``."""

    lin: Lin

    def __str__(self) -> str:
        return f"{self.lin} >= 0"


@dataclass(frozen=True)
class Eq:
    """``lin == 0``."""

    lin: Lin

    def __str__(self) -> str:
        return f"{self.lin} == 0"


@dataclass(frozen=True)
class Ne:
    """``lin != 0``."""

    lin: Lin

    def __str__(self) -> str:
        return f"{self.lin} != 0"


@dataclass(frozen=True)
class And:
    """All parts hold; true when there are none."""

    parts: frozenset[Cond]

    def __str__(self) -> str:
        return f"({' and '.join(sorted(map(str, self.parts)))})" if self.parts else "True"


@dataclass(frozen=True)
class Or:
    """One part holds; false when there are none."""

    parts: frozenset[Cond]

    def __str__(self) -> str:
        return f"({' or '.join(sorted(map(str, self.parts)))})" if self.parts else "False"


Cond = Ge | Eq | Ne | And | Or
TRUE = And(frozenset())
FALSE = Or(frozenset())


@dataclass(frozen=True)
class Cases:
    """``lin`` of the one case whose condition holds."""

    cases: tuple[tuple[Cond, Lin], ...]

    def __str__(self) -> str:
        return "; ".join(f"{lin} if {cond}" for cond, lin in self.cases)


Expr = Lin | Ge | Eq | Ne | And | Or | Cases
_CONDS = (Ge, Eq, Ne, And, Or)


def is_cond(expr: Expr) -> bool:
    """Whether the closed form is a truth value."""
    return isinstance(expr, _CONDS)


# Lin


def constant(value: Number) -> Lin:
    """A number; NaN has no closed form."""
    if isinstance(value, float):
        if math.isnan(value):
            raise Unknown("NaN")
        if value.is_integer() and abs(value) < 2**53:
            value = int(value)
    return Lin(frozenset(), value)


ZERO = constant(0)
ONE = constant(1)


def atom(one: Atom, coefficient: int = 1) -> Lin:
    """``coefficient * atom``."""
    return Lin(frozenset(((one, coefficient),)), 0) if coefficient else ZERO


def index(dim: int) -> Lin:
    """The index along ``dim``."""
    return atom(Index(dim))


def is_constant(lin: Lin) -> bool:
    """Whether the value is one number."""
    return not lin.terms


def _integral(lin: Lin) -> bool:
    return isinstance(lin.const, int)


def combine(left: Lin, right: Lin, factor: int = 1) -> Lin:
    """``left + factor * right`` in exact integers."""
    if not (_integral(left) and _integral(right)):
        raise Unknown("a float that is no integer, next to an index")
    terms = dict(left.terms)
    for one, k in right.terms:
        terms[one] = terms.get(one, 0) + factor * k
    const = left.const + factor * right.const
    return Lin(frozenset((one, k) for one, k in terms.items() if k), const)


def scale(lin: Lin, factor: int) -> Lin:
    """``factor * lin``."""
    return combine(ZERO, lin, factor)


def floor_div(lin: Lin, divisor: int) -> Lin:
    """``lin // divisor`` for a positive divisor; multiples of the divisor are taken out."""
    if divisor <= 0 or not _integral(lin):
        raise Unknown("division that is not by a positive integer")
    if divisor == 1:
        return lin
    out = {one: k // divisor for one, k in lin.terms if k % divisor == 0}
    rest = Lin(frozenset((one, k) for one, k in lin.terms if k % divisor), lin.const % divisor)
    whole = Lin(frozenset((one, k) for one, k in out.items() if k), lin.const // divisor)
    return whole if is_constant(rest) else combine(whole, atom(Floor(rest, divisor)))


def maximum(left: Lin, right: Lin) -> Lin:
    """The larger of the two, by index."""
    if not (_integral(left) and _integral(right)):
        if is_constant(left) and is_constant(right):
            return constant(max(left.const, right.const))
        raise Unknown("maximum of an index and a float")
    gap = combine(left, right, -1)
    if is_constant(gap):
        return left if gap.const >= 0 else right
    return atom(Max(frozenset((left, right))))


def substitute(lin: Lin, dims: Mapping[int, Lin]) -> Lin:
    """Replace the indices named in ``dims``; the others stay."""
    if not lin.terms:
        return lin
    total = Lin(frozenset(), lin.const)
    for one, k in lin.terms:
        total = combine(total, _substituted(one, dims), k)
    return total


def _substituted(one: Atom, dims: Mapping[int, Lin]) -> Lin:
    if isinstance(one, Index):
        return dims.get(one.dim) or index(one.dim)
    if isinstance(one, Floor):
        return floor_div(substitute(one.value, dims), one.divisor)
    if isinstance(one, Max):
        return reduce(maximum, (substitute(member, dims) for member in sorted(one.members, key=str)))
    return atom(one)


# Cond


def ge(lin: Lin) -> Cond:
    """``lin >= 0``, in the tightest integers."""
    if is_constant(lin):
        return TRUE if lin.const >= 0 else FALSE
    for one, k in lin.terms:
        if isinstance(one, Max):
            rest = combine(lin, atom(one), -k)
            parts = [ge(combine(rest, member, k)) for member in one.members]
            return all_of(parts) if k < 0 else any_of(parts)
    divisor = reduce(math.gcd, (k for _, k in lin.terms))
    if divisor > 1:
        lin = Lin(frozenset((one, k // divisor) for one, k in lin.terms), lin.const // divisor)
    return Ge(lin)


def eq(lin: Lin) -> Cond:
    """``lin == 0``; a difference and its negative are one condition."""
    if is_constant(lin):
        return TRUE if lin.const == 0 else FALSE
    divisor = reduce(math.gcd, (k for _, k in lin.terms))
    if lin.const % divisor:
        return FALSE
    first = min(lin.terms, key=lambda term: str(term[0]))[1]
    divisor = divisor if first > 0 else -divisor
    return Eq(Lin(frozenset((one, k // divisor) for one, k in lin.terms), lin.const // divisor))


def negate(cond: Cond) -> Cond:
    """The opposite condition."""
    if isinstance(cond, Ge):
        return ge(combine(constant(-1), cond.lin, -1))
    if isinstance(cond, Eq):
        return Ne(cond.lin)
    if isinstance(cond, Ne):
        return Eq(cond.lin)
    parts = [negate(part) for part in cond.parts]
    return any_of(parts) if isinstance(cond, And) else all_of(parts)


def all_of(parts: Iterable[Cond]) -> Cond:
    """Conjunction, with what one part says about another taken out."""
    return _join(parts, And, Or)


def any_of(parts: Iterable[Cond]) -> Cond:
    """Disjunction, with what one part says about another taken out."""
    return _join(parts, Or, And)


def _join(parts: Iterable[Cond], own: type[And] | type[Or], other: type[And] | type[Or]) -> Cond:
    flat: set[Cond] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, own) else {part}
    absorbing, neutral = (FALSE, TRUE) if own is And else (TRUE, FALSE)
    if absorbing in flat:
        return absorbing
    literals = {part for part in flat if not isinstance(part, (And, Or))}
    if any(negate(part) in literals for part in literals):
        return absorbing
    kept: set[Cond] = set(literals)
    for part in flat - literals:
        assert isinstance(part, other)
        if part.parts & literals:
            continue
        rest = frozenset(one for one in part.parts if isinstance(one, (And, Or)) or negate(one) not in literals)
        if rest != part.parts:
            return _join([*(flat - {part}), _join(rest, other, own)], own, other)
        kept.add(part)
    if len(kept) > MAX_LITERALS:
        raise Unknown("a condition of too many parts")
    return next(iter(kept)) if len(kept) == 1 else own(frozenset(kept)) if kept else neutral


def map_cond(cond: Cond, literal: Callable[[Lin, type[Ge] | type[Eq] | type[Ne]], Cond]) -> Cond:
    """Rebuild a condition from its comparisons."""
    if isinstance(cond, (Ge, Eq, Ne)):
        return literal(cond.lin, type(cond))
    parts = [map_cond(part, literal) for part in cond.parts]
    return all_of(parts) if isinstance(cond, And) else any_of(parts)


def compare(lin: Lin, kind: type[Ge] | type[Eq] | type[Ne]) -> Cond:
    """The comparison of a kind with zero."""
    return ge(lin) if kind is Ge else eq(lin) if kind is Eq else negate(eq(lin))


# Cases


def cases_of(expr: Expr) -> tuple[tuple[Cond, Lin], ...]:
    """Any closed form as number by condition; a truth value counts as 1 and 0."""
    if isinstance(expr, Cases):
        return expr.cases
    if isinstance(expr, Lin):
        return ((TRUE, expr),)
    return tuple((cond, lin) for cond, lin in ((expr, ONE), (negate(expr), ZERO)) if cond != FALSE)


def from_cases(cases: Iterable[tuple[Cond, Lin]]) -> Lin | Cases:
    """Merge cases of equal value; ``cases`` must be exhaustive and exclude each other."""
    merged: dict[Lin, list[Cond]] = {}
    for cond, lin in cases:
        if cond != FALSE:
            merged.setdefault(lin, []).append(cond)
    if not 1 <= len(merged) <= MAX_CASES:
        raise Unknown("no case, or too many")
    if len(merged) == 1:
        return next(iter(merged))
    return Cases(tuple((any_of(conds), lin) for lin, conds in merged.items()))


def choose(cond: Cond, yes: Expr, no: Expr) -> Lin | Cases:
    """``yes`` where ``cond`` holds, else ``no``, as numbers."""
    chosen = [(all_of((cond, c)), lin) for c, lin in cases_of(yes)] if cond != FALSE else []
    other = negate(cond)
    return from_cases(chosen + ([(all_of((other, c)), lin) for c, lin in cases_of(no)] if other != FALSE else []))


def map_expr(expr: Expr, lin: Callable[[Lin], Lin]) -> Expr:
    """Rebuild a closed form after a change of its integers (a change of indices, say)."""
    if isinstance(expr, Lin):
        return lin(expr)
    if isinstance(expr, Cases):
        return from_cases((map_cond(c, lambda one, kind: compare(lin(one), kind)), lin(v)) for c, v in expr.cases)
    return map_cond(expr, lambda one, kind: compare(lin(one), kind))
