# SPDX-License-Identifier: Apache-2.0
"""Ranks of a group that issue different calls are named in time; a slow rank is not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pcp_passes.collectives import Collective
from pcp_passes.distributed import EXIT_CODE
from pcp_passes.distributed.stages.logged_transport import LoggedTransport
from pcp_passes.distributed.stages.round_transport import GroupTransport
from pcp_passes.distributed.watch.blackbox import BlackBox, read_post
from pcp_passes.distributed.watch.divergence import DivergenceWatch, diagnose
from pcp_passes.distributed.watch.guard import Guard
from pcp_passes.distributed.watch.runlog import Post, RunLog, post_of
from pcp_passes.errors import PeerLost
from tests.multiproc import _mesh_ranks
from tests.multiproc._workers import Group

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(200)]

LIMIT_S = 30.0
F64 = torch.float64


# What the logs say, without processes.


class Logs:
    """Two stages of two ranks, ``(0, 1)`` and ``(2, 3)``; wires go from 0 to 2 and from 1 to 3."""

    def __init__(self) -> None:
        self.logs = [RunLog(rank, {"pcp": (rank // 2 * 2, rank // 2 * 2 + 1)}) for rank in range(4)]

    def begin(self, step: int) -> None:
        for log in self.logs:
            log.begin(step, "sharded")

    def gather(self, rank: int, *shape: int, op: str = "pcp::all_gather_rows") -> None:
        self.logs[rank].add(Collective(op, "pcp", shape or (4, 8), F64))

    def send(self, rank: int) -> None:
        self.logs[rank].talk("wires", (rank, rank + 2), "transfer", (4, 8), F64)

    def receive(self, rank: int, done: bool = True) -> None:
        pair = (rank - 2, rank)
        self.logs[rank].talk("wires", pair, "transfer", (4, 8), F64, waits_for=pair)
        if done:
            self.logs[rank].wait(None)

    def step(self, number: int) -> None:
        self.begin(number)
        for rank in (0, 1):
            self.gather(rank)
            self.send(rank)
        for rank in (2, 3):
            self.receive(rank)
            self.gather(rank)

    def found(self, stalled_s: float = 9.0, without: int | None = None) -> str:
        posts = {log.rank: post_of(log.post(stalled_s).plain()) for log in self.logs if log.rank != without}
        return str(diagnose(posts, 4, 8.0) or "")


def test_equal_logs_are_no_divergence() -> None:
    logs = Logs()
    for number in range(3):
        logs.step(number)
    assert not logs.found()
    logs.begin(3)
    logs.gather(0)  # rank 1 computes, 2 and 3 wait for wires
    logs.receive(2, done=False)
    logs.receive(3, done=False)
    assert not logs.found(), "a slow rank is no divergence, however long the others wait"


def test_another_op_shape_or_step_is_named_with_its_place() -> None:
    for said, op, shape in (
        ("reduce_rows(float64[4, 8])", "pcp::reduce_rows", (4, 8)),
        ("step 3 all_gather_rows(float64[6, 8])", "pcp::all_gather_rows", (6, 8)),
    ):
        logs = Logs()
        for number in range(3):
            logs.step(number)
        logs.begin(3)
        logs.gather(0)
        logs.gather(1, *shape, op=op)
        found = logs.found(stalled_s=0.0)
        assert found.startswith("rank 1 of group pcp[0,1] issues step 3") and said in found
        assert "as its 4th call where rank 0 issues step 3 all_gather_rows(float64[4, 8])" in found


def test_a_circle_is_named_and_needs_all_posts_and_time() -> None:
    """Rank 0 never sends: rank 2 waits for it, rank 3 for rank 2 in a gather, and the others for the next step."""
    logs = Logs()
    logs.step(0)
    logs.begin(1)
    for rank in (0, 1):
        logs.gather(rank)
    logs.send(1)
    logs.receive(2, done=False)
    logs.receive(3)
    logs.gather(3)
    assert not logs.found(), "rank 0 may still compute"
    logs.logs[0].talk("rounds", (0, 2), "broadcast", (1, 2), torch.int64, waits_for=(2,))
    found = logs.found()
    assert "rank 0 waits in step 1 broadcast" in found and "for rank 2, which issued 0 there" in found
    assert "rank 2 waits in step 1 transfer(float64[4, 8]), its 2nd call of group wires[0,2], for rank 0" in found
    assert not logs.found(stalled_s=7.0) and not logs.found(without=1)


def test_a_rank_that_ended_early_is_named() -> None:
    logs = Logs()
    logs.step(0)
    logs.logs[1].closed = True
    logs.begin(1)
    logs.gather(0)
    assert "for rank 1, which issued 1 there and has ended" in logs.found()
    logs.logs[1].closed = False
    assert not logs.found()


def test_only_the_last_entries_are_kept_and_a_difference_among_them_is_found() -> None:
    logs = Logs()
    for number in range(700):
        logs.step(number)
    logs.gather(0, 5, 8)
    logs.gather(1)
    assert "as its 701st call" in logs.found()
    assert len(logs.logs[0].post(0.0).groups["pcp[0,1]"].texts) == 512


def test_a_black_box_tells_what_was_issued_last() -> None:
    box, logs = BlackBox(), Logs()
    logs.logs[0].box = box
    for number in range(300):
        logs.step(number)
    post: Post = read_post(0, box._map)
    own = logs.logs[0].post(0.0)
    assert set(post.groups) == set(own.groups) == {"pcp[0,1]", "wires[0,2]"}
    for key, tail in post.groups.items():
        assert tail.count == own.groups[key].count == 300 and tail.members == own.groups[key].members
        assert tail.texts == own.groups[key].texts[-len(tail.texts) :] and len(tail.texts) == 128
    box.write("pcp[0,1]", 301, "step 300 all_gather_rows(float64[4, 8])" + " " * 200)
    assert read_post(0, box._map).groups["pcp[0,1]"].count == 300, "a cut entry would read as another call"
    box.unlink()


def test_what_a_device_has_queued_is_a_wait_of_a_rank_that_blocks_on_its_last_call() -> None:
    """On a GPU both replicas have issued all of the step, and wait for a wire that rank 0 never sent."""
    for queued, said in (({}, "rank 2 waits in step 1 transfer(float64[4, 8]), its 2nd call"), (None, "")):
        logs = Logs()
        for log in logs.logs:
            log.queued = None if queued is None else {}
        logs.step(0)
        logs.begin(1)
        for rank in (0, 1):
            logs.gather(rank)
        logs.send(1)
        for rank in (2, 3):
            logs.receive(rank)  # returns at once
            logs.gather(rank)
        logs.logs[0].talk("rounds", (0, 2), "broadcast", (1, 2), torch.int64, waits_for=(2,))
        assert said in logs.found() and bool(logs.found()) == bool(said)
        logs.logs[2].rest()
        assert not logs.found(), "rank 2 only queued it, and goes on"


def test_a_round_that_is_sent_late_is_logged_in_its_step_and_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where a thread sends it when the device has made it."""
    monkeypatch.setattr(GroupTransport, "__init__", lambda self, group, device_group=None: None)
    monkeypatch.setattr(GroupTransport, "broadcast", lambda self, payload: None)
    log = RunLog(1, {"pcp": (0, 1)})
    transport = LoggedTransport(cast(Any, None), (0, 1), log)
    transport.is_source = True
    log.begin(4, "sharded")
    later = transport.later()
    log.begin(5, "sharded")
    log.add(Collective("pcp::all_gather_rows", "pcp", (4, 8), F64))
    waiting = log.waiting
    later(torch.zeros(1, 2))
    assert log.comparable()["rounds[0,1]"] == ["step 4 broadcast(float32[1, 2])"]
    assert log.waiting is waiting is not None


