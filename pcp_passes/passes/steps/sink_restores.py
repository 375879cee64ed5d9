# SPDX-License-Identifier: Apache-2.0
"""sink-restores: only the rows that are sampled leave their rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.ir.token_markers import is_restore, restore_op
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.steps.edits import given, insert
from pcp_passes.step import ops


@dataclass(frozen=True)
class SinkRestores:
    """``select(restore(x), rows)`` becomes a restore of the selected rows.

    Why: of thousands of hidden states only those with logits are read in global order: a request's last row and the
    rows of the drafts it verifies. Each rank offers those it has, as many as the rank with most. The drafter samples
    one row per request, the last one that was not rejected, which only the device knows; but it is one of those rows,
    so they travel and the device chooses among them. What must be restored in full, for a drafter that is replicated,
    is joined first and travels in one gather.

    Before::

        %restore : f32[sT, 64] replicate = pcp.restore(%target, %restore_index, 0, 1, 1, 4, 'pcp')
        %sampled_hidden : f32[sL, 64] replicate = pcp_step.select_rows(%restore, %logit_rows)

    After::

        %offered : f32[sS, 64] shard(0) = pcp_step.select_rows(%target, %sampled_local)
        %restored : f32[sL, 64] replicate = pcp.restore(%offered, %sampled_restore, 0, 1, 1, 4, 'pcp')
    """

    name: ClassVar[str] = "sink-restores"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return sink_restores(graph)


def sink_restores(graph: fx.Graph) -> PassResult:
    """Sink every restore under the selections of logit rows that read it."""
    count = 0
    notes: list[Note | str] = []
    for whole in [node for node in graph.nodes if is_restore(node)]:
        if whole.args[1] is not given(graph, "restore_index"):
            continue  # sunk already
        sunk: fx.Node | None = None
        for user in list(whole.users):
            if ops.is_op(user, ops.join_rows):
                continue
            if not ops.is_op(user, ops.select_rows) or user.args[0] is not whole:
                notes.append(note("is read in full: restored in full", user))
                continue
            chosen = _choice(graph, user)
            if chosen is False:
                notes.append(note("selects rows that are not known to be logit rows: restored in full", user))
                continue
            if sunk is None:
                sunk = _restored(graph, whole)
            made = (
                sunk if chosen is None else insert(user, ops.select_rows, (sunk, chosen), SinkRestores.name, "chosen")
            )
            user.replace_all_uses_with(made)
            graph.erase_node(user)
            count += 1
        if not whole.users:
            graph.erase_node(whole)
    count += sum(_join(node) for node in list(graph.nodes) if ops.is_op(node, ops.join_rows))
    graph.eliminate_dead_code()
    if not count:
        notes.append("no restored value is selected from")
    return PassResult(count, tuple(notes))


def _choice(graph: fx.Graph, user: fx.Node) -> fx.Node | bool | None:
    """``None`` when all logit rows are selected, the choice among them, or ``False`` for other rows."""
    logit_rows, rows = given(graph, "logit_rows"), user.args[1]
    if rows is logit_rows:
        return None
    if isinstance(rows, fx.Node) and ops.is_op(rows, ops.select_rows) and rows.args[0] is logit_rows:
        chosen = rows.args[1]
        assert isinstance(chosen, fx.Node)
        return chosen
    return False


def _restored(graph: fx.Graph, whole: fx.Node) -> fx.Node:
    local, _, *tail = whole.args
    offered = insert(whole, ops.select_rows, (local, given(graph, "sampled_local")), SinkRestores.name, "offered")
    return insert(whole, restore_op, (offered, given(graph, "sampled_restore"), *tail), SinkRestores.name, "restored")


def _join(node: fx.Node) -> bool:
    """A join of restores becomes a restore of the join."""
    parts: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    if len(parts) < 2 or not all(is_restore(part) and part.args[1:] == parts[0].args[1:] for part in parts):
        return False
    joined = insert(node, ops.join_rows, ([part.args[0] for part in parts],), SinkRestores.name, "joined")
    made = insert(node, restore_op, (joined, *parts[0].args[1:]), SinkRestores.name, "restored")
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return True
