# SPDX-License-Identifier: Apache-2.0
"""The two plan inputs of a rank-free graph, and the two sizes they bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from pcp_passes.aten.decision import expression, multiple, tensor_of
from pcp_passes.errors import PcpError
from pcp_passes.ir import meta

ROWS = "pcp_rows"
"""``i64[M]``: global token of each local row."""

RESTORE = "pcp_restore"
"""``i64[T]``: place of each global token among the rank-major rows."""


@dataclass(frozen=True)
class PlanInputs:
    """The plan of one step, as the graph sees it.

    Attributes:
        rows, restore: the placeholders.
        tokens, local: their symbols, T and M.
    """

    rows: fx.Node
    restore: fx.Node
    tokens: sympy.Symbol
    local: sympy.Symbol


def add_plan_inputs(graph: fx.Graph, mode: Any, tokens: torch.SymInt, rows: torch.SymInt) -> PlanInputs:
    """Append the plan inputs to the placeholders of a captured graph, on the device of its token rows."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    symbol = expression(tokens)
    held = [h for node in graph.nodes if node.op == "placeholder" for h in meta.tensors(node)]
    on_rows = [h.device for h in held if any(multiple(size, symbol) for size in h.shape)]
    device = next(iter(on_rows or [h.device for h in held]), torch.device("cpu"))
    added = []
    for name, size in ((ROWS, rows), (RESTORE, tokens)):
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        with mode:
            meta.set_aten_value(last, torch.empty((size,), dtype=torch.int64, device=device))
        added.append(last)
    return plan_inputs(graph)


def has_plan(graph: fx.Graph) -> bool:
    """Whether the graph takes both plan inputs."""
    return {ROWS, RESTORE} <= {node.name for node in graph.nodes if node.op == "placeholder"}


def plan_inputs(graph: fx.Graph) -> PlanInputs:
    """Find them by name.

    Raises:
        PcpError: the graph has none: it was not prepared by :func:`add_plan_inputs`.
    """
    found = {node.name: node for node in graph.nodes if node.op == "placeholder" and node.name in (ROWS, RESTORE)}
    if len(found) < 2:
        raise PcpError(
            f"this graph has no inputs {ROWS} and {RESTORE}: found {sorted(found) or 'neither'}. Rewrite a captured "
            "graph through pcp_passes.passes.tokens.pipeline.rewrite_tokens, or run passes on a dump made by it."
        )
    rows, restore = found[ROWS], found[RESTORE]
    return PlanInputs(rows, restore, expression(tensor_of(restore).shape[0]), expression(tensor_of(rows).shape[0]))
