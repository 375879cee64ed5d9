# SPDX-License-Identifier: Apache-2.0
"""Two decoders of a few lines: grouped-query attention with rotary positions, and one with dropless experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional as F

from tests.graphs import Given, Program, given, traced

VOCABULARY, WIDTH, HEADS, GROUPS = 19, 16, 4, 2
SIZE = WIDTH // HEADS
Tensor = torch.Tensor
Block = Callable[..., Tensor]


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    tokens = x.shape[1]
    angles = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
    heads = ((x @ w).view(1, tokens, -1, SIZE).transpose(1, 2) for w in (q, k, v))
    query, key, value = heads
    key, value = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (_turned(key, angles), value))
    mixed = F.scaled_dot_product_attention(_turned(query, angles), key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(1, tokens, WIDTH) @ out


def dense(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def experts(x: Tensor, router: Tensor, weights: Tensor) -> Tensor:
    from tests.unit.aten.moe import by_index_put

    flat = x.reshape(-1, WIDTH)
    scores, chosen = (flat @ router).softmax(-1).topk(2, dim=-1)
    return by_index_put(flat * scores.sum(-1, keepdim=True), chosen.reshape(-1), weights, 2).reshape(1, -1, WIDTH)


def _model(block: Block, each: int) -> Callable[..., Tensor]:
    def run(ids: Tensor, table: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        for layer in range(2):
            own = weights[layer * (4 + each) : (layer + 1) * (4 + each)]
            x = x + _attention(F.rms_norm(x, [WIDTH], norm), *own[:4])
            x = x + block(F.rms_norm(x, [WIDTH], norm), *own[4:])
        return F.rms_norm(x, [WIDTH], norm) @ table.t()

    return run


_KV = (WIDTH, GROUPS * SIZE)
_ATTENTION = ((WIDTH, WIDTH), _KV, _KV, (WIDTH, WIDTH))
_BLOCKS: dict[str, tuple[Block, tuple[tuple[int, ...], ...]]] = {
    "dense": (dense, ((WIDTH, 24), (WIDTH, 24), (24, WIDTH))),
    "experts": (experts, ((WIDTH, 4), (4, WIDTH, WIDTH))),
}


def _weights(*shapes: tuple[int, ...]) -> list[Given]:
    return [given(*shape, low=-0.6, high=0.6) for shape in shapes]


@cache
def decoder(kind: str) -> Program:
    """``dense`` or ``experts``: two layers in float64, token ids i64[1, T] to logits [1, T, 19]."""
    block, own = _BLOCKS[kind]
    ids = given(1, "T", dtype=torch.int64, high=VOCABULARY)
    layers = [*_weights(*_ATTENTION, *own), *_weights(*_ATTENTION, *own)]
    return traced(
        _model(block, len(own)), ids, *_weights((VOCABULARY, WIDTH)), given(WIDTH, low=0.5, high=1.5), *layers
    )


KINDS = tuple(_BLOCKS)
