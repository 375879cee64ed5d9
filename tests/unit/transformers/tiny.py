# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers, one per kind of attention, with weights that make attention peaked."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY = 64
WINDOW = 6

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4_text": {
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}

_LATENT: dict[str, Any] = {
    **MODELS["deepseek_v3"],
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "index_topk": 5,
    "index_n_heads": 2,
    "index_head_dim": 12,
    "num_nextn_predict_layers": 1,
}
SPARSE: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {
        **_LATENT,
        "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "deepseek_v32": {**_LATENT, "mlp_layer_types": ["dense", "sparse"]},
}
"""Models with a sparse indexer; they select far fewer keys than the sequences of the tests have."""

GROUPED: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
}
"""Grouped heads and an MTP layer."""


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Matrices wide enough that dropping or adding one key changes the logits visibly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "sinks" in name:
                parameter.copy_(noise)
            elif parameter.dim() > 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.add_(0.1 * noise)
    return model.eval()


@functools.cache
def build(model_type: str) -> Any:
    """The model, float32, with its own eager attention. Shared between tests: leave it as it is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**_COMMON, **(MODELS | SPARSE | GROUPED)[model_type]})
    return randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def tokens(length: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids ``[batch, length]``."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def error(found: torch.Tensor, required: torch.Tensor) -> float:
    """Largest difference, in units of the largest required value."""
    return float((found - required).detach().abs().max() / required.detach().abs().max())


class CountOps(TorchDispatchMode):
    """How often each op runs inside the ``with`` block, by qualified name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))
