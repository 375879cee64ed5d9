# SPDX-License-Identifier: Apache-2.0
"""Replicas: a fleet in one process, lockstep where they share experts, and idle replicas that leave no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pcp_passes.engine.dummies import dummy_batch, dummy_decodes
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.fleet import Fleet
from pcp_passes.engine.lockstep import Agreement, Proposal, replicated_plan
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.programs import prepared
from pcp_passes.engine.request import RequestOutput
from pcp_passes.engine.simulated import SimulatedExecutor, execute_together
from pcp_passes.errors import ConfigError, PcpError
from tests import steps as small
from tests.engine_double import ArithmeticExecutor, reference
from tests.mesh_programs import mesh_program
from tests.mesh_schedules import check_mesh

OPTIONS = EngineOptions(block_size=4, max_len=48, max_requests=3, budget=32, num_blocks=64)
LOCKSTEP = replace(OPTIONS, dp=2, expert_parallel=True)


def fleet_of(options: EngineOptions, steps: int = 2) -> Fleet:
    program = mesh_program(options.pcp, steps)
    return Fleet([SimulatedExecutor(program, options, replica=place) for place in range(options.dp)])


def alone(prompt: Sequence[int], params: SamplingParams, options: EngineOptions = OPTIONS) -> RequestOutput:
    engine = Engine(SimulatedExecutor(mesh_program(1, 2), options))
    name = engine.add_request(prompt, params)
    return engine.run()[name]


def test_a_request_goes_to_the_replica_with_the_fewest() -> None:
    fleet = fleet_of(replace(OPTIONS, dp=2))
    names = [fleet.add_request([1, 2], SamplingParams(max_tokens=2)) for _ in range(3)]
    assert [fleet.replica_of(name) for name in names] == [0, 1, 0]
    assert fleet.add_request([3], request_id="x", replica=0) == "x" and fleet.replica_of("x") == 0
    with pytest.raises(ConfigError, match="'x' is in use"):
        fleet.add_request([3], request_id="x")
    for wrong in (2, -1, "1", 1.0, True):
        with pytest.raises(ConfigError, match=f"no replica {wrong!r}; there are 2, from 0: give 0 to 1, or leave"):
            fleet.add_request([3], replica=wrong)  # type: ignore[arg-type]
    assert fleet.abort("x").finish_reason == "abort"
    with pytest.raises(ConfigError, match="no unfinished request 'x'"):
        fleet.abort("x")
    assert sorted(fleet.run()) == names and not fleet.unfinished
    assert {key: one["steps"] > 0 for key, one in fleet.summary().items()} == {"replica 0": True, "replica 1": True}


def test_a_fleet_needs_one_executor_per_replica() -> None:
    program = mesh_program(1, 2)
    one = SimulatedExecutor(program, LOCKSTEP)
    with pytest.raises(ConfigError, match=r"replicas 0, 1 in this order; found \[0\]"):
        Fleet([one])
    with pytest.raises(ConfigError, match=r"found \[0, 0\]\. Make them with"):
        Fleet([one, one])
    with pytest.raises(ConfigError, match="have different EngineOptions"):
        Fleet([one, SimulatedExecutor(program, replace(LOCKSTEP, budget=16), replica=1)])
    with pytest.raises(ConfigError, match="found none"):
        Fleet([])
    two = [SimulatedExecutor(program, replace(OPTIONS, dp=2), replica=place) for place in range(2)]
    for depth in (0, -1, True):
        with pytest.raises(ConfigError, match=f"depth must be an integer of at least 1.*found {depth}"):
            Fleet(two, depth=depth)
    for place in (2, -1, "0"):
        with pytest.raises(ConfigError, match=f"replica must be 0 to 1, a place of dp=2; found {place!r}"):
            SimulatedExecutor(program, LOCKSTEP, replica=place)  # type: ignore[arg-type]


def test_replicas_that_share_experts_run_one_program() -> None:
    """A lockstep step runs the stages of the first for all."""
    with pytest.raises(ConfigError, match="the same StepProgram object"):
        Fleet([SimulatedExecutor(mesh_program(1, 0, 2 + r), LOCKSTEP, replica=r) for r in range(2)])
    Fleet([SimulatedExecutor(mesh_program(1, 0, 2 + r), replace(OPTIONS, dp=2), replica=r) for r in range(2)])


def test_names_are_given_past_those_that_callers_chose() -> None:
    fleet, engine = fleet_of(replace(OPTIONS, dp=2)), Engine(ArithmeticExecutor(OPTIONS, 0))
    for one in (fleet, engine):
        for taken in ("request-1", "request-2"):
            one.add_request([4, 5], request_id=taken)
        assert [one.add_request([4, 5]) for _ in range(2)] == ["request-3", "request-4"]


def test_a_fleet_knows_what_its_engines_did_alone() -> None:
    fleet, few = fleet_of(replace(OPTIONS, dp=2)), SamplingParams(max_tokens=2)
    fleet.add_request([1, 2], few, "x", replica=1)
    assert list(fleet.engines[1].run()) == ["x"]
    assert fleet.add_request([1, 2], few, "x", replica=0) == "x", "free again"
    fleet.engines[1].add_request([1, 2], few, "y")
    assert fleet.replica_of("y") == 1 and sorted(fleet.run()) == ["x", "y"]
    fleet.close()
    with pytest.raises(ConfigError, match="closed and takes no more requests"):
        fleet.add_request([1, 2])


def test_experts_are_asked_of_a_dense_model() -> None:
    with pytest.raises(ConfigError, match="no routed experts"):
        SimulatedExecutor(small.program(2), replace(OPTIONS, pcp=2, expert_parallel=True))


@pytest.mark.parametrize("pcp", [1, 2])
def test_an_idle_replica_joins_every_step_and_keeps_nothing(pcp: int) -> None:
    fleet = fleet_of(replace(LOCKSTEP, pcp=pcp))
    params = SamplingParams(max_tokens=9)
    name = fleet.add_request([1, 2, 3, 4, 5, 6, 7], params, replica=1)
    found = fleet.run()[name]
    assert found.tokens == alone([1, 2, 3, 4, 5, 6, 7], params).tokens
    idle = fleet.engines[0]
    assert idle.stats.dummy_steps == fleet.engines[1].stats.steps > 3 and idle.stats.steps == 0
    for rank in idle.executor.ranks:
        assert not any(held.any() for held in rank.memory.caches.tensors.values())
        assert not rank.state.computed.any() and not rank.state.drafts.any() and rank.state.draft_logits is None


def test_replicas_near_their_longest_keep_in_step() -> None:
    """One ends at ``max_len`` while the other is in the middle of a long prefill."""
    fleet = fleet_of(replace(LOCKSTEP, pcp=2, budget=8))
    asked = {"end": ([1] * 40, SamplingParams(max_tokens=8), 0), "long": ([2] * 44, SamplingParams(max_tokens=4), 1)}
    for name, (prompt, params, replica) in asked.items():
        fleet.add_request(prompt, params, name, replica=replica)
    found = fleet.run()
    for name, (prompt, params, _) in asked.items():
        assert found[name].tokens == alone(prompt, params).tokens
        assert len(prompt) + len(found[name].tokens) == OPTIONS.max_len


def test_a_stale_plan_is_never_run_for_a_dummy() -> None:
    """What an idle replica was told of its last batch belongs to that batch."""
    made = SimulatedExecutor(mesh_program(2, 2), replace(LOCKSTEP, pcp=2))
    before = dummy_batch(9)
    agreed = Agreement((made.propose(before), Proposal(3, 1, True, True)))
    idle = dummy_decodes(1, 0)
    with pytest.raises(PcpError, match="another batch is loaded"):
        made.join(idle, agreed)
    made.join(before, agreed)
    with pytest.raises(PcpError, match="did not agree on this one"):
        execute_together([made], [idle])


def test_reusing_the_last_plan_for_an_idle_replica_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the dummy takes the place of the batch that is loaded, with its plan."""

    def kept(engine: Engine, agreed: Agreement) -> Any:
        batch, engine._next, engine._agreed = engine._next, None, agreed
        if not agreed.runs:
            return None
        loaded = engine.executor._loaded
        if batch is None and loaded is not None and loaded.plans:
            batch = loaded.batch = dummy_decodes(1, 0)
        elif batch is None:
            batch = dummy_decodes(1, 0)
            engine.executor.load(batch)
        engine.executor.join(batch, agreed)
        return batch

    monkeypatch.setattr(Engine, "join", kept)
    with pytest.raises((AssertionError, PcpError, IndexError, RuntimeError)):
        check_mesh("dp2-pcp2-ep4", range(4), mesh_program)


