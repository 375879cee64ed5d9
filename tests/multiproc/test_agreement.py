# SPDX-License-Identifier: Apache-2.0
"""Ranks that differ, or that are missing, are named on every rank, in bounded time."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc import _workers
from tests.multiproc._workers import Group

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(90)]

GRAPH = "\n".join(f"  %mul_{i}: f32[t, 64] = aten.mul(%x_{i}, %w_{i})" for i in range(400))
OPTIONS = {"options": "layout=zigzag", "torch": "2.13.0"}


def post(topic: str, facts: list[dict[str, str]], texts: list[dict[str, str]] | None = None) -> dict[str, Any]:
    return {"topic": topic, "facts": facts, "texts": texts or [{}] * len(facts)}


def outcomes(folder: Path, world: int, rounds: list[dict[str, Any]], timeout_s: float = 20.0) -> dict[int, Any]:
    with Group(world, folder, _workers.agree, rounds=rounds, posting=list(range(world)), timeout_s=timeout_s) as group:
        assert group.exit_codes(list(range(world)), 60.0) == dict.fromkeys(range(world), 0)
        return group.results()


def test_equal_ranks_agree_again_and_again(tmp_path: Path) -> None:
    """The same topic thrice; the third time with other facts, which must not be compared with the earlier ones."""
    rounds = [post("body", [OPTIONS] * 3, [{"graph": GRAPH}] * 3)] * 2 + [post("body", [{"options": "other"}] * 3)]
    for per_rank in outcomes(tmp_path, 3, rounds).values():
        assert [kind for kind, _, _ in per_rank] == ["agreed"] * 3


def test_different_options_are_named_on_every_rank(tmp_path: Path) -> None:
    odd = {"options": "layout=interleave", "torch": "2.13.0", "gather": "packed"}
    for ((kind, message, seconds),) in outcomes(tmp_path, 3, [post("start", [OPTIONS, OPTIONS, odd])]).values():
        assert kind == "RankMismatch"
        assert "3 ranks disagree about 'start': 2 of 3 facts differ." in message
        assert "options  ranks 0, 1: 'layout=zigzag'" in message
        assert "rank 2: 'layout=interleave'" in message
        assert "gather   ranks 0, 1: <absent>" in message
        assert "torch " not in message, "what is equal is not listed"
        assert "next  start every rank with the same options" in message
        assert seconds < 10.0


def test_first_differing_graph_line_is_shown(tmp_path: Path) -> None:
    odd = GRAPH.replace("%mul_250: f32[t, 64] = aten.mul", "%mul_250: f32[t, 64] = aten.add")
    rounds = [post("body", [OPTIONS] * 3, [{"graph": odd}, {"graph": GRAPH}, {"graph": GRAPH}])]
    for ((kind, message, _),) in outcomes(tmp_path, 3, rounds).values():
        assert kind == "RankMismatch"
        lines = [" ".join(line.split()) for line in message.splitlines()]
        assert "249 %mul_248: f32[t, 64] = aten.mul(%x_248, %w_248)" in lines, "context before the difference"
        assert "- 251 %mul_250: f32[t, 64] = aten.mul(%x_250, %w_250) (rank 1)" in lines
        assert "+ 251 %mul_250: f32[t, 64] = aten.add(%x_250, %w_250) (rank 0)" in lines
        assert "%mul_252" not in message


def test_a_longer_graph_differs_at_its_end(tmp_path: Path) -> None:
    rounds = [post("body", [OPTIONS] * 2, [{"graph": GRAPH}, {"graph": GRAPH + "\n  return %mul_399"}])]
    for ((kind, message, _),) in outcomes(tmp_path, 2, rounds).values():
        assert kind == "RankMismatch"
        assert "<end of text>   (rank 0)" in message
        assert "return %mul_399   (rank 1)" in message


def test_long_values_are_cut_around_their_difference(tmp_path: Path) -> None:
    common = "x" * 5000
    rounds = [post("start", [{"config": common + "LEFT"}, {"config": common + "RIGHT"}])]
    for ((kind, message, _),) in outcomes(tmp_path, 2, rounds).values():
        assert kind == "RankMismatch"
        assert "xLEFT'" in message
        assert "xRIGHT'" in message
        assert len(message) < 1000


def test_a_rank_that_never_posts_is_named(tmp_path: Path) -> None:
    with Group(
        3, tmp_path, _workers.agree, rounds=[post("start", [OPTIONS] * 3)], posting=[0, 1], timeout_s=2.0
    ) as group:
        assert group.exit_codes([0, 1], 30.0) == {0: 0, 1: 0}
        results = group.results()
        for rank in (0, 1):
            ((kind, message, seconds),) = results[rank]
            assert kind == "PeerLost"
            assert message.startswith("rank 2 did not report about 'start' within 2 s")
            assert "look at the log of rank 2" in message
            assert 2.0 <= seconds < 10.0


@pytest.mark.parametrize(
    "number, says", [(signal.SIGSTOP, "no answer from rank 0"), (signal.SIGKILL, "lost the store of rank 0")]
)
def test_a_lost_store_host_is_an_error_and_no_hang(tmp_path: Path, number: int, says: str) -> None:
    """Against a frozen host torch's own timeouts do not help: an operation on its store never returns."""
    with Group(2, tmp_path, _workers.agree_when_told, facts=OPTIONS, timeout_s=1.0) as group:
        group.wait_for_marks("ready", [0, 1])
        group.signal(0, number)
        time.sleep(0.2)
        (tmp_path / "go").touch()
        assert group.exit_codes([1], 40.0) == {1: 0}
        kind, message = group.results()[1]
        assert kind == "PeerLost"
        assert says in message


def test_another_group_size_is_named(tmp_path: Path) -> None:
    with Group(2, tmp_path, _workers.open_with_own_world, worlds=[2, 3]) as group:
        assert group.exit_codes([1], 30.0) == {1: 0}
        assert "RankMismatch: group 'pcp': rank 1 was started with 3 ranks, rank 0 with 2" in group.results()[1]


def test_a_store_nobody_hosts_names_rank_0(tmp_path: Path) -> None:
    with Group(2, tmp_path, _workers.open_with_own_world, ranks=[1], worlds=[2, 2]) as group:
        assert group.exit_codes([1], 30.0) == {1: 0}
        assert "PeerLost: rank 1 could not reach rank 0" in group.results()[1]
