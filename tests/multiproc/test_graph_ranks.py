# SPDX-License-Identifier: Apache-2.0
"""Graphs on real ranks over gloo: what one rank without graphs says, the same buckets, and no rank goes astray."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import engine_schedules as schedules
from tests import steps as small
from tests.multiproc import _graph_ranks
from tests.multiproc._workers import Group

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

RUNS = ((3, "piecewise"), (7, "full_and_piecewise"), (12, "full_decode_only"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("graphs")
    with Group(2, folder, _graph_ranks.trace, runs=RUNS) as group:
        codes = group.exit_codes([0, 1], 140.0)
        assert codes == {0: 0, 1: 0}, "\n".join(group.stderr(rank)[-2000:] for rank in (0, 1))
    return [torch.load(folder / f"trace.{rank}", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("index", range(len(RUNS)), ids=str)
def test_two_ranks_with_graphs_equal_one_without(two: list[dict[str, Any]], index: int) -> None:
    seed, mode = RUNS[index]
    wanted = schedules.run_schedule(schedules.make_schedule(seed, vocab=small.VOCAB), 1, schedules.small_program)
    for rank in (0, 1):
        saved = two[rank]["runs"][index]
        found = schedules.Trace(saved["outputs"], saved["caches"], {}, saved["summary"])
        difference = schedules.compare(found, wanted)
        assert not difference.first, f"rank {rank}: {difference}"
        hits = saved["summary"]["graph_hits"]
        assert hits == two[0]["runs"][index]["summary"]["graph_hits"], "every rank replays the same buckets"
        assert any("sharded piecewise" in name for name in hits) == (mode != "full_decode_only")


def test_the_simulator_replays_what_ranks_replay(two: list[dict[str, Any]]) -> None:
    for index, (seed, mode) in enumerate(RUNS):
        simulated = schedules.run_schedule(_graph_ranks.schedule(seed, mode), 2, schedules.small_program)
        for name in ("graph_hits", "graph_padding_rows", "steps_without_graph", "bytes"):
            assert simulated.summary[name] == two[0]["runs"][index]["summary"][name], name


def test_a_rank_that_chooses_another_bucket_stops_by_name(two: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert two[rank]["told"].startswith("RankMismatch: step 1: pcp rank 1 schedules another batch"), two[rank]
        assert "chose another graph" in two[rank]["told"]
