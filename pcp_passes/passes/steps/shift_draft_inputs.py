# SPDX-License-Identifier: Apache-2.0
"""shift-draft-inputs: the first draft pass reads its tokens from the buffer that the target has read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.ir import meta
from pcp_passes.ir.token_markers import is_shard
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.steps.edits import given, insert
from pcp_passes.step import ops
from pcp_passes.step.placement import body_of


@dataclass(frozen=True)
class ShiftDraftInputs:
    """Shard the shifted tokens into the target's own token buffer.

    Why: the shift itself stays in global order, for the token after a shard's last one is on another rank. What it
    gives is needed rank-local once, when the target has consumed its own tokens; a second buffer would be one more
    address to capture, to pad and to keep in step. BUFFERS_IN_ORDER checks that nothing reads the old tokens later.

    Before::

        %shift : i64[sT] replicate = pcp_step.shift(%input_ids, %query_start_loc, %last_rows, %next_token)
        %shard_3 : i64[sM] shard(0) = pcp.shard(%shift, %local_rows, 0, 1, 1)

    After::

        %shift : i64[sT] replicate = pcp_step.shift(%input_ids, %query_start_loc, %last_rows, %next_token)
        %shard_into : i64[sM] shard(0) = pcp_step.shard_into(%shift, %local_rows, %shard)
    """

    name: ClassVar[str] = "shift-draft-inputs"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return shift_draft_inputs(graph)


def shift_draft_inputs(graph: fx.Graph) -> PassResult:
    """Give every sharded shift of the step's tokens the target's token buffer."""
    count = 0
    notes: list[Note | str] = []
    for node in list(graph.nodes):
        shifted = node.args[0] if is_shard(node) else None
        if not isinstance(shifted, fx.Node) or not ops.is_op(shifted, ops.shift):
            continue
        buffer = _consumed(graph, shifted.args[0], node)
        if buffer is None:
            notes.append(note("the tokens before the shift are not in a buffer of this rank", node))
            continue
        rows = given(graph, "local_rows")
        made = insert(node, ops.shard_into, (shifted, rows, buffer), ShiftDraftInputs.name, "shard_into")
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        count += 1
    if not count:
        notes.append("no drafter reads shifted tokens of a shard")
    return PassResult(count, tuple(notes))


def _consumed(graph: fx.Graph, tokens: object, before: fx.Node) -> fx.Node | None:
    """The rank's part of ``tokens``, read by a sharded body call and by nothing behind ``before``."""
    nodes: list[fx.Node] = list(graph.nodes)
    order = {node: index for index, node in enumerate(nodes)}
    for node in nodes:
        if is_shard(node) and node.args[0] is tokens and order[node] < order[before]:
            reads = [order[user] < order[before] for user in node.users]
            if all(reads) and any(body_of(user) for user in node.users) and meta.tensor(node) is not None:
                return node
    return None
