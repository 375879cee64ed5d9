# SPDX-License-Identifier: Apache-2.0
"""``pcp::experts`` against one expert at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pcp_passes.errors import ConfigError
from pcp_passes.paged.experts import ACTIVATIONS, experts_op

ROWS, HIDDEN, INNER, EXPERTS, WIDTH = 9, 6, 5, 4, 2


def operands(seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    chosen = torch.stack([torch.randperm(EXPERTS - 1)[:WIDTH] for _ in range(ROWS)])  # the last expert stays idle
    return (
        torch.randn(ROWS, HIDDEN, dtype=torch.float64),
        chosen,
        torch.rand(ROWS, WIDTH, dtype=torch.float64),
        torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.float64),
        torch.randn(EXPERTS, HIDDEN, INNER, dtype=torch.float64),
    )


def row_by_row(act: str, *given: torch.Tensor) -> torch.Tensor:
    hidden, chosen, weights, gate_up, down = given
    out = torch.zeros_like(hidden)
    for row in range(len(hidden)):
        for place, expert in enumerate(chosen[row].tolist()):
            gate, up = (gate_up[expert] @ hidden[row]).chunk(2)
            out[row] += weights[row, place] * (down[expert] @ (ACTIVATIONS[act](gate) * up))
    return out


@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
def test_equals_one_expert_at_a_time(act: str) -> None:
    given = operands()
    found, required = experts_op(*given, act), row_by_row(act, *given)
    torch.testing.assert_close(found, required, rtol=0, atol=1e-12)
    swapped = (given[0], given[1], given[2].flip(1), *given[3:])
    assert (experts_op(*swapped, act) - required).abs().max() > 1e-2


def test_a_row_does_not_depend_on_the_others() -> None:
    hidden, chosen, weights, *matrices = operands()
    whole = experts_op(hidden, chosen, weights, *matrices, "silu")
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = experts_op(hidden[one], chosen[one], weights[one], *matrices, "silu")
        torch.testing.assert_close(alone, whole[one], rtol=0, atol=1e-12)


def test_no_rows() -> None:
    hidden, chosen, weights, *matrices = operands()
    assert experts_op(hidden[:0], chosen[:0], weights[:0], *matrices, "silu").shape == (0, HIDDEN)


def test_it_is_registered_as_it_behaves() -> None:
    torch.library.opcheck(experts_op, (*operands(), "silu"))


def test_an_activation_that_does_not_exist() -> None:
    assert ACTIVATIONS["silu"] is F.silu
    with pytest.raises(ConfigError, match="no activation 'quick'"):
        experts_op(*operands(), "quick")