def test_a_dummy_that_writes_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pcp_passes.engine.executor.without_writes", lambda inputs, block_size: inputs)
    with pytest.raises((AssertionError, PcpError, IndexError)):
        check_mesh("dp2", range(4), mesh_program)


def test_one_replica_that_runs_another_program_is_named() -> None:
    made = [SimulatedExecutor(mesh_program(2, 2), replace(LOCKSTEP, pcp=2), replica=place) for place in range(2)]
    batches = [dummy_batch(9), dummy_decodes(2, 2)]
    proposals = tuple(one.propose(batch) for one, batch in zip(made, batches, strict=True))
    assert [one.sharded for one in proposals] == [True, False]
    for one, batch in zip(made, batches, strict=True):
        one.join(batch, Agreement((proposals[1], proposals[1])))
    with pytest.raises(PcpError, match=r"\[True, False\]"):
        execute_together(made, batches)


def test_a_replicated_layout_has_a_plan_when_another_replica_is_sharded() -> None:
    plan = replicated_plan(dummy_decodes(2, 1), 2, "cpu")
    assert plan.local_rows.tolist() == [0, 1, 2, 3] and plan.restore_index.tolist() == [0, 1, 2, 3]
    assert plan.gather_index.tolist() == [0, 1, 2, 3] * 2
    assert plan.write_mask.tolist() == [True] * 4 + [False] * 4, "rank 0's copy is written, and no other"
    assert plan.row_query_start_loc.tolist() == [0, 2, 4] and plan.row_request.tolist() == [0, 1]
    assert plan.sampled_local.tolist() == [0, 1, 2, 3] and plan.sampled_restore.tolist() == [0, 1, 2, 3]


