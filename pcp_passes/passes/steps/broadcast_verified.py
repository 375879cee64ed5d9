# SPDX-License-Identifier: Apache-2.0
"""broadcast-verified: all ranks go on with what rank 0 sampled."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.collectives import all_gather_rows_op
from pcp_passes.passes.base import PassContext, PassResult
from pcp_passes.passes.steps.edits import after, insert
from pcp_passes.step import ops


@dataclass(frozen=True)
class BroadcastVerified:
    """Replace sampled tokens, accepted counts and drafts by those of rank 0.

    Why: ranks compute the same logits, but kernels that are not deterministic may round a tie differently, and ranks
    that accept different counts never meet again. A few integers per request settle it. A broadcast is a gather of
    small rows of which rank 0's are taken, for that is the one collective there is; its operand is contiguous.

    Before::

        %verify : (i64[sR, 4], i64[sR]) replicate = pcp_step.verify(%logits, ...)
        %verified : i64[sR, 4] replicate = operator.getitem(%verify, 0)
        %accepted : i64[sR] replicate = operator.getitem(%verify, 1)

    After::

        %packed : i64[sR, 5] replicate = pcp_step.pack_verified(%verified, %accepted)
        %gathered : i64[4*sR, 5] rank_major = pcp.all_gather_rows(%packed, 4, 'pcp')
        %of_rank_0 : i64[sR, 5] replicate = pcp_step.of_rank_0(%gathered, %packed)
        %unpacked : (i64[sR, 4], i64[sR]) replicate = pcp_step.unpack_verified(%of_rank_0)
    """

    name: ClassVar[str] = "broadcast-verified"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return broadcast_verified(graph, ctx)


def broadcast_verified(graph: fx.Graph, ctx: PassContext) -> PassResult:
    """Insert a gather and a choice behind the verification and behind each draft."""
    count = 0
    for node in list(graph.nodes):
        if ops.is_op(node, ops.verify):
            _verified(node, ctx)
        elif ops.is_op(node, ops.sample_draft):
            readers = list(node.users)
            taken = _of_rank_0(node, after(node), ctx)
            for reader in readers:
                reader.replace_input_with(node, taken)
        else:
            continue
        count += 1
    return PassResult(count, () if count else ("the program samples nothing",))


def _of_rank_0(value: fx.Node, before: fx.Node, ctx: PassContext) -> fx.Node:
    gathered = insert(before, all_gather_rows_op, (value, ctx.pcp, ctx.axis), BroadcastVerified.name, "gathered")
    return insert(before, ops.of_rank_0, (gathered, value), BroadcastVerified.name, "of_rank_0")


def _verified(verify: fx.Node, ctx: PassContext) -> None:
    parts = {user.args[1]: user for user in verify.users}
    sampled, accepted = parts[0], parts[1]
    readers = {index: list(part.users) for index, part in parts.items()}
    before = after(max(sampled, accepted))
    packed = insert(before, ops.pack_verified, (sampled, accepted), BroadcastVerified.name, "packed")
    taken = _of_rank_0(packed, before, ctx)
    again = insert(before, ops.unpack_verified, (taken,), BroadcastVerified.name, "unpacked")
    for index, part in ((0, sampled), (1, accepted)):
        made = insert(before, operator.getitem, (again, index), BroadcastVerified.name, part.name)
        for reader in readers[index]:
            reader.replace_input_with(part, made)
