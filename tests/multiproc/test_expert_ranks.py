# SPDX-License-Identifier: Apache-2.0
"""Four real processes dispatch rows to experts over gloo, and get to the bit what the simulator gives."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from pcp_passes.collectives import CollectiveLog
from tests.multiproc import _expert_ranks

pytestmark = pytest.mark.multiproc
RANKS = 4


def test_ranks_equal_the_simulator_and_experts_at_hand(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload([_expert_ranks.__name__])
    start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
    start(_expert_ranks.run, args=(RANKS, str(tmp_path)), nprocs=RANKS, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(RANKS)]
    for name in _expert_ranks.CASES:
        given = _expert_ranks.world(name)
        logs: list[CollectiveLog] = []
        simulated = given.run(logs=logs)
        found = [rank[name]["out"] for rank in ranks]
        assert given.error(found) < 1e-12
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, simulated, strict=True)), name
        for rank in range(RANKS):
            assert ranks[rank][name]["log"] == [str(entry) for entry in logs[rank].entries]
            assert ranks[rank][name]["bytes"] == logs[rank].bytes
        if given.replicated:
            assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
        elif len(found[0]) == len(found[1]):
            assert given.error([found[1], found[0], *found[2:]]) > 1e-2, "rows of another rank are seen"
