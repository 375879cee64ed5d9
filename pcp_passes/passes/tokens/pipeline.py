# SPDX-License-Identifier: Apache-2.0
"""The pipeline for a captured graph of all tokens: from functional ATen to the graph of one rank's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import fx

from pcp_passes.aten.consistency import SIZES_SHARED
from pcp_passes.aten.decision import multiple
from pcp_passes.aten.plan_inputs import PlanInputs, add_plan_inputs
from pcp_passes.ir import meta
from pcp_passes.ir.copies import copy_graph, module_like
from pcp_passes.ir.index.algebra import Assumption
from pcp_passes.ir.invariants import LOWERED, ON_TOKENS, PLACED
from pcp_passes.passes.base import PassContext
from pcp_passes.passes.pipeline import Observer, Pipeline, PipelineReport
from pcp_passes.passes.tokens.coalesce_restores import CoalesceRestores
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.localize_attention import LocalizeAttention
from pcp_passes.passes.tokens.lower_indexer import LowerIndexer
from pcp_passes.passes.tokens.lower_restores import LowerRestores
from pcp_passes.passes.tokens.lower_sparse_attention import LowerSparseAttention
from pcp_passes.passes.tokens.normalize import Normalize
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements, Unknown
from pcp_passes.passes.tokens.select_early import SelectEarly

Outputs = Literal["global", "local", "last"]


class TokenSpace(Protocol):
    """Where a captured graph's values live."""

    @property
    def fake_mode(self) -> Any: ...
    @property
    def tokens(self) -> torch.SymInt: ...
    @property
    def rows(self) -> torch.SymInt: ...


@dataclass(frozen=True)
class TokenOptions:
    """What a user may decide about the rewrite.

    Attributes:
        outputs: ``global``: token rows leave in global order; ``local``: each rank returns its own rows; ``last``: only
            the last token of each output that has one token dimension.
        replicate: dotted paths of modules that run replicated.
        unknown: whether an op whose token behaviour cannot be known is refused or runs replicated.
        balance: operations that one byte of a gather is worth; by default that of the device.
        positions: turn masks into positions.
        pack: let restores that are ready together share a collective.
    """

    outputs: Outputs = "global"
    replicate: tuple[str, ...] = ()
    unknown: Unknown = "refuse"
    balance: float | None = None
    positions: bool = True
    pack: bool = True
    assume: tuple[tuple[str, Assumption], ...] = ()


@dataclass(frozen=True, eq=False)
class Rewritten:
    """The graph of one rank.

    Attributes:
        gm: takes the captured inputs in order, then ``pcp_rows`` i64[M] and ``pcp_restore`` i64[T].
        passes: what each pass did, with its notes.
    """

    gm: fx.GraphModule
    passes: PipelineReport


def token_pipeline(options: TokenOptions, observers: Sequence[Observer] = ()) -> Pipeline:
    """The passes, in order."""
    steps: list[Any] = [
        Normalize(),  # first: fewer spellings for everything that follows
        LowerIndexer(assume=options.assume) if options.positions else None,  # on global rows, where masks are
        LowerSparseAttention(assume=options.assume) if options.positions else None,  # behind it: it reads selections
        LocalizeAttention(assume=options.assume) if options.positions else None,  # what is left of attention
        SelectEarly(),  # on global rows: it moves ops, not placements
        PropagatePlacements(options.replicate, options.unknown),  # placements, before anything changes shape
        InsertReshards(options.balance, options.outputs),  # markers: what must move
        CoalesceRestores() if options.pack else None,  # on markers: packing is one node here
        LowerRestores(),  # last: nothing after it needs to know what moves
    ]
    passes = tuple(step for step in steps if step is not None)
    ensured = frozenset({LOWERED, PLACED, SIZES_SHARED})
    return Pipeline(passes, tuple(observers), ensures=ensured, always=ON_TOKENS)


def rewrite_tokens(
    gm: fx.GraphModule,
    space: TokenSpace,
    ctx: PassContext,
    *,
    options: TokenOptions | None = None,
    observers: Sequence[Observer] = (),
) -> Rewritten:
    """Rewrite a captured graph; ``gm`` is not changed.

    Args:
        gm: functional ATen with values of ``space`` on every node.
        space: fake mode and the two symbols, T and M.
        ctx: number of ranks and axis.

    Raises:
        Refusal: the graph holds an op that can neither run on rows nor replicated.
    """
    graph = copy_graph(gm)
    owner = module_like(gm, graph)
    graph = owner.graph
    plan = add_plan_inputs(graph, space.fake_mode, space.tokens, space.rows)
    if options is not None and options.outputs == "last":
        keep_last_token(graph, plan)
    report = token_pipeline(options or TokenOptions(), observers).run_graph(graph, ctx)
    owner.recompile()
    return Rewritten(owner, report)


def keep_last_token(graph: fx.Graph, plan: PlanInputs) -> None:
    """Slice each output that has one token dimension to its last token, keeping the dimension."""
    end = next(iter(reversed(graph.nodes)))
    aten: Any = torch.ops.aten

    def last(node: fx.Node) -> fx.Node:
        held = meta.tensor(node)
        dims = [d for d, size in enumerate(held.shape) if multiple(size, plan.tokens) == 1] if held is not None else []
        if held is None or len(dims) != 1:
            return node
        with graph.inserting_before(end):
            sliced = graph.call_function(aten.slice.Tensor, (node, dims[0], -1, 2**63 - 1))
        meta.duplicate(node, sliced)
        meta.set_value(sliced, held.narrow(dims[0], held.shape[dims[0]] - 1, 1))
        return sliced

    end.args = fx.node.map_arg(end.args, last)
