# SPDX-License-Identifier: Apache-2.0
"""A killed or frozen rank ends the others in time and by name; nothing else does."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pcp_passes.distributed import EXIT_CODE, Heartbeat
from pcp_passes.errors import ConfigError
from tests.multiproc import _workers
from tests.multiproc._workers import Group

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]

FAST = {"interval_s": 0.25, "silence_s": 3.0, "join_s": 30.0}
LIMIT_S = 30.0


def reasons(group: Group, ranks: list[int]) -> list[str]:
    return [(group.folder / f"reason.{rank}").read_text() for rank in ranks]


def lose(folder: Path, world: int, victim: int, number: int, heartbeat: dict[str, float]) -> tuple[float, list[str]]:
    """Signal ``victim`` while the others are blocked in gloo: seconds until they all ended, and their reasons."""
    others = [r for r in range(world) if r != victim]
    with Group(world, folder, _workers.collective, heartbeat=heartbeat, absent=victim) as group:
        group.wait_for_marks("ready", list(range(world)))
        time.sleep(4 * heartbeat["interval_s"])
        assert group.exit_codes(others, 0.0) == dict.fromkeys(others), "the others must still be blocked"
        begin = time.monotonic()
        group.signal(victim, number)
        codes = group.exit_codes(others, LIMIT_S)
        seconds = time.monotonic() - begin
        assert codes == dict.fromkeys(others, EXIT_CODE)
        for rank in others:
            assert f"pcp rank {victim} is lost" in group.stderr(rank), "the reason must also be logged"
        return seconds, reasons(group, others)


@pytest.mark.parametrize("victim", [0, 1], ids=["store_host", "peer"])
@pytest.mark.parametrize("number, how", [(signal.SIGKILL, "killed"), (signal.SIGSTOP, "frozen")], ids=["kill", "stop"])
def test_lost_rank_ends_the_others_by_name(tmp_path: Path, victim: int, number: int, how: str) -> None:
    seconds, told = lose(tmp_path, 3, victim, number, FAST)
    for reason in told:
        assert f"pcp rank {victim} is lost: {how} (process" in reason
    assert seconds < LIMIT_S / 2


def test_a_death_on_this_machine_need_not_wait_for_the_window(tmp_path: Path) -> None:
    seconds, _ = lose(tmp_path, 2, 1, signal.SIGKILL, {"interval_s": 0.5, "silence_s": 20.0})
    assert seconds < 10.0


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1], ids=["store_host", "peer"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_defaults_end_within_thirty_seconds(tmp_path: Path, victim: int, number: int) -> None:
    seconds, _ = lose(tmp_path, 3, victim, number, {"interval_s": 1.0, "silence_s": 20.0})
    assert seconds < LIMIT_S


def test_without_heartbeat_the_others_stay_blocked(tmp_path: Path) -> None:
    """Sabotage: the same freeze, heartbeat off. If the others ended anyway, the tests above would show nothing."""
    with Group(2, tmp_path, _workers.collective, heartbeat=None, absent=1) as group:
        group.wait_for_marks("ready", [0, 1])
        group.signal(1, signal.SIGSTOP)
        assert group.exit_codes([0], FAST["silence_s"] + 2.0) == {0: None}


def test_exception_without_goodbye_is_a_loss(tmp_path: Path) -> None:
    """Also the sabotage of the clean shutdowns below: the goodbye is what makes them clean."""
    with Group(3, tmp_path, _workers.raising, heartbeat=FAST, culprit=1) as group:
        assert group.exit_codes([0, 1, 2], LIMIT_S) == {0: EXIT_CODE, 1: 1, 2: EXIT_CODE}
        for reason in reasons(group, [0, 2]):
            assert "pcp rank 1 is lost: left" in reason


def test_clean_shutdown_in_any_order(tmp_path: Path) -> None:
    """Who stays longest outlasts ``silence_s`` after the first goodbye; the store's host may be the first to go."""
    orders = [[0.0, 0.0, 0.0], [0.0, 4.0, 4.5], [4.5, 0.0, 4.0], [1.0, 4.5, 0.0]]
    with ExitStack() as stack:
        groups = []
        for i, after_s in enumerate(orders):
            folder = tmp_path / str(i)
            folder.mkdir()
            group = Group(3, folder, _workers.departing, heartbeat=FAST, after_s=after_s)
            groups.append(stack.enter_context(group))
        for group in groups:
            assert group.exit_codes([0, 1, 2], LIMIT_S) == {0: 0, 1: 0, 2: 0}
            results = group.results()
            assert [results[r]["reason"] for r in range(3)] == [None] * 3
            assert max(results[r]["stop_s"] for r in range(3)) < 2.0
            assert not list(group.folder.glob("reason.*"))


