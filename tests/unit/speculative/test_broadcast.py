# SPDX-License-Identifier: Apache-2.0
"""The step program under noise of one unit in the last place, other noise on each rank, on logits with many ties.

With ``verify_tokens="identical"`` the ranks accept different counts; with ``"broadcast"`` they agree at every step, on
what one rank with rank 0's noise gives.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pcp_passes.speculative.mtp import MTP
from pcp_passes.step import StepInputs, StepOutputs, StepProgram, ops
from tests.steps import MIXED, Host, drafter, requests, target

AGREED = ("sampled", "num_sampled", "num_rejected", "next_token", "drafts")
STEPS = 2


class Noise:
    """Ties and per-rank noise in front of what samples. A rank is known by its own copy of ``seeds``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seeds: list[torch.Tensor] = []
        verify, sample_draft = ops.verify.function, ops.sample_draft.function
        monkeypatch.setattr(ops.verify, "function", lambda logits, *rest: verify(self.applied(logits, rest[-2]), *rest))
        monkeypatch.setattr(
            ops.sample_draft, "function", lambda logits, *rest: sample_draft(self.applied(logits, rest[1]), *rest)
        )

    def applied(self, logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        rank = next(rank for rank, own in enumerate(self.seeds) if own is seeds)
        generator = torch.Generator().manual_seed(rank)
        towards = torch.where(torch.rand(logits.shape, generator=generator) < 0.5, torch.inf, -torch.inf)
        # Two levels: the likeliest tokens of a row are many, until the noise parts them.
        tied = torch.where(logits >= logits.mean(-1, keepdim=True), 2.0, 1.0).to(logits.dtype)
        return torch.nextafter(tied, towards.to(logits.dtype))

    def for_ranks(self, inputs: StepInputs, count: int) -> list[StepInputs]:
        self.seeds = [inputs.seeds.clone() for _ in range(count)]
        return [replace(inputs, seeds=own) for own in self.seeds]


def run(
    noise: Noise, pcp: int, verify_tokens: str, temperature: float, decode: str
) -> tuple[Host, list[list[StepOutputs]]]:
    """All steps, following rank 0's outputs; the outputs of all ranks at each."""
    program = StepProgram(target(pcp), MTP(drafter(pcp), STEPS), pcp=pcp, verify_tokens=verify_tokens)  # type: ignore[arg-type]
    host = Host(program, requests(temperature=temperature), decode)
    every = []
    for scheduled in MIXED:
        inputs, layout = host.batch(scheduled)
        found = program.simulate(host.states, noise.for_ranks(inputs, pcp), host.plans(inputs, layout))
        host._apply(scheduled, inputs, found[0])
        every.append(found)
    return host, every


def divided(every: list[list[StepOutputs]], names: tuple[str, ...]) -> list[int]:
    """Steps at which some rank has another value of one of ``names`` than rank 0."""
    return [
        step
        for step, found in enumerate(every)
        if any(not torch.equal(getattr(o, name), getattr(found[0], name)) for o in found[1:] for name in names)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("decode", ["replicate", "owner"])
@pytest.mark.parametrize("pcp", [2, 4])
def test_ranks_agree_with_broadcast(pcp: int, decode: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = Noise(monkeypatch)
    host, every = run(noise, pcp, "broadcast", temperature, decode)
    assert divided(every, AGREED) == []
    alone, _ = run(noise, 1, "identical", temperature, decode)
    for mine, theirs in zip(host.requests, alone.requests, strict=True):
        assert (mine.tokens, mine.accepted) == (theirs.tokens, theirs.accepted)
    assert sum(map(sum, (request.accepted for request in host.requests))) > 0


@pytest.mark.parametrize("pcp", [2, 4])
def test_ranks_accept_different_counts_without(pcp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, every = run(Noise(monkeypatch), pcp, "identical", 0.0, "replicate")
    assert divided(every, ("num_rejected",)) != []
    assert divided(every, ("drafts",)) != []
