# SPDX-License-Identifier: Apache-2.0
"""lower-step: restores of a step program become one gather and one selection each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.collectives import all_gather_rows_op
from pcp_passes.ir.token_markers import is_restore
from pcp_passes.passes.base import PassContext, PassResult
from pcp_passes.passes.steps.edits import insert
from pcp_passes.step import ops
from pcp_passes.step.invariants import RESTORES_LOWERED


@dataclass(frozen=True)
class LowerStep:
    """Turn ``restore`` into ``pcp::all_gather_rows`` and a selection by the plan's index.

    Why: every restore of a step program is of whole rows, so it needs none of the dimension moves that a body's does.

    Before::

        %restored : f32[sL, 64] replicate = pcp.restore(%offered, %sampled_restore, 0, 1, 1, 4, 'pcp')

    After::

        %gathered : f32[4*sS, 64] rank_major = pcp.all_gather_rows(%offered, 4, 'pcp')
        %restored_2 : f32[sL, 64] replicate = pcp_step.select_rows(%gathered, %sampled_restore)
    """

    name: ClassVar[str] = "lower-step"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset({RESTORES_LOWERED})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return lower_step(graph)


def lower_step(graph: fx.Graph) -> PassResult:
    """Lower every restore of the program."""
    restores = [node for node in graph.nodes if is_restore(node)]
    for node in restores:
        local, index, _, _, _, pcp, axis = node.args
        assert isinstance(local, fx.Node)
        if not ops.is_op(local, ops.select_rows):  # a body may give rows that are views of wider ones
            local = insert(node, ops.contiguous, (local,), LowerStep.name, "contiguous")
        gathered = insert(node, all_gather_rows_op, (local, pcp, axis), LowerStep.name, "gathered")
        made = insert(node, ops.select_rows, (gathered, index), LowerStep.name, node.name)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return PassResult(len(restores), () if restores else ("the program holds no restore",))
