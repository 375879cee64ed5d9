# SPDX-License-Identifier: Apache-2.0
"""Shrink a configuration of transformers until its model fits a test, whatever the model type.

The default configuration is taken apart and every size in it is replaced by a small one, by the name it has. Names are
regular enough for that (``hidden_size``, ``n_embd``, ``d_model``), but they do not say what must divide what, so the
sizes are chosen to divide each other: 64 = 4 heads × 16, 8 experts in 2 groups. Of the layers, one of each kind stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VOCAB = 256
HIDDEN = 64
HEAD = 16
WINDOW = 16
MAX_LAYERS = 4

_KEY_HEADS = (
    r"^(num_key_value_heads|n_kv_heads?|kv_n_heads|num_kv_heads|num_query_groups|num_global_key_value_heads"
    r"|swa_num_key_value_heads|multi_query_group_num)$"
)
_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")

#: First match wins. Values of other types (lists, strings, ``None``, booleans) are never touched by these.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"^(vocab_size|.*vocab_size(_per_layer_input)?|text_vocab_size|n_vocab)$", VOCAB),
    (r"^(hidden_size_per_layer_input)$", 16),
    (r"moe.*(intermediate|ffn|hidden).*|expert_(intermediate|ffn|hidden).*|shared_expert_intermediate_size", 32),
    (r"(intermediate|ffn_hidden|ffn_inner|encoder_ffn|decoder_ffn|ffn)_(size|dim)(_mlp)?$|^(d_ff|d_inner|n_inner|ffn_dim)$"
     r"|^(intermediate_dim|dim_ff|block_ff_dim|inner_dim|dff|ffn_hidden_size|intermediate_size_mlp)$", 96),
    (r"^(hidden_size|d_model|n_embd|dim_model|dim|n_embed|embedding_size|word_embed_proj_dim|lru_width|hidden_dim"
     r"|attention_hidden_size|emb_dim|embed_dim|projection_size|d_embed)$", HIDDEN),
    (_KEY_HEADS, 2),
    (r"^qk_head_dim$", 2 * HEAD),
    (r"^(index_n_heads|index_num_heads)$", 4),
    (r"^(index_head_dim)$", 16),
    (r"^(index_topk|indexer_topk)$", 8),
    (r"^(mamba_n_heads|mamba_num_heads|n_mamba_heads)$", 8),
    (r"^(num_attention_heads|n_heads?|num_heads|encoder_attention_heads|decoder_attention_heads|num_q_heads"
     r"|swa_num_attention_heads|linear_num_attention_heads)$", 4),
    (r"^linear_num_key_heads$", 2),
    (r"^linear_num_value_heads$", 4),
    (r"^(kv_lora_rank)$", 32),
    (r"^(q_lora_rank|o_lora_rank)$", 48),
    (r"(head_dim|head_size|d_head|kv_channels|rotary_dim|rope_dim)$", HEAD),
    (r"^(d_kv|key_head_dim|value_head_dim|attention_head_dim)$", HEAD),
    (r"^(max_position_embeddings|n_positions|max_seq_len|n_ctx|max_sequence_length|seq_length|context_length"
     r"|max_target_positions|max_source_positions|num_positions)$", 512),
    (r"^(num_experts_per_tok|moe_top_?k|num_experts_per_token|top_k_experts|moe_k|num_selected_experts|moe_router_topk"
     r"|num_activated_experts)$", 2),
    (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|num_moe_experts)$", 8),
    (r"^(n_shared_experts|num_shared_experts|moe_num_shared_experts|num_shared_expert)$", 1),
    (r"^(zero_expert_num)$", 2),
    (r"^(n_group|n_groups_router|num_expert_group|num_expert_groups|moe_n_group)$", 2),
    (r"^(topk_group)$", 1),
    (r"^(sliding_window|sliding_window_size|attention_window|attention_window_size|window_size|local_window_size"
     r"|attention_chunk_size|attn_window_size|local_attention)$", WINDOW),
    (r"^(chunk_size|mamba_chunk_size|ssm_chunk_size|chunk_length)$", WINDOW),
    (r"^(state_size|mamba_d_state|ssm_state_size|d_state|mamba_state_dim)$", 8),
    (r"^(mamba_d_head|mamba_head_dim|mamba_headdim)$", HEAD),
    (r"^(time_step_rank|mamba_dt_rank)$", 8),
    (r"^(n_groups|mamba_n_groups|mamba_ngroups)$", 1),
    (r"^(mamba_expand|expand|mamba_expand_ratio)$", 2),
    (r"^(mamba_d_ssm|mamba_intermediate_size)$", 128),
    (r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index|first_dense_layers)$", 1),
    (r"^(num_nextn_predict_layers|num_mtp_layers|mtp_num_layers)$", 0),
    (r"^(attn_layer_period|expert_layer_period|decoder_sparse_step|interleave_moe_layer_step|full_attention_interval"
     r"|sliding_window_pattern|moe_layer_interval|global_attn_every_n_layers|no_rope_layer_interval)$", 2),
    (r"^(attn_layer_offset|expert_layer_offset)$", 1),
    (r"^(altup_num_inputs)$", 2),
    (r"^(laurel_rank)$", 16),
    (r"^(num_kv_shared_layers)$", 0),
    (r"^(pad_token_id|pad_token)$", 0),
    (r"^(bos_token_id|decoder_start_token_id)$", 1),
    (r"^(eos_token_id|sep_token_id|forced_eos_token_id)$", 2),
)  # fmt: skip
_RULES = tuple((re.compile(pattern), value) for pattern, value in _SIZES)
_LAYER_COUNTS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_decoder_layers|num_encoder_layers)$"
)
_TOKEN_IDS = re.compile(r"_token_(id|index)$|_token_ids$")
_DROPOUT = re.compile(r"drop(out)?(_|$)|pdrop|layerdrop|jitter")
_NOISE = {"transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id", "_name_or_path"}
_SECTIONS = ("mrope_section", "mrope_sections")


def small_config(configuration_class: Any, adjust: Mapping[str, Any] | None = None) -> Any:
    """An instance of a configuration class with small sizes, and with the values of ``adjust`` on top.

    A name of a nested configuration is written ``text_config.hidden_size``. Raises what the constructor raises.
    """
    values = shrink(plain_values(configuration_class()))
    values.pop("model_type", None)
    for name, value in (adjust or {}).items():
        *outer, last = name.split(".")
        held = values
        for part in outer:
            held = held.setdefault(part, {})
        held[last] = value
    return configuration_class(**values)


def plain_values(configuration: Any) -> dict[str, Any]:
    """What a configuration holds, nested ones as dictionaries."""
    values: dict[str, Any] = configuration.to_dict()
    return _without_noise(values)


def _without_noise(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_noise(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if isinstance(key, str) and key not in _NOISE
    }


def shrink(values: dict[str, Any]) -> dict[str, Any]:
    """The same keys with small values."""
    count = next((v for k, v in values.items() if _LAYER_COUNTS.match(k) and isinstance(v, int) and v), 0)
    kept = chosen_layers([v for v in values.values() if isinstance(v, list) and count and len(v) == count], count)
    small = {key: _small(key, value, count, kept) for key, value in values.items()}
    heads = next((values[key] for key in _HEADS if isinstance(values.get(key), int)), 0)
    for key, value in values.items():
        if re.match(_KEY_HEADS, key) and heads and value in (heads, None):  # no grouping: some models take no other
            small[key] = 4
    if "head_dim" in small and small["head_dim"] is None:
        small["head_dim"] = HEAD
    for key in ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids", "global_attn_indexes"):
        if isinstance(values.get(key), list):
            small[key] = [1] if len(kept) > 1 else []
    return small


def chosen_layers(lists: Sequence[list[Any]], count: int) -> list[int]:
    """Which layers stay: the first of each kind, in order, at least two and at most ``MAX_LAYERS``.

    Worked example: kinds ``[a, a, b, a, a, b]`` keep layers ``[0, 2]``.
    """
    kinds = [tuple(str(each[layer]) for each in lists) for layer in range(count)]
    first = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())[:MAX_LAYERS]
    if len(first) < 2:
        first = list(range(min(2, count)))
    return first


def _small(key: str, value: Any, count: int, kept: Sequence[int]) -> Any:
    if isinstance(value, dict):
        return _small_dictionary(key, value, kept)
    if isinstance(value, list):
        return _small_list(key, value, count, kept)
    if isinstance(value, bool) or value is None:
        return False if key == "use_cache" else value
    if isinstance(value, float):
        return 0.0 if _DROPOUT.search(key) else value
    if not isinstance(value, int):
        return value
    if _LAYER_COUNTS.match(key):
        return len(kept) if value == count else min(value, 2)
    for pattern, small in _RULES:
        if pattern.search(key):
            return min(value, small) if value >= 0 else value
    if _TOKEN_IDS.search(key):
        return min(value, VOCAB - 1)
    return value


def _small_dictionary(key: str, value: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    if value and all(name.isdigit() for name in value):  # values of single layers
        places = {layer: place for place, layer in enumerate(kept)}
        return {str(places[int(name)]): shrink(held) for name, held in value.items() if int(name) in places}
    if "rope" in key:
        return {inner: _small_rope(inner, held) for inner, held in value.items()}
    return shrink(value)


def _small_rope(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {inner: _small_rope(inner, held) for inner, held in value.items()}
    if key in _SECTIONS and isinstance(value, list):
        return [HEAD // 2 - 2 * (len(value) - 1), *[2] * (len(value) - 1)]
    if key in ("short_factor", "long_factor"):
        return value[: HEAD // 2]
    return value


def _small_list(key: str, value: list[Any], count: int, kept: Sequence[int]) -> Any:
    if count and len(value) == count:
        return [_small(key, value[layer], 0, ()) for layer in kept]
    if _TOKEN_IDS.search(key):
        return [min(each, VOCAB - 1) if isinstance(each, int) else each for each in value]
    if key in _SECTIONS:
        return _small_rope(key, value)
    return value


def too_large(parameters: Iterable[tuple[str, Any]], limit: int = 12_000_000) -> str | None:
    """Why a model is not small enough to be run: its largest parameters."""
    sizes = sorted(((parameter.numel(), name) for name, parameter in parameters), reverse=True)
    total = sum(size for size, _ in sizes)
    if total <= limit:
        return None
    shown = ", ".join(f"{name} has {size:,}" for size, name in sizes[:3])
    return f"{total:,} parameters after shrinking, at most {limit:,} allowed: {shown}"
