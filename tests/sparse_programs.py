# SPDX-License-Identifier: Apache-2.0
"""Attention over keys that an indexer selects, in many spellings, for the tests of the passes that lower it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

HEADS, NOPE, ROPE, VALUE, LATENT = 4, 12, 5, 6, 10
INDEX_HEADS, INDEX_SIZE, TOPK = 6, 7, 5
SCALE, INDEX_SCALE = 0.3, 0.4
INF = float("-inf")
LOW = torch.finfo(torch.float32).min

Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q [1, T, Hi, Di], k [1, T, Di], w [1, T, Hi]) -> [1, T, T]``."""
Masked = Callable[[Tensor, Tensor], Tensor]
"""``(scores [1, T, T], causal [T, T]) -> [1, T, T]``."""
Select = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(q, k, v, indices, causal) -> [1, H, T, Dv]``."""
Expand = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(latent [1, T, L], rope [1, T, R], weight) -> (k, v)``."""


def operands(tokens: int, batch: int = 1) -> tuple[Tensor, ...]:
    """``q [1, H, T, D]``, latent, rope, weight, and the indexer's q, k and w."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = [
        (batch, HEADS, tokens, NOPE + ROPE), (batch, tokens, LATENT), (batch, tokens, ROPE),
        (HEADS * (NOPE + VALUE), LATENT), (batch, tokens, INDEX_HEADS, INDEX_SIZE), (batch, tokens, INDEX_SIZE),
        (batch, tokens, INDEX_HEADS),
    ]  # fmt: skip
    return tuple(torch.randn(size, generator=generator) for size in sizes)


# Scores


def matmuls(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """As transformers writes it."""
    scores = F.relu(torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * INDEX_SCALE)
    return torch.matmul(w.float().unsqueeze(-2), scores).squeeze(-2)


def einsums(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    scores = torch.einsum("bthd,bsd->bths", q, k).relu()
    return torch.einsum("bths,bth->bts", scores.swapaxes(1, 2).swapaxes(1, 2), w * INDEX_SCALE)


def heads_first(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    scores = torch.matmul(q.transpose(1, 2), k.unsqueeze(1).transpose(-1, -2)).clamp_min(0) * INDEX_SCALE
    return (scores * w.transpose(1, 2).unsqueeze(-1)).sum(1)


def keys_left(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """``k @ q`` and a maximum with 0; the sum keeps its dimension."""
    scores = torch.maximum(torch.matmul(k.unsqueeze(1), q.transpose(-1, -2)) * INDEX_SCALE, torch.zeros(()))
    return (scores * w.unsqueeze(2)).sum(dim=-1, keepdim=True).squeeze(-1)


def batched(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    tokens = q.shape[1]
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)).view(1, tokens, INDEX_HEADS, tokens).clamp(min=0)
    summed = torch.bmm(w.reshape(tokens, 1, INDEX_HEADS), scores.reshape(tokens, INDEX_HEADS, tokens))
    return summed.view(1, tokens, tokens) / (1 / INDEX_SCALE)


def repeated(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Keys expanded to every head."""
    keys = k[:, None].expand(1, INDEX_HEADS, k.shape[1], INDEX_SIZE)
    scores = torch.einsum("bthd,bhsd->bhts", q, keys) * INDEX_SCALE
    return torch.einsum("bhts,bth->bts", scores.relu(), w)


SCORES: dict[str, Scores] = {
    "matmul": matmuls, "einsum": einsums, "heads first": heads_first, "keys on the left": keys_left,
    "bmm": batched, "repeated keys": repeated,
}  # fmt: skip

MASKED: dict[str, Masked] = {
    "masked_fill": lambda scores, causal: scores.masked_fill(~causal, INF),
    "where": lambda scores, causal: torch.where(causal, scores, INF),
    "where, turned": lambda scores, causal: torch.where(~causal, LOW, scores),
    "added": lambda scores, causal: scores + torch.zeros(causal.shape).masked_fill(~causal, INF),
    "added in front": lambda scores, causal: torch.zeros(causal.shape).masked_fill(~causal, LOW)[None] + scores,
    "triangle": lambda scores, causal: scores + torch.full(causal.shape, INF).triu(1),
}


