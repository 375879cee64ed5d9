# SPDX-License-Identifier: Apache-2.0
"""Dimensions followed from a result back to its operands, whatever moved, merged or broadcast them on the way.

Every dimension of a tensor carries a *label*: the named parts it is made of, in order, and none where its size is 1.
``scores[b, t, s]`` has the labels ``("b"), ("t"), ("s")``; before ``scores = x.view(B, T, S)`` of ``x[B * T, S]`` they
are ``("b", "t"), ("s")``. A product says which part it sums over, and its operands get their labels from its result.
Nothing here changes a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from pcp_passes.aten.decision import expression
from pcp_passes.ir import meta, rules

Label = tuple[str, ...]
Labels = tuple[Label, ...]
Sizes = dict[str, sympy.Expr]
"""Size of each part."""

_SAME = frozenset(f"aten::{name}" for name in "_to_copy to clone contiguous detach alias lift_fresh_copy".split())
_REGROUPING = frozenset(
    f"aten::{name}" for name in "view _unsafe_view reshape flatten unflatten unsqueeze squeeze".split()
)
_TRANSPOSING = frozenset(f"aten::{name}" for name in "transpose t mT numpy_T permute swapaxes swapdims".split())


def shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    """Sizes as expressions; ``None`` for what is no tensor."""
    held = meta.tensor(node)
    return None if held is None else tuple(map(expression, held.shape))


def named(sizes: Sequence[Any], names: Sequence[str], known: Sizes) -> Labels:
    """Labels of dimensions by their names, recorded in ``known``; one of size 1 gets none."""
    labels: list[Label] = []
    for size, name in zip(sizes, names, strict=True):
        labels.append(() if size == 1 else (name,))
        if size != 1:
            known[name] = size
    return tuple(labels)


def parts(labels: Labels) -> list[str]:
    """All parts in order."""
    return [part for label in labels for part in label]


def is_cast(node: fx.Node) -> bool:
    """Whether a node has the elements of its operand, up to dtype and memory."""
    return rules.op_name(node) in _SAME


def is_upcast(node: fx.Node) -> bool:
    """Whether a node widens the floats of its operand, which loses nothing."""
    return is_cast(node) and bool(node.args) and _widens(node, node.args[0])


def _widens(node: fx.Node, source: Any) -> bool:
    own, held = meta.tensor(node), meta.tensor(source)
    if own is None or held is None or not (own.is_floating_point() and held.is_floating_point()):
        return False
    return own.dtype == torch.promote_types(own.dtype, held.dtype)


def before_view(node: fx.Node, labels: Labels, known: Sizes) -> tuple[fx.Node, Labels] | None:
    """The operand of a view, cast or broadcast, with its labels; ``None`` for any other node.

    A cast that rounds, or cuts to integers, and a view of the bits change the elements: they are other nodes.
    """
    name = rules.op_name(node)
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    sizes = shape_of(source) if source is not None else None
    if source is None or sizes is None:
        return None
    if name in _SAME:
        return (source, labels) if is_upcast(node) else None
    if name in ("aten::expand", "aten::broadcast_to"):
        kept = labels[len(labels) - len(sizes) :]
        return source, tuple(() if size == 1 else label for size, label in zip(sizes, kept, strict=True))
    if name in _TRANSPOSING:
        return source, _untransposed(node, name, labels)
    if name == "aten::select":
        dim = int(rules.named_argument(node, "dim")) % len(sizes)
        return (source, (*labels[:dim], (), *labels[dim:])) if sizes[dim] == 1 else None
    if name in _REGROUPING and _dtype(node) == _dtype(source):
        found = _regrouped(parts(labels), sizes, known)
        return None if found is None else (source, found)
    return None


def _dtype(node: fx.Node) -> torch.dtype | None:
    held = meta.tensor(node)
    return None if held is None else held.dtype


def _untransposed(node: fx.Node, name: str, labels: Labels) -> Labels:
    rank = len(labels)
    order = list(range(rank))
    if name == "aten::permute":
        order = [int(dim) % rank for dim in rules.named_argument(node, "dims")]
    elif rank >= 2:
        keys = ("axis0", "axis1") if name == "aten::swapaxes" else ("dim0", "dim1")
        named_dims = (rules.named_argument(node, key) for key in keys)
        one, other = (-2, -1) if name in ("aten::t", "aten::mT", "aten::numpy_T") else map(int, named_dims)
        order[one], order[other] = order[other], order[one]
    out: list[Label] = [()] * rank
    for place, dim in enumerate(order):
        out[dim] = labels[place]
    return tuple(out)


def _regrouped(members: list[str], sizes: Sequence[Any], known: Sizes) -> Labels | None:
    """The parts dealt to dimensions of ``sizes``; ``None`` where a dimension would take a piece of a part."""
    waiting = list(members)
    labels: list[Label] = []
    for size in sizes:
        label: list[str] = []
        while size != 1 and sympy.prod([known[part] for part in label]) != size:
            if not waiting:
                return None
            label.append(waiting.pop(0))
        labels.append(tuple(label))
    return None if waiting else tuple(labels)


Operand = tuple[fx.Node, Labels]


def before_product(node: fx.Node, labels: Labels, summed: str, known: Sizes) -> tuple[Operand, Operand] | None:
    """Both operands of a product that sums over one dimension, here called ``summed``; ``None`` for any other node.

    Read are ``matmul``, ``bmm``, ``mm``, ``einsum`` of two operands, and ``sum`` of ``mul``.
    """
    name = rules.op_name(node)
    if name in ("aten::matmul", "aten::bmm", "aten::mm"):
        a, b = node.args[:2]
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        sizes = [shape_of(one) for one in (a, b)]
        if any(size is None or len(size) < 2 for size in sizes):
            return None
        known[summed] = sizes[0][-1]  # type: ignore[index]
        rows, columns = labels[-2], labels[-1]
        one = (*_aligned(labels[:-2], sizes[0][:-2]), rows, (summed,))  # type: ignore[index]
        other = (*_aligned(labels[:-2], sizes[1][:-2]), (summed,), columns)  # type: ignore[index]
        return (a, one), (b, other)
    if name == "aten::einsum":
        return _einsum(node, labels, summed, known)
    if name == "aten::sum":
        return _sum_of_product(node, labels, summed, known)
    return None


def _aligned(labels: Labels, sizes: Sequence[Any]) -> Labels:
    """Labels of a broadcast operand: right-aligned, none where its size is 1."""
    kept = labels[len(labels) - len(sizes) :]
    return tuple(() if size == 1 else label for size, label in zip(sizes, kept, strict=True))


def _einsum(node: fx.Node, labels: Labels, summed: str, known: Sizes) -> tuple[Operand, Operand] | None:
    text, members = str(node.args[0]).replace(" ", ""), node.args[1]
    if "->" not in text or "." in text or not isinstance(members, (list, tuple)) or len(members) != 2:
        return None
    inputs, output = text.split("->")
    terms = inputs.split(",")
    of = dict(zip(output, labels, strict=True))
    gone = [letter for letter in dict.fromkeys("".join(terms)) if letter not in of]
    if len(gone) != 1 or any(len(set(term)) != len(term) for term in (*terms, output)):
        return None
    of[gone[0]] = (summed,)
    found: list[Operand] = []
    for member, term in zip(members, terms, strict=True):
        sizes = shape_of(member) if isinstance(member, fx.Node) else None
        if sizes is None or not isinstance(member, fx.Node):
            return None
        if gone[0] in term:
            known[summed] = sizes[term.index(gone[0])]
        found.append((member, tuple(() if s == 1 else of[c] for s, c in zip(sizes, term, strict=True))))
    return found[0], found[1]


def _sum_of_product(node: fx.Node, labels: Labels, summed: str, known: Sizes) -> tuple[Operand, Operand] | None:
    inner = node.args[0]
    dims, keep = rules.named_argument(node, "dim"), bool(rules.named_argument(node, "keepdim"))
    sizes = shape_of(inner) if isinstance(inner, fx.Node) else None
    if not _widens(node, inner):  # it may sum in a dtype of its own
        return None
    while isinstance(inner, fx.Node) and is_upcast(inner):
        inner = inner.args[0]
    if not isinstance(inner, fx.Node) or rules.op_name(inner) != "aten::mul" or sizes is None or not dims:
        return None
    if len(dims) != 1:
        return None
    dim = int(dims[0]) % len(sizes)
    rest = labels[:dim] + labels[dim + 1 :] if keep else labels
    whole = (*rest[:dim], (summed,), *rest[dim:])
    known[summed] = sizes[dim]
    found: list[Operand] = []
    for member in inner.args[:2]:
        shape = shape_of(member) if isinstance(member, fx.Node) else None
        if shape is None or not isinstance(member, fx.Node):
            return None
        found.append((member, _aligned(whole, shape)))
    return found[0], found[1]


def peel(node: fx.Node, labels: Labels, order: Sequence[str], known: Sizes, *, widened: bool) -> Operand:
    """The operand behind views, up to where it has the dimensions ``order``; ``widened``: and behind upcasts of it."""
    while True:
        settled = [label for label in labels if label] == [(part,) for part in order] and len(labels) <= len(order) + 1
        if settled and not (widened and is_upcast(node)):
            return node, labels
        if is_cast(node) and not (widened and is_upcast(node)):
            return node, labels
        further = before_view(node, labels, known)
        if further is None:
            return node, labels
        node, labels = further


def sized(order: Sequence[str], known: Sizes) -> list[int]:
    """A size argument for dimensions ``order``: -1 for the one that is symbolic, 1 for one that is not there."""
    found = [known.get(part, sympy.Integer(1)) for part in order]
    return [int(size) if size.is_Integer else -1 for size in found]
