# SPDX-License-Identifier: Apache-2.0
"""keep-stage: of a finished step program, what one pipeline stage runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from pcp_passes.errors import Refusal
from pcp_passes.ir import fakes, invariants, meta
from pcp_passes.ir.invariants import require
from pcp_passes.passes.base import PassContext, PassResult
from pcp_passes.passes.bodies.stage_cut import Wire
from pcp_passes.passes.pipeline import Observer, Pipeline
from pcp_passes.passes.steps.edits import given
from pcp_passes.step.invariants import BUFFERS_IN_ORDER, OF_STEPS, ON_STEPS, OPERANDS_FIT, RESTORES_LOWERED
from pcp_passes.step.placement import body_of, misplaced, row_operands

STAGE_FITS = "STAGE_FITS"


@dataclass(frozen=True)
class KeepStage:
    """Give the target's call the wires of earlier stages; of a stage that is not the last, end the program there.

    Why: a stage does for its layers what the program does for all: the same block tables, slots and rows. Only the last
    has final hidden states, so sampling, verification and drafting are its own, and so is every restore: what the
    others send are the rows of the rank. A wire that a stage only passes on goes around its body. Wires are inputs
    behind all others, in the order in which they were computed.

    Before::

        %target : f32[sM, 64] shard(0) = module target.sharded(%shard, %shard_1, %row_inputs, %caches)
        %offered : f32[sS, 64] shard(0) = pcp_step.select_rows(%target, %sampled_local)

    After::

        %add_353 : f32[sM, 64] shard(0) = input
        %target : f32[sM, 64] shard(0) = module target.sharded(%shard, %shard_1, %add_353, %row_inputs, %caches)
        %offered : f32[sS, 64] shard(0) = pcp_step.select_rows(%target, %sampled_local)

    That is the last stage; the first calls its body as before and ends with ``return [%target]``.
    """

    takes: tuple[Wire, ...] = ()
    """What arrives."""
    reads: tuple[str, ...] = ()
    """Of that, what the body takes, in its order."""
    makes: tuple[str, ...] = ()
    """What the body gives, in its order; empty for the last stage."""
    gives: tuple[Wire, ...] = ()
    """What leaves; empty for the last stage."""

    name: ClassVar[str] = "keep-stage"
    requires: ClassVar[frozenset[str]] = frozenset({OPERANDS_FIT, BUFFERS_IN_ORDER, RESTORES_LOWERED})
    establishes: ClassVar[frozenset[str]] = frozenset({STAGE_FITS})
    breaks: ClassVar[frozenset[str]] = frozenset({OPERANDS_FIT})  # a stage returns rows of its rank

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return keep_stage(graph, self)


def keep_stage(graph: fx.Graph, stage: KeepStage) -> PassResult:
    """Reduce the program to the stage in place. The graph's module must hold the stage's bodies already."""
    call = target_call(graph)
    wires = {wire.name: _input(graph, wire, call) for wire in stage.takes}
    call.args = (*row_operands(call), *(wires[name] for name in stage.reads), *call.args[-2:])
    meta.set_changed_by(call, KeepStage.name)
    if stage.gives:
        _end_behind(graph, call, stage, wires)
    return PassResult(1 + len(wires))


def target_call(graph: fx.Graph) -> fx.Node:
    """The one call of the target's body.

    Raises:
        Refusal: there is none, or several.
    """
    given(graph, "block_table_pool")
    calls = [node for node in graph.nodes if body_of(node) and str(node.target).startswith("target.")]
    if len(calls) != 1:
        raise Refusal(
            "keep-stage: a step program calls the target's body once",
            [("found", f"{len(calls)} calls"), ("next", "build the program with pcp_passes.step.StepProgram")],
        )
    found: fx.Node = calls[0]
    return found


def _input(graph: fx.Graph, wire: Wire, call: fx.Node) -> fx.Node:
    like = meta.tensor(row_operands(call)[0])
    where, mode = meta.placement(call), fakes.fake_mode_of(like)
    assert like is not None and mode is not None and where is not None, "a body call without rows"
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.placeholder(wire.name)
    with mode:
        meta.set_aten_value(node, torch.empty((like.shape[0], *wire.shape), dtype=wire.dtype))
    meta.set_placement(node, where)
    return node


def _end_behind(graph: fx.Graph, call: fx.Node, stage: KeepStage, wires: dict[str, fx.Node]) -> None:
    body, like = body_of(call), meta.tensor(row_operands(call)[0])
    where = meta.placement(call)
    assert body is not None and like is not None and where is not None, "a body call without rows"
    end = graph.output_node()
    for part in list(call.users):
        part.replace_all_uses_with(call)  # whatever it fed goes below; its value is of another body
    meta.set_aten_value(call, body.fake(like.shape[0], like))
    made = dict.fromkeys(stage.makes, call)
    if len(stage.makes) > 1:
        for index, name in enumerate(stage.makes):
            with graph.inserting_before(end):
                part = graph.call_function(operator.getitem, (call, index))
            meta.set_aten_value(part, meta.value(call)[index])
            meta.set_placement(part, where)
            made[name] = part
    end.args = ([(made | wires)[wire.name] for wire in stage.gives],)
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and node is not call and not node.users:
            graph.erase_node(node)


def stage_fits(graph: fx.Graph, ctx: PassContext) -> None:
    """In a stage's program: operands as in every step program; results are global, or rows as the target's call has
    them."""
    end, where = graph.output_node(), meta.placement(target_call(graph))
    sampled = any(str(node.target).endswith(".head") for node in graph.find_nodes(op="call_module"))
    wanted = meta.placement(given(graph, "input_ids")) if sampled else where
    require(STAGE_FITS, "operands have the placement a call needs, and what a stage sends is rows of its rank", [
        *misplaced(graph),
        *((node, f"leaves and is {meta.placement(node)}; required {wanted}") for node in end.all_input_nodes
          if meta.placement(node) != wanted),
    ])  # fmt: skip


invariants.INVARIANTS[STAGE_FITS] = stage_fits


def stage_pipeline(step: KeepStage, observers: Sequence[Observer] = ()) -> Pipeline:
    """The pipeline that makes a stage's program of a finished one."""
    ensures = frozenset({STAGE_FITS, BUFFERS_IN_ORDER, RESTORES_LOWERED})
    return Pipeline((step,), tuple(observers), ensures, ON_STEPS - {OPERANDS_FIT}, OF_STEPS)
