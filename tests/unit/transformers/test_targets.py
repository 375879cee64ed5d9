# SPDX-License-Identifier: Apache-2.0
"""Captured targets against transformers itself, request by request, and the sharded body against the replicated one.

All in float64. Measured, relative to the largest hidden state: clean at most 4e-15; with a planted fault at least 1.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("transformers")

from pcp_passes.engine.bodies import Model, keeping_double
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.transformers import load_target
from pcp_passes.ir import fakes, meta
from pcp_passes.paged import index, running
from pcp_passes.passes import PassContext, build_variants
from pcp_passes.passes.observers import VerifyObserver
from tests.unit.transformers.steps import Requests, mislabelled, without_gather
from tests.unit.transformers.tiny import build, error, tokens

CLEAN, FAULT = 1e-12, 1e-3
LENGTHS = (23, 2, 31, 9)
SCHEDULE = ((9, 1, 17, 0), (7, 1, 0, 9), (6, 0, 12, 0), (1, 0, 1, 0), (0, 0, 1, 0))
"""New rows of each request, step by step: long prefills in chunks, short ones at once, decode rows in between."""
MODELS = ("llama", "qwen3", "mistral", "glm4_moe", "deepseek_v3", "glm_moe_dsa", "deepseek_v32")
AUX = (0,)


@functools.cache
def double(model_type: str) -> Any:
    model = copy.deepcopy(build(model_type)).double()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation_internal = "eager"
    return model


@functools.cache
def target(model_type: str) -> Model:
    return load_target(double(model_type), ctx=PassContext(2))


class TiesByPosition(TorchFunctionMode):
    """``topk`` that takes equal values from the left: transformers leaves their order open, and zeros are many."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.Tensor.topk, torch.topk):
            return func(*args, **(kwargs or {}))
        given, k = args[0], kwargs["k"] if "k" in (kwargs or {}) else args[1]
        values, indices = torch.sort(given, dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))


def requests() -> Requests:
    return Requests([tokens(length, seed=r)[0] for r, length in enumerate(LENGTHS)])


@functools.cache
def alone(model_type: str) -> tuple[torch.Tensor, ...]:
    """Hidden states of each request by transformers, run whole, alone, and without a cache."""
    with torch.no_grad(), keeping_double(), TiesByPosition():
        run = double(model_type).model
        return tuple(run(input_ids=one[None], use_cache=False).last_hidden_state[0] for one in requests().ids)


def expected(model_type: str, step: Any) -> torch.Tensor:
    return torch.cat([alone(model_type)[r][a:b] for r, (a, b) in zip(step.active, step.spans, strict=True)])


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("padding", [0, 5])
def test_equals_transformers(model_type: str, padding: int) -> None:
    given = requests()
    caches = given.caches()
    for rows in SCHEDULE:
        step = given.next(rows)
        found = step.run(target(model_type).bodies["replicated"], caches, padding=padding)
        assert error(found, expected(model_type, step)) < CLEAN


@pytest.mark.parametrize("pcp", [2, 4])
@pytest.mark.parametrize("model_type", MODELS)
def test_sharded_equals_replicated(model_type: str, pcp: int) -> None:
    given = requests()
    one, ranks = given.caches(), [given.caches() for _ in range(pcp)]
    model = target(model_type).over(PassContext(pcp))
    for rows in SCHEDULE:
        step = given.next(rows)
        expected = step.run(model.bodies["replicated"], one)
        assert error(step.run_sharded(model.bodies["sharded"], ranks), expected) < CLEAN
    for name, held in one.tensors.items():
        for caches in ranks:
            assert (caches.tensors[name] - held).abs().max() < CLEAN * held.abs().max()
            assert torch.equal(caches.tensors[name] == 0, held == 0), "a slot that nobody owns was written"


@pytest.mark.parametrize("model_type", ["llama", "glm_moe_dsa"])
def test_a_missing_gather_is_seen(model_type: str) -> None:
    given = requests()
    step = given.next((23, 2, 31, 9))
    model = target(model_type)
    found = step.run_sharded(model.bodies["sharded"], [given.caches() for _ in range(2)], change=without_gather)
    assert error(found, expected(model_type, step)) > FAULT


