# SPDX-License-Identifier: Apache-2.0
"""Closed forms through ATen ops that move elements: views, slices, gathers, joins, differences, sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import meta
from pcp_passes.ir import predicates as p
from pcp_passes.ir.index.ops import COUNTING, Call, Handler, condition, integer, mapped, moved
from pcp_passes.ir.index.values import IndexValue, never_negative, simplify
from pcp_passes.ir.predicates import Expr, Lin, Unknown

# Views


def _same(call: Call) -> Expr:
    return call.tensor().expr


def _cast(call: Call) -> Expr:
    value = call.tensor()
    source = meta.tensor(call.argument("self"))
    assert source is not None
    if source.is_floating_point() and not call.dtype.is_floating_point and call.dtype != torch.bool:
        for _, lin in p.cases_of(value.expr):
            if not isinstance(lin.const, int):
                raise Unknown("a float cut to an integer")
    return value.expr


def _broadcast(call: Call) -> Expr:
    return call.operand("self")


def _regrouped(call: Call) -> Expr:
    """Views: dims of size 1 come and go; a run of dims that is split or merged must not occur in the closed form."""
    value = call.tensor()
    source = meta.tensor(call.argument("self"))
    if source is None or source.dtype != call.dtype:
        raise Unknown("a view of the bits")
    old = [(d, size) for d, size in enumerate(value.shape) if size != p.ONE]
    new = [(d, size) for d, size in enumerate(call.shape) if size != p.ONE]
    head = _equal_run(old, new)
    tail = _equal_run(old[head:][::-1], new[head:][::-1])
    pairs = list(zip(old[:head], new[:head], strict=True))
    pairs += zip(old[len(old) - tail :], new[len(new) - tail :], strict=True)
    dims = {source: target for (source, _), (target, _) in pairs}
    return _carried(value.expr, dims)


def _equal_run(old: Sequence[tuple[int, Lin]], new: Sequence[tuple[int, Lin]]) -> int:
    count = 0
    for (_, one), (_, other) in zip(old, new, strict=False):
        if one != other:
            break
        count += 1
    return count


def _carried(expr: Expr, dims: dict[int, int]) -> Expr:
    if not used_dims(expr) <= dims.keys():
        raise Unknown("an index of a dim that was split or merged")
    return moved(expr, dims)


def used_dims(expr: Expr) -> set[int]:
    """The dimensions whose index occurs in a closed form."""
    found: set[int] = set()

    def lin(one: Lin) -> Lin:
        found.update(_dims_of(one))
        return one

    p.map_expr(expr, lin)
    return found


def _dims_of(lin: Lin) -> set[int]:
    found: set[int] = set()
    for one, _ in lin.terms:
        if isinstance(one, p.Index):
            found.add(one.dim)
        elif isinstance(one, p.Floor):
            found |= _dims_of(one.value)
        elif isinstance(one, p.Max):
            found |= set().union(*map(_dims_of, one.members))
    return found


def _dim(call: Call, value: IndexValue, name: str = "dim", default: int | None = None) -> int:
    dim = call.argument(name, default)
    if not isinstance(dim, int):
        raise Unknown(name)
    return dim % value.rank if value.rank else 0


def _transpose(call: Call) -> Expr:
    value = call.tensor()
    a, b = _dim(call, value, "dim0"), _dim(call, value, "dim1")
    return moved(value.expr, {a: b, b: a})


def _turn(call: Call) -> Expr:
    value = call.tensor()
    return moved(value.expr, {0: 1, 1: 0}) if value.rank == 2 else value.expr


def _permute(call: Call) -> Expr:
    value = call.tensor()
    return moved(value.expr, {old % value.rank: new for new, old in enumerate(call.argument("dims"))})


def _flip(call: Call) -> Expr:
    value = call.tensor()
    dims = [dim % value.rank for dim in call.argument("dims")]
    return mapped(value.expr, {d: p.combine(p.combine(value.shape[d], p.ONE, -1), p.index(d), -1) for d in dims})


def _repeat(call: Call) -> Expr:
    value = call.tensor()
    shift = len(call.shape) - value.rank
    whole = {d: d + shift for d in range(value.rank) if value.shape[d] == call.shape[d + shift]}
    return _carried(value.expr, whole)


# Slices and gathers


def _slice(call: Call) -> Expr:
    value = call.tensor()
    dim = _dim(call, value, default=0)
    start, step = integer(call.argument("start", 0)), call.argument("step", 1)
    if dim not in used_dims(value.expr):
        return value.expr
    if not isinstance(step, int) or not never_negative(start, ()):
        # A start that counts from the end is cut at 0 when the dim is shorter; nothing to prove that with.
        start = _from_end(start, value.shape[dim])
    return mapped(value.expr, {dim: p.combine(start, p.index(dim), integer(step).const)})  # type: ignore[arg-type]


def _from_end(start: Lin, size: Lin) -> Lin:
    end = p.combine(size, start)
    if not never_negative(p.combine(p.constant(-1), start, -1), ()) or not never_negative(end, ()):
        raise Unknown("start")
    return end


def _select(call: Call) -> Expr:
    value = call.tensor()
    dim, at = _dim(call, value), integer(call.argument("index"))
    if not never_negative(at, ()):
        if not p.is_constant(at):
            raise Unknown("index")
        at = p.combine(value.shape[dim], at)  # a negative index is in range, or the program fails
    kept = {d: p.index(d - (d > dim)) for d in range(value.rank) if d != dim}
    return mapped(value.expr, {**kept, dim: at})


def _narrow(call: Call) -> Expr:
    value = call.tensor()
    start = call.argument("start")
    dim = _dim(call, value)
    if not isinstance(start, (int, fx.Node)) or not never_negative(integer(start), ()):
        raise Unknown("start")
    return mapped(value.expr, {dim: p.combine(integer(start), p.index(dim))})


def _index_select(call: Call) -> Expr:
    value = call.tensor()
    dim = _dim(call, value)
    if dim not in used_dims(value.expr):
        return value.expr
    at = call.tensor("index")
    return mapped(value.expr, {dim: _in_range(moved(at.expr, {0: dim}), call.shape)})


def _index(call: Call) -> Expr:
    value = call.tensor()
    indices: list[Any] = list(call.argument("indices"))
    given = [d for d, one in enumerate(indices) if one is not None]
    held = [meta.tensor(indices[d]) for d in given]
    if not given or any(one is None or one.dtype in (torch.bool, torch.uint8) for one in held):
        raise Unknown("indices")
    rank = max(one.dim() for one in held if one is not None)
    first = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    dims: dict[int, Lin] = {}
    rest = 0
    used = used_dims(value.expr)
    for d in range(value.rank):
        if d not in given:
            dims[d] = p.index(rest if rest < first else rest + rank)
            rest += 1
        elif d in used:
            dims[d] = _in_range(_gathered(call, indices[d], first + rank), call.shape)
    return mapped(value.expr, {d: lin for d, lin in dims.items() if d in used})


def _gathered(call: Call, node: fx.Node, end: int) -> Expr:
    if node not in call.values:
        raise Unknown(node.name)
    at = call.values[node]
    return moved(at.expr, {d: end - at.rank + d for d in range(at.rank)})


def _anywhere(call: Call) -> Expr:
    """Elements that are all equal are equal wherever they go."""
    value = call.tensor()
    if used_dims(value.expr):
        raise Unknown("elements move")
    return value.expr


def _in_range(expr: Expr, shape: Sequence[Lin]) -> Lin:
    """An index that cannot be negative (it would count from the end); above the end, the program fails."""
    expr = simplify(tuple(shape), expr)
    if not isinstance(expr, Lin) or not never_negative(expr, tuple(shape)):
        raise Unknown("an index that may be negative")
    return expr


# Joins, differences and sums


def _cat(call: Call) -> Expr:
    parts = call.argument("tensors")
    values = []
    for node in parts:
        if node not in call.values:
            raise Unknown(node.name)
        if call.values[node].shape != (p.ZERO,):
            values.append(call.values[node])
    return joined(values, _dim(call, values[0], default=0))


def joined(values: Sequence[IndexValue], dim: int) -> Expr:
    """The one closed form that every piece continues along ``dim``."""
    whole: Expr | None = None
    offsets = [reduce(p.combine, (v.shape[dim] for v in values[:k]), p.ZERO) for k in range(len(values))]
    for value, offset in zip(values, offsets, strict=True):
        if value.shape[dim] != p.ONE:
            whole = mapped(value.expr, {dim: p.combine(p.index(dim), offset, -1)})
            break
    if whole is None:
        whole = values[0].expr
    for value, offset in zip(values, offsets, strict=True):
        if simplify(value.shape, mapped(whole, {dim: p.combine(p.index(dim), offset)})) != value.expr:
            raise Unknown("pieces of different closed forms")
    return whole


def _diff(call: Call) -> Expr:
    value = call.tensor()
    if call.argument("n", 1) != 1 or call.dtype not in COUNTING:
        raise Unknown("n")
    dim = _dim(call, value, default=-1)
    pieces = [call.tensor(name) for name in ("prepend", "self", "append") if call.argument(name) is not None]
    whole = joined(pieces, dim)
    if not isinstance(whole, Lin):
        raise Unknown("difference of cases")
    return p.combine(mapped(whole, {dim: p.combine(p.index(dim), p.ONE)}), whole, -1)  # type: ignore[arg-type]


def _cumsum(call: Call) -> Expr:
    value = call.tensor()
    step = _one_integer(value)
    dim = _dim(call, value)
    return p.scale(p.combine(p.index(dim), p.ONE), step)


def _total(call: Call) -> Expr:
    value = call.tensor()
    step = _one_integer(value)
    dims = call.argument("dim")
    over = {d % value.rank for d in dims} if dims else set(range(value.rank))
    long = [value.shape[d] for d in sorted(over) if value.shape[d] != p.ONE]
    if len(long) > 1 and step:
        raise Unknown("a product of sizes")
    return p.scale(long[0], step) if long else p.constant(step)


def _one_integer(value: IndexValue) -> int:
    cases = p.cases_of(value.expr)
    lin = cases[0][1]
    if len(cases) > 1 or not p.is_constant(lin) or not isinstance(lin.const, int):
        raise Unknown("sum of no constant")
    return lin.const


def _decided(call: Call) -> Expr:
    """``any`` and ``all`` of what is everywhere true or everywhere false."""
    value = call.tensor()
    cond = condition(value.expr)
    empty = not all(never_negative(p.combine(size, p.ONE, -1), ()) for size in value.shape)
    if empty or cond not in (p.TRUE, p.FALSE):
        raise Unknown("reduction of an undecided condition")
    return cond


def _triangle(lower: bool) -> Handler:
    def handler(call: Call) -> Expr:
        value = call.tensor()
        shift = integer(call.argument("diagonal", 0))
        row, column = p.index(value.rank - 2), p.index(value.rank - 1)
        reach = p.combine(p.combine(row, shift), column, -1)
        inside = p.ge(reach if lower else p.scale(reach, -1))
        if call.dtype == torch.bool:
            return p.all_of((inside, condition(value.expr)))
        return p.choose(inside, value.expr, p.ZERO)

    return handler


MOVES: dict[str, Handler] = {
    "_to_copy": _cast,
    "to": _cast,
    "clone": _same,
    "detach": _same,
    "alias": _same,
    "contiguous": _same,
    "lift_fresh_copy": _same,
    "lift_fresh": _same,
    "view": _regrouped,
    "_unsafe_view": _regrouped,
    "reshape": _regrouped,
    "unsqueeze": _regrouped,
    "squeeze": _regrouped,
    "flatten": _regrouped,
    "unflatten": _regrouped,
    "expand": _broadcast,
    "expand_as": _broadcast,
    "repeat": _repeat,
    "transpose": _transpose,
    "t": _turn,
    "permute": _permute,
    "flip": _flip,
    "slice": _slice,
    "select": _select,
    "narrow": _narrow,
    "index": _index,
    "index_select": _index_select,
    "gather": _anywhere,
    "roll": _anywhere,
    "repeat_interleave": _anywhere,
    "cat": _cat,
    "diff": _diff,
    "cumsum": _cumsum,
    "sum": _total,
    "any": _decided,
    "all": _decided,
    "tril": _triangle(True),
    "triu": _triangle(False),
}
"""Ops that move elements, by their ATen name."""
