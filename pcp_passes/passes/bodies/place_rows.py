# SPDX-License-Identifier: Apache-2.0
"""place-rows: refuse what cannot be sharded, then give every value a placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.invariants import ORDER_KNOWN, PLACED
from pcp_passes.ir.placements import Placement, Replicate, Shard
from pcp_passes.ir.refusals import refuse_mixing, refuse_rewritten, refuse_static, refuse_unruled
from pcp_passes.passes.base import PassContext, PassResult


@dataclass(frozen=True)
class PlaceRows:
    """Give every tensor of a captured body a placement, and refuse the body when one cannot have any.

    Why: continuous batching makes every op outside the attention family row-local, so rank-local rows stay rank-local
    through all of them: a value with a token dimension is ``shard``, one without is ``replicate``. That reasoning
    stops at four places, which are refused here, all offenders at once: an op of the attention family without a rule,
    attention whose cache write is inside the op, rows captured with a constant count, and an op that mixes rows. A
    graph that already holds our collectives is refused too: gathering twice would be silent and wrong.

    Before::

        %linear : f32[s72, 64] = torch.nn.functional.linear(%x, %w)

    After::

        %linear : f32[s72, 64] shard(0) = torch.nn.functional.linear(%x, %w)
    """

    name: ClassVar[str] = "place-rows"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset({PLACED, ORDER_KNOWN})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        refuse_rewritten(graph)
        if ctx.variant == "sharded":
            refuse_unruled(graph, ctx.pcp, ctx.axis, self.name, ctx.shared_cache_layers)
            refuse_static(graph, ctx.pcp, ctx.axis, self.name)
            refuse_mixing(graph, ctx.pcp, ctx.axis, self.name)
        return place_rows(graph, ctx)


def place_rows(graph: fx.Graph, ctx: PassContext) -> PassResult:
    """Record a placement on every node whose value holds a tensor, and the layer on every attention-family node.

    In the replicated body every rank holds all rows, so everything is ``replicate``.
    """
    count = 0
    for node in graph.nodes:
        rule = rules.rule_of(node)
        if isinstance(rule, (rules.CacheWrite, rules.LocalQuery)):
            meta.set_layer(node, rules.layer_of(node) or meta.module_path(node) or node.name)
        if meta.holds_tensor(node):
            meta.set_placement(node, _placement(node) if ctx.variant == "sharded" else Replicate())
            count += 1
    reason = "" if count else "no node of the graph has a tensor value: was it captured with example values?"
    return PassResult(count, (reason,) if reason else ())


def _placement(node: fx.Node) -> Placement:
    dims = [fakes.token_dim(t) for t in meta.tensors(node)]
    dim = next((d for d in dims if d is not None), None)
    return Replicate() if dim is None else Shard(dim)
