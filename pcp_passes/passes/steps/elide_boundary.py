# SPDX-License-Identifier: Apache-2.0
"""elide-boundary: what one sharded call gives, the next takes as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.ir.token_markers import is_restore, is_shard
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.steps.edits import given
from pcp_passes.step import ops
from pcp_passes.step.placement import buffer_of


@dataclass(frozen=True)
class ElideBoundary:
    """``shard(restore(x))`` is ``x``, and two calls over the same rows share one set of attention inputs.

    Why: the first draft pass runs over the tokens that the target has just run over, on the same rank, in the same
    rows. Gathering the hidden states to global order and taking the rank's rows again would move every hidden state
    of the prompt for nothing. Padded rows need no care: a restore drops them, and nothing reads what they hold.

    Before::

        %target : f32[sM, 64] shard(0) = module target.sharded(%shard, %shard_1, %row_inputs, %caches)
        %restore : f32[sT, 64] replicate = pcp.restore(%target, %restore_index, 0, 1, 1, 4, 'pcp')
        %shard_5 : f32[sM, 64] shard(0) = pcp.shard(%restore, %local_rows, 0, 1, 1)
        %drafter : f32[sM, 64] shard(0) = module drafter.sharded(%shard_3, %shard_4, %shard_5, %row_inputs_1, %caches)

    After::

        %target : f32[sM, 64] shard(0) = module target.sharded(%shard, %shard_1, %row_inputs, %caches)
        %drafter : f32[sM, 64] shard(0) = module drafter.sharded(%shard_3, %shard_1, %target, %row_inputs, %caches)
    """

    name: ClassVar[str] = "elide-boundary"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return elide_boundary(graph)


_SHARED = (ops.expand_slots, ops.select_rows, ops.gather_block_tables, ops.row_lengths, ops.attention_inputs)


def elide_boundary(graph: fx.Graph) -> PassResult:
    """Remove every shard of a restore, and every rank-local input that is there already."""
    count = 0
    notes: list[Note | str] = []
    for node in list(graph.nodes):
        if is_shard(node) and isinstance(node.args[0], fx.Node) and is_restore(node.args[0]):
            whole = node.args[0]
            if node.args[1] is not given(graph, "local_rows") or whole.args[1] is not given(graph, "restore_index"):
                notes.append(note("selects other rows than were restored: left as it is", node))
                continue
            local = whole.args[0]
            assert isinstance(local, fx.Node)
            node.replace_all_uses_with(local)
            graph.erase_node(node)
            if not whole.users:
                graph.erase_node(whole)
            count += 1
    count += _share(graph)
    if not count:
        notes.append("no sharded call feeds another")
    return PassResult(count, tuple(notes))


def _share(graph: fx.Graph) -> int:
    """Let equal calls of what a rank's inputs are made of be one."""
    known: dict[object, fx.Node] = {}
    written: dict[fx.Node, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        base = buffer_of(node)
        if is_shard(node) or ops.is_op(node, *_SHARED):
            first = known.setdefault((node.target, node.args), node)
            if first is not node and (base is None or written.get(base) is first):
                node.replace_all_uses_with(first)
                graph.erase_node(node)
                count += 1
                continue
        if base is not None:
            written[base] = node
    return count
