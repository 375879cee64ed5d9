# SPDX-License-Identifier: Apache-2.0
"""Attention programs of a symbolic token count, and how the tests of localize-attention capture and compare them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pcp_passes.attention import attend_op
from pcp_passes.ir import invariants, meta
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes import PassContext, PassResult
from pcp_passes.passes.tokens.localize_attention import LocalizeAttention

CTX = PassContext(4)
INF = float("-inf")
LOW = torch.finfo(torch.float32).min
HEADS, KV, SIZE = 4, 2, 8
LENGTHS = (2, 7, 16, 33)
CLOSE = 2e-5
"""Outputs are near 1; the sound rewrites differ by under 4e-6, the sabotaged ones by over 1e-2."""

Tensor = torch.Tensor
Program = Callable[..., Any]


def operands(tokens: int, kv: int = HEADS, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + tokens)
    sizes = [(batch, heads, tokens, SIZE) for heads in (HEADS, kv, kv)]
    return tuple(torch.randn(size, generator=generator) for size in sizes)  # type: ignore[return-value]


def captured(program: Program, *inputs: Tensor) -> fx.GraphModule:
    """Functional ATen in which the token count alone is symbolic."""
    tokens = inputs[0].shape[2]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for held in inputs:
        dims = [DimDynamic.DUCK if size == tokens else DimDynamic.STATIC for size in held.shape]
        fakes.append(mode.from_tensor(held, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims)))
    gm: fx.GraphModule = make_fx(program, tracing_mode="symbolic", pre_dispatch=True)(*fakes)
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    return gm


def rewritten(
    program: Program, *inputs: Tensor, step: LocalizeAttention | None = None
) -> tuple[fx.GraphModule, PassResult]:
    gm = captured(program, *inputs)
    result = (step or LocalizeAttention()).run(gm.graph, CTX)
    gm.recompile()
    invariants.well_formed(gm.graph, CTX)
    invariants.meta_fresh_full(gm.graph, CTX)
    return gm, result


def attends(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is attend_op]


def squares(gm: fx.GraphModule) -> list[fx.Node]:
    """Nodes that hold something of size T x T."""
    held = [(node, meta.tensor(node)) for node in gm.graph.nodes]
    return [n for n, t in held if t is not None and sum(isinstance(size, torch.SymInt) for size in t.shape) > 1]


def structure(gm: fx.GraphModule) -> str:
    """The graph by its shape alone: no names, no symbols, no types."""
    text = re.sub(r" : .*? = ", " = ", print_graph(gm, numbered=True, comments=False))
    return re.sub(r", (device=cpu|pin_memory=False|left=-1|right=0|chunk=0)(?=[,)])", "", text)


def grid(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n)[:, None], torch.arange(n)[None, :]


def causal(n: int) -> Tensor:
    i, j = grid(n)
    return j <= i


def windowed(n: int) -> Tensor:
    i, j = grid(n)
    return (j <= i) & (j > i - 5)


def chunked(n: int) -> Tensor:
    i, j = grid(n)
    return (j <= i) & (j // 4 == i // 4)


def either(n: int) -> Tensor:
    i, j = grid(n)
    return (i - j).abs() <= 3


def additive(mask: Tensor, low: float = LOW) -> Tensor:
    return torch.where(mask, 0.0, low)


def before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, windowed(q.shape[2]))


def sdpa(mask: Callable[[int], Tensor | None], **options: Any) -> Program:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q.shape[2]), **options)


def worst(gm: fx.GraphModule, program: Program, kv: int = HEADS, batch: int = 1) -> float:
    """The largest difference over all lengths."""
    gaps = []
    for tokens in LENGTHS:
        inputs = operands(tokens, kv, batch)
        gaps.append((gm(*inputs) - program(*inputs)).abs().max().item())
    return max(gaps)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float = SIZE**-0.5) -> Tensor:
    logits = torch.matmul(q, k.transpose(2, 3)) * scale
    weights = F.softmax(logits if mask is None else logits + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, 0.0, training=False), v)
