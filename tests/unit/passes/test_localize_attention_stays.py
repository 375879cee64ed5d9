# SPDX-License-Identifier: Apache-2.0
"""Attention that cannot be told by positions stays as it is, and the reason is reported."""

import pytest
import torch
import torch.nn.functional as F

from pcp_passes.errors import ConfigError
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes import PassResult
from pcp_passes.passes.tokens.localize_attention import LocalizeAttention
from tests.attention_programs import (
    CLOSE,
    CTX,
    Program,
    Tensor,
    additive,
    before,
    captured,
    causal,
    grid,
    operands,
    rewritten,
    sdpa,
    worst,
)

pytestmark = pytest.mark.unit


def prefix(n: int) -> Tensor:
    i, j = grid(n)
    return (j <= i) | (j < 3)


def no_own_key(n: int) -> Tensor:
    i, j = grid(n)
    return j < i


def random_mask(n: int) -> Tensor:
    return torch.rand(n, n) < 0.5


def penalty(n: int) -> Tensor:
    return additive(causal(n), -1e4)


def documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Documents known at run time only: their starts are read from the values."""
    segment = (v[0, 0, :, 0] > 1).long().cumsum(0)
    same = segment[:, None] == segment[None, :]
    return F.scaled_dot_product_attention(q, k, v, causal(q.shape[2]) & same)


def weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(q @ k.mT + additive(causal(q.shape[2])), -1)
    return weights @ v, weights


def logits_read_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.mT
    return torch.softmax(logits + additive(causal(q.shape[2])), -1) @ v + logits.sum(-1, keepdim=True)


def capped_otherwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(q @ k.mT / 2.0) * 3.0, -1) @ v


def capped_after_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.mT + additive(causal(q.shape[2]))
    return torch.softmax(torch.tanh(logits / 2.0) * 2.0, -1) @ v


def weakened_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q @ k.mT + additive(causal(q.shape[2]), -1e9)) * 1e-6, -1) @ v


def bounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.maximum(q @ k.mT, torch.full((), -3.0)), -1) @ v


def negative_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * -0.5, -1) @ v


def shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT - k.mT.sum(-2, keepdim=True), -1) @ v


def half_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    alibi = (v[0, :, 0, 0].abs()[:, None, None] * torch.arange(n)).bfloat16()
    return torch.softmax(q @ k.mT + alibi + additive(causal(n)), -1) @ v


def two_alibis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    alibi = v[0, :, 0, 0].abs()[:, None, None] * torch.arange(n)
    return torch.softmax(q @ k.mT + alibi + alibi, -1) @ v


def wrong_dim(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -2) @ v


def transposed_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1).mT @ v


def first_key_cut(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinks = v[0, :, 0, 0].reshape(1, -1, 1, 1).expand(1, -1, q.shape[2], -1)
    return torch.softmax(torch.cat([q @ k.mT, sinks], -1), -1)[..., 1:] @ v


def sink_per_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.cat([q @ k.mT, v[..., :1]], -1), -1)[..., :-1] @ v


def fewer_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, 1:])


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(q @ k.mT, -1), 0.5, training=True) @ v


STAYS: dict[str, tuple[Program, str]] = {
    "a prefix visible to all": (sdpa(prefix), "is no window of keys around the query"),
    "no own key": (sdpa(no_own_key), "which is no window"),
    "a random mask": (sdpa(random_mask), "%rand (aten.rand) is not"),
    "documents at run time": (documents, "(aten.select) is not|(aten.slice) is not|(an input) is not"),
    "a penalty, not a mask": (sdpa(penalty), "which is no window"),
    "random dropout": (sdpa(causal, dropout_p=0.5), "call model.eval() first"),
    "fewer keys than queries": (fewer_keys, "queries and "),
    "weights returned": (weights_returned, "are read by 2 nodes"),
    "logits read twice": (logits_read_twice, "is read by 2 nodes"),
    "a cap that does not undo its factor": (capped_otherwise, "caps at 3.0"),
    "a cap after the mask": (capped_after_mask, "masked or capped already"),
    "a mask scaled until it shows": (weakened_mask, "what is left may not hide"),
    "logits bounded from below": (bounded, "bounds the logits from below"),
    "a negative scale": (negative_scale, "no positive constant"),
    "a shift that is not the maximum": (shifted, "not their row maximum"),
    "alibi in half precision": (half_alibi, "is not known by position"),
    "alibi twice": (two_alibis, "that do not join"),
    "weights transposed": (transposed_weights, "its weights go through"),
    "the first key cut off": (first_key_cut, "otherwise than at their sinks"),
    "a sink per row": (sink_per_row, "not one sink per head"),
    "random dropout, written out": (dropped, "call model.eval() first"),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_what_is_not_proved_stays_and_is_reported(name: str) -> None:
    program, reason = STAYS[name]
    gm = captured(program, *operands(9))
    text = print_graph(gm)
    result = LocalizeAttention().run(gm.graph, CTX)
    assert result.rewrites == 0 and print_graph(gm) == text
    (told,) = [str(note) for note in result.notes]
    assert "attention stays explicit" in told and any(part in told for part in reason.split("|")), told


@pytest.mark.parametrize("program", [wrong_dim, lambda q, k, v: torch.softmax(q, -1), lambda q, k, v: q + k])
def test_other_nodes_are_none_of_its_business(program: Program) -> None:
    _, result = rewritten(program, *operands(9))
    assert result == PassResult(0, ("no attention in the graph",))


def test_one_is_rewritten_beside_one_that_stays() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return before(q, k, v) + sdpa(prefix)(q, k, v)

    gm, result = rewritten(program, *operands(9))
    assert result.rewrites == 1 and len(result.notes) == 2
    assert worst(gm, program) < CLOSE


def padded(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, causal(q.shape[2]) & padding.bool()[:, None, None, :])


def test_an_input_mask_needs_an_assumption() -> None:
    inputs = (*operands(9), torch.ones(1, 9, dtype=torch.long))
    gm, result = rewritten(padded, *inputs)
    assert result.rewrites == 0 and "(an input) is not" in str(result.notes[0])
    name = [node.name for node in gm.graph.nodes if node.op == "placeholder"][3]
    gm, result = rewritten(padded, *inputs, step=LocalizeAttention(((name, "ones"),)))
    assert result.rewrites == 1
    torch.testing.assert_close(gm(*inputs), padded(*inputs), rtol=0, atol=CLOSE)
    with pytest.raises(ConfigError, match="required a placeholder"):
        rewritten(padded, *inputs, step=LocalizeAttention((("nothing", "ones"),)))
