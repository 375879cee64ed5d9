# SPDX-License-Identifier: Apache-2.0
"""What each ATen op makes of the closed forms of its operands: arithmetic, comparisons and logic, element by element.

A function raises :class:`~pcp_passes.ir.predicates.Unknown` where it cannot prove its result. What comes out is
:func:`settled` into the dtype of the node: constants are rounded as the dtype rounds, and an index in a dtype that
cannot count the tokens (bfloat16, say) is dropped.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import meta, rules
from pcp_passes.ir import predicates as p
from pcp_passes.ir.index.values import IndexValue
from pcp_passes.ir.predicates import Expr, Lin, Unknown

Values = Mapping[fx.Node, IndexValue]
Handler = Callable[["Call"], Expr]

COUNTING = (torch.int64, torch.int32, torch.float64, torch.float32)
"""Dtypes that can hold an index: 32-bit integers below 2**31 tokens, float32 below 2**20 (see ``_held``)."""

_EXACT = 1 << 24
_FLOAT_FACTORS = 8


@dataclass(frozen=True)
class Call:
    """One node with the closed forms of what it reads."""

    node: fx.Node
    values: Values
    shape: tuple[Lin, ...]
    dtype: torch.dtype

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the op's schema."""
        found = rules.named_argument(self.node, name)
        return default if found is None else found

    def tensor(self, name: str = "self") -> IndexValue:
        """The closed form of a tensor argument, in its own indices."""
        found = self.argument(name)
        if not isinstance(found, fx.Node) or found not in self.values:
            raise Unknown(name)
        return self.values[found]

    def operand(self, name: str) -> Expr:
        """A tensor or number argument in the indices of the result, as broadcasting aligns them."""
        return self.lifted(self.argument(name))

    def lifted(self, found: Any) -> Expr:
        """A tensor or number in the indices of the result."""
        if isinstance(found, fx.Node) and meta.tensor(found) is not None:
            if found not in self.values:
                raise Unknown(found.name)
            value = self.values[found]
            return moved(value.expr, {d: d + len(self.shape) - value.rank for d in range(value.rank)})
        return number(found)


def sizes(tensor: torch.Tensor) -> tuple[Lin, ...]:
    """The sizes of a (fake) tensor as closed forms."""
    return tuple(size_lin(size) for size in tensor.shape)


def size_lin(size: int | torch.SymInt) -> Lin:
    """A size, or any ``SymInt``, as a closed form of size symbols. Never adds a guard."""
    return _from_sympy(size.node.expr) if isinstance(size, torch.SymInt) else p.constant(size)


@lru_cache(maxsize=4096)
def _from_sympy(expr: Any) -> Lin:
    parts = [(one, k) for one, k in expr.expand().as_coefficients_dict().items() if k]
    if not all(k.is_Integer for _, k in parts):
        return p.atom(p.Size(expr))
    const = sum(int(k) for one, k in parts if one == 1)
    return Lin(frozenset((p.Size(one), int(k)) for one, k in parts if one != 1), const)


def number(found: Any) -> Expr:
    """A Python number, or a node that holds a size."""
    held = meta.value(found) if isinstance(found, fx.Node) else found
    if isinstance(held, bool):
        return p.TRUE if held else p.FALSE
    if isinstance(held, torch.SymInt):
        return size_lin(held)
    if not isinstance(held, (int, float)):
        raise Unknown(str(found))
    return p.constant(held)


def integer(found: Any) -> Lin:
    """A Python integer or a size."""
    lin = number(found)
    if not isinstance(lin, Lin) or isinstance(lin.const, float):
        raise Unknown(str(found))
    return lin


def moved(expr: Expr, dims: Mapping[int, int]) -> Expr:
    """Rename indices; each index of ``expr`` must be named."""
    return mapped(expr, {old: p.index(new) for old, new in dims.items() if old != new})


def mapped(expr: Expr, dims: Mapping[int, Lin]) -> Expr:
    """Substitute indices."""
    return p.map_expr(expr, lambda lin: p.substitute(lin, dims)) if dims else expr


def condition(expr: Expr) -> p.Cond:
    """A closed form as truth value: non-zero is true."""
    if isinstance(expr, (Lin, p.Cases)):
        return p.any_of(p.all_of((c, p.negate(p.eq(lin)))) for c, lin in p.cases_of(expr))
    return expr


def settled(expr: Expr, dtype: torch.dtype) -> Expr:
    """The closed form as the dtype holds it."""
    if dtype == torch.bool:
        return condition(expr)
    return p.from_cases((cond, _held(lin, dtype)) for cond, lin in p.cases_of(expr))


