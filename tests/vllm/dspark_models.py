# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3 target and a DSpark drafter for it whose drafts are accepted often, and not always.

The drafter is not trained. Its Markov head holds the target's mean logits after each token, measured on random
contexts: as good as a drafter can be that sees one token. Its block, which reads the target's auxiliary states, adds
noise of about the size of the gaps between the best tokens; so a wrong auxiliary state or a stale cache row changes
which drafts are right, and with them the accepted counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import models

STEPS = 3
#: Auxiliary states are read after these target layers.
TARGET_LAYERS = (0, 2)
_NOISE = 0.4
_MIX = 0.1
_DRAFT: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "target_layer_ids": list(TARGET_LAYERS),
    "markov_rank": models.VOCAB_SIZE,
    "block_size": STEPS,
    # The last token of the vocabulary stands for a position that is not known yet.
    "mask_token_id": models.VOCAB_SIZE - 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "dtype": "float32",
}


def build(folder: Path) -> tuple[Path, Path]:
    """Write ``folder/target`` and ``folder/dspark``; return both."""
    target = folder / "target"
    model = _target()
    model.save_pretrained(target)
    models.make_tokenizer().save_pretrained(target)
    draft = folder / "dspark"
    draft.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_dict(), **_DRAFT, "layer_types": ["full_attention"]}
    (draft / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_draft_tensors(model), draft / "model.safetensors", metadata={"format": "pt"})
    return target, draft


@torch.no_grad()
def _target() -> Any:
    """``tiny_gqa`` with less of the context in its residual stream, so that the last token alone predicts much."""
    model = models.make_model("tiny_gqa", seed=1)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(_MIX)
    return model


@torch.no_grad()
def _draft_tensors(model: Any) -> dict[str, torch.Tensor]:
    config = model.config
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    keys, inner = config.num_key_value_heads * dim, config.intermediate_size
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, gain: float = 1.6) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(rows, columns, generator=generator)
        return drawn.mul_(gain / columns**0.5)

    layer = {
        "self_attn.q_proj": matrix(heads * dim, hidden, 2.4),
        "self_attn.k_proj": matrix(keys, hidden, 2.4),
        "self_attn.v_proj": matrix(keys, hidden),
        "self_attn.o_proj": matrix(hidden, heads * dim),
        "mlp.gate_proj": matrix(inner, hidden),
        "mlp.up_proj": matrix(inner, hidden),
        "mlp.down_proj": matrix(hidden, inner),
        "self_attn.q_norm": torch.ones(dim),
        "self_attn.k_norm": torch.ones(dim),
        "input_layernorm": torch.ones(hidden),
        "post_attention_layernorm": torch.ones(hidden),
    }
    tensors = {f"layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    tensors |= {
        "fc.weight": matrix(hidden, hidden * len(TARGET_LAYERS)),
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "embed_tokens.weight": torch.randn(config.vocab_size, hidden, generator=generator),
        "lm_head.weight": matrix(config.vocab_size, hidden, _NOISE),
        "markov_head.markov_w1.weight": torch.eye(config.vocab_size),
        "markov_head.markov_w2.weight": mean_logits(model).T.contiguous(),
    }
    return tensors


@torch.no_grad()
def mean_logits(model: Any, *, contexts: int = 8, length: int = 24) -> torch.Tensor:
    """f32[V, V]: row ``t`` is the mean of the logits after token ``t``, over random contexts before it."""
    vocabulary = model.config.vocab_size
    last = torch.arange(vocabulary)[:, None]
    generator = torch.Generator().manual_seed(11)
    total = torch.zeros(vocabulary, vocabulary)
    for _ in range(contexts):
        before = torch.randint(0, vocabulary, (vocabulary, length), generator=generator)
        total += model(torch.cat([before, last], dim=1)).logits[:, -1]
    return total / contexts
