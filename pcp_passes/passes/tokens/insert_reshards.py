# SPDX-License-Identifier: Apache-2.0
"""insert-reshards: make the graph of one rank, with every change between rows and whole values spelled out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from pcp_passes.aten.consistency import ROWS_CONSISTENT
from pcp_passes.aten.gather_points import BALANCE, Choice
from pcp_passes.aten.plan_inputs import plan_inputs
from pcp_passes.ir import meta
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.tokens.rank_program import RankProgram
from pcp_passes.passes.tokens.rank_writer import write


@dataclass(frozen=True)
class InsertReshards:
    """Turn a placed graph of all tokens into the graph of one rank's rows.

    Why: placements say where each value lives; this pass makes it so. An operand that must be whole is restored, one
    that must be rows is taken from a whole value, sizes become the rank's. Of the ways to get a value whole the
    cheapest is chosen (see :mod:`pcp_passes.aten.gather_points`); ``balance`` is the number of operations one byte is
    worth, by default that of the device. What is computed whole only for some rows to be taken is computed for those
    rows alone.

    Before::

        %linear : f32[1, sT, 64] shard(1) = aten.linear(%x, %weight)
        %view : f32[sT, 64] shard(0) = aten.reshape(%linear, [%sym_size_int, 64])
        %cumsum : f32[sT, 64] replicate rows shard(0) = aten.cumsum(%view, 0)

    After::

        %shard : f32[1, sM, 64] shard(1) = pcp.shard(%x, %pcp_rows, 1, 1, 1)
        %linear : f32[1, sM, 64] shard(1) = aten.linear(%shard, %weight)
        %view : f32[sM, 64] shard(0) = aten.reshape(%linear, [%sym_size_int_2, 64])
        %restore : f32[sT, 64] replicate = pcp.restore(%view, %pcp_restore, 0, 1, 1, 4, 'pcp')
        %cumsum : f32[sT, 64] replicate rows shard(0) = aten.cumsum(%restore, 0)
    """

    balance: float | None = None
    outputs: str = "global"

    name: ClassVar[str] = "insert-reshards"
    requires: ClassVar[frozenset[str]] = frozenset({"PLACED"})
    establishes: ClassVar[frozenset[str]] = frozenset({ROWS_CONSISTENT})
    breaks: ClassVar[frozenset[str]] = frozenset({"LOWERED"})

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return insert_reshards(graph, ctx, self.balance, whole_outputs=self.outputs != "local")


def insert_reshards(
    graph: fx.Graph, ctx: PassContext, balance: float | None = None, *, whole_outputs: bool = True
) -> PassResult:
    """Rewrite ``graph`` in place.

    Args:
        graph: placed by ``propagate-placements``.
        ctx: number of ranks and axis, written into each restore.
        balance: operations that one byte of a gather is worth.
        whole_outputs: restore outputs of token rows to global order; otherwise each rank returns its rows.
    """
    plan = plan_inputs(graph)
    program = RankProgram.of(graph, plan, _balance(graph) if balance is None else balance, whole_outputs)
    notes: list[str | Note] = list(_notes(program.choices))
    count = write(graph, program, ctx, InsertReshards.name)
    if not count and not notes:
        notes.append("every value is replicated")
    return PassResult(count, tuple(notes))


def _notes(choices: list[Choice]) -> Iterator[Note]:
    """What each choice gathers, and the repetition it accepts."""
    for choice in choices:
        if choice.gathered or choice.recomputed:
            yield note(str(choice), choice.wanted[0])


def _balance(graph: fx.Graph) -> float:
    device: Any = next((t.device.type for n in graph.nodes for t in meta.tensors(n)), "cpu")
    return BALANCE.get(device, BALANCE["cuda"])
