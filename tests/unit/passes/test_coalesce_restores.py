# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.ir import invariants
from pcp_passes.ir.token_markers import is_restore, is_restore_many
from pcp_passes.passes import PassContext
from pcp_passes.passes.tokens.coalesce_restores import CoalesceRestores
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.localize_attention import LocalizeAttention
from pcp_passes.passes.tokens.normalize import Normalize
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements
from tests.graphs import Given, after, expected, formula, given, traced, worst
from tests.unit.aten import models

pytestmark = pytest.mark.unit
PCP: Any = torch.ops.pcp
Tensor = torch.Tensor
X, W = given("T", 6), given(6, 6)


def packed(function: Callable[..., Any], *inputs: Given, pcp: int = 4) -> tuple[fx.GraphModule, Any]:
    steps = (Normalize(), PropagatePlacements(), InsertReshards(1e-6), CoalesceRestores())
    gm, results = after(traced(function, *inputs), steps, PassContext(pcp))
    invariants.meta_fresh_full(gm.graph, PassContext(pcp))
    invariants.well_formed(gm.graph, PassContext(pcp))
    return gm, results[-1]


def two(a: Tensor, b: Tensor) -> Tensor:
    """Ready together: keys and values, say."""
    x = a @ b
    left, right = torch.relu(x), torch.tanh(x).unsqueeze(0)
    return left.cumsum(0).sum() + right.cumsum(1).sum()


def two_expected(a: Tensor, b: Tensor, rows: Tensor, restore: Tensor) -> Tensor:
    x = PCP.shard(a, rows, 0, 1, 1) @ b
    left, right = torch.relu(x), torch.tanh(x).unsqueeze(0)
    left, right = PCP.restore_many([left, right], restore, [0, 1], [1, 1], [1, 1], 4, "pcp")
    return left.cumsum(0).sum() + right.cumsum(1).sum()


def test_before_and_expected() -> None:
    gm, result = packed(two, X, W)
    assert formula(gm) == expected(two_expected, X, W)
    assert result.rewrites == 1


def one_after_the_other(a: Tensor, b: Tensor) -> Tensor:
    first = torch.relu(a @ b).cumsum(0)
    return torch.tanh(first @ b).cumsum(0)


def two_types(a: Tensor, b: Tensor) -> Tensor:
    x = a @ b
    return torch.relu(x).cumsum(0).sum() + torch.tanh(x).float().cumsum(0).sum()


@pytest.mark.parametrize("function", [one_after_the_other, two_types])
def test_what_cannot_travel_together_does_not(function: Callable[..., Any]) -> None:
    gm, result = packed(function, X, W)
    assert result.rewrites == 0
    assert result.notes == ("no two restores are ready together",)
    assert not any(map(is_restore_many, gm.graph.nodes))
    assert sum(map(is_restore, gm.graph.nodes)) >= 2


@pytest.mark.parametrize("function", [two, one_after_the_other, two_types])
@pytest.mark.parametrize("pcp", [1, 2, 3])
def test_ranks_equal_the_captured_program(function: Callable[..., Any], pcp: int) -> None:
    gm, _ = packed(function, X, W, pcp=pcp)
    # The sum of 32-bit terms is taken over other numbers of rows only in the program's own scan.
    assert worst(traced(function, X, W), gm, pcp) < (1e-5 if function is two_types else 1e-12)


@pytest.mark.parametrize("kind", models.KINDS)
def test_a_layer_gathers_once(kind: str) -> None:
    if kind == "experts":
        pytest.importorskip("tests.unit.aten.moe", reason="transformers has the grouped product that runs on CPU")
    steps = (Normalize(), LocalizeAttention(), PropagatePlacements(), InsertReshards(1e-6), CoalesceRestores())
    gm, results = after(models.decoder(kind), steps, PassContext(3))
    assert results[-1].rewrites == 2
    assert [len(node.args[0]) for node in gm.graph.nodes if is_restore_many(node)] == [2, 2]
    assert worst(models.decoder(kind), gm, 3) < 1e-12


def _exchanged(node: fx.Node) -> None:
    """Keys for values."""
    for part in list(node.users):
        assert part.target is operator.getitem
        part.update_arg(1, 1 - part.args[1])


def _twice(node: fx.Node) -> None:
    """The keys in both places."""
    node.update_arg(0, [node.args[0][0], node.args[0][0]])


@pytest.mark.parametrize("sabotage", [_exchanged, _twice])
def test_sabotage_is_seen(sabotage: Callable[[fx.Node], None]) -> None:
    steps = (Normalize(), LocalizeAttention(), PropagatePlacements(), InsertReshards(1e-6), CoalesceRestores())
    for number in range(2):
        gm, _ = after(models.decoder("dense"), steps, PassContext(3))
        sabotage([node for node in gm.graph.nodes if is_restore_many(node)][number])
        gm.recompile()
        assert worst(models.decoder("dense"), gm, 3) > 1e-3