@pytest.mark.parametrize("model_type", ["llama", "glm_moe_dsa"])
def test_slots_of_another_layout_are_an_error(model_type: str) -> None:
    given = requests()
    model = target(model_type)
    with pytest.raises(ConfigError, match=r"rank_major rows and .* replicated slots"):
        given.next((23, 2, 31, 9)).run_sharded(
            model.bodies["sharded"], [given.caches() for _ in range(2)], change=mislabelled
        )


def test_a_wrong_selection_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = index.topk_paged
    monkeypatch.setattr(index, "topk_paged", lambda q, weights, *held, **options: right(q, -weights, *held, **options))
    given = requests()
    step = given.next((23, 2, 31, 9))
    found = step.run(target("glm_moe_dsa").bodies["replicated"], given.caches())
    assert error(found, expected("glm_moe_dsa", step)) > FAULT


@pytest.mark.parametrize("model_type", ["llama", "glm_moe_dsa"])
def test_auxiliary_layers(model_type: str) -> None:
    model = load_target(double(model_type), AUX, ctx=PassContext(2))
    given = Requests([tokens(19)[0]])
    step = given.next((19,))
    inputs = step.inputs()
    with torch.no_grad(), running(given.caches(), inputs):
        hidden, aux = model.bodies["replicated"](step.ids, inputs.positions)
    with torch.no_grad(), keeping_double(), TiesByPosition():
        found = double(model_type).model(input_ids=step.ids[None], use_cache=False, output_hidden_states=True)
    assert error(hidden, found.last_hidden_state[0]) < CLEAN
    assert error(aux, found.hidden_states[1][0]) < CLEAN


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_float32_keeps_the_models_own_roundings(model_type: str) -> None:
    """Measured at most 8e-7 of the largest hidden state; the ties of zero scores are the same in both."""
    model = build(model_type)
    body = load_target(model, ctx=PassContext(2)).bodies["replicated"]
    given = requests()
    caches = given.caches(torch.float32)
    for rows in SCHEDULE:
        step = given.next(rows)
        with torch.no_grad(), TiesByPosition():
            run = [model.model(input_ids=one[None], use_cache=False).last_hidden_state[0] for one in given.ids]
        required = torch.cat([run[r][a:b] for r, (a, b) in zip(step.active, step.spans, strict=True)])
        assert error(step.run(body, caches), required) < 1e-5


@pytest.mark.parametrize("model_type", MODELS)
def test_every_invariant_holds_after_every_pass(model_type: str) -> None:
    build_variants(target(model_type).captured[""], PassContext(4), [VerifyObserver("every")])


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("variant", ["sharded", "replicated"])
def test_no_value_pairs_rows_with_rows(model_type: str, variant: str) -> None:
    for node in target(model_type).bodies[variant].graph.nodes:
        for held in meta.tensors(node):
            assert sum(map(fakes.has_token_symbol, held.shape)) <= 1, f"%{node.name} is {list(held.shape)}"


def test_parameters_are_shared_with_the_model() -> None:
    model = double("llama")
    mine = dict(target("llama").bodies["sharded"].named_parameters())
    theirs = {id(parameter) for parameter in model.parameters()}
    assert mine and all(id(parameter) in theirs for parameter in mine.values())
    assert model.config._attn_implementation == "eager"


def test_a_model_in_training_mode_is_refused() -> None:
    model = copy.deepcopy(build("llama")).train()
    with pytest.raises(ConfigError, match=r"call model.eval\(\)"):
        load_target(model, ctx=PassContext(2))


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="required layers from 0 to 1"):
        load_target(double("llama"), (2,), ctx=PassContext(2))


def test_experts_of_another_form_are_refused() -> None:
    with pytest.raises(Refusal, match="no form as one row-local op"):
        load_target(build("gpt_oss"), ctx=PassContext(2))
