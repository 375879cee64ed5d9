# SPDX-License-Identifier: Apache-2.0
"""lower-sparse-index: a model's own dense scoring of index keys becomes one op over the paged index cache."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.errors import Refusal
from pcp_passes.ir import meta, rules
from pcp_passes.ir.printer import print_node
from pcp_passes.passes.base import Note, PassContext, PassResult, note

_ATEN: Any = torch.ops.aten
_RESHAPES = (_ATEN.unsqueeze.default, _ATEN.transpose.int, _ATEN._to_copy.default, _ATEN.to.dtype)


@dataclass(frozen=True)
class LowerSparseIndex:
    """Replace each indexer's scores, mask and top-k by ``pcp::index_topk``.

    Why: captured over stacked rows, the scores pair every row with every row of the step: N x N numbers that say
    nothing of the keys cached before, and that no rank can make from its own rows. The op scores the rows against the
    cached keys of their own requests, sees by position, and breaks ties by position, so neither batching nor sharding
    changes the selection. ``relu(s * x) = s * relu(x)`` for s > 0 lets the scale move into the weights.

    Before::

        %keys = pcp.index_keys(%k, %write)
        %scores = aten.relu(aten.mul(aten.matmul(%q, aten.unsqueeze(aten.transpose(%keys, -1, -2), 1)), 0.18))
        %sum = aten.squeeze(aten.matmul(aten.unsqueeze(%weights, -2), %scores), -2)
        %topk = aten.topk(aten.masked_fill(%sum, %hidden, -inf), 64)

    After::

        %weights_1 = aten.mul(aten.select(%weights, 0, 0), 0.18)
        %index_topk = pcp.index_topk(aten.select(%q, 0, 0), %weights_1, %write, 'target.0', 64)
    """

    name: ClassVar[str] = "lower-sparse-index"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return lower_sparse_index(graph)


def lower_sparse_index(graph: fx.Graph) -> PassResult:
    """Rewrite every indexer of the graph.

    Raises:
        Refusal: a consumer of index keys that is not scored, masked by position and selected as DeepSeek's indexer is.
    """
    keys = [node for node in graph.nodes if rules.op_name(node) == "pcp::index_keys"]
    if not keys:
        return PassResult(0, ("the model has no sparse indexer",))
    found: list[_Indexer] = []
    offenders: list[tuple[fx.Node, str]] = []
    for node in keys:
        try:
            found.append(_match(node))
        except _Mismatch as mismatch:
            offenders.append((mismatch.node, mismatch.reason))
    if offenders:
        raise Refusal(
            f"{len(offenders)} sparse indexers are not of the form that pcp::index_topk computes.",
            [
                *(pair for node, why in offenders for pair in (("node", print_node(node)), ("reason", why))),
                ("required", "topk(sum_h weights[h] * relu(q[h] . k * scale)) of the keys up to a row's own position"),
                (
                    "next",
                    "run this model without prefill context parallelism, or add its form to lower_sparse_index.py",
                ),
            ],
        )
    notes: list[Note | str] = [note(f"top {one.topk} of {one.layer}", _replace(graph, one)) for one in found]
    graph.eliminate_dead_code()
    return PassResult(len(found), tuple(notes))


class _Mismatch(Exception):
    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class _Indexer:
    """Operands of one indexer: q ``[1, N, Hi, D]``, weights ``[1, N, Hi]``, and the node that holds the selection."""

    q: fx.Node
    weights: fx.Node
    scale: float
    write: fx.Node
    layer: str
    topk: int
    selection: fx.Node


def _match(keys: fx.Node) -> _Indexer:
    seen = _only_user(keys)
    while seen.target in _RESHAPES:
        seen = _only_user(seen)
    held = meta.tensor(seen.all_input_nodes[-1])
    if seen.target is not _ATEN.matmul.default or seen.args[1] is not seen.all_input_nodes[-1] or held is None:
        raise _Mismatch(seen, "index keys are the right operand of a product with the queries")
    q = seen.args[0]
    scale, relu = 1.0, _only_user(seen)
    if relu.target is _ATEN.mul.Tensor:
        if not isinstance(relu.args[1], (int, float)) or relu.args[1] <= 0:
            raise _Mismatch(relu, "a scale in front of relu is a positive constant")
        scale, relu = float(relu.args[1]), _only_user(relu)
    if relu.target is not _ATEN.relu.default:
        raise _Mismatch(relu, "scores of a head go through relu")
    summed = _only_user(relu)
    spread = summed.args[0] if summed.args else None
    if summed.target is not _ATEN.matmul.default or summed.args[1] is not relu or not _is(spread, _ATEN.unsqueeze):
        raise _Mismatch(summed, "heads are summed by a product with unsqueezed weights")
    assert isinstance(spread, fx.Node)
    weights = spread.args[0]
    squeezed = _only_user(summed)
    if not _is(squeezed, _ATEN.squeeze):
        raise _Mismatch(squeezed, "one score per row and key is left")
    topk = _unmasked(squeezed)
    if topk.target is not _ATEN.topk.default or not isinstance(topk.args[1], int) or len(topk.args) > 2:
        raise _Mismatch(topk, "the best scores are taken by topk along the keys, with a constant count")
    selection = _only_user(topk)
    if selection.target is not operator.getitem or selection.args[1] != 1:
        raise _Mismatch(selection, "only the indices of topk are used")
    write = keys.args[1]
    layer = rules.layer_of(write) if isinstance(write, fx.Node) else None
    assert isinstance(q, fx.Node) and isinstance(weights, fx.Node) and isinstance(write, fx.Node) and layer is not None
    return _Indexer(q, weights, scale, write, layer, topk.args[1], selection)


def _unmasked(scores: fx.Node) -> fx.Node:
    """The node behind the mask; the mask has one element, which says that rows see by position."""
    user = _only_user(scores)
    if user.target is _ATEN.topk.default:
        raise _Mismatch(user, "scores are masked before the selection: without a mask a row would see later keys")
    if user.target not in (_ATEN.masked_fill.Scalar, _ATEN.add.Tensor):
        raise _Mismatch(user, "scores are masked by masked_fill or by an additive mask")
    mask = next((node for node in user.all_input_nodes if node is not scores), None)
    held = meta.tensor(mask)
    if held is None or any(not isinstance(size, int) or size != 1 for size in held.shape):
        raise _Mismatch(user, "a mask with sizes of the sequence states more than positions do")
    return _only_user(user)


def _replace(graph: fx.Graph, one: _Indexer) -> fx.Node:
    from pcp_passes.paged.ops import index_topk_op  # an op of its own: loaded when it is used

    with graph.inserting_before(one.selection):

        def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return meta.adopt(graph.call_function(target, args, kwargs), one.selection, LowerSparseIndex.name)

        q, weights = (make(_ATEN.select.int, node, 0, 0) for node in (one.q, one.weights))
        if one.scale != 1.0:
            weights = make(_ATEN.mul.Tensor, weights, one.scale)
        chosen = make(index_topk_op, q, weights, one.write, one.layer, one.topk)
        batched = make(_ATEN.unsqueeze.default, chosen, 0)
        wide: fx.Node | None = None
        for user in list(one.selection.users):
            if user.target is _ATEN._to_copy.default and user.kwargs.get("dtype") == torch.int32:
                user.replace_all_uses_with(batched)
                continue
            wide = wide or make(_ATEN._to_copy.default, batched, dtype=torch.int64)
            user.replace_input_with(one.selection, wide)
    return chosen


def _only_user(node: fx.Node) -> fx.Node:
    if len(node.users) != 1:
        raise _Mismatch(node, f"it has one consumer, and here {len(node.users)}")
    user: fx.Node = next(iter(node.users))
    if user.op == "output":
        raise _Mismatch(node, "it leaves the graph")
    return user


def _is(node: object, packet: Any) -> bool:
    return isinstance(node, fx.Node) and getattr(node.target, "overloadpacket", None) is packet
