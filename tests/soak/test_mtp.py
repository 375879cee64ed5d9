# SPDX-License-Identifier: Apache-2.0
"""Random schedules of the shipped GLM-DSA with MTP: P ranks give what one gives, in tokens, counts and caches.

All of them run under ``make soak``; every tenth under ``make test``. In float64: a float32 difference is written down
beside it and judged by nobody, for with it two right programs may fall to different sides of a near tie.
"""

from __future__ import annotations

import pytest

from pcp_passes.errors import RankMismatch
from tests.engine_schedules import (
    Difference,
    Schedule,
    Trace,
    compare,
    fp8_program,
    glm_program,
    make_schedule,
    run_schedule,
)
from tests.soak.programs import float32_program
from tests.soak.record import Part, chunks, name, require_hard_cases, run_part

SEEDS = range(300)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", chunks(SEEDS), ids=name)
def test_schedules(seeds: range) -> None:
    summary = run_part("mtp", seeds, glm_program).save(f"mtp-{name(seeds)}")
    require_hard_cases(summary["mtp"], len(SEEDS))


@pytest.mark.unit
@pytest.mark.parametrize("seed", SEEDS[::10])
def test_a_tenth(seed: int) -> None:
    assert run_part("mtp", [seed], glm_program).numbers["comparisons"] == {"2": 1, "4": 1, "8": 1}


FP8_SEEDS = range(2000, 2100)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", chunks(FP8_SEEDS), ids=name)
def test_schedules_over_fp8_caches(seeds: range) -> None:
    """Latents and index keys are quantised in front of the gather: the same bytes whatever the number of ranks."""
    part = run_part("fp8", seeds, fp8_program, (2, 4), "fp8")
    summary = part.save(f"fp8-{name(seeds)}")
    assert part.numbers["largest_kv_difference"] == 0
    require_hard_cases(summary["fp8"], len(FP8_SEEDS))


@pytest.mark.unit
@pytest.mark.parametrize("seed", FP8_SEEDS[::50])
def test_some_over_fp8_caches(seed: int) -> None:
    numbers = run_part("fp8", [seed], fp8_program, (2, 4), "fp8").numbers
    assert numbers["comparisons"] == {"2": 1, "4": 1} and numbers["largest_kv_difference"] == 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", chunks(SEEDS[::10]), ids=name)
def test_float32_is_written_down(seeds: range) -> None:
    part = Part("float32")
    for seed in seeds:
        schedule = make_schedule(seed)
        wanted = run_schedule(schedule, 1, float32_program)
        found = {pcp: in_float32(schedule, pcp, wanted) for pcp in (2, 4)}
        part.add(schedule, wanted, {pcp: difference for pcp, difference in found.items() if difference is not None})
        other = part.numbers.setdefault("runs_with_other_tokens", 0)
        part.numbers["runs_with_other_tokens"] = other + sum(difference is None for difference in found.values())
    assert part.save(f"float32-{name(seeds)}")["float32"]["schedules"] > 0


def in_float32(schedule: Schedule, pcp: int, wanted: Trace) -> Difference | None:
    """How far float32 is off where it gives the same tokens; None where a near tie fell to the other side."""
    try:
        found = run_schedule(schedule, pcp, float32_program)
    except RankMismatch:
        return None
    same = all(
        (found.outputs[request].tokens, found.outputs[request].accepted) == (other.tokens, other.accepted)
        for request, other in wanted.outputs.items()
    )
    return compare(found, wanted) if same else None
