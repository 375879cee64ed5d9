# SPDX-License-Identifier: Apache-2.0
"""Small configurations: which layers stay, which sizes follow from which names."""

from __future__ import annotations

import pytest
import torch

from pcp_passes.zoo.shrink import MAX_LAYERS, chosen_layers, shrink, too_large

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "lists, count, kept",
    [
        ([["a", "a", "b", "a", "a", "b"]], 6, [0, 2]),
        ([["a", "a", "a"]], 3, [0, 1]),
        ([], 12, [0, 1]),
        ([], 1, [0]),
        ([["a", "a", "b", "b"], ["x", "y", "x", "x"]], 4, [0, 1, 2]),
        ([list("abcdefgh")], 8, [0, 1, 2, 3]),
    ],
)
def test_layers_that_stay(lists: list[list[str]], count: int, kept: list[int]) -> None:
    found = chosen_layers(lists, count)
    assert found == kept
    assert len(found) <= MAX_LAYERS


def test_sizes_by_name() -> None:
    small = shrink(
        {
            "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 4, "intermediate_size": 11008,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "attention_dropout": 0.1, "rms_norm_eps": 1e-6,
            "use_cache": True, "eos_token_id": 31999, "num_experts": 64, "num_experts_per_tok": 8, "name": "x",
            "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20]},
        }
    )  # fmt: skip
    assert small == {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16,
        "layer_types": [SLIDING, FULL], "attention_dropout": 0.0, "rms_norm_eps": 1e-6,
        "use_cache": False, "eos_token_id": 2, "num_experts": 8, "num_experts_per_tok": 2, "name": "x",
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]},
    }  # fmt: skip


@pytest.mark.parametrize("heads", [32, None])
def test_models_without_grouped_heads_stay_so(heads: int | None) -> None:
    assert shrink({"num_attention_heads": 32, "num_key_value_heads": heads})["num_key_value_heads"] == 4


def test_small_sizes_stay_and_nested_ones_shrink() -> None:
    small = shrink({"num_key_value_heads": 1, "num_attention_heads": 8, "text_config": {"hidden_size": 2048}})
    assert small == {"num_key_value_heads": 1, "num_attention_heads": 4, "text_config": {"hidden_size": 64}}


def test_values_of_single_layers_follow_their_layer() -> None:
    values = {
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "per_layer_config": {"2": {"head_dim": 512}, "3": {"head_dim": 256}},
    }
    assert shrink(values)["per_layer_config"] == {"1": {"head_dim": 16}}


def test_large_models_are_named_by_their_largest_parameters() -> None:
    held = [("embed", torch.empty(2000, 7000, device="meta")), ("bias", torch.empty(10))]
    assert too_large(held[1:]) is None
    said = too_large(held)
    assert said is not None
    assert said.startswith("14,000,010 parameters after shrinking, at most 12,000,000 allowed: embed has 14,000,000")
