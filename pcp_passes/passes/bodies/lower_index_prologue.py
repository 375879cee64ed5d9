# SPDX-License-Identifier: Apache-2.0
"""lower-index-prologue: what an indexer does to its key and queries, up to their FP8 form, becomes two ops."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

import pcp_kernels.ops  # noqa: F401  registers the operators
from pcp_passes.ir import meta, rules
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.match_dims import shape_of
from pcp_passes.passes.match_indexer import Mismatch
from pcp_passes.passes.match_rotation import Rotation, constant_factor, match_rotation, plain

_ATEN: Any = torch.ops.aten
_KERNELS: Any = torch.ops.pcp_kernels
Make = Callable[..., fx.Node]


@dataclass(frozen=True)
class LowerIndexPrologue:
    """Make FP8 records and FP8 queries straight from the projections: norm, RoPE and quantisation in one kernel each.

    Why: an index key goes from its projection through LayerNorm, a split, RoPE and a concatenation into the packing of
    a record, five passes over memory; a query, H times as wide, through the same but the norm. With FP8 caches nothing
    of that is wanted but codes and scales. With caches of another dtype Inductor fuses the same ops by itself, and this
    pass does nothing. Runs after ``pack-records``; a layer whose key or queries are of no known form, named with the
    node where they differ, keeps its ops and is quantised by ``pcp::pack_record`` and ``pcp::index_topk``.

    RoPE of neighbours (``interleaved``) leaves pairs where they were. transformers moves the first values of all pairs
    in front of the second ones, so codes of the rotated part lie in another order than without this pass: in key and
    queries alike, hence both are rewritten or none. Of f32 and f64 models the codes are those of the model's own ops.
    Models in bf16 round after the norm and after each product; here that is once, in front of FP8, so some codes are
    a step away, and more where the two products of a pair nearly cancel. Constant factors of the weights become one,
    which may move their last bit.

    Before::

        %pack_record = pcp.pack_record(%latent, %rope, aten.cat([%rotated, %passed], -1), 'fp8')
        %record_write = pcp.record_write(%pack_record, 'target.0', 512, 64, 128)
        %index_topk = pcp.index_topk(%index_q, aten.mul(%w, 0.02), %record_write, 'target.0', 2048)

    After::

        %dsa_pack = pcp_kernels.dsa_pack(%latent, %rope, %k, %weight, %bias, 1e-06, %cos, %sin, rope='half', ...)
        %record_write = pcp.record_write(%dsa_pack, 'target.0', 512, 64, 128)
        %index_prep = pcp_kernels.index_prep(%q, %w, %cos, %sin, rope='half', ..., store='fp8', factor=0.02)
        %index_topk = pcp.index_topk(%index_prep[0], %index_prep[1], %record_write, 'target.0', 2048)
    """

    name: ClassVar[str] = "lower-index-prologue"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return lower_index_prologue(graph)


@dataclass(frozen=True)
class _Norm:
    """The rotation's operand is LayerNorm of ``x``, or ``x`` itself without a weight."""

    x: fx.Node
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    eps: float = 0.0


def lower_index_prologue(graph: fx.Graph) -> PassResult:
    """Rewrite every layer whose record has an index key that is packed to FP8."""
    count = 0
    notes: list[Note | str] = []
    views: dict[Any, fx.Node] = {}
    for pack in [node for node in graph.nodes if _packs_fp8(node)]:
        try:
            key = match_rotation(rules.argument(pack, 2))
            queries = [(node, _query(node, key)) for node in _readers(pack)]
        except Mismatch as mismatch:
            notes.append(note(f"{mismatch.reason}: its key and queries are quantised as they are", mismatch.node))
            continue
        record = _pack(partial(_make, graph, pack, views), pack, key, _norm(key.x))
        for node, (turned, weights, factor) in queries:
            _prepare(partial(_make, graph, node, views), node, turned, weights, factor)
        notes.append(
            note(f"RoPE of {key.size} values, {key.rope}, in the pack and {len(queries)} preparations", record)
        )
        count += 1
    if not notes:
        notes.append("no record with an index key is packed to FP8")
    graph.eliminate_dead_code()
    return PassResult(count, tuple(notes))


def _packs_fp8(node: fx.Node) -> bool:
    return (
        rules.op_name(node) == "pcp::pack_record"
        and rules.argument(node, 2) is not None
        and rules.argument(node, 3) == "fp8"
    )


