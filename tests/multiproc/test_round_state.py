# SPDX-License-Identifier: Apache-2.0
"""The round state between real processes: the last stage and the others, over gloo. Every fault has an end and a name.

All cases of two stages share one start of the processes, and so do those of five. What each stage does in a case stands
in ``_round_ranks``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multiproc import _round_ranks
from tests.multiproc._round_ranks import FIVE, ROUNDS, SHORT_S, TWO
from tests.multiproc._workers import Group

pytestmark = pytest.mark.multiproc

FIRST = [[5, -1, -1], [6, 7, -1]]
BOTH = [[2, 3], [2, 2]]
"""Payloads of a round of two requests and two drafts."""


def results(world: int, cases: dict[str, Any], folder: Path) -> dict[str, list[Any]]:
    with Group(world, folder, _round_ranks.run, names=list(cases)) as group:
        codes = group.exit_codes(list(range(world)), timeout_s=120)
        found = group.results()
        assert codes == dict.fromkeys(range(world), 0), (codes, [list(found.get(r, ())) for r in range(world)])
    return {name: [found[rank][name] for rank in range(world)] for name in cases}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Per case what the other stage found and what the last one did."""
    return results(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return results(5, FIVE, tmp_path_factory.mktemp("five"))


def error(found: list[Any], kind: str, *parts: str, within_s: float = 5.0) -> None:
    assert found[0] == kind, found
    assert all(part in found[1] for part in parts), found[1]
    assert found[2] < within_s, found


def test_a_wrong_row_count_ends_both_sides_at_once(two: dict[str, list[Any]]) -> None:
    (other, other_issued), (last, issued) = two["wrong_rows"]
    error(last[0], "RankMismatch", "step 1", "int64[1, 3]", "batch of 2 requests", "i64[2, 1 to 3]", within_s=1.0)
    error(other[0], "RankMismatch", "the last stage could not make the round of step 1")
    assert last[1:] == [None, None], "and the next round is sent"
    assert other[1] == [2, FIRST, [[8, 9], [10, 11]], [5, 7], [2, 1]]
    assert other_issued == issued == BOTH * 2


def test_a_narrow_round_is_padded(two: dict[str, list[Any]]) -> None:
    (other, _), (_, issued) = two["narrow"]
    assert other == [[1, [[5, -1, -1], [6, -1, -1]], [[8, 9], [10, 11]], [5, 6], [0, 0]]]
    assert issued == BOTH


def test_a_round_without_a_stash_raises_after_both_payloads(two: dict[str, list[Any]]) -> None:
    (other, _), (last, _) = two["unstashed"]
    error(other[0], "PcpError", "step 1", "stashed nothing")
    assert other[1] == [2, [[15, 12, -1], [16, -1, -1]], [[18, 19], [20, 21]], [12, 16], [1, 2]]
    assert last == [None, None, None], "the last stage was not held up"

    (other, _), (last, _) = two["forgetful"]
    error(other[0], "PcpError", "stashed nothing")
    error(other[1], "RankMismatch", "did not arrive")
    error(last[2], "PeerLost", "not passed on", within_s=SHORT_S + 5)


def test_listed_drafts_travel_as_zeros_and_are_not_read(two: dict[str, list[Any]]) -> None:
    (other, _), (last, issued) = two["listed"]
    zeros = [[0, 0], [0, 0]]
    assert other == [[1, FIRST, None, [5, 7], [2, 1]], zeros, [2, FIRST, None, [5, 7], [2, 1]], zeros]
    assert last == [None, None, None]
    assert issued == BOTH * 2


def test_lists_that_nobody_declared_are_refused(two: dict[str, list[Any]]) -> None:
    (other, _), (last, _) = two["undeclared"]
    error(last[0], "RankMismatch", "the drafts are lists on the host")
    error(other[0], "RankMismatch", "could not make the round")


def test_without_a_drafter_one_column_travels_and_nothing_else(two: dict[str, list[Any]]) -> None:
    (other, received), (_, issued) = two["without_drafter"]
    assert other == [[step, [[step], [step + 10]], [[], []], [step, step + 10], [0, 0]] for step in (1, 2, 3)]
    assert received == issued == [[2, 1]] * 3


@pytest.mark.parametrize("stages", [2, 5])
def test_rounds_between_sends_of_hidden_states(
    stages: int, two: dict[str, list[Any]], five: dict[str, list[Any]]
) -> None:
    found = (two if stages == 2 else five)["interleaved"]
    assert found == [[[], 2 * ROUNDS]] * stages


def test_a_round_that_is_not_sent_is_noticed(two: dict[str, list[Any]]) -> None:
    assert two["dropped"][0][0] == [250, 251, 252, 253, 254], "the comparison of interleaved rounds can fail"


def test_other_groups_are_refused(two: dict[str, list[Any]]) -> None:
    for fake, shared in two["refused"]:
        error(fake, "ConfigError", "CPU group of its own", "found one of 'fake'", "backend='gloo'")
        error(shared, "ConfigError", "found the group that the stages send hidden states on")


def test_a_stage_does_not_wait_for_ever(two: dict[str, list[Any]]) -> None:
    error(two["silent"][0][0], "PeerLost", "not passed on by stage 1", within_s=SHORT_S + 5)


def test_a_round_of_a_smaller_batch_is_noticed(two: dict[str, list[Any]]) -> None:
    error(two["fewer"][0][0][0], "RankMismatch", "expects a round of [[2, 1]]", "[1] values of it did not arrive")


def test_a_stage_that_looks_late_holds_nobody_up(five: dict[str, list[Any]]) -> None:
    for found in five["busy"][:-1]:
        assert [one[0] for one in found] == [0, 1, 2, 3], found
    held_up = [found for found in five["late"][:-1] if isinstance(found[-1][0], str)]
    assert held_up, "rounds pass through stages: one that joins late does hold up others"
    for found in held_up:
        error(found[-1], "PeerLost", "not passed on", within_s=SHORT_S + 5)
