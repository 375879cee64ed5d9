# SPDX-License-Identifier: Apache-2.0
"""What speculative decoding emits is distributed as the target's own tokens, however bad the drafter.

Many requests decode a three-token text with a target that looks at the last token, so its law is known exactly: the
first token's times the second's given the first times the third's. Rejected places are drafted again at the same
position, hence from the same stream, as the engine does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

from pcp_passes.speculative import DRAFT, argmax, sample, verify
from tests.unit.speculative.statistics import excess

# The package exports the function under the name of its module.
verify_module = importlib.import_module("pcp_passes.speculative.verify")
VOCAB, LENGTH, STEPS, REQUESTS = 4, 3, 2, 30_000
generator = torch.Generator().manual_seed(2)
TARGET = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
DRAFTERS = {
    "the target itself": TARGET,
    "close": TARGET + 0.3 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64),
    "far": -3.0 * TARGET,
    "nearly certain of a rare token": torch.zeros_like(TARGET).scatter_(1, TARGET.argmin(1, keepdim=True), 8.0),
}


def decode(drafter: torch.Tensor, temperature: float, drawn: bool, told: bool = True) -> tuple[torch.Tensor, float]:
    """The first tokens of each request, i64 ``[REQUESTS, LENGTH]``, and the mean number accepted of two drafts."""
    every = torch.arange(REQUESTS)
    seeds, warm = every + 17, torch.full((REQUESTS,), temperature, dtype=torch.float64)
    tokens = torch.zeros(REQUESTS, LENGTH + 1 + LENGTH * (STEPS + 1), dtype=torch.int64)
    done, counted = torch.zeros(REQUESTS, dtype=torch.int64), []
    for _ in range(LENGTH):
        last, drafts, logits = tokens[every, done], [], []
        for j in range(STEPS):
            logits.append(drafter[drafts[-1] if drafts else last])
            drafts.append(sample(logits[-1], warm, seeds, done + j, DRAFT) if drawn else argmax(logits[-1]))
        context = torch.stack([last, *drafts], 1)
        sampled, accepted = verify(
            TARGET[context].flatten(0, 1),
            torch.arange(REQUESTS + 1) * (STEPS + 1),
            torch.stack(drafts, 1),
            torch.stack(logits, 1) if drawn and told else None,
            warm,
            seeds,
            (done[:, None] + torch.arange(STEPS + 1)).flatten(),
        )
        for j in range(STEPS + 1):
            kept = sampled[:, j] >= 0
            tokens[every[kept], done[kept] + 1 + j] = sampled[kept, j]
        done = done + accepted + 1
        counted.append(accepted.double().mean().item())
    return tokens[:, 1 : LENGTH + 1], sum(counted) / len(counted)


def distance(tokens: torch.Tensor, temperature: float) -> float:
    """Standard deviations from the target's law over all texts."""
    p = torch.softmax(TARGET / temperature, -1)
    law = (p[0][:, None, None] * p[:, :, None] * p[None]).flatten()
    return excess((tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1), law)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "likeliest"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_follow_the_target(name: str, drawn: bool, temperature: float) -> None:
    tokens, accepted = decode(DRAFTERS[name], temperature, drawn)
    assert distance(tokens, temperature) < 5
    if name == "the target itself" and drawn:
        assert accepted == STEPS
    if name == "nearly certain of a rare token":
        assert accepted < 0.3


def test_drawn_drafts_taken_as_certain_are_exact_and_accepted_less() -> None:
    untold, fewer = decode(DRAFTERS["close"], 1.0, drawn=True, told=False)
    _, more = decode(DRAFTERS["close"], 1.0, drawn=True)
    assert distance(untold, 1.0) < 5
    assert fewer < 0.7 * more


def test_plain_sampling_follows_the_target() -> None:
    last, texts = torch.zeros(REQUESTS, dtype=torch.int64), []
    for place in range(LENGTH):
        where = torch.full((REQUESTS,), place)
        last = sample(TARGET[last], torch.ones(REQUESTS), torch.arange(REQUESTS), where)
        texts.append(last)
    assert distance(torch.stack(texts, 1), 1.0) < 5


def _replaces_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verify_module._after_accepted
    monkeypatch.setattr(
        verify_module, "_after_accepted", lambda logits, rejected, *rest: whole(logits, rejected * 0 - 1, *rest)
    )


def _replaces_from_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verify_module._after_accepted

    def swapped(logits: torch.Tensor, rejected: torch.Tensor, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = whole(q, rejected, logits, *rest)
        return found

    monkeypatch.setattr(verify_module, "_after_accepted", swapped)


def _accepts_by_the_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verify_module._accepted
    monkeypatch.setattr(
        verify_module, "_accepted", lambda logits, rows, drafts, q, *rest: whole(logits, rows, drafts, None, *rest)
    )


def _one_stream_to_accept_and_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "RESIDUAL", verify_module.ACCEPT)


def _one_stream_to_draft_and_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "RESIDUAL", DRAFT)


def _one_position_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verify_module.uniforms
    monkeypatch.setattr(verify_module, "uniforms", lambda seeds, positions, *rest: whole(seeds, positions * 0, *rest))


SABOTAGES = (
    _replaces_from_the_target,
    _replaces_from_the_drafter,
    _accepts_by_the_target_alone,
    _one_stream_to_accept_and_replace,
    _one_stream_to_draft_and_replace,
    _one_position_for_all_rows,
)


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_wrong_rule_is_seen(sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch)
    worst = max(distance(decode(DRAFTERS[name], 1.0, True)[0], 1.0) for name in ("close", "far"))
    assert worst > 10
