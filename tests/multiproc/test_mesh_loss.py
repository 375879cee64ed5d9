# SPDX-License-Identifier: Apache-2.0
"""A rank of a mesh that is killed or frozen during steps ends all others, by name and place."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pcp_passes.distributed import EXIT_CODE
from tests.multiproc import _mesh_ranks
from tests.multiproc._workers import Group

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

LIMIT_S = 30.0
STAGES = {"pp": 2, "pcp": 2}
REPLICAS = {"dp": 2, "pp": 2, "expert_parallel": True}
CASES = [
    pytest.param(STAGES, 0, signal.SIGKILL, "dp0 pp0 pcp0", id="first_stage_and_store_host_killed"),
    pytest.param(STAGES, 3, signal.SIGSTOP, "dp0 pp1 pcp1", id="last_stage_and_other_pcp_rank_frozen"),
    pytest.param(REPLICAS, 2, signal.SIGSTOP, "dp1 pp0 pcp0", id="first_stage_of_other_replica_frozen"),
    pytest.param(REPLICAS, 1, signal.SIGKILL, "dp0 pp1 pcp0", id="last_stage_killed"),
]
MORE = [
    pytest.param(STAGES, 1, signal.SIGSTOP, "dp0 pp0 pcp1", id="other_pcp_rank_frozen"),
    pytest.param(STAGES, 2, signal.SIGKILL, "dp0 pp1 pcp0", id="last_stage_killed_beside_its_pcp_peer"),
    pytest.param(REPLICAS, 0, signal.SIGSTOP, "dp0 pp0 pcp0", id="store_host_frozen"),
    pytest.param(REPLICAS, 3, signal.SIGKILL, "dp1 pp1 pcp0", id="last_stage_of_other_replica_killed"),
]


def lose(folder: Path, shape: dict[str, Any], victim: int, number: int, place: str) -> None:
    how = "killed" if number == signal.SIGKILL else "frozen"
    others = [rank for rank in range(4) if rank != victim]
    with Group(4, folder, _mesh_ranks.lost, shape=shape) as group:
        group.wait_for_marks("ready", [0, 1, 2, 3], 120.0)
        assert group.exit_codes(others, 0.0) == dict.fromkeys(others)
        begin = time.monotonic()
        group.signal(victim, number)
        assert group.exit_codes(others, LIMIT_S) == dict.fromkeys(others, EXIT_CODE)
        assert time.monotonic() - begin < LIMIT_S
        for rank in others:
            reason = (folder / f"reason.{rank}").read_text()
            assert f"rank {victim} ({place}) is lost: {how} (process" in reason, reason


@pytest.mark.parametrize("shape, victim, number, place", CASES)
def test_a_lost_rank_ends_all_others(
    tmp_path: Path, shape: dict[str, Any], victim: int, number: int, place: str
) -> None:
    lose(tmp_path, shape, victim, number, place)


@pytest.mark.soak
@pytest.mark.parametrize("shape, victim, number, place", MORE)
def test_any_other_lost_rank_does_too(
    tmp_path: Path, shape: dict[str, Any], victim: int, number: int, place: str
) -> None:
    lose(tmp_path, shape, victim, number, place)
