# SPDX-License-Identifier: Apache-2.0
"""split-stages: of a finished body, the layers of one pipeline stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.errors import InvariantError
from pcp_passes.ir import fakes, invariants, meta, rules
from pcp_passes.ir.copies import copy_graph_module, module_like
from pcp_passes.ir.invariants import LOWERED, NO_NEW_ALIAS, ONE_SYMBOL, ORDER_KNOWN, PADDING_DEFINED, PLACED, require
from pcp_passes.ir.placements import Placement, Replicate, Shard
from pcp_passes.passes.base import PassContext, PassResult
from pcp_passes.passes.bodies.stage_cut import StageCut, Wire
from pcp_passes.passes.pipeline import Observer, Pipeline
from pcp_passes.piecewise.cuts import base_of, expression, is_size, row_symbol

STAGED = "STAGED"


@dataclass(frozen=True)
class SplitStages:
    """Keep the layers of one stage; what crosses comes in as an input or leaves as a result: the wires.

    Why: a stage holds the weights and caches of its own layers only. Between stages travel rows of the rank, as they
    are: hidden states, a shared top-k where the next stage starts on a layer that reuses one, states for a drafter on
    their way to the last stage. Nothing is restored for it, since the next stage runs the same rows on the same rank of
    its group. What depends on inputs alone is cheaper to compute again than to send.

    Before::

        %embedding : f32[1, sM, 64] shard(1) = aten.embedding.default(%embed_weight, %unsqueeze)
        %add : f32[1, sM, 64] shard(1) = aten.add.Tensor(%embedding, %linear)   # layers.0
        %linear_1 : f32[1, sM, 64] shard(1) = aten.linear.default(%add, %w_1)   # layers.1
        %add_1 : f32[1, sM, 64] shard(1) = aten.add.Tensor(%add, %linear_1)   # layers.1
        %select : f32[sM, 64] shard(0) = aten.select.int(%add_1, 0, 0)
        return %select

    After::

        %ids : i64[sM] shard(0) = input
        %positions : i64[sM] shard(0) = input
        %add : f32[sM, 64] shard(0) = input
        %unsqueeze_1 : f32[1, sM, 64] shard(1) = aten.unsqueeze.default(%add, 0)
        %linear_1 : f32[1, sM, 64] shard(1) = aten.linear.default(%unsqueeze_1, %w_1)   # layers.1
        %add_1 : f32[1, sM, 64] shard(1) = aten.add.Tensor(%unsqueeze_1, %linear_1)   # layers.1
        %select : f32[sM, 64] shard(0) = aten.select.int(%add_1, 0, 0)
        return %select
    """

    layers: tuple[int, ...] = (1,)
    """Decoder layers of each stage."""
    index: int = 0
    """The stage that is kept."""

    name: ClassVar[str] = "split-stages"
    requires: ClassVar[frozenset[str]] = frozenset({LOWERED, PLACED})
    establishes: ClassVar[frozenset[str]] = frozenset({STAGED})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return keep_stage(graph, StageCut(graph, self.layers), self.index)


def keep_stage(graph: fx.Graph, cut: StageCut, index: int) -> PassResult:
    """Reduce ``graph`` to one stage in place."""
    taken, given = cut.reads(index), cut.makes(index)
    _own_sizes(graph, cut)
    end = graph.output_node()
    results = [_row_result(base, cut.row_dim(base), end) for base in given]
    for base in taken:
        _take(graph, base, cut)
    if index < cut.count - 1:
        end.args = (tuple(results),)
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)
    rewrites = len(taken) + len(given)
    return PassResult(rewrites, () if rewrites else ("there is one stage: nothing crosses",))


def _own_sizes(graph: fx.Graph, cut: StageCut) -> None:
    """Row counts are read off an input of the body, which every stage has, not off what another stage computes."""
    rows = next(node for node in graph.find_nodes(op="placeholder") if cut.symbol in _sizes(node))
    dim = _sizes(rows).index(cut.symbol)
    own: fx.Node | None = None
    for node in list(graph.nodes):
        foreign = is_size(node) and expression(meta.value(node)) == cut.symbol and node.all_input_nodes
        if not foreign or not any(base_of(n) in cut.stage_of for n in node.all_input_nodes if meta.holds_tensor(n)):
            continue
        if own is None:
            with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
                own = graph.call_function(torch.ops.aten.sym_size.int, (rows, dim))
            meta.adopt(own, rows, SplitStages.name)
        node.replace_all_uses_with(own)


def _sizes(node: fx.Node) -> list[Any]:
    held = meta.tensor(node)
    return [] if held is None else [expression(size) for size in held.shape]


def _row_result(base: fx.Node, dim: int, before: fx.Node) -> fx.Node:
    """``[1, N, ...]`` as ``[N, ...]``."""
    for _ in range(dim):
        with base.graph.inserting_before(before):
            made = base.graph.call_function(torch.ops.aten.select.int, (base, 0, 0))
        base = meta.adopt(made, base, SplitStages.name, _place(base, -1), meta.info(base).layer)
    return base


def _take(graph: fx.Graph, base: fx.Node, cut: StageCut) -> None:
    """Give all readers of ``base`` the rows of a new input."""
    held, dim, readers = meta.tensor(base), cut.row_dim(base), list(base.users)
    mode = fakes.fake_mode_of(held)
    assert held is not None and mode is not None, f"%{base.name} has no fake value"
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        wire = graph.placeholder(base.name)
    with mode:
        meta.set_aten_value(wire, torch.empty(held.shape[dim:], dtype=held.dtype, device=held.device))
    meta.set_placement(wire, _place(base, -dim))
    made = wire
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    for _ in range(dim):
        with graph.inserting_before(first):
            wider = graph.call_function(torch.ops.aten.unsqueeze.default, (made, 0))
        made = meta.adopt(wider, made, SplitStages.name, _place(made, 1))
    for reader in readers:
        if dim == 1 and reader.target is torch.ops.aten.select.int and reader.args[1:] == (0, 0):
            reader.replace_all_uses_with(wire)
        else:
            reader.replace_input_with(base, made)


def _place(node: fx.Node, shift: int) -> Placement:
    where = meta.placement(node)
    return Shard(where.dim + shift) if isinstance(where, Shard) else Replicate()


def staged(graph: fx.Graph, ctx: PassContext) -> None:
    """All that crosses to or from a stage is one row per token, on the rank that runs it; caches it reads it wrote."""
    require(STAGED, "a stage exchanges rows of its rank and reads its own caches only", _astray(graph, ctx))


def _astray(graph: fx.Graph, ctx: PassContext) -> Iterator[tuple[fx.Node, str]]:
    symbol = row_symbol(graph)
    wanted: Placement = Shard(0) if ctx.variant == "sharded" else Replicate()
    for node in [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]:
        if _sizes(node)[:1] != [symbol]:
            yield node, f"crosses with sizes {_sizes(node)}; required {symbol} rows first"
        elif meta.placement(node) != wanted:
            yield node, f"crosses and is {meta.placement(node)}; required {wanted}"
    written = {rules.layer_of(node) for node in graph.nodes if isinstance(rules.rule_of(node), rules.CacheWrite)}
    for node in graph.nodes:
        if isinstance(rules.rule_of(node), rules.LocalQuery) and rules.layer_of(node) not in written:
            yield node, f"reads the cache of {rules.layer_of(node)}, which no node of this stage writes"
        if node.op == "get_attr" and not node.users:
            yield node, "is held and not read"


invariants.INVARIANTS[STAGED] = staged
ON_STAGES: frozenset[str] = invariants.ALWAYS - {ONE_SYMBOL, NO_NEW_ALIAS}
"""What holds of a body before and after the split: a stage has inputs of its own, and returns views of its rows."""


@dataclass(frozen=True, eq=False)
class BodyStage:
    """One stage of a body: ``gm(*inputs of the body, *takes)`` gives ``gives``, or the body's results when it is the
    last. It shares parameters with the body and holds its own layers' only."""

    gm: fx.GraphModule
    takes: tuple[Wire, ...]
    gives: tuple[Wire, ...]


