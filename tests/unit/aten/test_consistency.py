# SPDX-License-Identifier: Apache-2.0
"""The graph of one rank is held to the rule table: a sound one passes, and each way of breaking a reshard is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.aten.consistency import ROWS_CONSISTENT, SIZES_SHARED, rows_consistent, sizes_shared
from pcp_passes.aten.plan_inputs import plan_inputs
from pcp_passes.collectives import is_collective
from pcp_passes.errors import InvariantError
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Replicate, Shard
from pcp_passes.ir.token_markers import is_restore, is_shard
from pcp_passes.passes import PassContext
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.lower_restores import LowerRestores
from pcp_passes.passes.tokens.normalize import Normalize
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements
from tests.graphs import after, given, traced

pytestmark = pytest.mark.unit

CTX = PassContext(4)
MARKED = (Normalize(), PropagatePlacements(), InsertReshards(1e-6))


def mixing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product of rows, something that needs all of them, rows again."""
    x = a @ b
    return torch.relu(x) + x.cumsum(0)


def marked() -> fx.Graph:
    return after(traced(mixing, given("T", 6), given(6, 6)), MARKED, CTX)[0].graph


def first(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> fx.Node:
    return next(filter(wanted, graph.nodes))


def drop_restore(graph: fx.Graph) -> None:
    node = first(graph, is_restore)
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.erase_node(node)


def drop_shard(graph: fx.Graph) -> None:
    node = first(graph, is_shard)
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.erase_node(node)


def other_dimension(graph: fx.Graph) -> None:
    first(graph, is_restore).update_arg(2, 1)


def other_order(graph: fx.Graph) -> None:
    first(graph, is_restore).update_arg(1, plan_inputs(graph).rows)


def other_ranks(graph: fx.Graph) -> None:
    first(graph, is_restore).update_arg(5, 8)


def stated_whole(graph: fx.Graph) -> None:
    node = first(graph, lambda n: n.op == "call_function" and meta.placement(n) == Shard(0) and not is_shard(n))
    meta.set_placements(node, (Replicate(),))


@pytest.mark.parametrize("breaks", [drop_restore, drop_shard, other_dimension, other_order, other_ranks, stated_whole])
def test_a_broken_reshard_is_named(breaks: Callable[[fx.Graph], None]) -> None:
    graph = marked()
    rows_consistent(graph, CTX)
    breaks(graph)
    with pytest.raises(InvariantError, match=ROWS_CONSISTENT):
        rows_consistent(graph, CTX)


def test_what_a_rank_brings_has_sizes_that_all_know() -> None:
    graph = after(traced(mixing, given("T", 6), given(6, 6)), (*MARKED, LowerRestores()), CTX)[0].graph
    sizes_shared(graph, CTX)
    operand = first(graph, is_collective).all_input_nodes[0]
    mode: Any = meta.tensor(operand).fake_mode  # type: ignore[union-attr]
    stranger = mode.shape_env.create_unbacked_symint()
    with mode:
        meta.set_value(operand, torch.empty((stranger, 6)))
    with pytest.raises(InvariantError, match=SIZES_SHARED):
        sizes_shared(graph, CTX)
