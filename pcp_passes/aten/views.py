# SPDX-License-Identifier: Apache-2.0
"""Ops that move, merge, split, add or remove dimensions and copy nothing across rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from pcp_passes.aten.decision import (
    Call,
    CannotTell,
    Decision,
    Local,
    Mixes,
    Rows,
    expression,
    position_of,
    tensor_of,
    wrap,
)
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement, Shard


def _moved(call: Call, dim: int | None, sizes: dict[int, Any] | None = None) -> Decision:
    """The only tensor operand keeps its rows at ``dim`` of the result."""
    source = call.operands[0]
    where, _ = _source(call)
    if dim is None:
        return Mixes("the token dimension has no place in the result")
    return Local(Shard(dim, where.outer, where.inner), call.needs({source: where}), sizes or {})


def _source(call: Call) -> tuple[Shard, int]:
    """Placement and rank of the first operand, or a reason why not."""
    where = call.at(call.operands[0])
    if not isinstance(where, Shard):
        raise CannotTell("what it views is not the sharded operand")
    return where, tensor_of(call.operands[0]).dim()


def permute(call: Call) -> Decision:
    """``permute(x, dims)``."""
    where, rank = _source(call)
    order = [wrap(d, rank) for d in call.arg("dims")]
    return _moved(call, order.index(where.dim))


def transpose(call: Call) -> Decision:
    """``transpose(x, dim0, dim1)``, and ``t``, ``mT`` and their like, which exchange two dimensions."""
    where, rank = _source(call)
    named = next(((a, b) for a, b in (("dim0", "dim1"), ("axis0", "axis1")) if a in call.names), None)
    if named:
        first, second = wrap(call.arg(named[0]), rank), wrap(call.arg(named[1]), rank)
    elif rank < 2 or (rank > 2 and "numpy_T" in str(call.node.target)):
        return Mixes("exchanges dimensions in a way that has no rule")
    else:
        first, second = rank - 2, rank - 1
    return _moved(call, {first: second, second: first}.get(where.dim, where.dim))


def movedim(call: Call) -> Decision:
    """``movedim(x, source, destination)`` with integers."""
    where, rank = _source(call)
    order = list(range(rank))
    source, destination = call.arg("source"), call.arg("destination")
    if not isinstance(source, int):
        return Mixes("movedim of several dimensions has no rule")
    order.insert(wrap(destination, rank), order.pop(wrap(source, rank)))
    return _moved(call, order.index(where.dim))


def unsqueeze(call: Call) -> Decision:
    """``unsqueeze(x, dim)``."""
    where, rank = _source(call)
    return _moved(call, where.dim + (wrap(call.arg("dim"), rank + 1) <= where.dim))


def squeeze(call: Call) -> Decision:
    """``squeeze`` of one, several, or all dimensions of size 1."""
    where, rank = _source(call)
    shape = tensor_of(call.operands[0]).shape
    asked: Any = call.arg("dim") if "dim" in call.names else list(range(rank))
    gone = {wrap(d, rank) for d in ([asked] if isinstance(asked, int) else asked)}
    removed = sum(1 for d in gone if d < where.dim and not hasattr(shape[d], "node") and shape[d] == 1)
    return _moved(call, where.dim - removed)


def expand(call: Call) -> Decision:
    """``expand(x, sizes)``: new leading dimensions, or size 1 made larger; the token dimension keeps its size."""
    where, rank = _source(call)
    name = "size" if "size" in call.names else "sizes"
    asked = list(call.arg(name))
    dim = where.dim + len(asked) - rank
    asked[dim] = Rows(where.outer, where.inner)
    return _moved(call, dim, {position_of(call.node, name): asked})


def select(call: Call) -> Decision:
    """``select(x, dim, index)`` of another dimension than the tokens'."""
    where, rank = _source(call)
    dim = wrap(call.arg("dim"), rank)
    if dim == where.dim:
        return Mixes("selects one token")
    return _moved(call, where.dim - (dim < where.dim))


def slice_(call: Call) -> Decision:
    """``slice(x, dim, start, end, step)``: all tokens, or of another dimension."""
    where, rank = _source(call)
    held = tensor_of(call.operands[0])
    dim = wrap(call.arg("dim"), rank)
    if dim != where.dim or expression(tensor_of(call.node).shape[dim]) == expression(held.shape[dim]):
        if dim == where.dim:
            end = position_of(call.node, "end")
            return _moved(call, where.dim, {end: None} if len(call.node.args) > end else {})
        return _moved(call, where.dim)
    return Mixes("takes some of the tokens")


def split(call: Call) -> Decision:
    """``split``, ``split_with_sizes``, ``chunk``, ``unbind`` along another dimension than the tokens'."""
    where, rank = _source(call)
    dim = wrap(call.arg("dim"), rank)
    if dim == where.dim:
        return Mixes("splits the tokens")
    unbinds = "unbind" in str(call.node.target)
    out: Placement = Shard(where.dim - (unbinds and dim < where.dim), where.outer, where.inner)
    parts = meta.value(call.node)
    return Local((out,) * len(parts), call.needs({call.operands[0]: where}))


