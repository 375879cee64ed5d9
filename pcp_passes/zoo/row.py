# SPDX-License-Identifier: Apache-2.0
"""All that the zoo says about one model type."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pcp_passes.errors import Refusal
from pcp_passes.passes.tokens.propagate_placements import Unknown
from pcp_passes.zoo.check import TOLERANCE, check
from pcp_passes.zoo.models import build, call, lengths_for, make_inputs, recipe, recipes
from pcp_passes.zoo.sharded import MEASURED_LENGTH, MEASURED_PCP, Account, ShardedModels

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        pcp: numbers of ranks.
        lengths: of the prompts; ``None`` for those that suit the model.
        unknown: what becomes of a graph whose tokens cannot be found, see ``TorchOptions.unknown``.
        measure: count FLOPs, collectives and fallbacks at T=64 and P=4.
    """

    pcp: tuple[int, ...] = (2, 3, 4)
    lengths: tuple[int, ...] | None = None
    unknown: Unknown = "refuse"
    measure: bool = True

    def order(self, model: nn.Module) -> tuple[int, ...]:
        """The lengths, with that of the measurement first: costs are counted at the length a graph was made from."""
        lengths = self.lengths or lengths_for(model)
        return tuple(sorted(lengths, key=lambda length: length != MEASURED_LENGTH))

    def ranks(self) -> tuple[int, ...]:
        """The numbers of ranks, with that of the measurement last: its compilation is used once more."""
        return tuple(sorted(self.pcp, key=lambda pcp: pcp == MEASURED_PCP))


def run_type(plan: Plan, name: str, tell: Callable[[str], None] = lambda stage: None) -> Row:
    """Build, check and measure one type; plain data. Never raises for what a model or the rewrite does."""
    began = time.perf_counter()
    row: Row = {"type": name, "family": recipe(name).family, "tolerance": TOLERANCE}
    torch.set_num_threads(1)
    try:
        tell("building")
        model = build(name)
        expected = call(model, make_inputs(model, min(plan.lengths or (7,))))
        assert expected.dim() == 3, f"logits have shape {list(expected.shape)}; required [1, T, V]"
    except Exception as error:
        chosen = name in recipes()
        return row | unbuilt("error" if chosen else "skipped", f"{type(error).__name__}: {error}", began)
    runner = ShardedModels(unknown=plan.unknown)
    verdict = check(
        model, runner, lengths=plan.order(model), pcp=plan.ranks(), wrong={"restore": runner.spoilt}, tell=tell,
    )  # fmt: skip
    tell("measuring")
    measured = plan.measure and verdict.kind in ("exact", "mixed", "replicated")
    account = _account(runner, model, MEASURED_PCP if measured else plan.ranks()[-1], measured)
    row |= verdict.to_json() | account.to_json()
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def _account(runner: ShardedModels, model: nn.Module, pcp: int, measure: bool) -> Account:
    try:
        return runner.account(model, pcp, measure=measure)
    except Refusal:  # the length to measure at is one of those that are refused
        return runner.account(model, pcp)


def unbuilt(verdict: str, reason: str, began: float | None = None) -> Row:
    """A row without a run."""
    seconds = 0.0 if began is None else round(time.perf_counter() - began, 1)
    return {"verdict": verdict, "reason": reason, "worst": None, "cases": [], "probes": {}, "seconds": seconds} | (
        Account().to_json()
    )


def died(name: str, why: str) -> Row:
    """The row of a type whose process gave none."""
    return {"type": name, "family": recipe(name).family, "tolerance": TOLERANCE} | unbuilt("error", why)


def work(plan: Plan) -> Callable[[str, Callable[[str], None]], Row]:
    """:func:`run_type` in a form that another process can be given."""
    return functools.partial(run_type, plan)


def failed(rows: Sequence[Row]) -> list[str]:
    """Types that must not be: wrong, in error, or checked by a model that cannot tell."""
    return [row["type"] for row in rows if row["verdict"] in ("WRONG", "error", "vacuous")]
