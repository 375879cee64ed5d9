# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from pcp_passes.attention import attend_op
from pcp_passes.ir import meta
from pcp_passes.ir.index.values import Visible
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes.tokens import localize_attention
from tests.attention_programs import (
    CLOSE,
    HEADS,
    INF,
    KV,
    LENGTHS,
    LOW,
    SIZE,
    Program,
    Tensor,
    additive,
    attends,
    before,
    captured,
    causal,
    chunked,
    eager,
    either,
    grid,
    operands,
    rewritten,
    sdpa,
    squares,
    structure,
    windowed,
    worst,
)

pytestmark = pytest.mark.unit


# scaled_dot_product_attention


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(q.shape[2])
    return attend_op(q, k, v, positions, scale=SIZE**-0.5, left=4)


def test_before_and_expected() -> None:
    gm, result = rewritten(before, *operands(9))
    assert structure(gm) == structure(captured(expected, *operands(9)))
    assert result.rewrites == 1
    assert [str(note) for note in result.notes] == ["told by positions: 1 with j >= i - 4 and j <= i"]


SDPA: dict[str, tuple[Program, Visible]] = {
    "causal mask": (sdpa(causal), Visible(-1, 0)),
    "float mask": (sdpa(lambda n: additive(causal(n))), Visible(-1, 0)),
    "float mask of -inf": (sdpa(lambda n: additive(causal(n), INF)[None, None]), Visible(-1, 0)),
    "is_causal": (sdpa(lambda n: None, is_causal=True), Visible(-1, 0)),
    "no mask": (sdpa(lambda n: None), Visible()),
    "window": (sdpa(windowed), Visible(4, 0)),
    "chunks": (sdpa(chunked), Visible(-1, 0, 4)),
    "both sides": (sdpa(either), Visible(3, 3)),
    "scale": (sdpa(causal, scale=0.3), Visible(-1, 0)),
    "mask of one row": (sdpa(lambda n: torch.ones(1, 1, 1, n, dtype=torch.bool)), Visible()),
}


@pytest.mark.parametrize("name", SDPA)
@pytest.mark.parametrize("batch", [1, 2])
def test_sdpa_computes_what_it_computed(name: str, batch: int) -> None:
    program, visible = SDPA[name]
    gm, result = rewritten(program, *operands(9, batch=batch))
    assert result.rewrites == 1 and not squares(gm)
    (node,) = attends(gm)
    assert Visible(node.kwargs["left"], node.kwargs["right"], node.kwargs["chunk"]) == visible  # type: ignore[arg-type]
    assert worst(gm, program, batch=batch) < CLOSE


def repeat_kv(x: Tensor) -> Tensor:
    """As transformers repeats heads."""
    batch, heads, tokens, size = x.shape
    return x[:, :, None].expand(batch, heads, HEADS // KV, tokens, size).reshape(batch, HEADS, tokens, size)


GROUPED: dict[str, Program] = {
    "enable_gqa": sdpa(causal, enable_gqa=True),
    "expand and reshape": lambda q, k, v: sdpa(causal)(q, repeat_kv(k), repeat_kv(v)),
    "repeat_interleave": lambda q, k, v: F.scaled_dot_product_attention(
        q, k.repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1), causal(q.shape[2])
    ),
    "expand, written out": lambda q, k, v: eager(q, repeat_kv(k), repeat_kv(v), additive(causal(q.shape[2]))),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPED)
