# SPDX-License-Identifier: Apache-2.0
"""Models of the zoo are the same everywhere, and look at their whole context."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from pcp_passes.errors import ConfigError
from pcp_passes.zoo.models import LENGTHS, PAST_CHUNK, all_types, build, call, lengths_for, make_inputs, recipe, recipes


def test_every_kind_of_token_mixing_is_among_the_chosen_types() -> None:
    chosen = recipes()
    assert len(chosen) == 21
    assert len({known.family for known in chosen.values()}) == 9
    assert {known.model_type for known in chosen.values()} <= set(all_types()) | {"phi3"}
    assert recipe("phi3@longrope").model_type == "phi3"


def test_any_other_type_is_shrunk_by_itself() -> None:
    assert recipe("olmo2").values is None
    model = build("olmo2")
    assert sum(parameter.numel() for parameter in model.parameters()) < 200_000
    assert call(model, make_inputs(model, 9)).shape == (1, 9, 256)


def test_a_mistyped_type_is_named_with_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"no causal language model of type 'lama'\. Did you mean 'llama'"):
        recipe("lama")


def test_weights_and_prompts_come_from_the_seed_alone() -> None:
    first, again, other = (build("llama", seed) for seed in (0, 0, 1))
    torch.manual_seed(99)
    inputs = make_inputs(first, 16)
    assert torch.equal(make_inputs(first, 16)["input_ids"], inputs["input_ids"])
    assert torch.equal(call(first, inputs), call(again, inputs))
    assert not torch.equal(call(first, inputs), call(other, inputs))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mamba2"])
def test_an_early_token_moves_the_logits_behind_it(name: str) -> None:
    model = build(name)
    inputs = make_inputs(model, 24)
    before = call(model, inputs)
    inputs["input_ids"][0, 2] += 1
    moved = (call(model, inputs) - before).abs().amax((0, 2))
    assert moved[:2].max() < 1e-6
    assert moved[3:].max() > 1e-2


def test_lengths_past_the_chunk_for_chunked_kernels_only() -> None:
    assert lengths_for(build("llama")) == LENGTHS
    assert lengths_for(build("mamba2")) == (*LENGTHS, PAST_CHUNK)
