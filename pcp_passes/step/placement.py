# SPDX-License-Identifier: Apache-2.0
"""Where the values of a step program live, by op; and the checks that rest on it.

``shard(0)`` is rank-local (a rank's rows, its attention rows), ``rank_major`` lists the rows of all ranks,
``replicate`` is global order and equal on all ranks. An op without a row in the table takes and gives replicated
values: nothing that is rank-local is ever sampled, shifted or returned.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement, RankMajor, Replicate, Shard
from pcp_passes.ir.token_markers import is_restore, is_shard
from pcp_passes.step import ops
from pcp_passes.step.calls import BodyCall

LOCAL, GATHERED, GLOBAL = Shard(0), RankMajor(), Replicate()
PLAN_PLACEMENTS: dict[str, Placement] = {
    "local_rows": LOCAL, "row_request": LOCAL, "row_query_start_loc": LOCAL, "sampled_local": LOCAL,
    "gather_index": GLOBAL, "write_mask": GLOBAL, "restore_index": GLOBAL, "sampled_restore": GLOBAL,
}  # fmt: skip
"""Of the inputs that the plan gives; others are replicated."""

Signature = tuple[tuple[Placement, ...], Placement]
"""What an op takes, operand by operand (nodes only), and what it gives."""

_SIGNATURES: dict[ops.StepOp, tuple[Signature, ...]] = {
    ops.select_rows: (
        ((GLOBAL, GLOBAL), GLOBAL), ((LOCAL, LOCAL), LOCAL), ((GLOBAL, LOCAL), LOCAL), ((GATHERED, GLOBAL), GLOBAL),
    ),
    ops.expand_slots: (((GLOBAL, GLOBAL, GLOBAL), GATHERED),),
    ops.gather_block_tables: (((GLOBAL, GLOBAL, GLOBAL), GLOBAL), ((GLOBAL, LOCAL, GLOBAL), LOCAL)),
    ops.row_lengths: (((LOCAL, LOCAL), LOCAL),),
    ops.attention_inputs: (((GLOBAL,) * 5, GLOBAL), ((GATHERED, *(LOCAL,) * 4), LOCAL)),
    ops.shard_into: (((GLOBAL, LOCAL, LOCAL), LOCAL),),
    ops.of_rank_0: (((GATHERED, GLOBAL), GLOBAL),),
    ops.contiguous: (((LOCAL,), LOCAL), ((GLOBAL,), GLOBAL)),
}  # fmt: skip


def signatures(node: fx.Node) -> tuple[Signature, ...]:
    """What the node may take and give; the first is what is asked for in a message."""
    count = len(_placed(node))
    if is_shard(node):
        return (((GLOBAL, LOCAL), LOCAL),)
    if is_restore(node):
        return (((LOCAL, GLOBAL), GLOBAL),)
    if is_collective(node):
        return ((LOCAL,), GATHERED), ((GLOBAL,), GATHERED)
    if node.op == "call_function" and node.target is operator.getitem:
        return tuple(((kind,), kind) for kind in (GLOBAL, LOCAL, GATHERED))
    if body := body_of(node):
        kind = LOCAL if body.sharded else GLOBAL
        return (((kind,) * count, kind),)
    if ops.is_op(node, ops.join_rows):
        return tuple(((kind,) * count, kind) for kind in (GLOBAL, LOCAL))
    if isinstance(node.target, ops.StepOp) and node.target in _SIGNATURES:
        return _SIGNATURES[node.target]
    return (((GLOBAL,) * count, GLOBAL),)


def body_of(node: fx.Node) -> BodyCall | None:
    """The body that a node calls, if any."""
    owner = node.graph.owning_module
    if node.op != "call_module" or owner is None:
        return None
    module = owner.get_submodule(str(node.target))
    return module if isinstance(module, BodyCall) else None


def row_operands(call: fx.Node) -> tuple[fx.Node, ...]:
    """Operands of a body call that have a row per token: ids, positions, hidden states."""
    return tuple(argument for argument in call.args[:-2] if isinstance(argument, fx.Node))


def _placed(node: fx.Node) -> list[fx.Node]:
    """Operands in order, without those that have no placement because they are no tensors of rows (the caches)."""
    found: list[fx.Node] = []

    def keep(operand: fx.Node) -> fx.Node:
        found.append(operand)
        return operand

    fx.map_arg((node.args, node.kwargs), keep)
    return [n for n in found if not (n.op == "placeholder" and not meta.holds_tensor(n))]


def result_of(node: fx.Node) -> Placement | None:
    """The placement that follows from the operands; ``None`` when they fit no signature."""
    found = tuple(meta.placement(operand) for operand in _placed(node))
    return next((result for takes, result in signatures(node) if takes == found), None)


def misfits(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Nodes whose operands, slot layout or stated placement do not fit, and results that are not global."""
    yield from misplaced(graph)
    for result in graph.output_node().all_input_nodes:
        if meta.placement(result) != GLOBAL:
            yield result, f"returned, but {meta.placement(result)}; required {GLOBAL}"


def misplaced(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Nodes whose operands, slot layout or stated placement do not fit."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        wanted = result_of(node)
        if wanted is None:
            found = ", ".join(f"%{operand.name} {meta.placement(operand)}" for operand in _placed(node))
            takes = " or ".join(f"({', '.join(map(str, takes))})" for takes, _ in signatures(node))
            yield node, f"operands {found}; required {takes}"
        elif wanted != meta.placement(node):
            yield node, f"stated {meta.placement(node)}, but its operands give {wanted}"
        elif ops.is_op(node, ops.attention_inputs) and (node.args[1] == "rank_major") != (wanted == LOCAL):
            yield node, f"slots are said to be {node.args[1]}, but are {meta.placement(node.args[0])}"


def buffer_of(node: fx.Node) -> fx.Node | None:
    """The node whose storage a call writes over, or ``None``."""
    if not ops.is_op(node, ops.gather_block_tables, ops.shard_into):
        return None
    base = node.args[2]
    assert isinstance(base, fx.Node), "a buffer is a node"
    return buffer_of(base) or base


def late_reads(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """``(value, writer, reader)``: a value in a buffer, read after another node has written over it."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    held: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if base := buffer_of(node):
            held.setdefault(base, []).append(node)
    for base, writers in held.items():
        values = writers if base.op == "placeholder" else [base, *writers]
        for value in values:
            writer = next((w for w in writers if position[w] > position[value]), None)
            if writer is None:
                continue
            for reader in readers(value):
                if position[reader] > position[writer]:
                    yield value, writer, reader


def readers(value: fx.Node) -> list[fx.Node]:
    """Nodes that read a value in a buffer, also through attention inputs, which only hold it."""
    found: list[fx.Node] = []
    for user in value.users:
        if buffer_of(user) is not None and user.args[2] is value and value not in user.args[:2]:
            continue  # writes over it
        found.append(user)
        if ops.is_op(user, ops.attention_inputs):
            found += user.users
    return found
