# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers, and the model that keeps one of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pcp_passes.inspection.layers import LayerStack, find_stack, keep_one_of_each
from pcp_passes.inspection.sources import load_config
from pcp_passes.inspection.weightless import Weightless, build_weightless
from tests.unit.inspection.configs import GLM, GPT_OSS, LLAMA


def stack_of(config: dict[str, Any]) -> tuple[Weightless, LayerStack]:
    built = build_weightless(config, torch.bfloat16)
    return built, find_stack(built.model, built.config)


def kinds(stack: LayerStack) -> dict[str, tuple[int, ...]]:
    return {kind.label: kind.layers for kind in stack.kinds}


def test_equal_layers_are_one_kind_beside_the_outer_two() -> None:
    _, stack = stack_of(LLAMA)
    assert stack.path == "model.layers"
    assert kinds(stack) == {"layer, first": (0,), "layer": (1, 2), "layer, last": (3,)}
    assert kinds(stack_of({**LLAMA, "num_hidden_layers": 1})[1]) == {"layer, first": (0,)}


def test_lists_of_the_configuration_and_modules_tell_kinds_apart() -> None:
    assert kinds(stack_of(GLM)[1]) == {
        "full dense, first": (0,), "full dense": (1,), "shared sparse": (2, 4), "full sparse": (3,),
        "full sparse, last": (5,),
    }  # fmt: skip
    assert kinds(stack_of(GPT_OSS)[1])["full_attention"] == (1, 3)
    # Which layers of this type have experts is no list of the configuration: their modules say it.
    mixed = {**LLAMA, "model_type": "qwen3_moe", "num_hidden_layers": 5, "mlp_only_layers": [1]}
    mixed |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert set(kinds(stack_of(mixed)[1]).values()) == {(0,), (1,), (2, 3), (4,)}


def test_the_published_schedule_of_glm_52() -> None:
    _, stack = stack_of(load_config("glm-5.2"))
    found = kinds(stack)
    assert found["full sparse"] == tuple(range(6, 77, 4))
    assert len(found["shared sparse"]) + len(found["shared sparse, last"]) == 57


def test_the_kept_layers_stand_in_order_and_know_their_new_numbers() -> None:
    built, stack = stack_of(GLM)
    keep_one_of_each(built.model, built.config, stack)
    layers = built.model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    assert stack.captured() == (0, 1, 2, 3, 5)
    assert built.config.num_hidden_layers == len(layers) == 5
    assert built.config.indexer_types == ["full", "full", "shared", "full", "full"]
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2, 3, 4]
    assert [type(layer.mlp).__name__ for layer in layers] == ["GlmMoeDsaMLP"] * 2 + ["GlmMoeDsaMoE"] * 3


def test_paths_say_which_layer_they_belong_to() -> None:
    _, stack = stack_of(LLAMA)
    assert stack.number_in("model.layers.12.self_attn.q_proj.weight") == 12
    assert stack.within("model.layers.12.self_attn.q_proj") == "self_attn.q_proj"
    assert stack.within("model.layers.12") == ""
    assert stack.number_in("model.norm") is None
    assert stack.number_in("other_model.layers.3.x") is None
    assert LayerStack("", ()).number_in("model.layers.3") is None


def test_a_model_without_a_list_of_layers_has_no_kinds() -> None:
    class Config:
        num_hidden_layers = 3

    assert find_stack(nn.Sequential(nn.Linear(2, 2)), Config()) == LayerStack("", ())