def _readers(pack: fx.Node) -> list[fx.Node]:
    """The selections over the cache that a record is written to."""
    found = [
        user for write in pack.users for user in write.users
        if rules.op_name(write) == "pcp::record_write" and rules.op_name(user) == "pcp::index_topk"
    ]  # fmt: skip
    if not found:
        raise Mismatch(pack, "nothing here scores its index key, so the order of its values is left to who does")
    return found


def _query(node: fx.Node, key: Rotation) -> tuple[Rotation, fx.Node, float]:
    """The rotated queries of a selection, its weights, and the constant factor in front of them."""
    turned = match_rotation(rules.argument(node, 0))
    if (turned.rope, turned.size) != (key.rope, key.size):
        raise Mismatch(
            node, f"its queries turn {turned.size} values, {turned.rope}, and its keys {key.size}, {key.rope}"
        )
    return turned, *constant_factor(rules.argument(node, 1))


def _norm(x: fx.Node) -> _Norm:
    weight = rules.named_argument(x, "weight") if rules.op_name(x) == "aten::layer_norm" else None
    if weight is None or len(rules.named_argument(x, "normalized_shape")) != 1:
        return _Norm(x)
    eps = rules.named_argument(x, "eps")
    inner = plain(rules.named_argument(x, "input"))
    return _Norm(inner, weight, rules.named_argument(x, "bias"), 1e-5 if eps is None else float(eps))


def _pack(make: Make, pack: fx.Node, key: Rotation, norm: _Norm) -> fx.Node:
    held = meta.tensor(rules.argument(pack, 2))
    rounding = "bf16" if held is not None and held.dtype == torch.bfloat16 else "fp32"
    latent, rope = (_rows(make, rules.argument(pack, position), 2) for position in (0, 1))
    x = _rows(make, norm.x, 2)
    angles = _angles(make, key)
    record = make(
        _KERNELS.dsa_pack.default, latent, rope, x, norm.weight, norm.bias, norm.eps, *angles,
        rope=key.rope, hadamard=False, rounding=rounding, store="fp8",
    )  # fmt: skip
    pack.replace_all_uses_with(record)
    return record


def _prepare(make: Make, node: fx.Node, turned: Rotation, weights: fx.Node, factor: float) -> None:
    prepared = make(
        _KERNELS.index_prep.default, _rows(make, turned.x, 3), _rows(make, weights, 2), *_angles(make, turned),
        rope=turned.rope, hadamard=False, store="fp8", factor=factor,
    )  # fmt: skip
    for place in (0, 1):
        rules.set_argument(node, place, make(operator.getitem, prepared, place))


def _angles(make: Make, turned: Rotation) -> tuple[fx.Node, fx.Node]:
    """cos and sin ``[N, R/2]``."""

    def columns(angle: fx.Node) -> fx.Node:
        rows = _rows(make, angle, 2)
        width = shape_of(rows)
        assert width is not None, f"%{rows.name} has no value"
        return rows if width[-1] == turned.size // 2 else make(_ATEN.slice.Tensor, rows, 1, 0, turned.size // 2)

    return columns(turned.cos), columns(turned.sin)


def _rows(make: Make, node: fx.Node, rank: int) -> fx.Node:
    """``node`` with ``rank`` dimensions: without the first ones of size 1, or with one for a single head."""
    while (shape := shape_of(node)) is not None and len(shape) > rank:
        node = make(_ATEN.select.int, node, shape.index(1), 0)
    return node if shape is None or len(shape) == rank else make(_ATEN.unsqueeze.default, node, 1)


def _make(
    graph: fx.Graph, serves: fx.Node, views: dict[Any, fx.Node], target: Any, *args: Any, **kwargs: Any
) -> fx.Node:
    """A node in front of the one it serves; views of one node are made once, for layers follow each other."""
    call = (target, *args)
    if not kwargs and call in views:
        return views[call]
    with graph.inserting_before(serves):
        node = graph.create_node("call_function", target, args, kwargs, name=getattr(target, "_opname", None))
    layer = rules.layer_of(serves) or meta.info(serves).layer
    meta.adopt(node, serves, LowerIndexPrologue.name, layer=layer if kwargs else None)
    return node if kwargs else views.setdefault(call, node)
