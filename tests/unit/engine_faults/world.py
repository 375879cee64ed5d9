# SPDX-License-Identifier: Apache-2.0
"""What the fault tests share: small programs and engines, and a verdict on a run against one that is right.

A fault test has three parts: the situation that showed the fault elsewhere, the clean run in it, and the same run with
the fault put in at one place, which must be *seen*: as another token, another cache row, or an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.errors import PcpError
from pcp_passes.step import StepProgram
from tests import steps as small
from tests.engine_schedules import Arrival, Schedule, Trace, compare, run_schedule, small_program

ATOL = 1e-9
"""Clean runs differ by up to 1e-14; with a fault by 1e-3 and more."""
SEEN = (AssertionError, PcpError, IndexError)


def schedule(
    lengths: Sequence[int],
    *,
    steps: int = 3,
    max_tokens: int = 6,
    every: int = 0,
    temperature: float = 0.0,
    prompts: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Schedule:
    """Requests of ``lengths``, one every ``every`` engine steps (0: all at once). Prompts are random unless given."""
    generator = torch.Generator().manual_seed(11)
    made = prompts or [torch.randint(0, small.VOCAB, (n,), generator=generator).tolist() for n in lengths]
    sizes = {"block_size": 4, "num_blocks": 96, "max_len": 64, "max_requests": 8, "budget": 20} | options
    arrivals = tuple(
        Arrival(i * every, f"r{i}", tuple(prompt), SamplingParams(max_tokens, temperature, 40 + i))
        for i, prompt in enumerate(made)
    )
    return Schedule(0, steps, EngineOptions(**sizes), arrivals, ())


def engine_run(given: Schedule, pcp: int) -> Trace:
    """A schedule on an engine with the small models, in the simulator; each step is watched for foreign slots."""
    return run_schedule(given, pcp, small_program)


def verdict(run: Callable[[], Trace], wanted: Trace) -> str:
    """Empty, or how an engine's run differs from ``wanted`` (PCP=1), or what ended it."""
    try:
        return compare(run(), wanted).first
    except SEEN as seen:
        return f"{type(seen).__name__}: {seen}"


@cache
def reference(steps: int = 3, **options: Any) -> small.Host:
    """``small.MIXED`` on one rank."""
    return small.run(small.program(1, steps, **options))


def run_mixed(program: StepProgram, host: type[small.Host] = small.Host) -> small.Host:
    """``small.MIXED``: prefills, chunks, verification of different draft counts, ranks without rows, changing order."""
    made = host(program, small.requests())
    for scheduled in small.MIXED:
        made.step(scheduled)
    return made


def difference(program: StepProgram, wanted: small.Host, host: type[small.Host] = small.Host) -> float:
    """How far ``small.MIXED`` on a program is from the wanted run; infinite for other tokens, or an error."""
    try:
        return small.difference(run_mixed(program, host), wanted)
    except SEEN:
        return math.inf


def replace_op(monkeypatch: Any, op: Any, function: Callable[..., Any]) -> None:
    """Let a step op call ``function(original, *operands)``, in programs that exist too."""
    original = op.function
    monkeypatch.setattr(op, "function", lambda *operands: function(original, *operands))
