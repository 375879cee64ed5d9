# SPDX-License-Identifier: Apache-2.0
"""Acceptance counters: counts per position, windows and their one warning, merging, impossible counts."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from pcp_passes.errors import ConfigError
from pcp_passes.speculative import AcceptanceCounters, StepRecord


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_counts_per_position_and_length() -> None:
    counters = AcceptanceCounters(3, keep_steps=None)
    counters.record([3, 0, 2, 1], [3, 0, 0, 1])
    counters.record(torch.tensor([3, 3]), torch.tensor([1, 2]))
    counters.record([0, 0], [0, 0])
    assert counters.summary() == {
        "rounds": 5,
        "drafted": 12,
        "accepted": 7,
        "drafted_per_position": [5, 4, 3],
        "accepted_per_position": [4, 2, 1],
        "rate_per_position": [4 / 5, 2 / 4, 1 / 3],
        "acceptance_rate": 7 / 12,
        "acceptance_length": 1 + 7 / 5,
    }
    assert list(counters.records) == [StepRecord((3, 2, 1), (3, 0, 1)), StepRecord((3, 3), (1, 2))]
    assert json.loads(json.dumps(counters.summary())) == counters.summary()


def test_nothing_drafted_has_no_ratios() -> None:
    summary = AcceptanceCounters(2).summary()
    assert summary["acceptance_rate"] is summary["acceptance_length"] is None
    assert summary["rate_per_position"] == [None, None]
    assert AcceptanceCounters(0).summary()["drafted_per_position"] == []


def test_records_are_bounded() -> None:
    none, two = AcceptanceCounters(1), AcceptanceCounters(1, keep_steps=2)
    for accepted in (0, 1, 1):
        none.record([1], [accepted])
        two.record([1], [accepted])
    assert not none.records and [record.accepted for record in two.records] == [(1,), (1,)]


def test_one_warning_per_window_under_the_floor(caplog: pytest.LogCaptureFixture) -> None:
    counters = AcceptanceCounters(2, floor=0.5, window=4)
    for _ in range(3):
        counters.record([2], [0])
    assert warnings(caplog) == []
    counters.record([2], [1])
    assert len(warnings(caplog)) == 1
    assert "12.5 % over the last 4 rounds, under the floor of 50.0 %" in warnings(caplog)[0]
    for _ in range(3):
        counters.record([2], [0])
    assert len(warnings(caplog)) == 1
    counters.record([2, 2], [0, 0])
    assert len(warnings(caplog)) == 2 and "over the last 5 rounds" in warnings(caplog)[1]


def test_a_window_is_judged_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    counters = AcceptanceCounters(1, floor=0.5, window=10)
    for _ in range(5):
        counters.record([1] * 10, [1] * 10)
    assert warnings(caplog) == []
    counters.record([1] * 10, [1] * 4 + [0] * 6)
    assert len(warnings(caplog)) == 1, "the average of all windows is over the floor"


@pytest.mark.parametrize("floor", [None, 0.5])
def test_no_warning_without_a_floor_nor_at_it(floor: float | None, caplog: pytest.LogCaptureFixture) -> None:
    counters = AcceptanceCounters(1, floor=floor, window=2)
    counters.record([1, 1], [0, floor is not None])
    assert warnings(caplog) == []


def test_merge_adds_and_opens_a_fresh_window(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (AcceptanceCounters(2, floor=0.9, window=4, keep_steps=None) for _ in range(2))
    first.record([2, 1], [2, 0])
    second.record([2], [1])
    both = first.merge(second)
    assert (both.rounds, both.drafted, both.accepted) == (3, [3, 2], [2, 1])
    assert list(both.records) == [*first.records, *second.records]
    assert (first.rounds, second.rounds) == (2, 1)
    both.record([2] * 3, [2] * 3)
    assert warnings(caplog) == []
    both.record([2], [0])
    assert len(warnings(caplog)) == 1 and "75.0 % over the last 4 rounds" in warnings(caplog)[0]
    with pytest.raises(ConfigError, match="2 and 3 draft steps"):
        first.merge(AcceptanceCounters(3))


@pytest.mark.parametrize(
    "drafted, accepted, message",
    [
        ([1, 2], [2, 2], "request 0: 1 drafted, 2 accepted"),
        ([1], [-1], "request 0: 1 drafted, -1 accepted"),
        ([4], [0], "request 0: 4 drafted of at most 3"),
        ([1, 1], [1], "2 requests drafted and 1 accepted"),
    ],
)
def test_impossible_counts_are_refused_before_any_is_counted(
    drafted: list[int], accepted: list[int], message: str
) -> None:
    counters = AcceptanceCounters(3)
    with pytest.raises(ConfigError, match=message):
        counters.record(drafted, accepted)
    assert counters.rounds == 0


@pytest.mark.parametrize("options", [{"steps": -1}, {"window": 0}, {"keep_steps": -1}, {"floor": 1.5}, {"floor": -0.1}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"found"):
        AcceptanceCounters(**{"steps": 2, **options})  # type: ignore[arg-type]
