# SPDX-License-Identifier: Apache-2.0
"""regather-block-tables: block tables in global order again, where a replicated call follows a sharded one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from pcp_passes.passes.base import PassContext, PassResult
from pcp_passes.passes.steps.edits import insert
from pcp_passes.step import ops
from pcp_passes.step.invariants import BUFFERS_IN_ORDER
from pcp_passes.step.placement import late_reads


@dataclass(frozen=True)
class RegatherBlockTables:
    """Gather the rows of the global requests from the pool, in front of the first call that needs them.

    Why: block tables live in one buffer whose address is captured. A sharded call has it filled with the rows of this
    rank's attention rows (a request cut in two has two). A replicated draft step that read it as it is would take slots
    and keys of other requests, without any error. The pool has every request, so nothing is communicated.

    A program for dummy and profile steps has no sharded call, so it has nothing to gather again.

    Before::

        %tables : i32[sR, sB] replicate = pcp_step.gather_block_tables(%block_table_pool, %requests, %table_buffer)
        %row_tables = pcp_step.gather_block_tables(%block_table_pool, %row_requests, %table_buffer)
        %draft_query = pcp_step.draft_query(%tables, %positions_1, %num_sampled, 1, %caches)

    After::

        %row_tables = pcp_step.gather_block_tables(%block_table_pool, %row_requests, %table_buffer)
        %regathered : i32[sR, sB] replicate = pcp_step.gather_block_tables(%block_table_pool, %requests, %table_buffer)
        %draft_query = pcp_step.draft_query(%regathered, %positions_1, %num_sampled, 1, %caches)
    """

    name: ClassVar[str] = "regather-block-tables"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset({BUFFERS_IN_ORDER})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return regather_block_tables(graph)


def regather_block_tables(graph: fx.Graph) -> PassResult:
    """Repeat a gather of block tables in front of the first reader that comes after its buffer was written over."""
    late: dict[fx.Node, list[fx.Node]] = {}
    for value, _, reader in late_reads(graph):
        if ops.is_op(value, ops.gather_block_tables):
            late.setdefault(value, []).append(reader)
    for value, readers in late.items():
        first = next(node for node in graph.nodes if node in readers)
        moved = {value: insert(first, ops.gather_block_tables, value.args, RegatherBlockTables.name, "regathered")}
        for held in value.users:
            # Attention inputs made before the buffer was written over, and read after.
            if ops.is_op(held, ops.attention_inputs) and held not in readers and set(held.users) & set(readers):
                args = (*held.args[:2], moved[value], *held.args[3:])
                moved[held] = insert(first, ops.attention_inputs, args, RegatherBlockTables.name, held.name)
        for reader in readers:
            for old, new in moved.items():
                reader.replace_input_with(old, new)
    graph.eliminate_dead_code()
    return PassResult(len(late), () if late else ("every call finds the block tables it needs",))