def _held(lin: Lin, dtype: torch.dtype) -> Lin:
    if not p.is_constant(lin):
        # float32 is exact to 2**24: with factors that add up to 8, for every prefill below 2**20 tokens.
        large = sum(abs(k) for _, k in lin.terms) > _FLOAT_FACTORS or abs(lin.const) > _EXACT // 2
        if dtype not in COUNTING or (dtype == torch.float32 and large):
            raise Unknown(f"an index in {dtype}")
        return lin
    if dtype in COUNTING and isinstance(lin.const, int) and abs(lin.const) <= _EXACT:
        return lin
    if dtype.is_complex:
        raise Unknown(str(dtype))
    try:
        return p.constant(torch.tensor(lin.const).to(dtype).item())
    except (RuntimeError, OverflowError) as error:
        raise Unknown(str(error)) from error


# Element by element


def _pointwise(formula: Callable[..., Lin] | None, names: Sequence[str]) -> Handler:
    """Integers by formula; constants by running the op itself, so that it rounds as it does."""

    def handler(call: Call) -> Expr:
        operands = [call.operand(name) for name in names]
        out: list[tuple[p.Cond, Lin]] = []
        for case in itertools.product(*map(p.cases_of, operands)):
            cond = p.all_of(c for c, _ in case)
            if cond != p.FALSE:
                out.append((cond, _one(call, formula, names, [lin for _, lin in case])))
        return p.from_cases(out)

    return handler


def _one(call: Call, formula: Callable[..., Lin] | None, names: Sequence[str], lins: Sequence[Lin]) -> Lin:
    exact = all(isinstance(lin.const, int) and abs(lin.const) <= _EXACT for lin in lins)
    if exact and formula is not None and call.dtype in COUNTING:
        return formula(*lins)
    if not all(map(p.is_constant, lins)):
        raise Unknown(call.node.name)
    given = {name: _example(call.argument(name), lin.const) for name, lin in zip(names, lins, strict=True)}
    target: Any = call.node.target
    arguments = {a.name: given.get(a.name, call.argument(a.name, a.default_value)) for a in target._schema.arguments}
    if any(isinstance(argument, fx.Node) for argument in arguments.values()):
        raise Unknown(call.node.name)
    return p.constant(target(**arguments).to(call.dtype).max().item())


def _example(found: Any, const: p.Number) -> torch.Tensor | p.Number:
    held = meta.tensor(found)
    if held is None:
        return const
    return torch.full([1] * held.dim(), const, dtype=held.dtype)  # zero dimensions promote in another way


def _sum(sign: int, swap: bool = False) -> Handler:
    plain = _pointwise(lambda a, b: p.combine(a, b, sign) if not swap else p.combine(b, a, -1), ("self", "other"))

    def handler(call: Call) -> Expr:
        return plain(call) if call.argument("alpha", 1) == 1 else _with_alpha(call, sign, swap)

    return handler


def _with_alpha(call: Call, sign: int, swap: bool) -> Expr:
    alpha = call.argument("alpha")
    if not isinstance(alpha, int) or call.dtype not in (torch.int64, torch.int32):
        raise Unknown("alpha")
    a, b = (call.operand(name) for name in (("other", "self") if swap else ("self", "other")))
    pairs = itertools.product(p.cases_of(a), p.cases_of(b))
    factor = -alpha if swap else sign * alpha
    return p.from_cases((p.all_of((ca, cb)), p.combine(x, y, factor)) for (ca, x), (cb, y) in pairs)


def _multiply(left: Lin, right: Lin) -> Lin:
    if p.is_constant(left):
        left, right = right, left
    if not p.is_constant(right):
        raise Unknown("product of two indices")
    return p.scale(left, int(right.const))


def _negative(lin: Lin) -> Lin:
    return p.scale(lin, -1)


def _absolute(lin: Lin) -> Lin:
    return p.maximum(lin, p.scale(lin, -1))


def _divisor(lin: Lin) -> int:
    if not p.is_constant(lin) or not isinstance(lin.const, int) or lin.const <= 0:
        raise Unknown("division by no positive integer")
    return lin.const


def _floor(left: Lin, right: Lin) -> Lin:
    return p.floor_div(left, _divisor(right))


def _remainder(left: Lin, right: Lin) -> Lin:
    return p.combine(left, p.scale(_floor(left, right), _divisor(right)), -1)


def _divide(call: Call) -> Expr:
    formula = _floor if call.argument("rounding_mode") == "floor" else None
    return _pointwise(formula, ("self", "other"))(call)


def _minimum(left: Lin, right: Lin) -> Lin:
    return p.scale(p.maximum(p.scale(left, -1), p.scale(right, -1)), -1)


def _clamp(call: Call) -> Expr:
    out = call.operand("self")
    for name, bound in (("min", p.maximum), ("max", _minimum)):
        if call.argument(name) is not None:
            pairs = itertools.product(p.cases_of(out), p.cases_of(call.operand(name)))
            out = p.from_cases((p.all_of((a, b)), bound(x, y)) for (a, x), (b, y) in pairs)
    return out


