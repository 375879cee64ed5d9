# SPDX-License-Identifier: Apache-2.0
"""Models with random weights, written over the paged ops: a dense decoder, and GLM-DSA with a next-token module.

The second has what makes GLM-DSA hard to capture: an absorbed MLA attention over keys that a lightning indexer selects,
and experts that a router chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pcp_passes.engine.bodies import Model, make_bodies, prepare
from pcp_passes.paged import index_topk, index_write, kv_attend, kv_write, mla_attend
from pcp_passes.paged.experts import experts_op
from pcp_passes.passes import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step.program import StepProgram


@dataclass(frozen=True)
class Size:
    """Of a model; with ``topk`` it is GLM-DSA, else dense. ``steps`` are drafts per step."""

    name: str
    hidden: int
    layers: int
    heads: int
    head_dim: int
    inner: int
    vocab: int
    dtype: torch.dtype
    steps: int = 0
    latent: int = 0
    rope: int = 0
    index_heads: int = 0
    index_dim: int = 0
    topk: int = 0
    experts: int = 0


TINY_DENSE = Size("dense tiny", 256, 2, 4, 64, 512, 64, torch.float32)
MEDIUM_DENSE = Size("dense medium", 1024, 12, 16, 64, 3072, 4096, torch.bfloat16)
TINY_GLM = Size("glm-dsa tiny", 256, 2, 16, 64, 256, 64, torch.float32, 2, 64, 32, 16, 64, 64, 8)
MEDIUM_GLM = Size("glm-dsa medium", 1024, 6, 16, 64, 512, 4096, torch.bfloat16, 3, 512, 64, 32, 128, 512, 16)
SIZES = (TINY_DENSE, MEDIUM_DENSE, TINY_GLM, MEDIUM_GLM)


def on_cpu(size: Size) -> Size:
    """A size that takes milliseconds a step on a CPU, in float64, where equality is judged to 1e-9."""
    small = replace(size, hidden=32, heads=2, head_dim=16, inner=64, vocab=64, dtype=torch.float64)
    small = replace(small, layers=4 if "medium" in size.name else 2)
    return replace(small, latent=16, rope=8, index_heads=2, index_dim=32, topk=16, experts=4) if size.topk else small


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(rows, columns, bias=False)


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``[N, H, D]`` in halves."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = positions.to(torch.float32)[:, None] * torch.pow(10000.0, -exponent)
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    low, high = x.split(half, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Dense(nn.Module):
    """Attention with a quarter of the heads for keys and values, then a gated feed-forward."""

    def __init__(self, size: Size, name: str) -> None:
        super().__init__()
        self.size, self.name = size, name
        self.kv_heads = max(1, size.heads // 4)
        self.before, self.after = Norm(size.hidden), Norm(size.hidden)
        self.q = linear(size.hidden, size.heads * size.head_dim)
        self.k = linear(size.hidden, self.kv_heads * size.head_dim)
        self.v = linear(size.hidden, self.kv_heads * size.head_dim)
        self.out = linear(size.heads * size.head_dim, size.hidden)
        self.gate, self.up = linear(size.hidden, size.inner), linear(size.hidden, size.inner)
        self.down = linear(size.inner, size.hidden)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        q = turned(self.q(normed).view(-1, self.size.heads, self.size.head_dim), positions)
        k = turned(self.k(normed).view(-1, self.kv_heads, self.size.head_dim), positions)
        v = self.v(normed).view(-1, self.kv_heads, self.size.head_dim)
        found = kv_attend(q, kv_write(k, v, self.name), self.name)
        x = x + self.out(found.reshape(-1, self.size.heads * self.size.head_dim))
        normed = self.after(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class Sparse(nn.Module):
    """Absorbed MLA attention over the keys that its indexer selects, then experts and a shared one."""

    def __init__(self, size: Size, name: str) -> None:
        super().__init__()
        self.size, self.name = size, name
        self.before, self.after, self.latent_norm = Norm(size.hidden), Norm(size.hidden), Norm(size.latent)
        self.q = linear(size.hidden, size.heads * (size.latent + size.rope))
        self.kv = linear(size.hidden, size.latent + size.rope)
        self.out = linear(size.heads * size.latent, size.hidden)
        self.index_q = linear(size.hidden, size.index_heads * size.index_dim)
        self.index_k, self.index_w = linear(size.hidden, size.index_dim), linear(size.hidden, size.index_heads)
        self.router = linear(size.hidden, size.experts)
        self.gate_up = nn.Parameter(torch.empty(size.experts, 2 * size.inner, size.hidden))
        self.down = nn.Parameter(torch.empty(size.experts, size.hidden, size.inner))
        self.shared_up, self.shared_down = linear(size.hidden, size.inner), linear(size.inner, size.hidden)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        size, normed = self.size, self.before(x)
        q = self.q(normed).view(-1, size.heads, size.latent + size.rope)
        nope, rope = q.split([size.latent, size.rope], -1)
        q = torch.cat([nope, turned(rope, positions)], -1)
        latent, rope = self.kv(normed).split([size.latent, size.rope], -1)
        rope = turned(rope[:, None], positions)
        index_k = turned(self.index_k(normed)[:, None], positions)[:, 0]
        index_q = turned(self.index_q(normed).view(-1, size.index_heads, size.index_dim), positions)
        weights = self.index_w(normed) * (size.index_heads * size.index_dim) ** -0.5
        chosen = index_topk(index_q, weights, index_write(index_k, self.name), self.name, size.topk)
        dep = kv_write(self.latent_norm(latent)[:, None], rope, self.name)
        scale = (size.latent + size.rope) ** -0.5
        found = mla_attend(q, dep, self.name, scale=scale, latent=size.latent, indices=chosen)
        x = x + self.out(found.reshape(-1, size.heads * size.latent))
        normed = self.after(x)
        share, expert = self.router(normed).sigmoid().topk(2, dim=-1)
        share = share / share.sum(-1, keepdim=True)
        routed = experts_op(normed, expert, share, self.gate_up, self.down, "silu")
        result: torch.Tensor = x + routed + self.shared_down(F.silu(self.shared_up(normed)))
        return result


class Decoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.hidden)
        kind = Sparse if size.topk else Dense
        self.layers = nn.ModuleList(kind(size, f"target.{i}") for i in range(size.layers))
        self.norm = Norm(size.hidden)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions)
        result: torch.Tensor = self.norm(x)
        return result


class NextToken(nn.Module):
    """The drafter: a layer of the target's kind between a projection of token and hidden state, and a norm."""

    def __init__(self, size: Size, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed
        self.of_token, self.of_hidden, self.norm = Norm(size.hidden), Norm(size.hidden), Norm(size.hidden)
        self.join = linear(2 * size.hidden, size.hidden)
        self.layer = (Sparse if size.topk else Dense)(size, "drafter.0")

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.join(torch.cat([self.of_token(self.embed(ids)), self.of_hidden(hidden)], -1))
        result: torch.Tensor = self.norm(self.layer(x, positions))
        return result


def _ready(module: nn.Module, seed: int, size: Size, device: torch.device) -> Any:
    """Weights drawn on the CPU, so that every device and rank has the same."""
    generator = torch.Generator().manual_seed(seed)
    module.requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            parameter.copy_(3 * drawn if parameter is getattr(getattr(module, "embed", None), "weight", 0) else drawn)
    return module.to(device, size.dtype).eval()


def make_program(size: Size, pcp: int, device: torch.device) -> StepProgram:
    """The model as a step program of ``pcp`` ranks; with ``size.steps`` drafts by its next-token module."""
    decoder, context = _ready(Decoder(size), 1, size, device), PassContext(pcp)
    head = _ready(linear(size.hidden, size.vocab), 2, size, device)
    ids = torch.zeros(64 + size.topk, dtype=torch.int64, device=device)
    names = tuple(f"target.{i}" for i in range(size.layers))
    sizes = (head, size.hidden, size.vocab)
    target = Model("target", make_bodies({"": prepare(decoder, (ids, ids))}, context), *sizes, names, size.dtype)
    if not size.steps:
        return StepProgram(target, NoDrafter(), pcp=pcp)
    module = _ready(NextToken(size, decoder.embed), 3, size, device)
    hidden = torch.zeros(len(ids), size.hidden, dtype=size.dtype, device=device)
    bodies = make_bodies({"": prepare(module, (ids, ids, hidden))}, context)
    drafter = Model("drafter", bodies, *sizes, ("drafter.0",), size.dtype)
    return StepProgram(target, MTP(drafter, size.steps), pcp=pcp)
