# SPDX-License-Identifier: Apache-2.0
"""Keys and values that multi-head latent attention expanded from one latent a token, read back to the latent.

A model with MLA makes the keys and values of all heads by one linear map of a latent, and joins rotary channels that
all heads share to the keys. Channel by channel, whatever cut and joined them (``split``, ``slice``, ``cat``, copies
into an empty tensor), they are::

    k[h] = [ W[h, a:b] latent | rope ]        v[h] = W[h, c:d] latent
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import fakes, meta, rules
from pcp_passes.passes.match_dims import shape_of

_SAME = ("aten::clone", "aten::contiguous", "aten::alias", "aten::detach")
_SPLITS = ("aten::split_with_sizes", "aten::split", "aten::chunk")
_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::unflatten")


class Explicit(Exception):
    """Why keys and values are no expansion of a latent."""


@dataclass(frozen=True)
class Expanded:
    """Channels ``[start, stop)`` of each head of ``linear(latent, weight)``, which has ``width`` channels a head."""

    latent: fx.Node
    weight: fx.Node
    width: int
    start: int
    stop: int


@dataclass(frozen=True)
class Shared:
    """Channels ``[start, stop)`` of ``node``, ``[B, 1, S, C]`` or, ``heads_last``, ``[B, S, 1, C]``."""

    node: fx.Node
    heads_last: bool
    start: int
    stop: int


Piece = Expanded | Shared


@dataclass(frozen=True)
class Latent:
    """One latent, and what keys and values take of it.

    Attributes:
        latent: ``[B, 1, S, L]`` or ``[B, S, L]``; ``weight``: ``[H * width, L]``.
        keys: pieces of a key's channels in order, one of each kind, the rotary one possibly missing.
        values: the piece that values are.
    """

    latent: fx.Node
    weight: fx.Node
    keys: tuple[Piece, ...]
    values: Expanded


def match_latent(k: fx.Node, v: fx.Node, heads: int) -> Latent | str:
    """Read keys ``[B, H, S, D]`` and values ``[B, H, S, Dv]`` of H ``heads``; a string says why they stay expanded."""
    try:
        keys, values = (_whole(node) for node in (k, v))
    except Explicit as why:
        return str(why)
    expanded = [piece for piece in (*keys, *values) if isinstance(piece, Expanded)]
    shared = [piece for piece in keys if isinstance(piece, Shared)]
    sources = {(piece.latent, piece.weight, piece.width) for piece in expanded}
    if len(values) != 1 or not isinstance(values[0], Expanded) or len(expanded) != 2 or len(sources) != 1:
        return f"%{k.name} and %{v.name} are not one part each of one expanded latent"
    if len(shared) > 1:
        return f"%{k.name} joins {len(shared)} tensors to what is expanded"
    latent, weight, width = sources.pop()
    matrix = meta.tensor(weight)
    if matrix is None or not fakes.same_size(matrix.shape[0], heads * width):
        return f"%{weight.name} has other heads than the queries, which have {heads}"
    if _elements(latent) + sum(piece.stop - piece.start for piece in shared) > _elements(k) + _elements(v):
        return f"the latent %{latent.name} is wider than the keys and values it is expanded to"
    return Latent(latent, weight, tuple(keys), values[0])


def _elements(node: fx.Node) -> int:
    """Elements of one token."""
    held = meta.tensor(node)
    assert held is not None
    return int(held.shape[-1]) * (int(held.shape[1]) if held.dim() == 4 and isinstance(held.shape[1], int) else 1)


def _whole(node: fx.Node) -> list[Piece]:
    held = meta.tensor(node)
    if held is None or held.dim() != 4 or not isinstance(held.shape[-1], int):
        raise Explicit(f"%{node.name} is not [B, H, S, channels]")
    return _joined(_pieces(node, 0, held.shape[-1], False))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Adjacent channels of one source as one piece; a piece without channels is none."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if piece.start == piece.stop:
            continue
        if isinstance(last, Expanded) and piece == replace(last, start=last.stop, stop=piece.stop):
            out[-1] = replace(last, stop=piece.stop)
        else:
            out.append(piece)
    return out


def _pieces(node: fx.Node, start: int, stop: int, heads_last: bool) -> list[Piece]:
    """Channels ``[start, stop)`` of a tensor whose dims 1 and 2 are heads and tokens, or the other way round."""
    name = rules.op_name(node)
    source: Any = node.args[0] if node.args else None
    if name in _SAME:
        return _pieces(source, start, stop, heads_last)
    if name in ("aten::_to_copy", "aten::to") and _dtype(source) == _dtype(node):
        return _pieces(source, start, stop, heads_last)
    if name == "aten::copy":
        source = rules.named_argument(node, "src")
        if shape_of(source) != shape_of(node):
            raise Explicit(f"%{node.name} broadcasts what it copies")
        return _pieces(source, start, stop, heads_last)
    if name == "aten::cat" and _last(node, _rank(node)):
        return _of_cat(node, start, stop, heads_last)
    if name == "aten::slice_scatter" and _last(node, _rank(node)):
        return _of_scatter(node, start, stop, heads_last)
    if name in ("aten::slice", "aten::narrow") and _last(node, _rank(node)):
        if name == "aten::slice" and rules.named_argument(node, "step") not in (None, 1):
            raise Explicit(f"%{node.name} takes every other channel")
        offset = int(rules.named_argument(node, "start") or 0)
        offset += _channels(source) if offset < 0 else 0
        return _pieces(source, start + offset, stop + offset, heads_last)
    if node.target is operator.getitem and rules.op_name(source) in _SPLITS:
        return _of_split(node, source, start, stop, heads_last)
    if name == "aten::transpose" and {rules.named_argument(node, key) % 4 for key in ("dim0", "dim1")} == {1, 2}:
        return _pieces(source, start, stop, not heads_last)
    if name == "aten::expand":
        return _of_expand(node, source, start, stop, heads_last)
    if name in _VIEWS and heads_last:
        return _of_linear(node, source, start, stop)
    raise Explicit(f"%{node.name} ({name.replace('::', '.') or node.op}) is no part of an expanded latent")


def _of_cat(node: fx.Node, start: int, stop: int, heads_last: bool) -> list[Piece]:
    out: list[Piece] = []
    offset = 0
    for member in rules.named_argument(node, "tensors"):
        width = _channels(member)
        low, high = max(start, offset), min(stop, offset + width)
        if low < high:
            out += _pieces(member, low - offset, high - offset, heads_last)
        offset += width
    return out


def _of_scatter(node: fx.Node, start: int, stop: int, heads_last: bool) -> list[Piece]:
    """``self`` with channels ``[first, last)`` replaced by those of ``src``."""
    base, src = (rules.named_argument(node, name) for name in ("self", "src"))
    if rules.named_argument(node, "step") not in (None, 1):
        raise Explicit(f"%{node.name} writes every other channel")
    first = int(rules.named_argument(node, "start") or 0)
    last = first + _channels(src)
    out: list[Piece] = []
    for low, high, member, offset in ((start, first, base, 0), (first, last, src, first), (last, stop, base, 0)):
        low, high = max(start, low), min(stop, high)
        if low < high:
            out += _pieces(member, low - offset, high - offset, heads_last)
    return out


def _of_split(node: fx.Node, split: fx.Node, start: int, stop: int, heads_last: bool) -> list[Piece]:
    source: Any = split.args[0]
    if not _last(split, _rank(source)):
        raise Explicit(f"%{split.name} splits another dimension than the channels")
    members = meta.value(split)
    assert isinstance(members, (tuple, list))
    index: Any = node.args[1]
    offset = sum(int(member.shape[-1]) for member in members[:index])
    return _pieces(source, start + offset, stop + offset, heads_last)


def _of_expand(node: fx.Node, source: fx.Node, start: int, stop: int, heads_last: bool) -> list[Piece]:
    heads = 2 if heads_last else 1
    before, after = shape_of(source) or (), shape_of(node) or ()
    if len(before) != 4 or before[heads] != 1:
        if before == after:
            return _pieces(source, start, stop, heads_last)
        raise Explicit(f"%{node.name} expands another dimension than the heads")
    if any(one != other for dim, (one, other) in enumerate(zip(before, after, strict=True)) if dim != heads):
        raise Explicit(f"%{node.name} expands another dimension than the heads")
    return [Shared(source, heads_last, start, stop)]


def _of_linear(node: fx.Node, source: fx.Node, start: int, stop: int) -> list[Piece]:
    """``linear(latent, weight)`` seen as ``[B, S, H, channels]``."""
    if rules.op_name(source) != "aten::linear" or rules.named_argument(source, "bias") is not None:
        raise Explicit(f"%{source.name} is no linear map without a bias")
    latent, weight = source.args[:2]
    held, out, matrix = meta.tensor(latent), meta.tensor(node), meta.tensor(weight)
    if held is None or out is None or matrix is None or out.dim() != 4:
        raise Explicit(f"%{node.name} is not [B, S, H, channels]")
    assert isinstance(latent, fx.Node) and isinstance(weight, fx.Node)
    rows = held.shape[:-1] if held.dim() == 3 else (held.shape[0], held.shape[2]) if held.dim() == 4 else ()
    lone = held.dim() == 3 or (held.dim() == 4 and fakes.same_size(held.shape[1], 1))
    if not lone or len(rows) != 2 or not all(map(fakes.same_size, rows, out.shape[:2])):
        raise Explicit(f"%{latent.name} is not one latent a token")
    if not fakes.same_size(out.shape[2] * out.shape[3], matrix.shape[0]):
        raise Explicit(f"%{node.name} does not see {matrix.shape[0]} features as heads")
    return [Expanded(latent, weight, int(out.shape[3]), start, stop)]


def _last(node: fx.Node, rank: int) -> bool:
    dim = rules.named_argument(node, "dim")
    return isinstance(dim, int) and dim % rank == rank - 1


def _rank(node: fx.Node) -> int:
    return len(shape_of(node) or ())


def _channels(node: fx.Node) -> int:
    held = meta.tensor(node)
    if held is None or not isinstance(held.shape[-1], int):
        raise Explicit(f"%{node.name} has no fixed number of channels")
    return held.shape[-1]


def _dtype(node: fx.Node) -> torch.dtype | None:
    held = meta.tensor(node)
    return None if held is None else held.dtype
