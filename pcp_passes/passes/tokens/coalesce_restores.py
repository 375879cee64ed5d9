# SPDX-License-Identifier: Apache-2.0
"""coalesce-restores: restores that wait for nothing in between share one collective."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.ir import meta
from pcp_passes.ir.placements import Replicate
from pcp_passes.ir.token_markers import is_restore, restore_many_op
from pcp_passes.passes.base import PassContext, PassResult


@dataclass(frozen=True)
class CoalesceRestores:
    """Let neighbouring restores of one dtype travel together.

    Why: a collective costs its start as well as its bytes. The keys and values of a layer are ready before either is
    read, so one gather can carry both; it is issued where the first of them is read.

    Before::

        %restore : f32[1, 4, sT, 16] replicate = pcp.restore(%k, %pcp_restore, 2, 1, 1, 4, 'pcp')
        %restore_1 : f32[1, 4, sT, 16] replicate = pcp.restore(%v, %pcp_restore, 2, 1, 1, 4, 'pcp')

    After::

        %restore_many = pcp.restore_many([%k, %v], %pcp_restore, [2, 2], [1, 1], [1, 1], 4, 'pcp')
        %getitem : f32[1, 4, sT, 16] replicate = operator.getitem(%restore_many, 0)
        %getitem_1 : f32[1, 4, sT, 16] replicate = operator.getitem(%restore_many, 1)
    """

    name: ClassVar[str] = "coalesce-restores"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return coalesce_restores(graph)


def coalesce_restores(graph: fx.Graph) -> PassResult:
    """Pack each run of restores that ends where the first of them is read."""
    _sink_readers(graph)
    open_groups: dict[Any, list[fx.Node]] = {}
    packed = 0
    for node in list(graph.nodes):
        for key, group in list(open_groups.items()):
            if any(operand in group for operand in node.all_input_nodes):
                packed += _pack(graph, open_groups.pop(key), node)
        if is_restore(node):
            held = meta.tensor(node)
            assert held is not None, f"%{node.name} restores no tensor"
            if sum(isinstance(size, torch.SymInt) for size in held.shape) > 1:
                continue  # scores of all keys: as wide as the prompt, and better alone
            open_groups.setdefault((held.dtype, held.device.type, node.args[1], *node.args[5:]), []).append(node)
    return PassResult(packed, () if packed else ("no two restores are ready together",))


def _sink_readers(graph: fx.Graph) -> None:
    """Move what is computed whole from restored values down to where it is read.

    Keys and values computed from a restored latent stand right behind it, and an indexer's keys come later: sunk, all
    three restores are still unread when the first of them is, and the wide values live shorter.
    """
    after: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not meta.placements(node):
            continue
        whole = all(isinstance(where, Replicate) for where in meta.placements(node))
        if whole and not is_restore(node) and any(is_restore(n) or n in after for n in node.all_input_nodes):
            after[node] = None
    for node in reversed(after):
        if node.users:
            min(node.users).prepend(node)


def _pack(graph: fx.Graph, group: list[fx.Node], reader: fx.Node) -> int:
    if len(group) < 2:
        return 0
    lists = [[member.args[position] for member in group] for position in (0, 2, 3, 4)]
    args = (lists[0], group[0].args[1], *lists[1:], *group[0].args[5:])
    with graph.inserting_before(reader):
        many = graph.call_function(restore_many_op, args, name="restore_many")
        parts = [graph.call_function(operator.getitem, (many, index)) for index in range(len(group))]
    meta.adopt_lazily(many, group[0], CoalesceRestores.name, Replicate())
    meta.set_value(many, [meta.value(member) for member in group])
    for member, part in zip(group, parts, strict=True):
        meta.adopt_lazily(part, member, CoalesceRestores.name, Replicate())
        meta.set_value(part, meta.value(member))
        member.replace_all_uses_with(part)
        graph.erase_node(member)
    return 1
