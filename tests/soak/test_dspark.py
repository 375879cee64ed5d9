# SPDX-License-Identifier: Apache-2.0
"""Random schedules of the shipped GLM-DSA with the shipped block drafter, as in ``test_mtp``."""

from __future__ import annotations

import pytest

from tests.soak.programs import dspark_program
from tests.soak.record import chunks, name, require_hard_cases, run_part

SEEDS = range(1000, 1100)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", chunks(SEEDS), ids=name)
def test_schedules(seeds: range) -> None:
    summary = run_part("dspark", seeds, dspark_program).save(f"dspark-{name(seeds)}")
    require_hard_cases(summary["dspark"], len(SEEDS))


@pytest.mark.unit
@pytest.mark.parametrize("seed", SEEDS[::10])
def test_a_tenth(seed: int) -> None:
    assert run_part("dspark", [seed], dspark_program).numbers["comparisons"] == {"2": 1, "4": 1, "8": 1}
