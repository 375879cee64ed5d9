# SPDX-License-Identifier: Apache-2.0
"""Small configurations in the format of transformers, as a ``config.json`` would hold them."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip

GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 2,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16,
    "indexer_types": ["full", "full", "shared", "full", "shared", "full"], "max_position_embeddings": 512,
}  # fmt: skip

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 16, "max_position_embeddings": 512,
}  # fmt: skip

LENGTH_BOUND: dict[str, Any] = {
    "model_type": "recurrent_gemma", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 2, "lru_width": 32, "attention_window_size": 16,
}  # fmt: skip
"""A model that compiles its number of tokens in."""

MAMBA2: dict[str, Any] = {
    "model_type": "mamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
    "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16,
}  # fmt: skip