def test_a_rank_holds_its_share_of_the_experts_of_its_stage() -> None:
    fleet = fleet_of(replace(LOCKSTEP, pcp=2, pp=2))
    layers: dict[int, set[str]] = {0: set(), 1: set()}
    shares: list[tuple[int, int]] = []
    for engine in fleet.engines:
        for rank in engine.executor.ranks:
            held = rank.memory.caches.experts
            layers[rank.stage] |= held.keys()
            shares += {(one.first, len(one.down)) for one in held.values()} if rank.stage == 0 else []
    assert not layers[0] & layers[1] and any("drafter" in name for name in layers[1])
    assert not any("drafter" in name for name in layers[0])
    assert shares == [(0, 2), (2, 2), (4, 2), (6, 0)], "six experts over four ranks, in the order (dp, pcp)"


def test_profiling_is_a_step_of_all_replicas() -> None:
    fleet = fleet_of(replace(LOCKSTEP, pcp=2, pp=2))
    found = fleet.profile(7, 2)
    assert [one is not None and one.sampled.shape for one in found] == [(2, 3)] * 2
    assert not any(held.any() for engine in fleet.engines for rank in engine.executor.ranks
                   for held in rank.memory.caches.tensors.values())  # fmt: skip
    apart = fleet_of(replace(OPTIONS, dp=2))
    assert len(apart.profile(5)) == 2


def test_an_engine_alone_refuses_lockstep_and_loses_nothing() -> None:
    why = "step them through a Fleet, or with GroupExecutors give each engine an exchange"
    with pytest.raises(ConfigError, match=why):
        Engine(SimulatedExecutor(mesh_program(1, 2), LOCKSTEP))
    with pytest.raises(ConfigError, match=why):  # its replicas meet in one process
        Engine(SimulatedExecutor(mesh_program(1, 2), LOCKSTEP), exchange=Meeting(0, [], threading.Barrier(2)))
    fleet, params = fleet_of(LOCKSTEP), SamplingParams(max_tokens=5)
    name = fleet.add_request([1, 2, 3], params, replica=0)
    for refused in (fleet.engines[0].step, lambda: fleet.engines[0].profile(3)):
        with pytest.raises(ConfigError, match=why):
            refused()
    assert fleet.run()[name].tokens == alone([1, 2, 3], params).tokens