def least(scores: Tensor) -> Tensor:
    """As transformers writes it."""
    return scores.topk(min(TOPK, scores.shape[-1]), dim=-1).indices.to(torch.int32)


SELECT: dict[str, Select] = {
    "min": least,
    "unsorted": lambda scores: scores.topk(min(TOPK, scores.shape[-1]), dim=-1, sorted=False)[1],
    "constant": lambda scores: torch.topk(scores, TOPK).indices,
}


# From the latent to the output


def joined(latent: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    both = F.linear(latent, weight).view(latent.shape[0], -1, HEADS, NOPE + VALUE).transpose(1, 2)
    nope, v = both.split([NOPE, VALUE], dim=-1)
    return torch.cat([nope, rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], -1), v


def copied(latent: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers writes it, without mutations: both parts copied into an empty tensor."""
    tokens = latent.shape[1]
    both = F.linear(latent[:, None], weight).view(1, tokens, -1, NOPE + VALUE).transpose(1, 2)
    nope, v = both.split([NOPE, VALUE], dim=-1)
    k = torch.slice_scatter(both.new_empty(1, HEADS, tokens, NOPE + ROPE), nope, 3, 0, NOPE)
    return torch.slice_scatter(k, rope[:, None].expand(-1, HEADS, -1, -1), 3, NOPE, NOPE + ROPE), v


def rope_first(latent: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary channels in front, values in front of keys, cut before heads come first."""
    both = F.linear(latent, weight).unflatten(-1, (HEADS, NOPE + VALUE))
    v, nope = both[..., :VALUE].transpose(1, 2), both[..., VALUE:].transpose(1, 2)
    shared = rope.unsqueeze(2).expand(-1, -1, HEADS, -1).transpose(1, 2)
    return torch.cat([shared, nope], -1), v


EXPAND: dict[str, Expand] = {"cat": joined, "copies": copied, "rope first": rope_first}


def truth(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
    """As transformers writes it for SDPA."""
    hidden = torch.ones(q.shape[0], *causal.shape, dtype=torch.bool).scatter(-1, indices.long(), False)
    return F.scaled_dot_product_attention(q, k, v, causal & ~hidden.unsqueeze(1), scale=SCALE)


def written_out(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
    """As transformers writes it without SDPA."""
    mask = torch.zeros(causal.shape).masked_fill(~causal, LOW)[None, None]
    hidden = torch.ones(1, *causal.shape, dtype=torch.bool).scatter(-1, indices.long(), False)
    logits = torch.matmul(q, k.transpose(2, 3)) * SCALE + mask.masked_fill(hidden.unsqueeze(1), LOW)
    return torch.matmul(torch.softmax(logits, -1, dtype=torch.float32).to(q.dtype), v)


def added(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
    """As DeepSeek's reference writes it: an additive mask of -inf in which the selected keys are 0."""
    selected = torch.full((1, *causal.shape), INF).scatter(-1, indices.long(), 0.0)
    mask = selected + torch.full(causal.shape, INF).triu(1)
    return F.scaled_dot_product_attention(q, k, v, mask.unsqueeze(1), scale=SCALE)


def shown(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
    selected = torch.zeros(1, *causal.shape, dtype=torch.bool).scatter(-1, indices.long(), True)
    return F.scaled_dot_product_attention(q, k, v, (selected & causal)[:, None], scale=SCALE)


ATTEND: dict[str, Attend] = {"sdpa": truth, "softmax": written_out, "additive": added, "shown": shown}


@dataclass(frozen=True)
class Model:
    """One layer; every part can be spelt otherwise."""

    scores: Scores = matmuls
    masked: Masked = MASKED["masked_fill"]
    select: Select = least
    expand: Expand = joined
    attend: Attend = truth

    def with_(self, **parts: object) -> Model:
        return replace(self, **parts)  # type: ignore[arg-type]

    def __call__(self, q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, *index: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        causal = places[None, :] <= places[:, None]
        indices = self.select(self.masked(self.scores(*index), causal))
        k, v = self.expand(latent, rope, weight)
        return self.attend(q, k, v, indices, causal)
