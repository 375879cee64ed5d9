# SPDX-License-Identifier: Apache-2.0
"""What ``inspect_stages`` counts, against the collectives of a step that runs on DP2 x PP2 x PCP2 with experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.expert_shards import shard_experts
from pcp_passes.inspection.stages import StageLine, stage_line
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.peer_rows import PeerRows
from pcp_passes.paged import PagedCaches
from pcp_passes.step import RankState
from pcp_passes.step.stages import split_program
from tests import steps
from tests.mesh_programs import mesh_program

pytestmark = pytest.mark.unit
MESH = Mesh(dp=2, pp=2, pcp=2)
DRAFTS = 2


def _ran() -> tuple[list[StageLine], list[list[CollectiveLog]], int, int]:
    """A step with prefills on both replicas, which have the same batch: lines, logs by stage and rank, M and R."""
    whole = mesh_program(MESH.pcp, DRAFTS)
    program = whole.dispatching(MESH.dp)
    stages = split_program(program, MESH.pp)
    host = steps.Host(program, steps.requests())
    inputs, layout = host.batch(steps.MIXED[0])
    plans = host.plans(inputs, layout)
    assert plans is not None
    rows, requests = int(plans[0].local_rows.shape[0]), int(inputs.requests.shape[0])
    groups = {name: [[0, 1], [2, 3]] if name == "pcp" else [[0, 2], [1, 3]] for name in ("pcp", "dp")}
    wires: Any = None
    logs: list[list[CollectiveLog]] = []
    for stage in stages:
        states = [_state(host.states[0].caches, whole, rank, rows, requests) for rank in range(MESH.ep)]
        own: list[CollectiveLog] = []
        wires = stage.simulate(states, [inputs] * MESH.ep, plans * MESH.dp, wires, groups=groups, logs=own)
        logs.append(own)
    return [stage_line(stage, stage.index, stage.index + 1, MESH) for stage in stages], logs, rows, requests


def _state(like: PagedCaches, program: Any, rank: int, rows: int, requests: int) -> RankState:
    caches = PagedCaches(like.num_blocks, like.block_size, like.dtype)
    caches.experts = shard_experts(program.target, rank, MESH.ep) | shard_experts(program.drafter.model, rank, MESH.ep)
    caches.peers = PeerRows((rows,) * MESH.dp, (requests,) * MESH.dp, rank // MESH.pcp)
    return RankState(caches)


def test_a_step_sends_what_was_counted() -> None:
    lines, logs, rows, requests = _ran()
    assert rows != requests, "another number of rows would not show"
    for line, ranks in zip(lines, logs, strict=True):
        bodies = [one for one in line.exchanges["sharded"] if one.call]
        said = _sent(
            (one.group, one.op, one.times, one.bytes_per_row * _rows(one.call, rows, requests)) for one in bodies
        )
        of_step = sum(one.times for one in line.exchanges["sharded"] if not one.call)
        for log in ranks:
            ran = _sent((e.axis, e.op.removeprefix("pcp::"), 1, e.bytes) for e in log.entries)
            assert not said - ran, "said, and not sent"
            assert (ran - said).total() == of_step
        wrong = _sent((one.group, one.op, one.times, one.bytes_per_row * (rows + 1)) for one in bodies)
        assert wrong - _sent((e.axis, e.op.removeprefix("pcp::"), 1, e.bytes) for e in ranks[0].entries)
    assert {one.group for one in lines[0].exchanges["sharded"]} == {"pcp", "dp"}
    assert [len(line.restores["sharded"]) for line in lines] == [0, 2]
    assert any(one.call == "drafter.replicated" for one in lines[1].exchanges["sharded"])


def _rows(call: str, rows: int, requests: int) -> int:
    return requests if call == "drafter.replicated" else rows


def _sent(calls: Any) -> Counter[tuple[str, str, int]]:
    """How often each (group, op, bytes) was sent."""
    found: Counter[tuple[str, str, int]] = Counter()
    for group, op, times, size in calls:
        found[group, op, size] += times
    return found