def test_a_long_wait_for_a_rank_that_is_not_stepped_is_told_and_explains_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logs = Logs()
    logs.step(0)
    for log in logs.logs:
        log.rest()
    logs.logs[0].begin(1, "sharded")
    logs.gather(0)
    posts = {log.rank: post_of(log.post(9.0).plain()) for log in logs.logs}
    assert not diagnose(posts, 4, 8.0)
    watch = DivergenceWatch(cast(Any, None), logs.logs[0], 4, lambda found: None)
    with caplog.at_level(logging.WARNING):
        watch._notice(posts, 9.0)
    assert "for 9 s rank 0 waits in step 1 all_gather_rows" in caplog.text
    assert "for rank 1, which issued 1 there and is in no step; it is slow, or nobody steps its engine" in caplog.text

    guard = object.__new__(Guard)
    guard.watch, guard.silence_s, guard.heartbeat = watch, 4.0, cast(Any, _Sound())
    guard.log, guard._name_of = logs.logs[0], "rank {}".format

    def fail() -> None:
        raise RuntimeError("Timed out waiting 300000ms")

    with pytest.raises(PeerLost, match=r"rank 1, which issued 1 there and is in no step; then Timed out waiting"):
        guard.or_lost(fail)
    watch.slow = ""
    with pytest.raises(RuntimeError, match=r"^Timed out"):
        guard.or_lost(fail)
    guard.heartbeat.departed = {1}  # type: ignore[misc, assignment]
    with pytest.raises(PeerLost, match=r"rank 0 waits in step 1 all_gather_rows.* for rank 1, which said goodbye"):
        guard.or_lost(fail)