def split_body(
    gm: fx.GraphModule, ctx: PassContext, layers: Sequence[int], observers: Sequence[Observer] = ()
) -> tuple[BodyStage, ...]:
    """All stages of a finished body, which is not changed; ``ctx.variant`` says which body it is.

    Raises:
        ConfigError, Refusal: as :class:`~pcp_passes.passes.bodies.stage_cut.StageCut`.
        InvariantError: the stages do not add up to the body.
    """
    cut = StageCut(gm.graph, layers)
    given = frozenset({PLACED, ORDER_KNOWN, PADDING_DEFINED, LOWERED})
    stages = []
    for index in range(len(layers)):
        held = copy_graph_module(gm)
        step = SplitStages(tuple(layers), index)
        Pipeline((step,), tuple(observers), frozenset({STAGED}), ON_STAGES, given).run(held, ctx)
        takes, gives = (tuple(cut.wire(base) for base in found) for found in (cut.reads(index), cut.makes(index)))
        stages.append(BodyStage(module_like(held, held.graph), takes, gives))
        staged(stages[-1].gm.graph, ctx)
    require_whole(gm, [stage.gm for stage in stages])
    return tuple(stages)


def require_whole(body: fx.GraphModule, stages: Sequence[fx.GraphModule]) -> None:
    """Collectives, cache writes and parameters of the stages are those of the body, each in one stage.

    Raises:
        InvariantError: names what is missing, and what is there twice.
    """
    parts = [_parts(stage) for stage in stages]
    whole, found = _parts(body), sum(parts, Counter[str]())
    if whole != found:
        raise InvariantError(
            f"{STAGED}: the stages are not the body: missing {', '.join(sorted(whole - found)) or 'nothing'}; too many "
            f"{', '.join(sorted(found - whole)) or 'nothing'}. Keep layers that share weights or caches in one stage"
        )


def _parts(gm: fx.GraphModule) -> Counter[str]:
    counted: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if is_collective(node):
            held = meta.tensor(node.args[0])
            counted[
                f"{rules.op_name(node)} of {held.dtype if held is not None else ''} in {meta.module_path(node)}"
            ] += 1
        elif isinstance(rules.rule_of(node), rules.CacheWrite):
            counted[f"write of {rules.layer_of(node)} by {rules.op_name(node)}"] += 1
    return counted + Counter({f"parameter {name}": 1 for name, _ in gm.named_parameters()})