def compile_while_others_wait(folder: Path, seconds: float, backend: str, heartbeat: dict[str, float]) -> None:
    with Group(2, folder, _workers.compiling, heartbeat=heartbeat, seconds=seconds, backend=backend) as group:
        assert group.exit_codes([0, 1], seconds + LIMIT_S) == {0: 0, 1: 0}
        results: dict[int, Any] = group.results()
    assert results[0]["waited"] > seconds - 1.0 > 2 * heartbeat["silence_s"]
    assert [results[r]["reason"] for r in (0, 1)] == [None, None]


def test_a_compile_longer_than_the_window_is_no_loss(tmp_path: Path) -> None:
    compile_while_others_wait(tmp_path, 12.0, "aot_eager", {"interval_s": 0.5, "silence_s": 4.0, "join_s": 30.0})


@pytest.mark.soak
def test_a_sixty_second_compile_is_no_loss(tmp_path: Path) -> None:
    compile_while_others_wait(tmp_path, 60.0, "inductor", {"interval_s": 1.0, "silence_s": 20.0, "join_s": 60.0})


def test_suspending_the_whole_group_is_no_loss(tmp_path: Path) -> None:
    """Stop all ranks and let them run again one by one, as a debugger might.

    The second group is the sabotage: without the allowance for its own suspension a rank blames its peers.
    """
    folders = [tmp_path / "forgiving", tmp_path / "unforgiving"]
    for folder in folders:
        folder.mkdir()
    with (
        Group(3, folders[0], _workers.waiting, heartbeat=FAST, forgiving=True) as group,
        Group(3, folders[1], _workers.waiting, heartbeat=FAST, forgiving=False) as control,
    ):
        for each in (group, control):
            each.wait_for_marks("ready", [0, 1, 2])
        time.sleep(4 * FAST["interval_s"])
        for number, pause_s in ((signal.SIGSTOP, 0.0), (signal.SIGCONT, 0.5)):
            for rank in range(3):
                group.signal(rank, number)
                control.signal(rank, number)
                time.sleep(pause_s)
            if number == signal.SIGSTOP:
                time.sleep(1.5 * FAST["silence_s"])
        assert EXIT_CODE in control.exit_codes([0, 1, 2], FAST["silence_s"] + 1.0).values()
        assert group.exit_codes([0, 1, 2], 0.0) == {0: None, 1: None, 2: None}
        (folders[0] / "go").touch()
        assert group.exit_codes([0, 1, 2], LIMIT_S) == {0: 0, 1: 0, 2: 0}
        assert group.results() == {0: None, 1: None, 2: None}


def test_rank_that_never_starts_its_heartbeat_is_named(tmp_path: Path) -> None:
    heartbeat = FAST | {"join_s": 3.0}
    with Group(3, tmp_path, _workers.partly_beating, heartbeat=heartbeat, mute=2) as group:
        assert group.exit_codes([0, 1], LIMIT_S) == {0: EXIT_CODE, 1: EXIT_CODE}
        for reason in reasons(group, [0, 1]):
            assert "pcp rank 2 is lost: silent (process" in reason
            assert "still runs; its heartbeat never started" in reason


def test_reason_is_there_for_callers_that_raise(tmp_path: Path) -> None:
    with Group(2, tmp_path, _workers.raising_peer_lost, heartbeat=FAST) as group:
        group.wait_for_marks("ready", [0, 1])
        group.signal(1, signal.SIGKILL)
        assert group.exit_codes([0], LIMIT_S) == {0: 0}
        assert "PeerLost: pcp rank 1 is lost: killed" in group.results()[0]


def test_window_too_short_for_the_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 \* interval_s <= silence_s"):
        Heartbeat(None, rank=0, world=2, interval_s=1.0, silence_s=3.0)  # type: ignore[arg-type]
