# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages in the engine: several steps in flight, and state that reaches earlier stages by rounds alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pcp_passes.distributed.stages.round_state import Round
from pcp_passes.engine import scheduler as scheduler_module
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.engine.scheduler import Scheduler
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.engine.stage_rounds import StageRounds
from pcp_passes.engine.state import DeviceState
from pcp_passes.errors import ConfigError, PcpError, RankMismatch
from tests.engine_double import VOCAB, ArithmeticExecutor, reference
from tests.mesh_programs import mesh_program
from tests.mesh_schedules import check_mesh

OPTIONS = EngineOptions(block_size=4, max_len=48, max_requests=3, budget=32, num_blocks=64)


def options_of(**given: Any) -> EngineOptions:
    return replace(OPTIONS, **given)


def run_deep(seed: int, depth: int) -> dict[str, int]:
    """A random schedule over the arithmetic model with ``depth`` steps in flight; what happened, outputs checked."""
    rng = random.Random(seed)
    steps = rng.randint(0, 5)
    options = EngineOptions(
        block_size=4, max_len=80, max_requests=rng.randint(1, 4), budget=rng.choice([8, 16, 64]), num_blocks=1000,
        long_prefill_threshold=rng.choice([0, 8]), prefix_cache=rng.random() < 0.8,
    )  # fmt: skip
    options = replace(options, num_blocks=options.blocks_per_request(steps) + rng.randint(0, 12))
    engine = Engine(ArithmeticExecutor(options, steps), depth=depth)
    base = [rng.randrange(VOCAB) for _ in range(80)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    outputs, left, deepest = {}, 6, 0
    while left or engine.unfinished:
        if left and rng.random() < 0.5:
            left -= 1
            length = rng.choice([1, 5, rng.randint(1, 50), 60])
            prompt = (base[: rng.randint(0, 50)] + [rng.randrange(VOCAB) for _ in range(80)])[:length]
            eos = (rng.randrange(VOCAB),) if rng.random() < 0.3 else ()
            params = SamplingParams(max_tokens=min(80 - length, rng.randint(1, 30)), eos=eos)
            asked[engine.add_request(prompt, params)] = (prompt, params)
        if engine.scheduler.requests and rng.random() < 0.05:
            name = rng.choice(sorted(engine.scheduler.requests))
            outputs[name] = engine.abort(name)
        outputs.update((output.id, output) for output in engine.step())
        deepest = max(deepest, len(engine._in_flight))
    for name, (prompt, params) in asked.items():
        wanted, found = reference(prompt, params.max_tokens, params.eos), list(outputs[name].tokens)
        assert found == (wanted[: len(found)] if outputs[name].finish_reason == "abort" else wanted), name
    assert engine.scheduler.pool.num_free == options.num_blocks, "every block came back"
    return {"deepest": deepest, "preemptions": engine.stats.preemptions, "cached": engine.stats.cached_tokens}


def run_many(depth: int) -> list[dict[str, int]]:
    return [run_deep(seed, depth) for seed in range(12)]


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_outputs_do_not_depend_on_the_steps_in_flight(depth: int) -> None:
    ran = run_many(depth)
    assert max(one["deepest"] for one in ran) == depth, "as many as asked for, and never more"
    assert sum(one["preemptions"] for one in ran) > 3 and sum(one["cached"] for one in ran) > 0


def test_results_are_collected_as_many_steps_late_as_there_are_stages() -> None:
    engine = Engine(SimulatedExecutor(mesh_program(1, 2), options_of(pp=3)))
    for name in "abc":
        engine.add_request([1] * 30, SamplingParams(max_tokens=4), name)
    seen = [(len(engine._in_flight), engine._in_flight[0].batch.step) for _ in range(6) if engine.step() == []]
    assert seen == [(1, 1), (2, 1), (3, 1), (3, 2), (3, 3), (3, 4)]


def furthest(depth: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks that the longest possible request asks for at most, as the host sees it."""
    options = replace(OPTIONS, max_requests=1, num_blocks=200)
    asked: list[int] = []
    original = Scheduler._blocks_for

    def noted(self: Scheduler, end: int) -> int:
        asked.append(original(self, end))
        return asked[-1]

    monkeypatch.setattr(Scheduler, "_blocks_for", noted)
    for prompt in range(1, options.max_len, 5):
        engine = Engine(ArithmeticExecutor(options, steps), depth=depth)
        engine.add_request([3] * prompt, SamplingParams(max_tokens=options.max_len - prompt), "a")
        engine.run()
    return max(asked)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_request_never_needs_more_blocks_than_its_row_holds(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor runs two verifications ahead, whatever the depth."""
    assert furthest(depth, 5, monkeypatch) <= OPTIONS.blocks_per_request(5)


def test_without_the_bound_on_pending_steps_a_row_would_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MOST_PENDING", 5)
    with pytest.raises((AssertionError, ConfigError, ValueError, RuntimeError, IndexError)):
        assert furthest(5, 5, monkeypatch) <= OPTIONS.blocks_per_request(5)


def test_readmitting_a_request_with_results_in_flight_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a preempted request is prefilled again before a step in flight gave it its token."""
    original = Scheduler._admit

    def at_once(self: Scheduler, request: Any, budget: int) -> int:
        held, request.pending = request.pending, 0
        try:
            return original(self, request, budget)
        finally:
            request.pending = held

    monkeypatch.setattr(Scheduler, "_admit", at_once)
    with pytest.raises(AssertionError):
        run_many(3)


class FirstStages(SimulatedExecutor):
    """As on a process of the first stage: nothing but the round state tells what was sampled."""

    def execute(self, batch: ScheduledBatch) -> Any:
        return None, super().execute(batch)[1]


def test_a_process_without_the_last_stage_has_tokens_and_no_log_probabilities() -> None:
    engines = [Engine(kind(mesh_program(1, 2), options_of(pp=2))) for kind in (SimulatedExecutor, FirstStages)]
    for engine in engines:
        for length in (3, 20):
            engine.add_request([4] * length, SamplingParams(max_tokens=9), f"of-{length}")
    last, first = (engine.run() for engine in engines)
    assert {name: (one.tokens, one.accepted) for name, one in first.items()} == {
        name: (one.tokens, one.accepted) for name, one in last.items()
    }
    assert all(one.logprobs == () for one in first.values()) and all(len(one.logprobs) == 9 for one in last.values())


def test_a_dummy_step_runs_every_stage_and_ships_no_round() -> None:
    executor = SimulatedExecutor(mesh_program(2, 2), options_of(pp=3, pcp=2))
    engine = Engine(executor)
    engine.add_request([5] * 20, SamplingParams(max_tokens=8), "a")
    engine.step()
    waiting = [rank.rounds.waiting for rank in executor.ranks if rank.rounds is not None]
    before = [{name: held.clone() for name, held in rank.memory.caches.tensors.items()} for rank in executor.ranks]
    outputs = engine.profile(11, 3)
    assert outputs is not None and outputs.sampled.shape == (3, 3)
    assert [rank.rounds.waiting for rank in executor.ranks if rank.rounds is not None] == waiting == [(1,)] * 4
    for rank, held in zip(executor.ranks, before, strict=True):
        assert all(torch.equal(rank.memory.caches.tensors[name], rows) for name, rows in held.items())
    alone = Engine(SimulatedExecutor(mesh_program(1, 2), OPTIONS))
    alone.add_request([5] * 20, SamplingParams(max_tokens=8), "a")
    assert engine.run()["a"].tokens == alone.run()["a"].tokens


def test_stages_hold_caches_of_their_own_layers() -> None:
    executor = SimulatedExecutor(mesh_program(1, 2), options_of(pp=2))
    engine = Engine(executor)
    engine.add_request([5] * 9, SamplingParams(max_tokens=3), "a")
    engine.run()
    held = [sorted({name.rpartition(".")[0] for name in rank.memory.caches.tensors}) for rank in executor.ranks]
    assert held == [["target.0", "target.1", "target.2"], ["drafter.0", "target.3", "target.4"]]


def test_a_step_waits_only_for_the_rounds_that_it_needs() -> None:
    """Two requests of one step each in turn: the other's round is still to come when a step runs."""
    executor = SimulatedExecutor(mesh_program(1, 2), options_of(pp=2, budget=3))
    engine, waiting = Engine(executor), []
    for name in "ab":
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=6), name)
    original = executor._run_step

    def noted(step: Any) -> Any:
        assert executor.ranks[0].rounds is not None
        found = original(step)
        waiting.append(executor.ranks[0].rounds.waiting[:-1])
        return found

    executor._run_step = noted  # type: ignore[method-assign]
    engine.run()
    assert any(waiting), "never did a round of another request outlast a step"