class _Sound:
    departed: set[int] = set()  # noqa: RUF012
    raise_if_lost: Callable[..., None] = staticmethod(lambda wait_s: None)


# Real ranks.


def told(group: Group, rank: int) -> str:
    path = group.folder / f"reason.{rank}"
    return path.read_text() if path.exists() else ""


def run_all(folder: Path, cases: dict[str, Any]) -> dict[str, tuple[dict[int, int | None], list[str]]]:
    """Exit codes and reasons by case; all cases at once, each within the limit."""
    found = {}
    with ExitStack() as stack:
        groups = {}
        for name, (work, options) in cases.items():
            (folder / name).mkdir()
            groups[name] = stack.enter_context(Group(2, folder / name, work, **options))
        for group in groups.values():
            group.wait_for_marks("begun", [0, 1], 120.0)
        begin = time.monotonic()
        for name, group in groups.items():
            left = 0.0 if name == "unwatched" else LIMIT_S - (time.monotonic() - begin)
            codes = group.exit_codes([0, 1], left)
            found[name] = codes, [told(group, rank) for rank in (0, 1)]
    return found


def test_planted_divergences_end_both_ranks_by_name_and_a_slow_rank_does_not(tmp_path: Path) -> None:
    """And, the sabotage, without a watch the one that was not sent to waits on."""
    whats = ("skip", "shape", "dtype", "unsent", "slow", "unwatched")
    found = run_all(tmp_path, {what: (_mesh_ranks.diverging, {"what": what}) for what in whats})
    for what, said in (
        ("skip", "issues step 4 all_gather_rows(float64[4, 4]) as its 8th call where rank 0 issues step 3 all_gather"),
        ("shape", "issues step 3 all_gather_rows(float64[5, 4]) as its 8th call where rank 0 issues step 3 all_gather"),
        ("dtype", "issues step 3 all_gather_rows(float32[4, 4]) as its 8th call where rank 0 issues step 3 all_gather"),
        ("unsent", "rank 1 waits in step 3 transfer(float64[4, 4]), its 4th call of group wires[0,1], for rank 0"),
    ):
        codes, reasons = found[what]
        assert None not in codes.values() and EXIT_CODE in codes.values(), f"{what}: {codes}"
        survivors = [reason for rank, reason in enumerate(reasons) if codes[rank] == EXIT_CODE]
        for reason in survivors:
            assert reason.startswith("ranks of a group diverge: ") and said in reason, reason
            assert "source: body sharded %gather_" in reason
    assert found["slow"] == ({0: 0, 1: 0}, ["", ""])
    assert found["unwatched"] == ({0: None, 1: None}, ["", ""])


def test_an_engine_that_goes_astray_is_named(tmp_path: Path) -> None:
    owner = {"pcp": 2, "decode": "owner", "check_ranks": False}
    found = run_all(
        tmp_path,
        {
            "unsent": (_mesh_ranks.straying, {"shape": {"pp": 2, "check_ranks": False}, "what": "unsent"}),
            "plain": (_mesh_ranks.straying, {"shape": owner, "what": "plain"}),
            "prompt": (_mesh_ranks.parting, {"what": "prompt"}),
            "abort": (_mesh_ranks.parting, {"what": "abort"}),
            "unchecked": (_mesh_ranks.parting, {"what": "prompt", "check": False}),
        },
    )
    for what, step in (("prompt", 1), ("abort", 3)):
        codes, _ = found[what]
        told = (tmp_path / what / "told.1").read_text()
        assert f"RankMismatch: step {step}: stage 0 (rank 0) schedules another batch, or knows other tokens" in told
        assert None not in codes.values() and codes[0] == EXIT_CODE, codes
    assert found["unchecked"][0] == {0: 0, 1: 0}, "the sabotage: nobody notices that stages embed other prompts"
    for what, said in (
        ("unsent", "rank 1 (dp0 pp1 pcp0) waits in step 5 transfer(float64["),
        ("plain", "rank 1 (dp0 pp0 pcp1) of group pcp[0,1] issues step 6 all_gather_rows(float64["),
    ):
        codes, reasons = found[what]
        assert None not in codes.values() and EXIT_CODE in codes.values(), f"{what}: {codes}"
        for rank, reason in enumerate(reasons):
            assert codes[rank] != EXIT_CODE or said in reason, reason
    assert "source: body target.sharded %all_gather_rows" in found["plain"][1][0]
