# SPDX-License-Identifier: Apache-2.0
"""Training of the block drafter: many blocks per window at once, dense attention instead of a cache.

Shapes: B windows of S tokens, A anchors in each, K query tokens per anchor.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pcp_passes.demo.text import FILLER, VOCABULARY
from pcp_passes.speculative.dspark_model import DSpark, DSparkConfig
from tiny.checkpoint import write_json
from tiny.losses import Loss, against_target
from tiny.model import AUX_LAYERS, LOWEST, TinyGlm, trunk


def tiny_drafter(target: TinyGlm) -> DSpark:
    """0.44 M parameters in two layers, on the frozen embedding and head of ``target``."""
    config = DSparkConfig(
        vocab_size=VOCABULARY, hidden_size=target.config.hidden_size, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, intermediate_size=320, target_layer_ids=AUX_LAYERS, mask_token_id=FILLER,
        block_size=5, markov_rank=32, rope_theta=500.0,
    )  # fmt: skip
    drafter = DSpark(config)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data *= (2 * config.num_hidden_layers) ** -0.5
    drafter.embed_tokens.weight = target.main.model.embed_tokens.weight
    drafter.lm_head.weight = target.main.lm_head.weight
    return drafter


def block_loss(target: TinyGlm, drafter: DSpark, tokens: Tensor) -> Loss:
    """Cross-entropy of every draft of a block with the frozen target's distribution of the same token.

    The Markov head is given the real previous token: what is fed back when all drafts before were right.

    Args:
        target: frozen.
        drafter: what learns.
        tokens: i64[B, S]; anchors are drawn from it at random, one for every six tokens.
    """
    batch, length = tokens.shape
    size = drafter.config.block_size
    with torch.no_grad():
        aux: list[Tensor] = []
        distribution = target.logits(trunk(target, tokens, aux=aux))
    # A block needs a context of one token at least, and the target's distribution at each of its positions.
    anchors = 1 + torch.rand(batch, length - size).argsort(1)[:, : length // 6]
    rows = anchors[..., None] + torch.arange(size)
    flat = rows.flatten(1)
    ids = torch.full_like(rows, drafter.config.mask_token_id)
    ids[..., 0] = tokens.gather(1, anchors)

    positions = torch.arange(length).repeat(batch)
    context = drafter.context_keys_values(tuple(layer.flatten(0, 1) for layer in aux), positions)
    seen = (torch.arange(length) < anchors[..., None]).repeat_interleave(size, 1)[:, None]

    def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = q.shape[1]
        ck, cv = (part.view(batch, length, heads, -1).transpose(1, 2) for part in context[number])
        q, k, v = (part.view(batch, -1, size, heads, part.shape[-1]).permute(0, 3, 1, 2, 4) for part in (q, k, v))
        outside = (q.flatten(2, 3) @ ck.mT).masked_fill(~seen, LOWEST)  # [B, H, A * K, S]
        inside = (q @ k.mT).flatten(2, 3)  # [B, H, A * K, K]
        weight = (torch.cat([outside, inside], -1) * q.shape[-1] ** -0.5).softmax(-1)
        own = weight[..., length:].unflatten(2, (-1, size)) @ v
        return (weight[..., :length] @ cv + own.flatten(2, 3)).transpose(1, 2).flatten(0, 1)

    hidden = drafter.query(ids.flatten(), flat.flatten(), attend).view(*rows.shape, -1)
    logits = drafter.logits(hidden) + drafter.markov_head(tokens.gather(1, flat)).view(*rows.shape, -1)
    wanted = distribution.gather(1, flat[..., None].expand(-1, -1, distribution.shape[-1])).view(*rows.shape, -1)
    return against_target(list(logits.unbind(2)), list(wanted.unbind(2)))


def save_drafter(drafter: DSpark, folder: Path) -> None:
    """`config.json` and `model.safetensors` in bf16, without the target's embedding and head."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in sorted(drafter.own_tensors().items())}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", drafter.config.to_json() | {"dtype": "bfloat16"})
