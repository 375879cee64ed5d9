# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pcp_passes.passes import PassContext
from pcp_passes.passes.tokens.normalize import Normalize
from tests.graphs import ATEN, after, expected, formula, given, step_plan, traced

pytestmark = pytest.mark.unit
CTX = PassContext(4)
Tensor = torch.Tensor
X = given("T", 6)


def before(a: Tensor) -> tuple[Tensor, Tensor]:
    tokens = a.shape[0]
    square = a.new_ones(tokens, tokens, dtype=torch.bool).tril()
    parts = a.view(-1, 2, 3)
    return square, parts.float().type_as(a) + a.new_zeros(3) + a.new_full((2, 1), 1.5)


def spelled(a: Tensor, rows: Tensor, restore: Tensor) -> tuple[Tensor, Tensor]:
    tokens = restore.shape[0]
    cpu = {"device": torch.device("cpu"), "pin_memory": False}
    square = torch.ones((tokens, tokens), dtype=torch.bool, **cpu).tril()
    parts = ATEN.reshape.default(a, [-1, 2, 3])
    zeros = torch.zeros(3, dtype=torch.float64, **cpu)
    full = torch.full((2, 1), 1.5, dtype=torch.float64, **cpu)
    return square, parts.to(torch.float32).to(torch.float64) + zeros + full


def test_before_and_expected() -> None:
    gm, (result,) = after(traced(before, X), (Normalize(),), CTX)
    assert formula(gm) == expected(spelled, X)
    assert result.rewrites >= 5
    left = {str(node.target) for node in gm.graph.nodes}
    assert not left & {"aten.view.default", "aten.new_ones.default", "aten._assert_tensor_metadata.default"}


def test_values_stay() -> None:
    program = traced(before, X)
    gm, _ = after(program, (Normalize(),), CTX)
    for tokens in (2, 7):
        arguments = program.arguments(tokens)
        rows, restore = step_plan(tokens, 4)
        for one, other in zip(gm(*arguments, rows[0], restore), program.gm(*arguments), strict=True):
            assert torch.equal(one, other)


def test_every_size_comes_from_the_plan() -> None:
    """A size read from an activation would be the number of the rank's rows once the activation is."""
    program = traced(lambda a: a.repeat(2, 1).view(2, a.shape[0], 6) @ a.new_zeros(6, a.repeat(2, 1).shape[0]), X)
    gm, _ = after(program, (Normalize(),), CTX)
    read = [node for node in gm.graph.nodes if node.target is ATEN.sym_size.int]
    assert [node.args[0].name for node in read] == ["pcp_restore"]


def test_a_normal_graph_gives_a_reason() -> None:
    _, (result,) = after(traced(lambda a: torch.relu(a), X), (Normalize(),), CTX)
    assert result.rewrites == 0
    assert result.notes == ("every node was normal",)
