# SPDX-License-Identifier: Apache-2.0
"""The summary of the soak counts every part once, keeps the largest differences, and leaves out other sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import steps as small
from tests.engine_schedules import Difference, make_schedule, run_schedule, small_program
from tests.soak import record
from tests.soak.record import Part, require_hard_cases, run_part
from tests.unit.engine_faults.test_tables import without_regather

pytestmark = pytest.mark.unit


def part(kind: str, seed: int, *differences: Difference) -> Part:
    schedule = make_schedule(seed, vocab=small.VOCAB)
    made = Part(kind)
    made.add(schedule, run_schedule(schedule, 1, small_program), dict(zip((2, 4), differences, strict=False)))
    return made


def test_parts_add_up(tmp_path: Path) -> None:
    equal, unequal = Difference("", 1e-14, 2e-15), Difference("r0: tokens", 3e-13, 0.0)
    first, second = part("mtp", 3, equal, equal), part("mtp", 4, unequal)
    first.save("a", tmp_path)
    first.save("a", tmp_path)
    part("gloo", 3, equal).save("c", tmp_path)
    found = second.save("b", tmp_path)
    assert json.loads((tmp_path / "soak.json").read_text()) == found
    mtp = found["mtp"]
    assert mtp["schedules"] == 2 and mtp["comparisons"] == {"2": 2, "4": 1}
    assert (mtp["largest_kv_difference"], mtp["largest_logprob_difference"]) == (3e-13, 2e-15)
    for name in ("tokens", "drafted", "accepted", "preemptions", "aborts", "cached_tokens"):
        assert mtp[name] == first.numbers[name] + second.numbers[name]
    assert sum(mtp["drafts_per_step"].values()) == 2 and found["gloo"]["schedules"] == 1


def test_a_part_of_other_sources_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equal = Difference("", 0.0, 0.0)
    monkeypatch.setattr(record, "SOURCES", "before")
    part("mtp", 3, equal).save("a", tmp_path)
    monkeypatch.setattr(record, "SOURCES", "after")
    assert part("mtp", 4, equal).save("b", tmp_path)["mtp"]["schedules"] == 1


def test_a_schedule_that_differs_fails_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: without the regather of block tables a part of three schedules is red, and says which one."""
    monkeypatch.setattr(record, "make_schedule", lambda seed, **given: make_schedule(seed, vocab=small.VOCAB))
    assert run_part("mtp", range(3), small_program, (2, 4)).numbers["comparisons"] == {"2": 3, "4": 3}
    without_regather(monkeypatch)

    def broken(pcp: int, steps: int) -> object:
        return small.program(pcp, steps) if pcp > 1 else small_program(pcp, steps)

    with pytest.raises(AssertionError, match="seed 0, pcp 2"):
        run_part("mtp", range(3), broken, (2,))  # type: ignore[arg-type]


def test_schedules_without_a_hard_case_are_refused() -> None:
    numbers = {"schedules": 2, "preemptions": 1, "aborts": 1, "cached_tokens": 9, "sharded_steps": 4}
    good = numbers | {"accepted": 3, "drafted": 5}
    require_hard_cases(good, 2)
    for bad in (good | {"aborts": 0}, good | {"accepted": 5}, good | {"accepted": 0}):
        require_hard_cases(bad, 3)
        with pytest.raises(AssertionError):
            require_hard_cases(bad, 2)
