# SPDX-License-Identifier: Apache-2.0
"""Row counts of replicas: rank-local and padded, the same on all PCP ranks, in flattened expert order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pcp_passes.engine import executor as executor_module
from pcp_passes.engine.dummies import dummy_batch, dummy_decodes
from pcp_passes.engine.lockstep import NOTHING, Agreement, Proposal
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.mesh.peer_rows import PeerRows, flattened_sizes, rows_of_call
from tests.engine_schedules import make_schedule
from tests.mesh_programs import VOCAB, mesh_program
from tests.mesh_schedules import MESHES, check_mesh, run_fleet


def test_a_call_has_rows_of_tokens_or_of_requests() -> None:
    peers = PeerRows((6, 3), (2, 1), 0)
    assert rows_of_call(peers, 0) == (6, 3)
    assert rows_of_call(peers, 1) == (2, 1) and rows_of_call(peers, 4) == (8, 4)
    with pytest.raises(ConfigError, match="found -1"):
        rows_of_call(peers, -1)


@pytest.mark.parametrize(
    ("tokens", "requests", "replica", "text"),
    [((1,), (1, 1), 0, "1 token counts and 2"), ((1, 1), (1, 1), 2, "replica 2"), ((1, 0), (1, 1), 0, "dummy step")],
)
def test_counts_that_are_none_are_refused(tokens: Any, requests: Any, replica: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PeerRows(tokens, requests, replica)


def test_sizes_come_in_flattened_expert_order_and_repeat_over_pcp() -> None:
    assert flattened_sizes((5, 2), 1) == (5, 2)
    assert flattened_sizes((5, 2), 2) == (5, 5, 2, 2)
    assert flattened_sizes((5, 2), 2, 2) == (5, 5, 5, 5, 2, 2, 2, 2)
    assert flattened_sizes((5, 2), 2, 2, sequence_parallel=True) == (3, 3, 3, 3, 1, 1, 1, 1)
    with pytest.raises(ConfigError, match="found 0 and 1"):
        flattened_sizes((5, 2), 0)


def test_a_proposal_travels_as_four_integers() -> None:
    for one in (NOTHING, Proposal(7, 3, True, True), replace(NOTHING, unfinished=True)):
        assert Proposal.from_ints(one.to_ints()) == one


def test_an_idle_replica_brings_one_row_and_decides_nothing() -> None:
    agreed = Agreement((Proposal(6, 2, True, True), NOTHING))
    assert agreed.runs and agreed.sharded and agreed.unfinished
    assert agreed.peers(1) == PeerRows((6, 1), (2, 1), 1)
    assert not Agreement((NOTHING, NOTHING)).runs
    with pytest.raises(ConfigError, match="replica 1 proposed"):
        agreed.require_matches(1, Proposal(6, 2, True, True))


def executor(pcp: int, **given: Any) -> SimulatedExecutor:
    options = EngineOptions(pcp=pcp, dp=2, expert_parallel=True, block_size=4, max_len=64, budget=64, **given)
    return SimulatedExecutor(mesh_program(pcp, 2), options)


@pytest.mark.parametrize(
    ("batch", "pcp", "wanted"),
    [
        (dummy_batch(11, 2), 1, Proposal(11, 2, False, True)),
        (dummy_batch(11, 1), 2, Proposal(6, 1, True, True)),  # 6 and 5 rows: padded, and not the 11 of all ranks
        (dummy_decodes(3, 2), 2, Proposal(9, 3, False, True)),
    ],
)
def test_a_proposal_holds_rank_local_padded_rows(batch: ScheduledBatch, pcp: int, wanted: Proposal) -> None:
    assert executor(pcp).propose(batch) == wanted


def test_every_pcp_rank_of_a_replica_is_told_the_same() -> None:
    made, batch = executor(2), dummy_decodes(3, 2)
    agreed = Agreement((made.propose(batch), Proposal(4, 1, True, True)))
    made.join(batch, agreed)
    assert [rank.memory.caches.peers for rank in made.ranks] == [PeerRows((9, 4), (3, 1), 0)] * 2


def test_counts_of_the_global_batch_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: tell the others the tokens of the batch, as they are before PCP deals them out."""
    schedule = make_schedule(1, max_requests=3, vocab=VOCAB, longest=30, steps=2)
    run_fleet(schedule, MESHES["dp2-pcp2-ep4"], mesh_program)
    original = executor_module._Loaded.proposal

    def of_all_ranks(loaded: Any) -> Proposal:
        return replace(original.fget(loaded), tokens=loaded.layout.num_tokens)  # type: ignore[misc]

    monkeypatch.setattr(executor_module._Loaded, "proposal", property(of_all_ranks))
    with pytest.raises(PcpError, match="rows"):
        run_fleet(schedule, MESHES["dp2-pcp2-ep4"], mesh_program)


def test_counts_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: every replica takes the others' counts for its own."""

    def reversed_rows(self: Agreement, replica: int) -> PeerRows:
        tokens = tuple(max(1, one.tokens) for one in self.proposals)[::-1]
        return PeerRows(tokens, tuple(max(1, one.requests) for one in self.proposals)[::-1], replica)

    monkeypatch.setattr(Agreement, "peers", reversed_rows)
    with pytest.raises(AssertionError, match="rows"):
        check_mesh("dp2", [1], mesh_program)
