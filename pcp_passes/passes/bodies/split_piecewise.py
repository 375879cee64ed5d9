# SPDX-License-Identifier: Apache-2.0
"""split-piecewise: cut a finished body into pieces that can be captured, at the calls that cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.ir import invariants
from pcp_passes.ir.invariants import LOWERED, NO_NEW_ALIAS, ORDER_KNOWN, PADDING_DEFINED, PLACED
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.pipeline import Observer, Pipeline
from pcp_passes.piecewise.invariants import PIECEWISE
from pcp_passes.piecewise.pieces import Collectives
from pcp_passes.piecewise.split import NAME, cut_body


@dataclass(frozen=True)
class SplitPiecewise:
    """Replace what lies between cache writes, attention, sparse indexing, experts and collectives by calls of pieces.

    Why: those calls read lengths and tables of the step, or wait for other ranks, and everything between them only
    depends on the row count: it can be captured once a bucket and replayed. Parameters become inputs of a piece, so
    equal layers have equal pieces. What a piece reads and no piece made goes through a hold, which has a fixed address
    under a runner. Views are copied into the pieces that read them; results of pieces never share memory. Sizes do not
    cross a border: a piece takes its row count from a tensor of its own.

    Before::

        %linear = aten.linear(%hidden, %w_q)
        %view = aten.view(%linear, [%sym_size, 2, 8])
        %kv_attend = pcp.kv_attend(%view, %kv_write, 'target.0')
        %linear_1 = aten.linear(%kv_attend, %w_o)
        return %linear_1

    After::

        %hold = pcp_graph.hold(%hidden, 'hidden', 0)
        %piece_0 = module piece_0(%hold, %w_q)
        %linear = operator.getitem(%piece_0, 0)
        %view = aten.view(%linear, [%sym_size, 2, 8])
        %kv_attend = pcp.kv_attend(%view, %kv_write, 'target.0')
        %hold_1 = pcp_graph.hold(%kv_attend, 'held.0', 0)
        %piece_1 = module piece_1(%hold_1, %w_o)
        %linear_1 = operator.getitem(%piece_1, 0)
        %hold_2 = pcp_graph.hold(%linear_1, 'result', 0)
        return %hold_2
    """

    collectives: Collectives = "outside"
    """``"inside"`` captures collectives too, where their back end allows it."""

    name: ClassVar[str] = NAME
    requires: ClassVar[frozenset[str]] = frozenset({LOWERED})
    establishes: ClassVar[frozenset[str]] = frozenset({PIECEWISE})
    breaks: ClassVar[frozenset[str]] = frozenset({ORDER_KNOWN})  # a piece with a collective gives rows of two orders

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return split_piecewise(graph, ctx, self.collectives)


def split_piecewise(graph: fx.Graph, ctx: PassContext, collectives: Collectives = "outside") -> PassResult:
    """Cut ``graph`` in place; its owning module gets the pieces. See :func:`pcp_passes.piecewise.split.cut_body`."""
    cut = cut_body(graph, collectives)
    notes: list[Note | str] = [note(reason, node) for node, reason in cut.reasons.items()]
    if not cut.pieces:
        notes.append("no kernel lies between the cuts: nothing to capture")
    return PassResult(cut.pieces, tuple(notes))


ON_SPLIT: frozenset[str] = invariants.ALWAYS - {NO_NEW_ALIAS}
"""What holds of a body before and after the split: a held result lies where the next call's will lie, on purpose."""


def split_pipeline(collectives: Collectives = "outside", observers: tuple[Observer, ...] = ()) -> Pipeline:
    """The pipeline that splits a finished body."""
    given = frozenset({PLACED, ORDER_KNOWN, PADDING_DEFINED, LOWERED})
    return Pipeline((SplitPiecewise(collectives),), observers, frozenset({PIECEWISE}), ON_SPLIT, given)