def test_results_are_taken_once_and_in_order() -> None:
    executor = SimulatedExecutor(mesh_program(1, 2), options_of(pp=2))
    engine = Engine(executor)
    engine.add_request([5] * 9, SamplingParams(max_tokens=3), "a")
    engine.step()
    batch = engine._in_flight[0].batch
    executor.settle(batch)
    with pytest.raises(PcpError, match="step 1 has no round to come"):
        executor.settle(batch)


def no_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageRounds, "catch_up", lambda self, batch: None)


def no_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "current", lambda self, now: torch.ones(len(self.stash.rows), dtype=torch.bool))


def no_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimistic tokens stay."""
    monkeypatch.setattr(Round, "advance", property(lambda self: torch.tensor(self.stash.lengths)))


def no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DeviceState.apply_round

    def without(self: DeviceState, batch: Any, current: Any, advance: Any, token: Any, drafts: Any) -> None:
        original(self, batch, current, advance, token, None)

    monkeypatch.setattr(DeviceState, "apply_round", without)


def prefills_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the middle of a prefill do not advance."""
    monkeypatch.setattr(DeviceState, "advance_prefills", lambda self, batch: None)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_catching_up, no_generations, no_trimming, no_drafts, prefills_wait,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_stage_that_applies_rounds_wrongly_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # a position may lie past the request's blocks
        check_mesh("pp3", range(12), mesh_program)


@pytest.mark.parametrize("mesh", ["pp3", "pp2-pcp2"])
def test_schedules_on_stages_equal_one_rank(mesh: str) -> None:
    check_mesh(mesh, [5000], mesh_program)


def test_stages_that_know_other_tokens_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine() -> Engine:
        made = Engine(SimulatedExecutor(mesh_program(1, 2, 3), options_of(pp=3)))
        made.add_request([5] * 9, SamplingParams(max_tokens=3), "a")
        return made

    apart, false = engine(), engine()
    rounds = apart.executor.ranks[1].rounds
    assert rounds is not None
    honest, settle = rounds.sampled_of, false.executor.settle
    monkeypatch.setattr(rounds, "sampled_of", lambda step: honest(step) + 1)
    with pytest.raises(RankMismatch, match="differs between ranks that did not sample it"):
        apart.run()
    monkeypatch.setattr(false.executor, "settle", lambda batch: settle(batch) + 1)  # type: ignore[operator]
    with pytest.raises(RankMismatch, match="the round state differs from what the last stage sampled"):
        false.run()
