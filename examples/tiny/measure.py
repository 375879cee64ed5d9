# SPDX-License-Identifier: Apache-2.0
"""How good the tiny checkpoints are: bits per byte of held-out text, and how many drafts the target accepts.

Greedy speculation changes no token. So transformers continues the prompts first, and the rounds are then replayed: a
round that stands at a known token accepts as many drafts as agree with what follows there.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pcp_passes.demo.text import python_text, spread
from pcp_passes.speculative.dspark_model import DSpark, load_dspark
from tiny.checkpoint import load
from tiny.model import TinyGlm, drafts, trunk

Measured = dict[str, object]


@torch.no_grad()
def measure(target: Path, drafter: Path, prompts: int = 48, length: int = 512, new: int = 32) -> Measured:
    """Numbers for a README.

    Args:
        target, drafter: checkpoints.
        prompts: how many held-out prompts to continue.
        length: tokens of each.
        new: tokens to generate; few, since a long greedy continuation repeats itself, which flatters every drafter.
    """
    held_out = python_text().held_out
    model = load(target).eval()
    block = load_dspark(drafter, model.main.model.embed_tokens.weight, model.main.lm_head.weight)
    result: Measured = {"text": python_text().digest, "prompts": prompts, "prompt_bytes": length, "new_bytes": new}
    for context, windows in ((256, 32), (1024, 16), (4096, 3)):
        result[f"bits_per_byte_{context}"] = round(bits_per_byte(model, held_out, windows, context), 3)
    starts = spread(held_out, prompts, length)
    steps = max(3, block.config.block_size)
    known = model.main.generate(
        starts,
        attention_mask=torch.ones_like(starts),
        max_new_tokens=new + steps + 1,
        min_new_tokens=new + steps + 1,
        do_sample=False,
    )
    result["mtp"] = replay(known, length, new, mtp_streaks(model, known, 3), 3)
    result["block"] = replay(known, length, new, block_streaks(model, block, known, length), block.config.block_size)
    return result


def bits_per_byte(model: TinyGlm, stream: Tensor, windows: int, context: int) -> float:
    """Mean over the second half of each window, attending to what the indexers select."""
    total = 0.0
    for window in spread(stream, windows, context + 1):
        logits = model.logits(trunk(model, window[None, :-1]))[0, context // 2 :]
        total += F.cross_entropy(logits, window[context // 2 + 1 :]).item()
    return total / windows / math.log(2)


def mtp_streaks(model: TinyGlm, known: Tensor, steps: int) -> Tensor:
    """i64[B, S - steps - 1]: drafts that agree, for a round whose newest token is at column t + 1."""
    rows = []
    for row in known[:, None]:
        states = drafts(model, row, trunk(model, row), steps, sparse=True)
        width = states[0].shape[1] - 1
        agree = [model.logits(s[:, :width]).argmax(-1) == row[:, k : k + width] for k, s in enumerate(states, start=2)]
        rows.append(torch.stack(agree).int().cumprod(0).sum(0))
    return torch.cat(rows)


def block_streaks(model: TinyGlm, drafter: DSpark, known: Tensor, first: int) -> Tensor:
    """The same for the block drafter; columns before ``first`` - 1 are left at 0."""
    size = drafter.config.block_size
    streaks = torch.zeros(len(known), known.shape[1] - size - 1, dtype=torch.int64)
    for number, row in enumerate(known):
        aux: list[Tensor] = []
        trunk(model, row[None], aux=aux)
        context = drafter.context_keys_values(tuple(state[0] for state in aux), torch.arange(len(row)))
        for column in range(first - 1, streaks.shape[1]):
            drafted = block_drafts(drafter, context, row[column + 1], column + 1)
            agree = drafted == row[column + 2 : column + 2 + size]
            streaks[number, column] = agree.int().cumprod(0).sum()
    return streaks


def block_drafts(drafter: DSpark, context: list[tuple[Tensor, Tensor]], anchor: Tensor, position: int) -> Tensor:
    """i64[K] greedy drafts after ``anchor`` at ``position``; the context is cut off before it."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat([old[:position], own]) for old, own in zip(context[layer], (k, v), strict=True))
        weight = (torch.einsum("nhd,mhd->hnm", q, keys) * q.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weight, values)

    size = drafter.config.block_size
    ids = torch.full((size,), drafter.config.mask_token_id)
    ids[0] = anchor
    base = drafter.logits(drafter.query(ids, position + torch.arange(size), attend))
    tokens = [anchor[None]]
    for row in base:
        tokens.append((row + drafter.markov_head(tokens[-1])).argmax(-1))
    return torch.cat(tokens[1:])


def replay(known: Tensor, length: int, new: int, streaks: Tensor, steps: int) -> Measured:
    """Rounds of all sequences: share with drafts 1..k accepted, and tokens a round."""
    accepted = []
    for row in streaks.tolist():
        column = length - 1
        while column < length + new - 1:
            accepted.append(row[column])
            column += row[column] + 1
    counts = torch.tensor(accepted)
    shares = [(counts >= k).double().mean().item() for k in range(1, steps + 1)]
    return {
        "rounds": len(accepted),
        "accepted_per_position": [round(share, 3) for share in shares],
        "tokens_per_round": round(1 + sum(shares), 3),
    }
