# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's lightning indexer read from the selection back to its operands. Nothing here changes a graph.

The idea, in whatever spelling::

    score[t, s] = sum_h weights[t, h] * relu(scale * <q[t, h], k[s]>)        scale > 0
    selection   = indices of topk(masked(score), n)

Products may be ``matmul``, ``bmm``, ``einsum`` or ``sum`` of ``mul``, with their operands in either order and their
dimensions anywhere (:mod:`pcp_passes.passes.match_dims` follows them); positive constants may stand in front of the
relu, behind it, or behind the sum, since ``relu(s * x) = s * relu(x)``; the relu may be a clamp or a maximum with 0.
Which keys a row may see is told by the masks, which a caller has to judge.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from pcp_passes.aten.decision import expression
from pcp_passes.ir import meta, rules
from pcp_passes.passes.match_dims import (
    Labels,
    Sizes,
    before_product,
    before_view,
    named,
    parts,
    peel,
    shape_of,
    sized,
)

_ATEN: Any = torch.ops.aten
_ZEROS = ("aten::zeros", "aten::zeros_like", "aten::new_zeros")
_FILLS = {"aten::full": "fill_value", "aten::full_like": "fill_value", "aten::scalar_tensor": "s"}


class Mismatch(Exception):
    """A node that is not what the indexer has there, and why."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class Masking:
    """One mask on the scores.

    Attributes:
        node: the op that masks.
        mask: its mask.
        hides: whether a true element hides; ``None`` for a mask that is added.
        low: what hidden scores become; ``None`` for a mask that is added.
    """

    node: fx.Node
    mask: fx.Node
    hides: bool | None
    low: float | None


@dataclass(frozen=True)
class Operand:
    """A tensor and the dimensions it has, as :mod:`pcp_passes.passes.match_dims` labels them."""

    node: fx.Node
    labels: Labels


@dataclass(frozen=True)
class Indexer:
    """One match.

    Attributes:
        q: dimensions b, t, h, d.
        k: dimensions b, s, d.
        weights: dimensions b, t, h.
        scale: positive factor of the scores that is not in the weights.
        masks: from the selection back.
        topk: at most so many keys.
        selection: the node that holds the indices ``[..., T, n]``.
        sizes: of the dimensions b, t, s, h, d; one of size 1 is left out.
    """

    q: Operand
    k: Operand
    weights: Operand
    scale: float
    masks: tuple[Masking, ...]
    topk: int
    selection: fx.Node
    sizes: Sizes


def match_indexer(topk: fx.Node) -> Indexer:
    """Read the indexer that ends in a ``topk``.

    Raises:
        Mismatch: it is another computation.
    """
    scores, count, selection = _selection(topk)
    sizes = shape_of(scores)
    if sizes is None or not 2 <= len(sizes) <= 4 or sum(size != 1 for size in sizes[:-2]) > 1:
        raise Mismatch(topk, "scores have the dimensions batch, row and key")
    known: Sizes = {}
    labels = named(sizes, [*("b",) * (len(sizes) - 2), "t", "s"], known)
    found = _summed(scores, labels, known)
    loose = [part for part in "bhd" if not found.sizes.get(part, sympy.Integer(1)).is_Integer]
    if loose:
        raise Mismatch(topk, f"batch, heads and channels have fixed sizes, and here {found.sizes[loose[0]]}")
    return replace(found, topk=count, selection=selection)


def _selection(topk: fx.Node) -> tuple[fx.Node, int, fx.Node]:
    scores, k, largest = (rules.named_argument(topk, name) for name in ("self", "k", "largest"))
    held = meta.tensor(scores)
    dim = rules.named_argument(topk, "dim")
    if held is None or dim not in (None, -1, held.dim() - 1) or largest is False:
        raise Mismatch(topk, "the best scores are taken by topk along the keys")
    users = list(topk.users)
    if len(users) != 1 or users[0].target is not operator.getitem or users[0].args[1] != 1:
        raise Mismatch(topk, "only the indices of topk are used")
    return scores, _count(topk, k, held.shape[-1]), users[0]


def _count(topk: fx.Node, k: Any, keys: Any) -> int:
    """The constant of ``topk(n)`` or ``topk(min(n, keys))``."""
    if isinstance(k, int):
        return k
    size = meta.value(k) if isinstance(k, fx.Node) else None
    expr: Any = expression(size) if isinstance(size, (int, torch.SymInt)) else None
    if expr is not None and expr.is_Integer:
        return int(expr)
    if type(expr).__name__ == "Min":  # PyTorch has one of its own beside sympy's
        numbers = [one for one in expr.args if one.is_Integer]
        if len(numbers) == 1 and {*expr.args} == {numbers[0], expression(keys)}:
            return int(numbers[0])
    raise Mismatch(topk, f"it takes {expr if expr is not None else k} keys, which is no constant")


def _summed(at: fx.Node, labels: Labels, known: Sizes) -> Indexer:
    """From the selection to the sum over heads."""
    scale = 1.0
    masks: list[Masking] = []
    while True:
        found = before_product(at, labels, "h", known)
        if found is not None:
            return _heads(at, found, scale, tuple(masks), known)
        name = rules.op_name(at)
        if name == "aten::add":
            return _added(at, labels, known, scale, masks)
        masking = _masking(at)
        if masking is not None:
            inner, mask = masking
            _require_last(at, labels)
            masks.append(mask)
            at = inner
            continue
        factor = _factor(at)
        if factor is not None:
            at, number = factor
            scale *= number
            continue
        further = before_view(at, labels, known)
        if further is None:
            raise Mismatch(at, f"between the selection and the sum over heads, {_told(at)} is not read")
        at, labels = further


def _added(at: fx.Node, labels: Labels, known: Sizes, scale: float, masks: list[Masking]) -> Indexer:
    """``scores + mask``: the operand that leads to the sum over heads is the scores."""
    operands = [rules.named_argument(at, name) for name in ("self", "other")]
    if rules.named_argument(at, "alpha") not in (None, 1) or not all(isinstance(one, fx.Node) for one in operands):
        raise Mismatch(at, "scores are masked by masked_fill, where, or an additive mask")
    _require_last(at, labels)
    whole, failures = shape_of(at), []
    for scores, mask in (operands, operands[::-1]):
        if shape_of(scores) != whole:
            continue
        try:
            found = _summed(scores, labels, dict(known))
        except Mismatch as mismatch:
            failures.append(mismatch)
            continue
        inner = Masking(at, mask, None, None)
        return replace(found, scale=found.scale * scale, masks=(*masks, inner, *found.masks))
    raise failures[0] if failures else Mismatch(at, "neither operand has the scores' size")


def _require_last(at: fx.Node, labels: Labels) -> None:
    if len(labels) < 2 or labels[-2:] != (("t",), ("s",)):
        raise Mismatch(at, "a mask is applied to scores whose last dimensions are rows and keys")


def _masking(at: fx.Node) -> tuple[fx.Node, Masking] | None:
    """``masked_fill(x, hide, low)`` and ``where(show, x, low)``."""
    name = rules.op_name(at)
    if name == "aten::masked_fill":
        inner, mask, low = (rules.named_argument(at, key) for key in ("self", "mask", "value"))
        return (inner, Masking(at, mask, True, _number(at, low))) if shape_of(inner) == shape_of(at) else None
    if name == "aten::where":
        mask, one, other = (rules.named_argument(at, key) for key in ("condition", "self", "other"))
        if isinstance(one, fx.Node) and shape_of(one) == shape_of(at):
            return one, Masking(at, mask, False, _number(at, other))
        if isinstance(other, fx.Node) and shape_of(other) == shape_of(at):
            return other, Masking(at, mask, True, _number(at, one))
    return None


def _number(at: fx.Node, found: Any) -> float:
    """A number, or a tensor that is made of one."""
    while isinstance(found, fx.Node) and rules.op_name(found) in ("aten::expand", "aten::_to_copy"):
        found = found.args[0]
    if isinstance(found, fx.Node):
        name = rules.op_name(found)
        found = 0.0 if name in _ZEROS else rules.named_argument(found, _FILLS[name]) if name in _FILLS else None
    if not isinstance(found, (int, float)):
        raise Mismatch(at, "hidden scores become a constant")
    return float(found)


def _factor(at: fx.Node) -> tuple[fx.Node, float] | None:
    """``x * n`` and ``x / n`` for a number."""
    name = rules.op_name(at)
    if name not in ("aten::mul", "aten::div"):
        return None
    inner, factor = rules.named_argument(at, "self"), rules.named_argument(at, "other")
    if not isinstance(inner, fx.Node) and name == "aten::mul":
        inner, factor = factor, inner
    positive = isinstance(factor, (int, float)) and math.isfinite(factor) and factor > 0
    if not positive or not isinstance(inner, fx.Node) or rules.named_argument(at, "rounding_mode") is not None:
        raise Mismatch(at, "scores are scaled by a positive constant")
    assert isinstance(factor, (int, float))
    return inner, float(factor) if name == "aten::mul" else 1.0 / float(factor)


def _heads(at: fx.Node, found: Any, scale: float, masks: tuple[Masking, ...], known: Sizes) -> Indexer:
    """From the sum over heads to the product with the queries."""
    sides = [one for one in found if "s" in parts(one[1])]
    others = [one for one in found if "s" not in parts(one[1])]
    if len(sides) != 1 or len(others) != 1:
        raise Mismatch(at, "heads are summed with one weight for each row and head")
    (scores, labels), weights = sides[0], others[0]
    relu = False
    while True:
        product = before_product(scores, labels, "d", known)
        if product is not None and not relu:
            raise Mismatch(scores, "scores of a head go through relu before they are summed")
        if product is not None:
            return _operands(scores, product, weights, scale, masks, known)
        inner = _rectified(scores)
        if inner is not None:
            if relu:
                raise Mismatch(scores, "scores of a head go through relu once")
            relu, scores = True, inner
            continue
        factor = _factor(scores)
        if factor is not None:
            scores, number = factor
            scale *= number
            continue
        further = before_view(scores, labels, known)
        if further is None:
            raise Mismatch(scores, f"scores of a head go through relu, and here through {_told(scores)}")
        scores, labels = further


def _rectified(node: fx.Node) -> fx.Node | None:
    """The operand of ``relu(x)`` in any spelling."""
    name = rules.op_name(node)
    inner: fx.Node = rules.named_argument(node, "self")
    if name == "aten::relu":
        return inner
    if name == "aten::clamp_min" and rules.named_argument(node, "min") == 0:
        return inner
    if name in ("aten::clamp", "aten::clip") and rules.named_argument(node, "min") == 0:
        return inner if rules.named_argument(node, "max") is None else None
    if name == "aten::threshold":
        bounds = (rules.named_argument(node, "threshold"), rules.named_argument(node, "value"))
        return inner if bounds == (0, 0) else None
    if name in ("aten::maximum", "aten::max", "aten::fmax"):
        for one, other in (node.args[:2], node.args[1::-1]) if len(node.args) > 1 else ():
            both = isinstance(one, fx.Node) and isinstance(other, fx.Node)
            if both and _is_zero(other) and shape_of(one) == shape_of(node):  # type: ignore[arg-type]
                return one  # type: ignore[return-value]
    return None


def _is_zero(node: fx.Node) -> bool:
    name = rules.op_name(node)
    return name in _ZEROS or (name in _FILLS and rules.named_argument(node, _FILLS[name]) == 0)


def _operands(at: fx.Node, product: Any, weights: Any, scale: float, masks: Any, known: Sizes) -> Indexer:
    keys = [one for one in product if "s" in parts(one[1])]
    queries = [one for one in product if "s" not in parts(one[1])]
    if len(keys) != 1 or len(queries) != 1:
        raise Mismatch(at, "scores of a head are a product of queries and keys")
    held = []
    for (node, labels), order, what in (
        (queries[0], "bthd", "queries have the dimensions batch, row, head and channel"),
        (keys[0], "bsd", "all heads and rows share the keys: batch, key and channel"),
        (weights, "bth", "there is one weight for each row and head"),
    ):
        wanted = [part for part in order if part in known]
        found = peel(node, labels, wanted, known, widened=order != "bth")  # weights may yet be scaled: keep f32
        if sorted(parts(found[1])) != sorted(wanted):
            raise Mismatch(found[0], f"{what}, and here {', '.join(parts(found[1]))}")
        held.append(Operand(*found))
    q, k, w = held
    return Indexer(q, k, w, scale, masks, 0, at, known)


def _told(node: fx.Node) -> str:
    return f"{rules.op_name(node).replace('::', '.') or node.op}"


def canonical(make: Any, one: Operand, order: str, sizes: Sizes) -> fx.Node:
    """``one`` with exactly the dimensions ``order``; new nodes, as few as needed, are made by ``make(target, *args)``.

    Sizes of 1 that are missing in ``sizes`` are dimensions of the result all the same.
    """
    node, labels = one.node, one.labels
    if any(len(label) > 1 for label in labels):
        node = make(_ATEN.reshape.default, node, sized(parts(labels), sizes))
        labels = tuple((part,) for part in parts(labels))
    wanted = [(part,) for part in order if part in sizes]
    if [label for label in labels if label] != wanted:
        units = [dim for dim, label in enumerate(labels) if not label]
        moved = [*units, *(labels.index(label) for label in wanted)]
        node = make(_ATEN.permute.default, node, moved)
        labels = tuple(labels[dim] for dim in moved)
    shape = tuple(sizes.get(part, 1) for part in order)
    return node if shape_of(node) == shape else make(_ATEN.reshape.default, node, sized(order, sizes))
