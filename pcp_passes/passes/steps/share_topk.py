# SPDX-License-Identifier: Apache-2.0
"""share-topk: later draft steps read the keys that the indexer chose in the first pass."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.ir import fakes, meta
from pcp_passes.passes.base import PassContext, PassResult
from pcp_passes.passes.steps.edits import given, insert
from pcp_passes.step import ops
from pcp_passes.step.placement import body_of


@dataclass(frozen=True)
class ShareTopK:
    """Run draft steps from the second on without their indexer, with the choice of each request's last valid token.

    Why: the steps of one round look at nearly the same keys, and scoring all of them costs more than the rest of a
    draft step. Under PCP the choice of a row exists on one rank only, the owner of the token: which one is the plan's
    business, so here it is a selection in global order, and ``sink-restores`` lets the owner's row travel with the rows
    that are sampled. It stands in the plain program too, for one rank must draft what many draft.

    Before::

        %drafter_1 = module drafter.replicated(%draft, %rows, %draft_hidden, %attention_inputs_1, %caches)

    After::

        %topk : i32[sT, 32] replicate = operator.getitem(%drafter, 1)
        %shared_topk : i32[sR, 32] replicate = pcp_step.select_rows(%topk, %last_rows)
        %drafter_1 = module drafter.replicated_shared(%draft, %rows, %draft_hidden, %shared_topk, ...)
    """

    name: ClassVar[str] = "share-topk"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return share_topk(graph)


def share_topk(graph: fx.Graph) -> PassResult:
    """Give every draft step over one row per request the first pass's choice."""
    tokens = meta.value(given(graph, "input_ids")).shape[0]
    calls = [n for n in graph.nodes if body_of(n) and str(n.target).startswith("drafter.")]
    first = next((n for n in calls if isinstance(meta.value(n), tuple) and _rows(n, tokens)), None)
    steps = [n for n in calls if not _rows(n, tokens)]
    if first is None or not steps:
        return PassResult(0, ("no draft step follows a pass whose body returns a top-k",))
    hidden = next(user for user in first.users if user.args[1] == 0)
    selection = next(user for user in hidden.users if ops.is_op(user, ops.select_rows))
    topk = insert(selection, operator.getitem, (first, 1), ShareTopK.name, "topk")
    shared = insert(selection, ops.select_rows, (topk, selection.args[1]), ShareTopK.name, "shared_topk")
    for step in steps:
        step.target = "drafter.replicated_shared"
        step.args = (*step.args[:-2], shared, *step.args[-2:])
        meta.set_changed_by(step, ShareTopK.name)
        (part,) = step.users
        meta.set_aten_value(step, meta.value(part))
        part.replace_all_uses_with(step)
        graph.erase_node(part)
    return PassResult(len(steps))


def _rows(call: fx.Node, tokens: object) -> bool:
    held = meta.tensor(call.args[0])
    return held is not None and fakes.same_size(held.shape[0], tokens)
