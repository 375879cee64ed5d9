# SPDX-License-Identifier: Apache-2.0
"""Ten of the schedules on real ranks over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_schedules import Trace, compare, glm_program, make_schedule, run_schedule
from tests.multiproc._workers import Group
from tests.soak import _ranks
from tests.soak.record import Part

SEEDS = tuple(range(5, 300, 30))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4])
def test_ten_schedules_over_gloo(world: int, tmp_path: Path) -> None:
    assert len(SEEDS) == 10
    with Group(world, tmp_path, _ranks.trace, seeds=SEEDS, which="glm") as group:
        codes = group.exit_codes(list(range(world)), _ranks.LIMIT_S)
        assert codes == dict.fromkeys(range(world), 0), "\n".join(group.stderr(rank)[-2000:] for rank in range(world))
    saved: list[list[dict[str, Any]]] = [
        torch.load(tmp_path / f"trace.{rank}", weights_only=False) for rank in range(world)
    ]
    part = Part("gloo")
    for index, seed in enumerate(SEEDS):
        schedule = make_schedule(seed)
        wanted = run_schedule(schedule, 1, glm_program)
        worst, sharded = None, 0
        for rank, of_rank in enumerate(saved):
            one = of_rank[index]
            difference = compare(Trace(one["outputs"], one["caches"], {}, one["summary"]), wanted)
            assert not difference.first, f"seed {seed}, rank {rank} of {world}: {difference}"
            sharded = one["summary"]["sharded_steps"]
            worst = difference if worst is None or difference.cache > worst.cache else worst
        assert worst is not None
        part.add(schedule, wanted, {world: worst}, sharded)
    part.save(f"gloo-{world}")
