# SPDX-License-Identifier: Apache-2.0
"""The pipelines of step programs."""

from __future__ import annotations

from typing import Literal

from pcp_passes.passes.base import Pass
from pcp_passes.passes.pipeline import Observer, Pipeline
from pcp_passes.passes.steps.broadcast_verified import BroadcastVerified
from pcp_passes.passes.steps.elide_boundary import ElideBoundary
from pcp_passes.passes.steps.lower_step import LowerStep
from pcp_passes.passes.steps.place_step import PlaceStep
from pcp_passes.passes.steps.regather_block_tables import RegatherBlockTables
from pcp_passes.passes.steps.share_topk import ShareTopK
from pcp_passes.passes.steps.shift_draft_inputs import ShiftDraftInputs
from pcp_passes.passes.steps.sink_restores import SinkRestores
from pcp_passes.step.invariants import OF_STEPS, ON_STEPS

STEP: tuple[Pass, ...] = (
    ShareTopK(),            # (share_topk="owner") first: it is a selection in global order, like those it is sunk with
    PlaceStep(),            # correct and naive: everything that follows is a saving, but for one repair
    ElideBoundary(),        # before shift-draft-inputs: the target's token buffer has one reader only then
    ShiftDraftInputs(),     # before sink-restores: nothing else writes over what a rank holds
    SinkRestores(),         # after elide-boundary: restores that are left are read in global order
    RegatherBlockTables(),  # the repair; after the calls have found what they share
    BroadcastVerified(),    # (verify_tokens="broadcast") anywhere before lowering
    LowerStep(),            # last: nothing after it needs to know what moves
)  # fmt: skip


def step_pipeline(
    variant: Literal["sharded", "replicated"],
    share: bool = False,
    broadcast: bool = False,
    optimize: bool = True,
    *,
    observers: tuple[Observer, ...] = (),
) -> Pipeline:
    """The passes for a step program.

    Args:
        variant: ``sharded`` for steps with a plan; ``replicated`` for those on which every rank runs all tokens.
        share: with ``share-topk``.
        broadcast: with ``broadcast-verified``.
        optimize: ``False`` leaves out what only saves.
        observers: told of each pass.
    """
    unwanted: set[type[object]] = set()
    if not share:
        unwanted.add(ShareTopK)
    if not broadcast:
        unwanted.add(BroadcastVerified)
    if variant == "replicated":
        unwanted |= {PlaceStep, RegatherBlockTables, LowerStep}
    if variant == "replicated" or not optimize:
        unwanted |= {ElideBoundary, ShiftDraftInputs, SinkRestores}
    passes = tuple(step for step in STEP if type(step) not in unwanted)
    return Pipeline(passes, observers, ensures=OF_STEPS, always=ON_STEPS, given=OF_STEPS)
