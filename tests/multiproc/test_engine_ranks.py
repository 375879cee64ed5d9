# SPDX-License-Identifier: Apache-2.0
"""The engine on real ranks over gloo: what the simulator says, and an end in time when a rank is lost."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pcp_passes.distributed import EXIT_CODE
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.ranks import GroupExecutor
from pcp_passes.errors import ConfigError
from tests import engine_schedules as schedules
from tests import steps as small
from tests.multiproc import _engine_ranks
from tests.multiproc._workers import Group

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

LIMIT_S = 30.0
SEEDS = (3, 7, 11, 12)


def run_ranks(folder: Path, world: int, seeds: tuple[int, ...], which: str) -> list[list[dict[str, Any]]]:
    with Group(world, folder, _engine_ranks.trace, seeds=seeds, which=which) as group:
        codes = group.exit_codes(list(range(world)), 140.0)
        assert codes == dict.fromkeys(range(world), 0), "\n".join(group.stderr(rank)[-2000:] for rank in range(world))
    return [torch.load(folder / f"trace.{rank}", weights_only=False) for rank in range(world)]


def check(saved: list[list[dict[str, Any]]], seeds: tuple[int, ...], which: str) -> dict[str, int]:
    program_of, vocab = _engine_ranks.PROGRAMS[which]
    totals: dict[str, int] = {}
    for index, seed in enumerate(seeds):
        schedule = schedules.make_schedule(seed, vocab=vocab)
        wanted = schedules.run_schedule(schedule, 1, program_of)
        for rank, of_rank in enumerate(saved):
            found = schedules.Trace(of_rank[index]["outputs"], of_rank[index]["caches"], {}, of_rank[index]["summary"])
            difference = schedules.compare(found, wanted)
            assert not difference.first, f"seed {seed}, rank {rank}: {difference}"
            assert of_rank[index]["bytes"] == saved[0][index]["bytes"], "ranks send the same"
            for name, count in found.counts.items():
                totals[name] = totals.get(name, 0) + count
    return totals


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return run_ranks(tmp_path_factory.mktemp("two"), 2, SEEDS, "small")


def test_two_ranks_equal_one(two: list[list[dict[str, Any]]]) -> None:
    totals = check(two, SEEDS, "small")
    assert totals["sharded_steps"] > 20 and totals["accepted"] > 0


def test_the_simulator_counts_the_bytes_that_ranks_send(two: list[list[dict[str, Any]]]) -> None:
    for index, seed in enumerate(SEEDS):
        schedule = schedules.make_schedule(seed, vocab=small.VOCAB)
        simulated = schedules.run_schedule(schedule, 2, schedules.small_program)
        assert simulated.summary["bytes"] == sum(two[0][index]["bytes"]) > 0


def test_another_schedule_is_not_equal(two: list[list[dict[str, Any]]]) -> None:
    """Sabotage: the comparison can fail."""
    other = [[of_rank[1], of_rank[0], *of_rank[2:]] for of_rank in two]
    with pytest.raises(AssertionError, match="seed 3, rank 0"):
        check(other, SEEDS, "small")


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_with_the_shipped_model(tmp_path: Path, world: int) -> None:
    check(run_ranks(tmp_path, world, (1, 2), "glm"), (1, 2), "glm")


@pytest.mark.parametrize("victim", [0, 1], ids=["store_host", "peer"])
@pytest.mark.parametrize("number, how", [(signal.SIGKILL, "killed"), (signal.SIGSTOP, "frozen")], ids=["kill", "stop"])
def test_a_rank_lost_in_a_draft_step_ends_the_other_by_name(tmp_path: Path, victim: int, number: int, how: str) -> None:
    other = 1 - victim
    with Group(2, tmp_path, _engine_ranks.lost_in_a_draft_step, victim=victim, heartbeat=True) as group:
        group.wait_for_marks("ready", [0, 1], 120.0)
        time.sleep(1.0)
        assert group.exit_codes([other], 0.0) == {other: None}, "the other must be waiting in a collective"
        begin = time.monotonic()
        group.signal(victim, number)
        assert group.exit_codes([other], LIMIT_S) == {other: EXIT_CODE}
        assert time.monotonic() - begin < LIMIT_S
        assert f"pcp rank {victim} is lost: {how} (process" in (tmp_path / f"reason.{other}").read_text()


def test_without_a_heartbeat_the_other_stays_blocked(tmp_path: Path) -> None:
    """Sabotage: the same freeze, nobody watching."""
    with Group(2, tmp_path, _engine_ranks.lost_in_a_draft_step, victim=1, heartbeat=False) as group:
        group.wait_for_marks("ready", [0, 1], 120.0)
        group.signal(1, signal.SIGSTOP)
        assert group.exit_codes([0], _engine_ranks.HEARTBEAT_S + 4.0) == {0: None}


@pytest.mark.parametrize("what, said", [("options", "options"), ("weights", "weights"), ("steps", "plain")])
def test_ranks_that_differ_do_not_start(tmp_path: Path, what: str, said: str) -> None:
    with Group(2, tmp_path, _engine_ranks.disagreeing, what=what) as group:
        assert group.exit_codes([0, 1], 100.0) == {0: 0, 1: 0}
        for rank in (0, 1):
            told = (tmp_path / f"told.{rank}").read_text()
            assert told.startswith("RankMismatch: 2 ranks disagree about 'engine'") and said in told, told


def test_ranks_that_come_to_different_tokens_stop_by_name(tmp_path: Path) -> None:
    with Group(2, tmp_path, _engine_ranks.drifting, check=True) as group:
        assert group.exit_codes([0, 1], 100.0) == {0: 0, 1: 0}
        for rank in (0, 1):
            told = (tmp_path / f"told.{rank}").read_text()
            assert told.startswith("RankMismatch: step 3: pcp rank 1 schedules another batch, or knows other tokens"), (
                told
            )


def test_without_the_comparison_they_go_on_apart(tmp_path: Path) -> None:
    """Sabotage: nobody compares, so nobody stops (decoding is replicated: there is no other collective)."""
    with Group(2, tmp_path, _engine_ranks.drifting, check=False) as group:
        assert group.exit_codes([0, 1], 100.0) == {0: 0, 1: 0}
        assert [(tmp_path / f"told.{rank}").read_text() for rank in (0, 1)] == ["ended", "ended"]


def test_equal_ranks_start(tmp_path: Path) -> None:
    """Sabotage of the test above: nothing differs."""
    with Group(2, tmp_path, _engine_ranks.disagreeing, what="nothing") as group:
        assert group.exit_codes([0, 1], 100.0) == {0: 0, 1: 0}
        assert [(tmp_path / f"told.{rank}").read_text() for rank in (0, 1)] == ["agreed", "agreed"]


def test_a_group_of_another_size_is_refused() -> None:
    class Three:
        def size(self) -> int:
            return 3

        def rank(self) -> int:
            return 0

    with pytest.raises(ConfigError, match="process group has 3 ranks and EngineOptions has pcp=2"):
        GroupExecutor(small.program(2, 1), EngineOptions(pcp=2), Three())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="built for 2 pcp ranks and EngineOptions has pcp=3"):
        Engine(GroupExecutor(small.program(2, 1), EngineOptions(pcp=3), Three()))  # type: ignore[arg-type]
