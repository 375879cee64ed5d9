# SPDX-License-Identifier: Apache-2.0
"""gather-cache-writes: put a reshard in front of every token-row operand of a cache write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.ir import meta, rules
from pcp_passes.ir.invariants import COALESCED, CONFLICT_FREE, LOWERED, PLACED
from pcp_passes.ir.markers import reshard_op
from pcp_passes.ir.placements import RANK_MAJOR, SHARD, RankMajor, Shard
from pcp_passes.passes.base import Note, PassContext, PassResult, note


@dataclass(frozen=True)
class GatherCacheWrites:
    """Make the rows of every cache write rank-major.

    Why: each rank attends over the whole prefix, so each rank's cache needs the new rows of all ranks. The slot mapping
    of the step lists the rows of all ranks, rank after rank (slot -1 for padded rows), which is the order a gather
    gives. The attention op keeps its rank-local rows: it reads the cache. A write that states the layout of its rows,
    as those of this package do, is told that they are ``'rank_major'`` now, so that slots made for another layout are
    an error at run time.

    Before::

        %write = toy.kv_cache_update(%k, %v, %layer)

    After::

        %reshard = pcp.reshard(%k, 'shard', 'rank_major', 4, 'pcp')
        %reshard_1 = pcp.reshard(%v, 'shard', 'rank_major', 4, 'pcp')
        %write = toy.kv_cache_update(%reshard, %reshard_1, %layer)
    """

    name: ClassVar[str] = "gather-cache-writes"
    requires: ClassVar[frozenset[str]] = frozenset({PLACED})
    establishes: ClassVar[frozenset[str]] = frozenset({CONFLICT_FREE})
    breaks: ClassVar[frozenset[str]] = frozenset({LOWERED, COALESCED})

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return gather_cache_writes(graph, ctx)


def gather_cache_writes(graph: fx.Graph, ctx: PassContext) -> PassResult:
    """Insert ``pcp::reshard`` before each row operand of each ``CacheWrite`` that is not rank-major yet."""
    count = 0
    notes: list[Note | str] = []
    for write in list(graph.nodes):
        rule = rules.rule_of(write)
        if not isinstance(rule, rules.CacheWrite):
            continue
        gathered = 0
        for position in rule.rows:
            rows = rules.argument(write, position)
            if meta.placement(rows) != Shard(0):
                notes.append(note(f"operand {position} is {meta.placement(rows)}: left as it is", write))
                continue
            with graph.inserting_before(write):
                args = (rows, SHARD, RANK_MAJOR, ctx.pcp, ctx.axis)
                marker = graph.create_node("call_function", reshard_op, args, name="reshard")
            meta.adopt(marker, write, GatherCacheWrites.name, RankMajor(), meta.info(write).layer)
            rules.set_argument(write, position, marker)
            gathered += 1
        if gathered and rule.layout is not None:
            rules.set_named_argument(write, rule.layout, RANK_MAJOR)
        count += gathered
    if not count:
        notes.append("no cache write in the graph has rank-local rows: nothing to gather")
    return PassResult(count, tuple(notes))
