# SPDX-License-Identifier: Apache-2.0
"""The check itself: does a sharded run give the model's logits, and would we notice if it did not.

A run is compared with the model in eager mode, at several lengths and numbers of ranks. That a comparison passes says
little when the model hardly looks at its context, so the same model is also run wrong on purpose
(:data:`PROBES`): a probe that passes the comparison makes the verdict ``vacuous``.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from pcp_passes.errors import Refusal
from pcp_passes.zoo.models import Inputs, call, make_inputs

TOLERANCE = 2e-4
"""Of the largest logit. Clean runs of all types measured stay below 2e-5; the weakest probe differs by 3e-3."""

Result = Literal["exact", "WRONG", "refused", "error"]
Kind = Literal["exact", "replicated", "mixed", "refused", "WRONG", "error", "vacuous", "skipped"]

FAILURES: frozenset[Kind] = frozenset({"WRONG", "error", "vacuous"})


@dataclass(frozen=True)
class Ran:
    """What a sharded run returns.

    Attributes:
        logits: f32[1, T, V] of all tokens in global order.
        sharded: whether any graph was; ``False`` when every rank ran everything.
    """

    logits: torch.Tensor
    sharded: bool = True


Runner = Callable[[nn.Module, Inputs, int], Ran]
"""``runner(model, inputs, pcp)``."""


@dataclass(frozen=True)
class Case:
    """One length on one number of ranks.

    Attributes:
        error: largest difference over the largest logit; infinite for a wrong shape or NaN; ``None`` for no result.
        reason: of a refusal or an error, in full.
    """

    length: int
    pcp: int
    result: Result
    error: float | None = None
    reason: str = ""
    sharded: bool = True


@dataclass(frozen=True)
class Probe:
    """A run that is wrong on purpose: its largest and smallest error over lengths and ranks."""

    caught: bool
    largest: float
    smallest: float


@dataclass(frozen=True)
class Verdict:
    """What became of one model.

    ``exact``: every case within tolerance; ``replicated``: exact, but nothing was sharded; ``mixed``: exact or refused;
    ``refused``: every case; ``WRONG``: some case beyond tolerance; ``error``: some case raised what is no refusal;
    ``vacuous``: exact, and so is a probe.
    """

    kind: Kind
    cases: tuple[Case, ...]
    probes: Mapping[str, Probe] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest error of a case that gave a result."""
        return max((case.error for case in self.cases if case.error is not None), default=0.0)

    @property
    def reason(self) -> str:
        """Why it is not plainly exact."""
        if self.kind == "vacuous":
            missed = [name for name, probe in self.probes.items() if not probe.caught]
            return f"probes pass as exact: {', '.join(missed)}"
        order: tuple[Result, ...] = ("WRONG", "error", "refused")
        for result in order:
            for case in self.cases:
                if case.result == result:
                    return f"T={case.length} P={case.pcp}: " + (case.reason or f"relative error {case.error:.1e}")
        return ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite error becomes text."""
        return {
            "verdict": self.kind,
            "worst": _plain(self.worst),
            "reason": self.reason,
            "cases": [{**asdict(case), "error": _plain(case.error)} for case in self.cases],
            "probes": {
                name: {"caught": probe.caught, "largest": _plain(probe.largest), "smallest": _plain(probe.smallest)}
                for name, probe in self.probes.items()
            },
        }


def _plain(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else str(number)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; infinite for another shape, NaN included."""
    if found.shape != expected.shape:
        return math.inf
    error = float((found.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
    return math.inf if math.isnan(error) else error


def check(
    model: nn.Module,
    runner: Runner,
    *,
    lengths: Sequence[int],
    pcp: Sequence[int],
    tolerance: float = TOLERANCE,
    wrong: Mapping[str, Runner] | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> Verdict:
    """Compare sharded runs of a model with the model.

    Args:
        model: as :func:`~pcp_passes.zoo.models.build` makes it.
        runner: what is tested. A :class:`~pcp_passes.errors.Refusal` it raises is a refusal, anything else an error.
        lengths, pcp: every length is run on every number of ranks.
        wrong: runners that break something on purpose; like :data:`PROBES`, each must be caught.
        tell: hears which case begins.
    """
    cases = []
    for ranks in pcp:  # a model is compiled once for each number of ranks: keep its lengths together
        for length in lengths:
            tell(f"T={length} P={ranks}")
            cases.append(_case(model, runner, length, ranks, tolerance))
    kind = _kind(cases)
    if kind not in ("exact", "mixed", "replicated"):
        return Verdict(kind, tuple(cases))
    tell("probes")
    probes = run_probes(model, tolerance, {**PROBES, **(wrong if wrong and kind != "replicated" else {})})
    if not all(probe.caught for probe in probes.values()):
        kind = "vacuous"
    return Verdict(kind, tuple(cases), probes)


def _case(model: nn.Module, runner: Runner, length: int, pcp: int, tolerance: float) -> Case:
    inputs = make_inputs(model, length)
    expected = call(model, inputs).float()
    given = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    try:
        ran = runner(model, given, pcp)
    except Refusal as refusal:
        return Case(length, pcp, "refused", reason=str(refusal))
    except Exception as raised:
        return Case(length, pcp, "error", reason=_told(raised))
    error = relative_error(ran.logits, expected)
    return Case(length, pcp, "exact" if error <= tolerance else "WRONG", error, sharded=ran.sharded)


def _told(error: BaseException) -> str:
    """An exception with the place that raised it, since nobody sees its traceback."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place, trace = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}", trace.tb_next
    return f"{type(error).__name__}: {error} ({place})"


def _kind(cases: Sequence[Case]) -> Kind:
    count = Counter(case.result for case in cases)
    if count["WRONG"]:
        return "WRONG"
    if count["error"]:
        return "error"
    if count["refused"]:
        return "mixed" if count["exact"] else "refused"
    return "exact" if any(case.sharded for case in cases) else "replicated"


# Probes. Each breaks what a sharded run must get right, with the model itself and without any rewriting.


def _shards(length: int, pcp: int) -> list[tuple[int, int]]:
    step = -(-length // pcp)
    return [(first, min(first + step, length)) for first in range(0, length, step)]


def run_alone(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
    """No communication: each contiguous shard sees its own tokens only, at their true positions."""
    ids = inputs["input_ids"]
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    parts = []
    for first, last in _shards(ids.shape[1], pcp):
        own = {**inputs, "input_ids": ids[:, first:last]}
        if takes_positions:
            own["position_ids"] = torch.arange(first, last)[None]
        parts.append(call(model, own))
    return Ran(torch.cat(parts, 1))


def run_swapped(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
    """Right rows in a wrong order: the first and the last shard change places."""
    logits = call(model, inputs)
    shards = _shards(logits.shape[1], pcp)
    order = [shards[-1], *shards[1:-1], shards[0]]
    return Ran(torch.cat([logits[:, first:last] for first, last in order], 1))


def run_without_a_token(model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
    """One token does not reach the other ranks: they see another one where the first shard ends."""
    logits = call(model, inputs).clone()
    (_, cut), *_ = _shards(logits.shape[1], pcp)
    ids = inputs["input_ids"].clone()
    low, high = 3, int(ids.max()) + 1
    ids[0, cut - 1] = low + (ids[0, cut - 1] - low + (high - low) // 2) % (high - low)
    logits[:, cut:] = call(model, {**inputs, "input_ids": ids})[:, cut:]
    return Ran(logits)


PROBES: Mapping[str, Runner] = {"alone": run_alone, "swapped": run_swapped, "lost token": run_without_a_token}
"""Each must be caught on every model."""

PROBE_LENGTHS = (33, 48)
PROBE_PCP = (2, 4)


def run_probes(model: nn.Module, tolerance: float, probes: Mapping[str, Runner]) -> dict[str, Probe]:
    """Which of the wrong runs differ from the model by more than ``tolerance``, at any length and number of ranks."""
    return {name: _probe(list(_probe_errors(model, probe)), tolerance) for name, probe in probes.items()}


def _probe_errors(model: nn.Module, probe: Runner) -> Iterator[float]:
    for length in PROBE_LENGTHS:
        inputs = make_inputs(model, length)
        expected = call(model, inputs).float()
        for pcp in PROBE_PCP:
            try:
                logits = probe(model, dict(inputs), pcp).logits
            except Exception:  # it catches nothing by that: a probe that never runs is not caught
                continue
            yield relative_error(logits, expected)


def _probe(errors: Sequence[float], tolerance: float) -> Probe:
    return Probe(max(errors, default=0.0) > tolerance, max(errors, default=0.0), min(errors, default=0.0))