def _comparison(test: Callable[[Lin, Lin], p.Cond], exact: Callable[[p.Number, p.Number], bool]) -> Handler:
    def one(left: Lin, right: Lin) -> p.Cond:
        if p.is_constant(left) and p.is_constant(right):
            return p.TRUE if exact(left.const, right.const) else p.FALSE
        return test(left, right)

    def handler(call: Call) -> Expr:
        pairs = itertools.product(p.cases_of(call.operand("self")), p.cases_of(call.operand("other")))
        return p.any_of(p.all_of((ca, cb, one(a, b))) for (ca, a), (cb, b) in pairs)

    return handler


def _gap(left: Lin, right: Lin, less: int = 0) -> Lin:
    return p.combine(p.combine(left, right, -1), p.constant(less), -1)


def _logic(join: Callable[[Sequence[p.Cond]], p.Cond], absorbing: p.Cond) -> Handler:
    """``and`` and ``or``: one decided operand can decide the result alone."""

    def handler(call: Call) -> Expr:
        conds: list[p.Cond] = []
        missing = False
        for name in ("self", "other"):
            found = call.argument(name)
            held = meta.tensor(found)
            bits = held is not None and held.dtype != torch.bool and "logical" not in rules.op_name(call.node)
            if call.dtype != torch.bool or bits:
                raise Unknown("bits of integers")
            try:
                conds.append(condition(call.lifted(found)))
            except Unknown:
                missing = True
        if absorbing in conds:
            return absorbing
        if missing:
            raise Unknown(call.node.name)
        return join(conds)

    return handler


def _not(call: Call) -> Expr:
    if call.dtype != torch.bool:
        raise Unknown("bits of integers")
    return p.negate(condition(call.operand("self")))


def _xor(call: Call) -> Expr:
    if call.dtype != torch.bool:
        raise Unknown("bits of integers")
    a, b = condition(call.operand("self")), condition(call.operand("other"))
    return p.any_of((p.all_of((a, p.negate(b))), p.all_of((b, p.negate(a)))))


def _select_by(cond: str, yes: str, no: str) -> Handler:
    def handler(call: Call) -> Expr:
        test = condition(call.operand(cond))
        if test in (p.TRUE, p.FALSE):
            return call.operand(yes if test == p.TRUE else no)
        a, b = call.operand(yes), call.operand(no)
        if call.dtype == torch.bool:
            return p.any_of((p.all_of((test, condition(a))), p.all_of((p.negate(test), condition(b)))))
        return p.choose(test, a, b)

    return handler


def _product(call: Call) -> Expr:
    return _and(call) if call.dtype == torch.bool else _pointwise(_multiply, ("self", "other"))(call)


_and = _logic(p.all_of, p.FALSE)
_or = _logic(p.any_of, p.TRUE)

POINTWISE: dict[str, Handler] = {
    "add": _sum(1),
    "sub": _sum(-1),
    "rsub": _sum(1, swap=True),
    "mul": _product,
    "neg": _pointwise(_negative, ("self",)),
    "abs": _pointwise(_absolute, ("self",)),
    "floor_divide": _pointwise(_floor, ("self", "other")),
    "remainder": _pointwise(_remainder, ("self", "other")),
    "div": _divide,
    "exp": _pointwise(None, ("self",)),
    "log": _pointwise(None, ("self",)),
    "pow": _pointwise(None, ("self", "exponent")),
    "minimum": _pointwise(_minimum, ("self", "other")),
    "maximum": _pointwise(p.maximum, ("self", "other")),
    "clamp": _clamp,
    "clamp_min": _pointwise(p.maximum, ("self", "min")),
    "clamp_max": _pointwise(_minimum, ("self", "max")),
    "ge": _comparison(lambda a, b: p.ge(_gap(a, b)), operator.ge),
    "gt": _comparison(lambda a, b: p.ge(_gap(a, b, 1)), operator.gt),
    "le": _comparison(lambda a, b: p.ge(_gap(b, a)), operator.le),
    "lt": _comparison(lambda a, b: p.ge(_gap(b, a, 1)), operator.lt),
    "eq": _comparison(lambda a, b: p.eq(_gap(a, b)), operator.eq),
    "ne": _comparison(lambda a, b: p.negate(p.eq(_gap(a, b))), operator.ne),
    "__and__": _and,
    "bitwise_and": _and,
    "logical_and": _and,
    "__or__": _or,
    "bitwise_or": _or,
    "logical_or": _or,
    "__xor__": _xor,
    "bitwise_xor": _xor,
    "logical_xor": _xor,
    "logical_not": _not,
    "bitwise_not": _not,
    "where": _select_by("condition", "self", "other"),
    "masked_fill": _select_by("mask", "value", "self"),
}
"""Ops that act element by element, by their ATen name."""