def test_heads_are_not_repeated(name: str) -> None:
    gm, _ = rewritten(GROUPED[name], *operands(9, KV))
    (node,) = attends(gm)
    assert [meta.tensor(operand).shape[1] for operand in node.args[1:3]] == [KV, KV]  # type: ignore[union-attr]
    assert worst(gm, GROUPED[name], KV) < CLOSE


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads repeated in another order: query head h reads key head ``h % KV``."""
    return F.scaled_dot_product_attention(
        q, k.repeat(1, HEADS // KV, 1, 1), v.repeat(1, HEADS // KV, 1, 1), is_causal=True
    )


def test_heads_repeated_in_another_order_stay_repeated() -> None:
    gm, _ = rewritten(tiled, *operands(9, KV))
    assert meta.tensor(attends(gm)[0].args[1]).shape[1] == HEADS  # type: ignore[union-attr]
    assert worst(gm, tiled, KV) < CLOSE


def test_positions_are_made_once_and_counted_by_an_input() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for mask in (causal, windowed, chunked):
            q = F.scaled_dot_product_attention(q * 2, k, v, mask(q.shape[2]))
        return q

    gm, result = rewritten(layers, *operands(9))
    assert result.rewrites == 3
    assert len({node.args[3] for node in attends(gm)}) == 1
    (sized,) = [node for node in gm.graph.nodes if node.target is torch.ops.aten.sym_size.int]
    assert sized.args[0].op == "placeholder"


def test_a_view_that_needs_the_old_strides_becomes_a_reshape() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager(q, k, v, additive(causal(q.shape[2]))).view(HEADS, -1)

    gm, _ = rewritten(program, *operands(9))
    assert torch.ops.aten.reshape.default in [node.target for node in gm.graph.nodes]
    assert worst(gm, program) < CLOSE


def test_captured_values_behind_the_attention_are_restated() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager(q, k, v, additive(causal(q.shape[2]))).transpose(1, 2) * 2

    gm, _ = rewritten(program, *operands(9))  # rewritten() checks every value, strides included
    out = next(iter(reversed(gm.graph.nodes))).args[0]
    assert meta.tensor(out).is_contiguous()  # type: ignore[union-attr]


# Attention written out


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.matmul(q, k.permute(0, 1, 3, 2)) / torch.full([], SIZE**0.5)
    return torch.matmul(torch.softmax(torch.where(causal(q.shape[2]), logits, INF), -1), v)


def scaled_after_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As codegen does: the mask is divided with the logits."""
    logits = torch.maximum(q @ k.mT + additive(causal(q.shape[2])), torch.full((), LOW))
    return torch.softmax(logits / 2.0, -1) @ v


def merged_for_the_logits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads merged for the first product alone."""
    n = q.shape[2]
    a, b = q.reshape(-1, n, SIZE), k.reshape(-1, n, SIZE)
    logits = torch.zeros(a.shape[0], n, n).baddbmm(a, b.transpose(1, 2), beta=1.0, alpha=0.3).view(-1, HEADS, n, n)
    return torch.softmax(torch.where(causal(n), logits, LOW), -1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = (torch.matmul(q * 0.4, k.mT)).masked_fill(~windowed(q.shape[2]), LOW)
    return torch.softmax(logits, -1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.5 / 1.5) * 1.5
    return torch.softmax(logits + additive(causal(q.shape[2])), -1) @ v


def sunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinks = v[0, :, 0, 0].reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    logits = torch.matmul(q, k.transpose(2, 3)) * 0.5 + additive(windowed(q.shape[2]))
    joined = torch.cat([logits, sinks], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return torch.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1] @ v


def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads merged, the bias added inside ``baddbmm``; ALiBi by the key's position, as in bloom."""
    n = q.shape[2]
    slopes = v[0, :, 0, 0].abs()
    alibi = (slopes[:, None] * torch.arange(n)[None, None, :]).view(-1, 1, n)
    a, b, c = (one.reshape(-1, n, SIZE) for one in (q, k, v))
    logits = alibi.baddbmm(a, b.transpose(-1, -2), beta=1.0, alpha=0.35).view(q.shape[0], HEADS, n, n)
    weights = torch.softmax(logits + additive(causal(n)), -1, dtype=torch.float32).view(-1, n, n)
    return torch.bmm(weights, c).view(q.shape)


def relative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ALiBi by the distance from the last key, added to the logits, as in mpt."""
    n = q.shape[2]
    alibi = torch.arange(1 - n, 1).view(1, 1, 1, n) * v[0, :, 0, 0].abs().view(1, HEADS, 1, 1) * 0.5
    logits = torch.matmul(q, k.transpose(-1, -2)) * 0.3 + alibi
    return torch.softmax(logits.masked_fill(~causal(n), LOW), -1) @ v


def alibi_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ALiBi by the distance of key and query, inside the mask of an SDPA."""
    i, j = grid(q.shape[2])
    bias = v[0, :, 0, 0].abs()[:, None, None] * (j - i) + additive(causal(q.shape[2]))
    return F.scaled_dot_product_attention(q, k, v, bias[None])


