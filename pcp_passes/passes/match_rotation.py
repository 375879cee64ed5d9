# SPDX-License-Identifier: Apache-2.0
"""A vector whose first values are turned by RoPE, read back to what is turned. Nothing here changes a graph.

In whatever spelling of cuts, with ``x`` of D values of which R are turned, and pairs ``(a, b)`` of neighbours or of
halves::

    cat([cat([a * cos - b * sin, b * cos + a * sin]), x[R:]])         cos, sin of R/2 values
    cat([x[:R] * cos + cat([-b, a]) * sin, x[R:]])                    pairs of halves; cos, sin of R values, twice R/2
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pcp_kernels.specs import ROPE_DIMS
from pcp_passes.ir import meta, rules
from pcp_passes.passes.match_dims import shape_of
from pcp_passes.passes.match_indexer import Mismatch

_RESHAPING = frozenset(
    f"aten::{name}" for name in "view _unsafe_view reshape unsqueeze squeeze select alias contiguous clone".split()
)
_CUTS = ("aten::split_with_sizes", "aten::split", "aten::chunk")
_POINTWISE = ("aten::cos", "aten::sin")
_SIZES = tuple(size for size in ROPE_DIMS if size)


@dataclass(frozen=True)
class Rotation:
    """One match.

    Attributes:
        x: what is turned, ``[.., N, (H,) D]``.
        rope: ``"interleaved"`` or ``"half"``, as pcp_kernels calls them.
        size: R.
        cos, sin: ``[.., N, R/2]``, or ``[.., N, R]`` with two equal halves.
    """

    x: fx.Node
    rope: str
    size: int
    cos: fx.Node
    sin: fx.Node


def match_rotation(node: fx.Node) -> Rotation:
    """Read the rotation that ends in ``node``.

    Raises:
        Mismatch: it is another computation.
    """
    joined = plain(node)
    parts = _joined(joined)
    if parts is None:
        raise Mismatch(joined, "a key or query joins a turned part and the rest of its values")
    turned, rest = parts
    x, kept = _cut(rest)
    size = kept.start
    if kept != range(size, _width(x)) or size not in _SIZES:
        raise Mismatch(rest, f"not turned are the values behind the first R of {', '.join(map(str, _SIZES))}")
    rope, cos, sin = _turned(turned, x, size)
    rows = shape_of(node)
    for angle in (cos, sin):
        shape = shape_of(angle)
        if rows is None or shape is None or [s for s in shape[:-1] if s != 1] != [s for s in rows[:1] if s != 1]:
            raise Mismatch(angle, "each row has angles of its own, which all of its heads share")
    return Rotation(x, rope, size, cos, sin)


def constant_factor(node: fx.Node) -> tuple[fx.Node, float]:
    """``(x, n)`` of ``x * n``, behind any chain of products and quotients with numbers."""
    node, factor = plain(node), 1.0
    while rules.op_name(node) in ("aten::mul", "aten::div"):
        inner, number = node.args[:2]
        if rules.op_name(node) == "aten::mul" and not isinstance(inner, fx.Node):
            inner, number = number, inner
        if not isinstance(inner, fx.Node) or not _is_number(number) or node.kwargs:
            break
        step = float(number) if rules.op_name(node) == "aten::mul" else 1.0 / float(number)  # type: ignore[arg-type]
        factor *= step
        node = plain(inner)
    return node, factor


def plain(node: fx.Node) -> fx.Node:
    """What ``node`` is a view or a float copy of, with the same sizes but for those of 1 in front of the last."""
    while (inner := _behind(node)) is not None:
        node = inner
    return node


def _behind(node: fx.Node) -> fx.Node | None:
    name = rules.op_name(node)
    inner = node.args[0] if node.args else None
    if not isinstance(inner, fx.Node) or not (name in _RESHAPING or name == "aten::_to_copy"):
        return None
    held, given = meta.tensor(node), meta.tensor(inner)
    sizes, before = shape_of(node), shape_of(inner)
    if held is None or given is None or not sizes or not before or sizes[-1] != before[-1]:
        return None
    if [size for size in sizes if size != 1] != [size for size in before if size != 1]:
        return None
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if name in _RESHAPING and held.dtype != given.dtype:  # a view of the bits
        return None
    if held.device != given.device or (held.dtype != given.dtype and {held.dtype, given.dtype} - set(floats)):
        return None
    return inner


def _turned(node: fx.Node, x: fx.Node, size: int) -> tuple[str, fx.Node, fx.Node]:
    """(rope, cos, sin) of the first ``size`` values of ``x``, turned."""
    node = plain(node)
    pairs = {
        "interleaved": (range(0, size, 2), range(1, size, 2)),
        "half": (range(size // 2), range(size // 2, size)),
    }
    parts = _joined(node)
    if parts is not None:
        minus, plus = (_terms(part, x) for part in map(plain, parts))
        if minus is None or plus is None or minus[0] != "aten::sub" or plus[0] != "aten::add":
            raise Mismatch(node, "the turned part joins a * cos - b * sin and b * cos + a * sin")
        (a, cos), (b, sin) = minus[1]
        for rope, (first, second) in pairs.items():
            if (a, b) == (first, second) and _same(plus[1], ((b, cos), (a, sin))):
                return rope, _angle(cos, size // 2), _angle(sin, size // 2)
        raise Mismatch(node, "pairs are neighbours or halves, and turn as a * cos - b * sin and b * cos + a * sin")
    found = _terms(node, x)
    if found is not None and found[0] == "aten::add":
        whole, (a, b) = range(size), pairs["half"]
        swapped = (*b, *a)
        for (one, cos), (other, sin) in (found[1], found[1][::-1]):
            if one == whole and other == swapped:
                return "half", _doubled(cos, size), _doubled(sin, size)
    raise Mismatch(node, "the turned part is x * cos + cat([-b, a]) * sin")


Term = tuple[Any, fx.Node]
"""Which values of x, a range or those of ``cat([-b, a])``, and the angle that they are multiplied with."""


def _terms(node: fx.Node, x: fx.Node) -> tuple[str, tuple[Term, Term]] | None:
    """A sum or difference of two products of values of ``x`` with angles."""
    name = rules.op_name(node)
    if name not in ("aten::add", "aten::sub") or node.kwargs or len(node.args) != 2:
        return None
    found = [_term(plain(one), x) if isinstance(one, fx.Node) else None for one in node.args]
    one, other = found
    return None if one is None or other is None else (name, (one, other))


def _term(node: fx.Node, x: fx.Node) -> Term | None:
    if rules.op_name(node) != "aten::mul":
        return None
    for one, angle in (node.args[:2], node.args[1::-1]):
        if not isinstance(one, fx.Node) or not isinstance(angle, fx.Node):
            return None
        base, taken = _cut(one)
        if base is x:
            return taken, plain(angle)
        values = _swapped(plain(one), x)
        if values is not None:
            return values, plain(angle)
    return None


def _swapped(node: fx.Node, x: fx.Node) -> tuple[int, ...] | None:
    """The places of ``cat([-b, a])``."""
    parts = _joined(node)
    if parts is None:
        return None
    negated, second = plain(parts[0]), _cut(parts[1])
    if rules.op_name(negated) != "aten::neg" or second[0] is not x:
        return None
    first = _cut(negated.args[0])  # type: ignore[arg-type]
    return (*first[1], *second[1]) if first[0] is x else None


def _same(found: tuple[Term, Term], wanted: tuple[Term, Term]) -> bool:
    return found in (wanted, wanted[::-1])


def _joined(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Both parts of a concatenation along the last dimension."""
    if rules.op_name(node) != "aten::cat":
        return None
    parts: Any = node.args[0]
    shape = shape_of(node)
    dim = rules.named_argument(node, "dim") or 0
    if shape is None or len(parts) != 2 or dim % len(shape) != len(shape) - 1:
        return None
    return parts[0], parts[1]


