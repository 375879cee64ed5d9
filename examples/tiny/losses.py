# SPDX-License-Identifier: Apache-2.0
"""One loss per phase of the training, each of a batch of windows i64[B, S]; numbers to report come along."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny.model import TinyGlm, causal, drafts, finish, heads, index_heads, index_scores, mtp_input, trunk

Loss = tuple[Tensor, dict[str, float]]
BITS = math.log2(math.e)


def language(model: TinyGlm, tokens: Tensor, sparse: bool, mtp_weight: float = 0.3) -> Loss:
    """The target's next byte, and the MTP layer's one after it from one draft step."""
    known = tokens[:, :-1]
    states = trunk(model, known, sparse)
    (draft,) = drafts(model, known, states, 1, sparse)
    main = F.cross_entropy(model.logits(states).flatten(0, 1), tokens[:, 1:].flatten())
    mtp = F.cross_entropy(model.logits(draft).flatten(0, 1), tokens[:, 2:].flatten())
    return main + mtp_weight * mtp, {"bits": main.item() * BITS, "mtp bits": mtp.item() * BITS}


def indexers(model: TinyGlm, tokens: Tensor) -> Loss:
    """KL divergence of every indexer's softmax from the attention it is to stand in for.

    That is the mean over heads, and over the layers that use its selection, of full attention. Queries that see no
    more keys than are selected teach nothing and are left out.
    """
    length, k = tokens.shape[1], model.config.index_topk
    seen = causal(length)
    sources, targets = [], []
    with torch.no_grad():
        x, rope = model.embed(tokens), model.rope(torch.arange(length))
        for layer in (*model.main.model.layers, model.mtp.block):
            if layer is model.mtp.block:
                # There is no token after the last; its query is dropped below.
                x = mtp_input(model, tokens.roll(-1, 1), model.main.model.norm(x), first=True)
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            h = heads(attention, normed, rope)
            weight = (h.q @ h.k.mT * attention.scaling).masked_fill(~seen, -torch.inf).softmax(-1)
            if attention.indexer is not None:
                sources.append((attention.indexer, normed, h.latent))
                targets.append([])
            targets[-1].append(weight.mean(1))
            x = finish(layer, x, weight @ h.v)
    total, report = torch.zeros(()), {}
    for number, ((indexer, normed, latent), wanted) in enumerate(zip(sources, targets, strict=True)):
        i = index_heads(indexer, normed, latent, rope)
        scores = index_scores(i.q, i.weight, i.key)[:, k:-1].masked_fill(~seen[k:-1], -torch.inf)
        target = torch.stack(wanted).mean(0)[:, k:-1]
        log = scores.log_softmax(-1).masked_fill(~seen[k:-1], 0.0)
        divergence = (target * (target.clamp_min(1e-9).log() - log)).sum(-1).mean()
        report[f"attention kept {number}"] = target.gather(-1, scores.topk(k, -1).indices).sum(-1).mean().item()
        total = total + divergence
    return total, report | {"kl": total.item()}


def drafting(model: TinyGlm, tokens: Tensor, steps: int) -> Loss:
    """Cross-entropy of each recursive draft with the frozen target's distribution of the same byte."""
    with torch.no_grad():
        states = trunk(model, tokens)
        targets = model.logits(states)
    predicted = [model.logits(state) for state in drafts(model, tokens, states, steps, sparse=True)]
    return against_target(predicted, [targets[:, k : k + predicted[0].shape[1]] for k in range(1, steps + 1)])


def against_target(predicted: list[Tensor], targets: list[Tensor]) -> Loss:
    """Mean cross-entropy over draft positions; reported: how often drafts 1..k all equal the target's choice."""
    total, report = torch.zeros(()), {}
    right = torch.ones(predicted[0].shape[:-1], dtype=torch.bool)
    for k, (draft, target) in enumerate(zip(predicted, targets, strict=True), start=1):
        total = total + F.cross_entropy(draft.flatten(0, -2), target.softmax(-1).flatten(0, -2)) / len(predicted)
        right &= draft.argmax(-1) == target.argmax(-1)
        report[f"accepted {k}"] = right.float().mean().item()
    return total, report | {"nats": total.item()}