class Meeting:
    """An exchange between threads, as one over a process group."""

    def __init__(self, replica: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.replica, self.shared, self.barrier, self.count = replica, shared, barrier, 0

    def exchange(self, mine: Proposal) -> Sequence[Proposal]:
        self.count += 1
        self.shared[self.replica] = mine
        self.barrier.wait(20)
        found = list(self.shared)
        self.barrier.wait(20)
        return found


def run_threads(work: Callable[[Engine, int], Any]) -> tuple[list[Any], list[int]]:
    """Two engines over an arithmetic model that meet in an exchange; their results, and how often each exchanged."""
    shared: list[Any] = [None, None]
    barrier, results = threading.Barrier(2), [None, None]
    meetings = [Meeting(place, shared, barrier) for place in range(2)]

    def one(place: int) -> None:
        executor = ArithmeticExecutor(LOCKSTEP, 2)
        executor.replica = place
        results[place] = work(Engine(executor, exchange=meetings[place]), place)

    threads = [threading.Thread(target=one, args=(place,), daemon=True) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a replica waits for one that left"
    return results, [meeting.count for meeting in meetings]


@pytest.mark.parametrize("busy", [(0,), (1,), (0, 1), ()])
def test_replicas_leave_together_whoever_has_work(busy: tuple[int, ...]) -> None:
    def work(engine: Engine, place: int) -> Any:
        found = []
        for turn in range(2):
            if place in busy:
                engine.add_request([place + 1] * 5, SamplingParams(max_tokens=4 + 6 * place + turn))
            found.append([list(one.tokens) for one in engine.run().values()])
        return found

    results, counts = run_threads(work)
    assert counts[0] == counts[1], "one exchanged more often than the other"
    for place in range(2):
        wanted = [[reference([place + 1] * 5, 4 + 6 * place + turn)] if place in busy else [] for turn in range(2)]
        assert results[place] == wanted


def test_results_of_an_idle_replica_do_not_wait_for_the_others() -> None:
    def work(engine: Engine, place: int) -> int:
        engine.add_request([place + 1] * 5, SamplingParams(max_tokens=(3, 24)[place]))
        last, count = 0, 0
        while engine.unfinished or count == 0:
            count += 1
            last = count if engine.step() else last
        return last

    (short, long), _ = run_threads(work)
    assert short < long - 2


def test_a_profiled_step_over_an_exchange_ends_nothing() -> None:
    """The idle replica must not take the dummies for the end of the other's work."""

    def work(engine: Engine, place: int) -> Any:
        if place:
            engine.add_request([2] * 5, SamplingParams(max_tokens=9))
        found = engine.step()
        engine.profile(3 + place)
        while engine.unfinished:
            found += engine.step()
        return [one.tokens for one in found]

    results, counts = run_threads(work)
    assert counts[0] == counts[1] and results == [[], [tuple(reference([2] * 5, 9))]]


def test_what_is_made_of_a_program_depends_on_the_replicas() -> None:
    program = mesh_program(1, 0, 2)
    two, three = (prepared(program, replace(LOCKSTEP, dp=dp)) for dp in (2, 3))
    assert two.program is not three.program and two.program is prepared(program, LOCKSTEP).program


def test_schedules_on_replicas_equal_one_rank() -> None:
    check_mesh("dp2", [5000], mesh_program)


@pytest.mark.parametrize("options", [replace(OPTIONS, dp=2), LOCKSTEP, replace(LOCKSTEP, pp=2)])
def test_replicas_are_profiled_after_long_requests(options: EngineOptions) -> None:
    fleet = fleet_of(options)
    for replica in range(2):
        fleet.add_request([1] * 40, SamplingParams(max_tokens=8), replica=replica)
    for _ in range(3):
        fleet.step()
    fleet.profile(32)
    fleet.run()
    assert len(fleet.profile(32)) == 2


def test_replicas_numbered_otherwise_than_they_exchange_are_named() -> None:
    class Crossed:
        replica = 0

        def exchange(self, mine: Proposal) -> Sequence[Proposal]:
            return replace(mine, tokens=mine.tokens + 1), mine

    engine = Engine(ArithmeticExecutor(LOCKSTEP, 2), exchange=Crossed())
    engine.add_request([1, 2])
    with pytest.raises(ConfigError, match="order the exchange by the dp axis"):
        engine.step()
