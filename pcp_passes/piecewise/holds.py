# SPDX-License-Identifier: Apache-2.0
"""Holds of a split body: where they stand, and which of them share a slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pcp_passes.errors import Refusal
from pcp_passes.ir import fakes, meta
from pcp_passes.ir.printer import print_node
from pcp_passes.piecewise.cuts import is_view, odd_value, row_dims
from pcp_passes.piecewise.pieces import Slot, hold, is_hold, slot_of

SHARED = "held."
"""Slots of results of eager calls: shared by values that are not alive together."""
RESULT = "result"


def hold_inputs(graph: fx.Graph, symbol: Any, pass_name: str) -> tuple[fx.Node, int]:
    """Hold every input under its own name, in front of all calls: what follows has the rows of the held ones.

    Returns:
        a hold, and the dimension of its rows.
    """
    inputs = graph.find_nodes(op="placeholder")
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    rows: tuple[fx.Node, int] | None = None
    for node in inputs:
        if meta.tensor(node) is None or not node.users:
            continue
        held = insert_hold(graph, node, str(node.target), symbol, first, pass_name)
        own = (held, held.args[0])  # the hold, and the copy in front of it where there is one
        node.replace_all_uses_with(held, delete_user_cb=lambda user, own=own: user not in own)
        dims = row_dims(_tensor(held), symbol)
        if rows is None and dims:
            rows = held, dims[0]
    assert rows is not None, "a body of one token symbol has an input with rows"
    return rows


def insert_hold(graph: fx.Graph, value: fx.Node, slot: str, symbol: Any, before: fx.Node, pass_name: str) -> fx.Node:
    """A hold of ``value`` in ``slot``; a copy in between makes rows lie one after another."""
    with graph.inserting_before(before):
        if not fakes.is_row_major(_tensor(value)):
            copy = graph.call_function(
                torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format}
            )
            value = meta.adopt(copy, value, pass_name, meta.placement(value), meta.info(value).layer)
        dims = row_dims(_tensor(value), symbol)
        node = graph.create_node("call_function", hold, (value, slot, dims[0] if dims else None), name="hold")
    return meta.adopt(node, value, pass_name, meta.placement(value), meta.info(value).layer)


def hold_results(graph: fx.Graph, symbol: Any, pass_name: str) -> None:
    """Hold what the body returns in slots ``result``, ``result.1``, ...

    Raises:
        Refusal: a result has a size that is neither the rows nor a constant.
    """
    end = graph.output_node()
    results = list(dict.fromkeys(n for n in end.all_input_nodes if meta.holds_tensor(n)))
    odd = [(node, why) for node in results if (why := odd_value(node, symbol))]
    if odd:
        raise Refusal(
            "split-piecewise: a body returns rows of one rank, and these results have others",
            [*(("found", f"{print_node(node)}: {why}") for node, why in odd),
             ("next", "return one row per token")],
        )  # fmt: skip
    for index, node in enumerate(results):
        held = insert_hold(graph, node, f"{RESULT}.{index}" if index else RESULT, symbol, end, pass_name)
        end.replace_input_with(node, held)


def share_slots(graph: fx.Graph) -> None:
    """Give each held result of an eager call the first slot of its type that no value is alive in."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    free_from: dict[str, int] = {}
    types: dict[str, Slot] = {}
    for node in order:
        if not (is_hold(node) and str(node.args[1]).startswith(SHARED)):
            continue
        wanted = slot_of(node, "")
        fitting = (name for name, end in free_from.items() if types[name] == wanted and end < order[node])
        name = next(fitting, f"{SHARED}{len(free_from)}")
        types[name] = wanted
        free_from[name] = last_read(node, order.__getitem__)
        node.update_arg(1, name)


def last_read(node: fx.Node, place: Callable[[fx.Node], int]) -> int:
    """Place of the last call that reads a held value, also through views of the parent; its own where none does."""
    last = place(node)
    for user in node.users:
        view = user.op in ("call_function", "call_method") and not is_hold(user) and is_view(user)
        last = max(last, last_read(user, place) if view else place(user))
    return last


def _tensor(node: fx.Node) -> torch.Tensor:
    held = meta.tensor(node)
    assert held is not None, f"%{node.name} has no tensor value"
    return held