def _cut(node: fx.Node) -> tuple[fx.Node, range]:
    """What ``node`` is cut from along the last dimension, and which values it has of it."""
    node = plain(node)
    taken = range(_width(node))
    while (found := _one_cut(node)) is not None:
        node, values = plain(found[0]), found[1]
        taken = values[taken.start : taken.stop : taken.step]
    return node, taken


def _one_cut(node: fx.Node) -> tuple[fx.Node, range] | None:
    name = rules.op_name(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name == "aten::slice":
        shape, (start, stop, step) = shape_of(source), (rules.named_argument(node, s) for s in ("start", "end", "step"))
        last = shape is not None and (rules.named_argument(node, "dim") or 0) % len(shape) == len(shape) - 1
        if not last or not all(bound is None or isinstance(bound, int) for bound in (start, stop, step)):
            return None
        return source, range(_width(source))[start:stop:step]
    if node.target is not operator.getitem or rules.op_name(source) not in _CUTS:
        return None
    cut = source.args[0]
    shape = shape_of(cut) if isinstance(cut, fx.Node) else None
    if shape is None or (rules.named_argument(source, "dim") or 0) % len(shape) != len(shape) - 1:
        return None
    sizes = [int(part.shape[-1]) for part in meta.tensors(source)]
    place = int(node.args[1])  # type: ignore[arg-type]
    return cut, range(sum(sizes[:place]), sum(sizes[: place + 1]))  # type: ignore[return-value]


def _width(node: fx.Node) -> int:
    shape = shape_of(node)
    if not shape or not shape[-1].is_Integer:
        raise Mismatch(node, "keys and queries have a fixed number of values")
    return int(shape[-1])


def _angle(node: fx.Node, width: int) -> fx.Node:
    if _width(node) != width:
        raise Mismatch(node, f"each of {width} pairs has an angle of its own")
    return node


def _doubled(node: fx.Node, width: int) -> fx.Node:
    """An angle whose second half repeats the first: a function, value by value, of ``cat([f, f])``."""
    at = _angle(node, width)
    while (parts := _joined(at)) is None:
        further, _ = constant_factor(at)
        if rules.op_name(further) in _POINTWISE:
            further = plain(further.args[0])  # type: ignore[arg-type]
        if further is at:
            raise Mismatch(at, "angles of R values are those of R/2, twice")
        at = further
    if parts[0] is not parts[1]:
        raise Mismatch(at, "angles of R values are those of R/2, twice")
    return node


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value != 0
