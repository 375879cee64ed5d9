# SPDX-License-Identifier: Apache-2.0
"""The passes, and the two pipelines that make the bodies of one capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from pcp_passes.ir.copies import copy_graph, copy_graph_module, module_like
from pcp_passes.ir.invariants import (
    COALESCED,
    CONFLICT_FREE,
    EQUAL_COLLECTIVES,
    LOWERED,
    ORDER_KNOWN,
    PADDING_DEFINED,
    PLACED,
)
from pcp_passes.passes.base import VARIANTS, Note, Pass, PassContext, PassResult, Variant
from pcp_passes.passes.bodies.coalesce_reshards import CoalesceReshards
from pcp_passes.passes.bodies.dispatch_experts import DispatchExperts
from pcp_passes.passes.bodies.gather_cache_writes import GatherCacheWrites
from pcp_passes.passes.bodies.lower_index_prologue import LowerIndexPrologue
from pcp_passes.passes.bodies.lower_reshards import LowerReshards
from pcp_passes.passes.bodies.lower_sparse_index import LowerSparseIndex
from pcp_passes.passes.bodies.mask_padding import MaskPadding
from pcp_passes.passes.bodies.pack_records import PackRecords
from pcp_passes.passes.bodies.place_rows import PlaceRows
from pcp_passes.passes.bodies.split_piecewise import SplitPiecewise
from pcp_passes.passes.bodies.split_stages import SplitStages
from pcp_passes.passes.pipeline import Event, Observer, Pipeline, PipelineReport
from pcp_passes.passes.steps.keep_stage import KeepStage
from pcp_passes.passes.steps.pipeline import STEP
from pcp_passes.passes.tokens.pipeline import TokenOptions, token_pipeline

__all__ = [
    "PASSES", "REPLICATED", "SHARDED", "SHARDED_UNPACKED", "STEP", "TOKENS", "VARIANTS", "CoalesceReshards", "Event",
    "GatherCacheWrites", "LowerReshards", "MaskPadding",
    "Note", "Observer", "Pass", "PassContext", "PassResult", "Pipeline", "PipelineReport", "PlaceRows",
    "SplitPiecewise", "Variant", "body_pipeline", "build_variants", "copy_graph_module",
]  # fmt: skip

SHARDED: tuple[Pass, ...] = (
    PlaceRows(),          # first: refusals before any change, and placements for all that follow
    GatherCacheWrites(),  # markers: what must move
    MaskPadding(),        # anywhere after placement; before lowering, so dumps of markers show the final buffers
    CoalesceReshards(),   # on markers: packing is one node here and nine after lowering
    LowerReshards(),      # last: nothing after it needs to know what moves
)  # fmt: skip

SHARDED_UNPACKED: tuple[Pass, ...] = (
    PlaceRows(),
    GatherCacheWrites(),
    MaskPadding(),
    LowerReshards(),  # each operand of a cache write in a collective of its own
)

REPLICATED: tuple[Pass, ...] = (
    PlaceRows(),    # placements only; every rank holds all rows, so nothing is refused
    MaskPadding(),  # ranks pad to a bucket in this body too
)  # fmt: skip

TOKENS: tuple[Pass, ...] = token_pipeline(TokenOptions()).passes
"""The passes for a captured graph of all tokens (see :mod:`pcp_passes.passes.tokens.pipeline`)."""

PASSES: tuple[Pass, ...] = (
    *SHARDED,
    *TOKENS,
    LowerSparseIndex(),
    PackRecords(),
    LowerIndexPrologue(),
    DispatchExperts(),
    SplitStages(),
    *STEP,
    KeepStage(),
    SplitPiecewise(),
)
"""Every pass, in the order the reference documents them."""

_BODY = frozenset({PLACED, ORDER_KNOWN, PADDING_DEFINED, LOWERED})
_SHARDED_BODY = _BODY | {CONFLICT_FREE, EQUAL_COLLECTIVES}


def body_pipeline(variant: Variant = "sharded", observers: Sequence[Observer] = (), *, pack: bool = True) -> Pipeline:
    """The pipeline that makes one body of a capture.

    Args:
        variant: ``"sharded"`` (each rank runs its own rows) or ``"replicated"`` (every rank runs all rows).
        observers: called with the captured graph and after each pass, in this order.
        pack: let the row operands of one cache write share one collective.
    """
    if variant == "replicated":
        return Pipeline(REPLICATED, tuple(observers), _BODY)
    if not pack:
        return Pipeline(SHARDED_UNPACKED, tuple(observers), _SHARDED_BODY)
    return Pipeline(SHARDED, tuple(observers), _SHARDED_BODY | {COALESCED})


def build_variants(
    gm: fx.GraphModule, ctx: PassContext, observers: Sequence[Observer] = (), *, pack: bool = True
) -> dict[Variant, fx.GraphModule]:
    """Both bodies of one capture: ``{"sharded": ..., "replicated": ...}``.

    ``gm`` is never changed (its tracer reads it again). The copies share parameters, buffers and example values with
    it, take the same inputs in the same order, and hold no rank: the text is equal on all ranks.

    Args:
        gm: a captured body; tensors with a symbolic dimension are token rows.
        ctx: axis and size; its ``variant`` is ignored.
        observers: called for the sharded body, then for the replicated one; ``event.ctx.variant`` tells which.
        pack: let the row operands of one cache write share one collective.

    Raises:
        Refusal: the body holds an op that cannot run on sharded rows, or has been rewritten already.
    """
    bodies: dict[Variant, fx.GraphModule] = {}
    for variant in VARIANTS:
        graph = copy_graph(gm)
        body_pipeline(variant, observers, pack=pack).run_graph(graph, replace(ctx, variant=variant))
        bodies[variant] = module_like(gm, graph)
    return bodies
