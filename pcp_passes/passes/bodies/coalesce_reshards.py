# SPDX-License-Identifier: Apache-2.0
"""coalesce-reshards: the reshards that feed one cache write become one packed reshard."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.invariants import COALESCED, CONFLICT_FREE
from pcp_passes.ir.markers import is_marker, is_packed, marker_rows, reshard_many_op
from pcp_passes.ir.placements import RankMajor
from pcp_passes.ir.printer import dtype_text
from pcp_passes.passes.base import Note, PassContext, PassResult, note


@dataclass(frozen=True)
class CoalesceReshards:
    """Let the row operands of one cache write (K and V, or latent and rope part) ride in one collective.

    Why: a gather of a few hundred bytes a row costs latency, not bandwidth; one instead of two per layer halves it.
    Operands of different dtypes stay apart: packing them would mean a cast or a byte view of unequal alignment.

    Before::

        %reshard = pcp.reshard(%k, 'shard', 'rank_major', 4, 'pcp')
        %reshard_1 = pcp.reshard(%v, 'shard', 'rank_major', 4, 'pcp')
        %write = toy.kv_cache_update(%reshard, %reshard_1, %layer)

    After::

        %reshard_many = pcp.reshard_many([%k, %v], 'shard', 'rank_major', 4, 'pcp')
        %getitem = operator.getitem(%reshard_many, 0)
        %getitem_1 = operator.getitem(%reshard_many, 1)
        %write = toy.kv_cache_update(%getitem, %getitem_1, %layer)
    """

    name: ClassVar[str] = "coalesce-reshards"
    requires: ClassVar[frozenset[str]] = frozenset({CONFLICT_FREE})
    establishes: ClassVar[frozenset[str]] = frozenset({COALESCED})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return coalesce_reshards(graph)


def coalesce_reshards(graph: fx.Graph) -> PassResult:
    """Pack the reshards of each ``CacheWrite``, one pack per dtype, at the place of the write."""
    count = 0
    notes: list[Note | str] = []
    for write in list(graph.nodes):
        rule = rules.rule_of(write)
        if not isinstance(rule, rules.CacheWrite):
            continue
        operands = [rules.argument(write, position) for position in rule.rows]
        packs = _packs([node for node in dict.fromkeys(operands) if is_marker(node) and not is_packed(node)])
        if len(packs) > 1:
            kinds = ", ".join(dtype_text(_rows(pack[0]).dtype) for pack in packs)
            notes.append(note(f"{len(packs)} collectives: the operands differ in dtype ({kinds}) or rows", write))
        for pack in packs:
            if len(pack) > 1:
                _pack(graph, write, pack)
                count += 1
    if not count:
        notes.append("no cache write is fed by two reshards that could share a collective")
    return PassResult(count, tuple(notes))


def _rows(marker: fx.Node) -> torch.Tensor:
    rows = meta.tensor(marker_rows(marker)[0])
    assert rows is not None, f"%{marker.name} has an operand without a value"
    return rows


def _packs(markers: Sequence[fx.Node]) -> list[list[fx.Node]]:
    packs: list[list[fx.Node]] = []
    for marker in markers:
        for pack in packs:
            first, own = _rows(pack[0]), _rows(marker)
            if first.dtype == own.dtype and fakes.same_size(first.shape[0], own.shape[0]) \
                    and pack[0].args[1:] == marker.args[1:]:  # fmt: skip
                pack.append(marker)
                break
        else:
            packs.append([marker])
    return packs


def _pack(graph: fx.Graph, write: fx.Node, pack: Sequence[fx.Node]) -> None:
    layer = meta.info(write).layer
    with graph.inserting_before(write):
        args = ([marker.args[0] for marker in pack], *pack[0].args[1:])
        packed = graph.create_node("call_function", reshard_many_op, args, name="reshard_many")
        meta.adopt(packed, write, CoalesceReshards.name, RankMajor(), layer)
        for index, marker in enumerate(pack):
            part = graph.call_function(operator.getitem, (packed, index))
            meta.adopt(part, write, CoalesceReshards.name, RankMajor(), layer)
            write.replace_input_with(marker, part)
    for marker in pack:
        if not marker.users:
            graph.erase_node(marker)
