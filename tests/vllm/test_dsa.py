# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention with drafts in real vLLM on CPU: on one rank equal to transformers, on two to one."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.vllm import cases, dsa_models
from tests.vllm.dsa_engines import BUDGET, CASES, FAULTS, engine, group_of, probed, steps_of
from tests.vllm.test_equality import TOLERANCE, difference

MODELS = tuple(dsa_models.MODELS)
#: Per layer of the target, and of the drafter's one: latent and rope key, and an index key where keys are selected.
LATENT, INDEX = 64 + 16, 32
RECORDS = {
    "glm_moe_dsa": {LATENT + INDEX: 3, LATENT: 1},
    "deepseek_v32": {LATENT + INDEX: 2},
}


@pytest.fixture(scope="module", autouse=True)
def _engines_on_one_rank() -> None:
    """Each keeps one core busy; the machine has two. Threads must not be the first to import transformers."""
    for model in MODELS:
        dsa_models.build(model)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(engine, MODELS, [1, 1]))


def _compare(model: str, case: str) -> tuple[bool, float]:
    group = group_of(case)
    return difference(engine(model, 2).outputs[group], engine(model, 1).outputs[group])


@pytest.fixture
def ties_in_position_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """``topk`` breaks ties as it likes, and here hundreds of scores are exactly zero."""

    def topk(self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        values, indices = torch.sort(self + 0.0, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    monkeypatch.setattr(torch.Tensor, "topk", topk)
    monkeypatch.setattr(torch, "topk", topk)


def _off_transformers(model: str) -> tuple[int, float]:
    """How many greedy tokens of the ragged case transformers would not have taken, and the largest difference of the
    logprobs of those that were."""
    target = dsa_models.make(model)
    wrong, largest = 0, 0.0
    for request, output in zip(cases.ragged().requests, engine(model, 1).outputs[group_of("ragged")], strict=True):
        assert output is not None and isinstance(request.prompt, list)
        with torch.no_grad():
            logits = target(torch.tensor([request.prompt + output.tokens])).logits[0]
        rows = logits.log_softmax(-1)[len(request.prompt) - 1 : -1]
        tokens = torch.tensor(output.tokens)
        wrong += int((rows.argmax(-1) != tokens).sum())
        gaps = (rows.gather(1, tokens[:, None])[:, 0] - torch.tensor(output.logprobs)).abs()
        largest = max(largest, float(gaps.max()))
    return wrong, largest


@pytest.mark.usefixtures("ties_in_position_order")
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_equals_transformers(model: str) -> None:
    wrong, largest = _off_transformers(model)
    assert wrong == 0
    assert largest <= TOLERANCE


def test_ties_decide() -> None:
    """With ties as they come, transformers answers otherwise: the order of equal scores is part of the result."""
    wrong, largest = _off_transformers("glm_moe_dsa")
    assert wrong > 0 or largest > 100 * TOLERANCE


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_equal_one(model: str, case: str) -> None:
    tokens, largest = _compare(model, case)
    assert tokens
    assert largest <= TOLERANCE
    for what in ("accepted", "drafts"):
        wanted = steps_of(model, 1, case, what)
        assert wanted
        assert [steps_of(model, 2, case, what, rank) for rank in (0, 1)] == [wanted, wanted]


@pytest.mark.parametrize("model", MODELS)
def test_acceptance_is_a_signal(model: str) -> None:
    counts = [count for step in steps_of(model, 1, "waves", "accepted") for count in step.values() if count > 0]
    # A request's first token is sampled without a draft.
    share = sum(count > 1 for count in counts) / (len(counts) - 20)
    assert 0.25 <= share <= 0.9


@pytest.mark.parametrize("model", MODELS)
def test_both_graphs_are_sharded(model: str) -> None:
    ran = {tuple(body) for body in probed(model, 2)["ran"]}
    # With decode="owner" no step of the target is replicated.
    alone = set() if model == "glm_moe_dsa" else {("target", "replicated")}
    assert ran == {("target", "sharded"), ("drafter", "sharded"), ("drafter", "replicated")} | alone
    report = engine(model, 2).rpc[group_of("stop")][1][0]
    assert set(report) == {"model", "drafter"}
    layers = {role: [layer["layer"] for layer in found["layers"]] for role, found in report.items()}
    hidden = dsa_models.MODELS[model].fields["num_hidden_layers"]
    assert len([name for name in layers["model"] if name.endswith(".attn")]) == hidden
    assert len([name for name in layers["drafter"] if name.endswith(".attn")]) == 1


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_sends_one_record(model: str) -> None:
    """What a token leaves in the caches of a layer travels at once; a layer that selects nothing sends no index key."""
    seen = probed(model, 2)
    ran = [tuple(body) for body in seen["ran"]]
    targets, drafters = (ran.count((role, "sharded")) for role in ("target", "drafter"))
    assert targets == drafters > 10
    sent = Counter(call["shape"][1] for call in seen["collectives"] if call["shape"][1] in (LATENT, LATENT + INDEX))
    wanted = {width: count * targets for width, count in RECORDS[model].items()}
    wanted[LATENT + INDEX] += drafters
    assert dict(sent) == wanted


def test_prompts_are_far_longer_than_the_selection() -> None:
    assert all(step["tokens"] <= BUDGET for step in probed("glm_moe_dsa", 2)["steps"])
    assert max(len(request.prompt) for request in cases.ragged().requests) > 12 * dsa_models.TOPK


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_fault_is_seen(fault: str) -> None:
    tokens, largest = _compare("glm_moe_dsa", fault)
    assert not tokens or not largest <= 100 * TOLERANCE  # NaN counts


def test_engine_is_right_without_a_fault() -> None:
    tokens, largest = _compare("glm_moe_dsa", "none")
    assert tokens
    assert largest <= TOLERANCE
