# SPDX-License-Identifier: Apache-2.0
"""lower-sparse-index: a model's own dense scoring of index keys becomes one op over the paged index cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.errors import Refusal
from pcp_passes.ir import meta, rules
from pcp_passes.ir.index.values import HIDDEN_HALF
from pcp_passes.ir.printer import print_node
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.match_indexer import Indexer, Mismatch, canonical, match_indexer

_ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class LowerSparseIndex:
    """Replace each indexer's scores, mask and top-k by ``pcp::index_topk``.

    Why: captured over stacked rows, the scores pair every row with every row of the step: N x N numbers that say
    nothing of the keys cached before, and that no rank can make from its own rows. The op scores the rows against the
    cached keys of their own requests, sees by position, and breaks ties by position, so neither batching nor sharding
    changes the selection. What is read is the idea and not a spelling, see :mod:`pcp_passes.passes.match_indexer`;
    the mask has one element, which says that rows see by position.

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
    found: list[tuple[fx.Node, Indexer]] = []
    offenders: list[tuple[fx.Node, str]] = []
    for node in keys:
        try:
            found.append((node, _match(node)))
        except Mismatch as mismatch:
            offenders.append((mismatch.node, mismatch.reason))
    if offenders:
        raise Refusal(
            f"{len(offenders)} sparse indexers are not of the form that pcp::index_topk computes.",
            [
                *(pair for node, why in offenders for pair in (("node", print_node(node)), ("reason", why))),
                ("required", "topk(sum_h weights[h] * relu(q[h] . k * scale)) of the keys up to a row's own position"),
                ("next", "run this model without prefill context parallelism, or add its form to match_indexer.py"),
            ],
        )
    notes: list[Note | str] = []
    for node, one in found:
        chosen, layer = _replace(graph, node, one)
        notes.append(note(f"top {one.topk} of {layer}", chosen))
    graph.eliminate_dead_code()
    return PassResult(len(found), tuple(notes))


def _match(keys: fx.Node) -> Indexer:
    found = match_indexer(_selection_of(keys))
    if found.k.node is not keys:
        raise Mismatch(found.k.node, "index keys are scored as they are")
    for masking in found.masks:
        held = meta.tensor(masking.mask)
        if held is None or any(not isinstance(size, int) or size != 1 for size in held.shape):
            raise Mismatch(masking.node, "a mask with sizes of the sequence states more than positions do")
        if masking.low is not None and not masking.low <= HIDDEN_HALF:  # of NaN neither holds
            raise Mismatch(masking.node, f"hidden scores become {masking.low}, which a score may be")
    if not found.masks:
        raise Mismatch(
            found.selection, "scores are masked before the selection: without a mask a row would see later keys"
        )
    batch = found.sizes.get("b", 1)
    if batch != 1:
        raise Mismatch(keys, f"a body has one batch of stacked rows, and here {batch}")
    return found


def _selection_of(keys: fx.Node) -> fx.Node:
    """The top-k at the end of what index keys flow into; each step has one consumer."""
    at = keys
    while rules.op_name(at) != "aten::topk":
        if len(at.users) != 1:
            raise Mismatch(at, f"it has one consumer, and here {len(at.users)}")
        user = next(iter(at.users))
        if user.op == "output":
            raise Mismatch(at, "it leaves the graph; the best scores are taken by topk along the keys")
        at = user
    return at


def _replace(graph: fx.Graph, keys: fx.Node, one: Indexer) -> tuple[fx.Node, str]:
    from pcp_passes.paged.ops import index_topk_op  # an op of its own: loaded when it is used

    write = keys.args[1]
    layer = rules.layer_of(write) if isinstance(write, fx.Node) else None
    assert layer is not None, f"%{keys.name} does not say which layer's keys it stands for"
    with graph.inserting_before(one.selection):
        make = partial(_make, graph, one.selection)
        q = make(_ATEN.select.int, canonical(make, one.q, "bthd", one.sizes), 0, 0)
        weights = make(_ATEN.select.int, canonical(make, one.weights, "bth", one.sizes), 0, 0)
        if one.scale != 1.0:
            weights = make(_ATEN.mul.Tensor, weights, one.scale)
        chosen = make(index_topk_op, q, weights, write, layer, one.topk)
        batched = make(_ATEN.unsqueeze.default, chosen, 0)
        wide: fx.Node | None = None
        for user in list(one.selection.users):
            if user.target is _ATEN._to_copy.default and user.kwargs.get("dtype") == torch.int32:
                user.replace_all_uses_with(batched)
                continue
            wide = wide or make(_ATEN._to_copy.default, batched, dtype=torch.int64)
            user.replace_input_with(one.selection, wide)
    return chosen, layer


def _make(graph: fx.Graph, serves: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return meta.adopt(graph.call_function(target, args, kwargs), serves, LowerSparseIndex.name)
