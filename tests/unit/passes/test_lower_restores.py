# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.ir import invariants, meta
from pcp_passes.passes import PassContext
from pcp_passes.passes.tokens.coalesce_restores import CoalesceRestores
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.lower_restores import LowerRestores
from pcp_passes.passes.tokens.normalize import Normalize
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements
from tests.graphs import ATEN, Given, after, formula, given, markers, traced, worst

pytestmark = pytest.mark.unit
Tensor = torch.Tensor
X, W, HEADS = given("T", 6), given(6, 6), given(1, 2, "T", 3)


def lowered(function: Callable[..., Any], *inputs: Given, pcp: int = 4) -> tuple[fx.GraphModule, Any]:
    steps = (Normalize(), PropagatePlacements(), InsertReshards(1e-6), CoalesceRestores(), LowerRestores())
    gm, results = after(traced(function, *inputs), steps, PassContext(pcp))
    invariants.meta_fresh_full(gm.graph, PassContext(pcp))
    invariants.well_formed(gm.graph, PassContext(pcp))
    return gm, results[-1]


def first_dim(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


FIRST_DIM = """\
%0 : f64[sM, 6] = aten.index_select.default(%a, 0, %pcp_rows)
%1 : f64[sM, 6] = aten.matmul.default(%0, %b)
%2 : f64[4*sM, 6] = pcp.all_gather_rows.default(%1, 4, pcp)
%3 : f64[sT, 6] = aten.index_select.default(%2, 0, %pcp_restore)
return (%3,)"""


def inner_dim(a: Tensor) -> Tensor:
    return torch.relu(a)


INNER_DIM = """\
%0 : f64[1, 2, sM, 3] = aten.index_select.default(%a, 2, %pcp_rows)
%1 : f64[1, 2, sM, 3] = aten.relu.default(%0)
%2 : f64[sM, 1, 2, 3] = aten.permute.default(%1, [2, 0, 1, 3])
%3 : f64[sM, 6] = aten.flatten.using_ints(%2, 1, 3)
%4 : f64[4*sM, 6] = pcp.all_gather_rows.default(%3, 4, pcp)
%5 : f64[sT, 6] = aten.index_select.default(%4, 0, %pcp_restore)
%6 : f64[sT, 1, 2, 3] = aten.reshape.default(%5, [-1, 1, 2, 3])
%7 : f64[1, 2, sT, 3] = aten.permute.default(%6, [1, 2, 0, 3])
return (%7,)"""


def merged(a: Tensor) -> Tensor:
    """Two blocks of tokens, three values each."""
    return torch.relu(a.t().reshape(2, 3, -1).transpose(1, 2).reshape(-1))


def several(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = a @ b
    left, right = torch.relu(x), torch.tanh(x).reshape(-1, 2, 3).transpose(0, 1)
    flat = x.sigmoid().reshape(-1)
    return left.cumsum(0), right.cumsum(1), flat.cumsum(0)


EXACT = {"first": (first_dim, FIRST_DIM, (X, W)), "inner": (inner_dim, INNER_DIM, (HEADS,))}
ALL: dict[str, tuple[Callable[..., Any], tuple[Given, ...]]] = {
    "first": (first_dim, (X, W)), "inner": (inner_dim, (HEADS,)),
    "merged": (merged, (X,)), "several": (several, (X, W)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_before_and_expected(name: str) -> None:
    before, wanted, inputs = EXACT[name]
    gm, result = lowered(before, *inputs)
    assert formula(gm) == wanted
    assert result.rewrites == 2


@pytest.mark.parametrize("name", ALL)
def test_one_collective_for_what_travels_together(name: str) -> None:
    gm, _ = lowered(ALL[name][0], *ALL[name][1])
    gathers = [node for node in gm.graph.nodes if is_collective(node)]
    assert len(gathers) == 1
    assert not markers(gm.graph)
    assert not [node for node in gm.graph.nodes if str(node.target).startswith("pcp.shard")]
    for node in gathers:
        (operand,) = node.all_input_nodes
        assert meta.tensor(operand).is_contiguous()
        assert str(meta.placement(node)) == "rank_major"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("pcp", [1, 2, 3, 4])
def test_ranks_equal_the_captured_program(name: str, pcp: int) -> None:
    gm, _ = lowered(ALL[name][0], *ALL[name][1], pcp=pcp)
    assert worst(traced(ALL[name][0], *ALL[name][1]), gm, pcp) < 1e-12


def test_no_marker_gives_a_reason() -> None:
    _, results = after(traced(lambda a: a * 2, given(6, 6)), (Normalize(), LowerRestores()), PassContext(4))
    assert results[-1].rewrites == 0
    assert results[-1].notes == ("the graph holds no marker",)


def _rank_major(gm: fx.GraphModule) -> None:
    """The order of arrival taken for global order."""
    for node in gm.graph.nodes:
        if is_collective(node):
            (ordered,) = node.users
            assert ordered.target is ATEN.index_select.default
            with gm.graph.inserting_before(ordered):
                arrival = gm.graph.call_function(ATEN.sort.default, (ordered.args[2],))
                first = gm.graph.call_function(operator.getitem, (arrival, 0))
            ordered.update_arg(2, first)


def _own_rows(gm: fx.GraphModule) -> None:
    """Every rank takes the rows of the first token."""
    for node in list(gm.graph.nodes):
        if node.target is ATEN.index_select.default and node.args[2].name == "pcp_rows":
            with gm.graph.inserting_before(node):
                zeros = gm.graph.call_function(ATEN.zeros_like.default, (node.args[2],))
            node.update_arg(2, zeros)


@pytest.mark.parametrize("sabotage", [_rank_major, _own_rows])
@pytest.mark.parametrize("name", ALL)
def test_sabotage_is_seen(sabotage: Callable[[fx.GraphModule], None], name: str) -> None:
    gm, _ = lowered(ALL[name][0], *ALL[name][1], pcp=3)
    sabotage(gm)
    gm.recompile()
    assert worst(traced(ALL[name][0], *ALL[name][1]), gm, 3, (9,)) > 1e-3


def test_dimensions_in_another_order_are_seen() -> None:
    gm, _ = lowered(inner_dim, given(3, 3, "T", 3), pcp=3)
    node = [n for n in gm.graph.nodes if n.target is ATEN.permute.default][-1]
    node.update_arg(1, [2, 1, 0, 3])
    gm.recompile()
    assert worst(traced(inner_dim, given(3, 3, "T", 3)), gm, 3, (9,)) > 1e-3
