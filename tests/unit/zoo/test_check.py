# SPDX-License-Identifier: Apache-2.0
"""The harness judges runs: right ones pass, and every way to be wrong that we know of does not.

Run on a toy that needs its context and on one that does not, so that nothing of this depends on transformers.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pcp_passes.errors import Refusal
from pcp_passes.zoo.check import (
    FAILURES,
    PROBES,
    Ran,
    Runner,
    Verdict,
    check,
    relative_error,
    run_alone,
    run_swapped,
    run_without_a_token,
)
from pcp_passes.zoo.models import Inputs, call

LENGTHS, PCP = (7, 33), (2, 3)


class Toy(nn.Module):
    """Logits of a token are those of the mean of all tokens so far."""

    def __init__(self, looks_back: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(256, 16, _weight=torch.randn(256, 16, generator=generator))
        self.head = torch.randn(16, 256, generator=generator)
        self.looks_back = looks_back

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        rows = self.embed(input_ids)
        if self.looks_back:
            rows = rows.cumsum(1) / torch.arange(1, rows.shape[1] + 1)[:, None]
        return (rows @ self.head,)


def right(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
    return Ran(call(model, inputs))


def off_by(error: float) -> Runner:
    def run(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
        logits = call(model, inputs).clone()
        logits[0, -1, 0] += error * logits.abs().max()
        return Ran(logits)

    return run


def refusing(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
    raise Refusal("this toy is not for sharding", [("next", "take another")])


def crashing(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
    raise ZeroDivisionError("planted")


def nan(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
    logits = call(model, inputs).clone()
    logits[0, 0, 0] = math.nan
    return Ran(logits)


def short(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
    return Ran(call(model, inputs)[:, :-1])


def replicated(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
    return Ran(call(model, inputs), sharded=False)


def only_at(ranks: int, runner: Runner, otherwise: Runner) -> Runner:
    return lambda model, inputs, pcp: (runner if pcp == ranks else otherwise)(model, inputs, pcp)


def judge(runner: Runner, model: nn.Module | None = None, **options: object) -> Verdict:
    return check(model or Toy(), runner, lengths=LENGTHS, pcp=PCP, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "runner, kind",
    [
        (right, "exact"),
        (off_by(1e-4), "exact"),
        (replicated, "replicated"),
        (refusing, "refused"),
        (only_at(2, right, refusing), "mixed"),
        (run_alone, "WRONG"),
        (run_swapped, "WRONG"),
        (run_without_a_token, "WRONG"),
        (off_by(3e-4), "WRONG"),
        (nan, "WRONG"),
        (short, "WRONG"),
        (only_at(3, short, right), "WRONG"),
        (only_at(3, run_alone, refusing), "WRONG"),
        (crashing, "error"),
        (only_at(3, crashing, right), "error"),
    ],
)
def test_verdicts(runner: Runner, kind: str) -> None:
    verdict = judge(runner)
    assert verdict.kind == kind
    assert len(verdict.cases) == len(LENGTHS) * len(PCP)
    assert (verdict.reason == "") == (kind in ("exact", "replicated"))


@pytest.mark.parametrize("kind", ["WRONG", "error", "vacuous"])
def test_what_fails_a_run(kind: str) -> None:
    assert kind in FAILURES
    assert not {"exact", "replicated", "mixed", "refused", "skipped"} & FAILURES


def test_a_model_that_ignores_its_context_proves_nothing() -> None:
    verdict = judge(right, Toy(looks_back=False))
    assert verdict.kind == "vacuous"
    assert [name for name, probe in verdict.probes.items() if not probe.caught] == ["alone", "lost token"]
    assert "alone, lost token" in verdict.reason


def test_a_sabotage_of_the_tested_run_that_passes_proves_nothing() -> None:
    verdict = judge(right, wrong={"no effect": right})
    assert verdict.kind == "vacuous"
    assert not verdict.probes["no effect"].caught
    assert judge(right, wrong={"effect": short}).kind == "exact"


def test_a_probe_that_never_runs_is_not_caught() -> None:
    assert judge(right, wrong={"broken": crashing}).kind == "vacuous"


def test_a_wrong_run_is_reported_before_what_was_refused_and_with_its_place() -> None:
    assert judge(only_at(3, run_alone, refusing)).reason.startswith("T=7 P=3: relative error ")
    refused = judge(refusing).reason
    assert refused.startswith("T=7 P=2: this toy is not for sharding")
    assert "next  take another" in refused
    assert "ZeroDivisionError: planted (test_check.py:" in judge(crashing).reason


def test_what_a_runner_does_to_its_inputs_stays_there() -> None:
    def greedy(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
        logits = call(model, inputs)
        inputs["input_ids"].zero_()
        return Ran(logits)

    assert judge(greedy).kind == "exact"


def test_json_is_plain() -> None:
    import json

    told = json.loads(json.dumps(judge(nan).to_json()))
    assert told["verdict"] == "WRONG"
    assert told["worst"] == "inf"
    assert told["cases"][0] == {
        "length": 7, "pcp": 2, "result": "WRONG", "error": "inf", "reason": "", "sharded": True,
    }  # fmt: skip


def test_error_of_a_run() -> None:
    expected = torch.tensor([[[1.0, -4.0]]])
    assert relative_error(torch.tensor([[[1.0, -3.0]]]), expected) == 0.25
    assert relative_error(expected[:, :, :1], expected) == math.inf
    assert relative_error(expected * math.nan, expected) == math.inf


@pytest.mark.parametrize("name", PROBES)
def test_probes_change_what_they_say(name: str) -> None:
    """Rows before the cut are right in all but ``swapped``; rows behind it are wrong in all."""
    model, pcp, length = Toy(), 2, 8
    inputs = {"input_ids": torch.arange(10, 10 + length)[None]}
    found = PROBES[name](model, inputs, pcp).logits
    expected = call(model, inputs)
    same = [bool(torch.allclose(found[0, row], expected[0, row])) for row in range(length)]
    cut = length // pcp
    assert same == [name != "swapped"] * cut + [False] * cut
