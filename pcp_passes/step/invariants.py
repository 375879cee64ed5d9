# SPDX-License-Identifier: Apache-2.0
"""Invariants of step programs, under their names in :data:`pcp_passes.ir.invariants.INVARIANTS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from pcp_passes.ir import invariants
from pcp_passes.ir.invariants import PLACED, RANK_FREE, WELL_FORMED, require
from pcp_passes.ir.token_markers import is_restore
from pcp_passes.step.placement import late_reads, misfits

if TYPE_CHECKING:
    from pcp_passes.passes.base import PassContext

OPERANDS_FIT = "OPERANDS_FIT"
BUFFERS_IN_ORDER = "BUFFERS_IN_ORDER"
RESTORES_LOWERED = "RESTORES_LOWERED"

OF_STEPS: frozenset[str] = frozenset({OPERANDS_FIT, BUFFERS_IN_ORDER, RESTORES_LOWERED})
"""What holds of a plain step program and of a finished one; of no body."""

ON_STEPS: frozenset[str] = frozenset({WELL_FORMED, RANK_FREE, PLACED, OPERANDS_FIT})
"""The same for a step program, whose every value is placed from the start."""


def operands_fit(graph: fx.Graph, ctx: PassContext) -> None:
    """In a step program: each call gets operands where it needs them, slots say their layout, and results are global.

    A sharded body takes rank-local rows, a replicated one global rows; only global rows are sampled or returned.
    """
    require(OPERANDS_FIT, "every operand of a step program has the placement its call needs", misfits(graph))


def buffers_in_order(graph: fx.Graph, ctx: PassContext) -> None:
    """In a step program: what lies in a buffer that is used again is read before it is written over."""
    require(BUFFERS_IN_ORDER, "a buffer is read before it is written over", (
        (reader, f"reads %{value.name} after %{writer.name} has written over it")
        for value, writer, reader in late_reads(graph)
    ))  # fmt: skip


def restores_lowered(graph: fx.Graph, ctx: PassContext) -> None:
    """No restore marker is left in a step program."""
    require(RESTORES_LOWERED, "no restore marker is left", (
        (node, "a marker has no body") for node in graph.nodes if is_restore(node)
    ))  # fmt: skip


invariants.INVARIANTS[OPERANDS_FIT] = operands_fit
invariants.INVARIANTS[BUFFERS_IN_ORDER] = buffers_in_order
invariants.INVARIANTS[RESTORES_LOWERED] = restores_lowered