EAGER: dict[str, Program] = {
    "transformers": lambda q, k, v: eager(q, k, v, additive(causal(q.shape[2]))[None, None]),
    "no mask": lambda q, k, v: eager(q, k, v, None),
    "window": lambda q, k, v: eager(q, k, v, additive(windowed(q.shape[2]), INF), 0.7),
    "two masks": lambda q, k, v: eager(q, k, v, additive(windowed(q.shape[2]))) * eager(q, k, v, None),
    "divided by a constant tensor": divided,
    "masked_fill": filled,
    "scaled after the mask": scaled_after_mask,
    "merged for the logits": merged_for_the_logits,
    "soft cap": capped,
    "sinks": sunk,
    "merged heads and alibi": flat,
    "alibi from the last key": relative,
    "alibi in a mask": alibi_mask,
}


@pytest.mark.parametrize("name", EAGER)
def test_attention_written_out_computes_what_it_computed(name: str) -> None:
    gm, result = rewritten(EAGER[name], *operands(9))
    assert result.rewrites == len(attends(gm)) >= 1 and not squares(gm), print_graph(gm)
    assert worst(gm, EAGER[name]) < CLOSE


def test_options_that_are_read() -> None:
    seen = {name: attends(rewritten(EAGER[name], *operands(9))[0])[0].kwargs for name in EAGER}
    assert seen["divided by a constant tensor"]["scale"] == pytest.approx(SIZE**-0.5)
    assert seen["soft cap"]["softcap"] == 1.5 and seen["soft cap"]["scale"] == 0.5
    assert seen["sinks"]["sinks"] is not None and seen["sinks"]["left"] == 4
    assert seen["merged heads and alibi"]["slopes"] is not None
    assert seen["masked_fill"]["scale"] == 1.0
    assert "slopes" not in seen["transformers"] and "sinks" not in seen["transformers"]


def half_eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    low = torch.finfo(torch.bfloat16).min
    return eager(q, k, v, torch.where(causal(q.shape[2]), 0.0, low).to(torch.bfloat16))


def test_a_softmax_in_float32_between_half_products() -> None:
    inputs = tuple(one.bfloat16() for one in operands(9))
    gm, result = rewritten(half_eager, *inputs)
    assert result.rewrites == 1 and not squares(gm)
    for tokens in LENGTHS:
        inputs = tuple(one.bfloat16() for one in operands(tokens))
        exact = half_eager(*(one.float() for one in inputs))
        # Both round to bfloat16 (2**-8); neither may be farther from the exact result than that.
        assert (gm(*inputs) - exact).abs().max() < 0.03


# Sabotage: the same comparison must see each of these


@pytest.mark.parametrize(
    "name, change",
    [
        ("window", {"left": 5}),
        ("window", {"left": 3}),
        ("window", {"right": 1}),
        ("sinks", {"sinks": None}),
        ("soft cap", {"softcap": 0.0}),
        ("soft cap", {"scale": 0.55}),
        ("alibi from the last key", {"slopes": None}),
        ("transformers", {"right": -1}),
        ("transformers", {"chunk": 4}),
    ],
)
def test_sabotage_of_an_option_is_seen(name: str, change: dict[str, Any]) -> None:
    gm, _ = rewritten(EAGER[name], *operands(9))
    (node,) = attends(gm)
    node.kwargs = {**node.kwargs, **change}
    gm.recompile()
    assert worst(gm, EAGER[name]) > 1e-2


def test_sabotage_of_the_positions_is_seen() -> None:
    gm, _ = rewritten(before, *operands(9))
    (node,) = attends(gm)
    with gm.graph.inserting_before(node):
        node.update_arg(3, gm.graph.call_function(torch.ops.aten.flip.default, (node.args[3], [0])))
    gm.recompile()
    assert worst(gm, before) > 1e-2


def test_sabotage_of_a_reading_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher that reads a window one too wide gives another result."""
    original = localize_attention.MATCHERS["aten::scaled_dot_product_attention"]

    def wider(node: fx.Node, values: Any) -> Any:
        found: Any = original(node, values)
        return replace(found, visible=replace(found.visible, left=found.visible.left + 1))

    monkeypatch.setitem(localize_attention.MATCHERS, "aten::scaled_dot_product_attention", wider)
    gm, _ = rewritten(before, *operands(9))
    assert worst(gm, before) > 1e-2