def reshape(call: Call) -> Decision:
    """``view``, ``reshape``, ``flatten``, ``unflatten``: the token factor is found again in the new sizes."""
    source = call.operands[0]
    where = call.at(source)
    if not isinstance(where, Shard):
        return Mixes("no operand is sharded")
    shape = tensor_of(call.node).shape
    out = relocate(tensor_of(source).shape, where, shape, call)
    if out is None:
        return Mixes("merges or splits the token dimension in a way that is not a product of the token count")
    return Local(out, call.needs({source: where}), _new_sizes(call, out))


def _new_sizes(call: Call, out: Shard) -> dict[int, Any]:
    node = call.node
    target: Any = node.target
    name = next((n for n in ("size", "shape", "sizes") if n in call.names), None)
    if name is None:
        return {}  # flatten: no sizes
    asked = list(call.arg(name))
    at = out.dim
    if "unflatten" in str(target):
        at -= wrap(call.arg("dim"), tensor_of(call.operands[0]).dim())
        if not 0 <= at < len(asked):
            return {}
    # A second unknown could not be inferred beside the new one, and the token count of one before is not M.
    asked = [Rows(out.outer, out.inner) if i == at else size for i, size in enumerate(asked)]
    return {position_of(node, name): asked}


def relocate(before: Sequence[Any], where: Shard, after: Sequence[Any], call: Call) -> Shard | None:
    """Where the token factor of ``before`` is in ``after``, two shapes of the same elements in row-major order.

    A token is ``stride = inner * prod(before[dim + 1:])`` elements, and ``prod(before[:dim]) * outer`` blocks of tokens
    come one after another. Dimension ``e`` of ``after`` holds the tokens when its own suffix product divides the stride
    and its size is ``outer * tokens * inner`` with whole numbers.
    """
    sizes = [expression(size) for size in after]
    stride = where.inner * _product(before[where.dim + 1 :])
    blocks = where.outer * _product(before[: where.dim])
    if stride == 0 or blocks == 0:
        return None
    suffix = sympy.Integer(1)
    for dim in reversed(range(len(sizes))):
        if suffix == 0:
            return None
        inner = sympy.cancel(stride / suffix)
        prefix = _product(after[:dim])
        outer = sympy.cancel(blocks / prefix) if prefix != 0 else None
        whole = inner.is_Integer and inner > 0 and outer is not None and outer.is_Integer and outer > 0
        if whole and sizes[dim] == outer * inner * call.tokens:
            return Shard(dim, int(outer), int(inner))  # type: ignore[arg-type]
        suffix = suffix * sizes[dim]
    return None


def _product(sizes: Sequence[Any]) -> sympy.Expr:
    product = sympy.Integer(1)
    for size in sizes:
        product = product * expression(size)
    return product


def repeat(call: Call) -> Decision:
    """``repeat(x, repeats)``: whole copies of the tokens become outer blocks."""
    where, rank = _source(call)
    repeats = list(call.arg("repeats" if "repeats" in call.names else "dims"))
    repeats = [1] * (rank - len(repeats)) + repeats
    dim = where.dim + len(repeats) - rank
    if not isinstance(repeats[dim], int):
        return Mixes("repeats the tokens a symbolic number of times")
    return Local(Shard(dim, where.outer * repeats[dim], where.inner), call.needs({call.operands[0]: where}))


def repeat_interleave(call: Call) -> Decision:
    """``repeat_interleave(x, n, dim)``: each token ``n`` times in a row becomes inner values."""
    where, rank = _source(call)
    dim, times = call.arg("dim"), call.arg("repeats")
    if not isinstance(times, int) or dim is None or call.arg("output_size") is not None:
        return Mixes("repeats tokens a number of times that depends on data, or flattens them")
    if wrap(dim, rank) != where.dim:
        return Local(where, call.needs({call.operands[0]: where}))
    return Local(Shard(where.dim, where.outer, where.inner * times), call.needs({call.operands[0]: where}))


def unfold(call: Call) -> Decision:
    """``unfold(x, dim, size, step)`` of another dimension than the tokens'."""
    where, rank = _source(call)
    if wrap(call.arg("dimension"), rank) == where.dim:
        return Mixes("windows over neighbouring tokens")
    return _moved(call, where.dim)


def as_complex(call: Call) -> Decision:
    """``view_as_complex`` takes the last dimension away, ``view_as_real`` adds one."""
    where, rank = _source(call)
    takes = "complex" in str(call.node.target)
    return Mixes("pairs tokens") if takes and where.dim == rank - 1 else _moved(call, where.dim)
