# SPDX-License-Identifier: Apache-2.0
"""Whatever is scheduled, every request gets the tokens that follow from its prompt alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from pcp_passes.engine import scheduler as scheduler_module
from pcp_passes.engine.blocks import block_keys
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import RequestOutput
from pcp_passes.engine.scheduler import Scheduler
from pcp_passes.errors import PcpError
from tests.engine_double import VOCAB, ArithmeticExecutor, reference


@dataclass
class Ran:
    engine: Engine
    outputs: dict[str, RequestOutput]


def run_random(seed: int) -> Ran:
    """A random schedule with arrivals, aborts, shared prefixes, few blocks; checks every output."""
    rng = random.Random(seed)
    steps = rng.randint(0, 5)
    options = EngineOptions(
        block_size=rng.choice([4, 8, 16]),
        num_blocks=1000,
        max_len=240,
        max_requests=rng.randint(1, 6),
        budget=rng.choice([16, 32, 64, 256]),
        long_prefill_threshold=rng.choice([0, 8, 24]),
        prefix_cache=rng.random() < 0.8,
    )
    options = replace(options, num_blocks=options.blocks_per_request(steps) + rng.randint(0, 20))
    engine = Engine(ArithmeticExecutor(options, steps))
    base = [rng.randrange(VOCAB) for _ in range(200)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    outputs: dict[str, RequestOutput] = {}
    left = rng.randint(3, 10)
    while left or engine.unfinished:
        if left and rng.random() < 0.4:
            left -= 1
            length, shared = rng.randint(1, 200), rng.randint(0, 200)
            prompt = (base[:shared] + [rng.randrange(VOCAB) for _ in range(200)])[:length]
            eos = (rng.randrange(VOCAB),) if rng.random() < 0.3 else ()
            params = SamplingParams(max_tokens=rng.randint(1, 40), eos=eos)
            asked[engine.add_request(prompt, params)] = (prompt, params)
        if engine.scheduler.requests and rng.random() < 0.03:
            name = rng.choice(sorted(engine.scheduler.requests))
            outputs[name] = engine.abort(name)
        outputs.update((output.id, output) for output in engine.step())
    for name, (prompt, params) in asked.items():
        wanted = reference(prompt, params.max_tokens, params.eos)
        found = list(outputs[name].tokens)
        assert found == (wanted[: len(found)] if outputs[name].finish_reason == "abort" else wanted), name
    assert engine.scheduler.pool.num_free == options.num_blocks, "every block came back"
    return Ran(engine, outputs)


def run_many(count: int) -> None:
    for seed in range(count):
        run_random(seed)


def test_random_schedules_give_the_reference() -> None:
    preemptions = cached = aborted = trimmed = 0
    for seed in range(40):
        ran = run_random(seed)
        preemptions += ran.engine.stats.preemptions
        cached += ran.engine.stats.cached_tokens
        aborted += sum(output.finish_reason == "abort" for output in ran.outputs.values())
        trimmed += sum(len(set(output.drafted)) > 1 for output in ran.outputs.values())
    assert preemptions > 20 and cached > 1000 and aborted > 3 and trimmed > 20, "the schedules reach these cases"


def test_a_drafter_row_of_another_next_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: keys over a block's own tokens alone share rows that the drafter made from another next token."""

    def short(tokens: list[int], size: int, *, next_token: bool, known: list[bytes] = []) -> Iterator[bytes]:  # noqa: B006
        return block_keys(tokens[: -1 if next_token else None], size, next_token=False, known=known)

    a, b = [1] * 16 + [2, 3], [1] * 16 + [4, 5]
    assert two(a, b).engine.stats.cached_tokens == 8, "the first of two blocks; the second has another successor"
    monkeypatch.setattr(scheduler_module, "block_keys", short)
    with pytest.raises(AssertionError, match="another next token"):
        two(a, b)


def two(a: list[int], b: list[int]) -> Ran:
    """Two requests, one after the other."""
    engine = Engine(ArithmeticExecutor(EngineOptions(block_size=8, num_blocks=20, max_len=64), 2))
    outputs = {}
    for prompt in (a, b):
        engine.add_request(prompt, SamplingParams(max_tokens=6))
        outputs.update(engine.run())
    return Ran(engine, outputs)


def test_results_are_collected_one_step_late_and_the_cursor_runs_ahead() -> None:
    engine = Engine(ArithmeticExecutor(EngineOptions(), 3))
    engine.add_request(list(range(10)), SamplingParams(max_tokens=30), "a")
    request = engine.scheduler.requests["a"]
    assert (engine.step(), request.cursor, request.confirmed, request.output) == ([], 10, 0, [])
    ahead = 0
    while request.status != "finished":
        engine.step()
        if request.status == "running":
            ahead += request.cursor > int(engine.executor.ranks[0].state.computed[request.row])
    assert ahead > 2, "some step was scheduled on a cursor that the device did not confirm"


def test_a_last_chunk_as_short_as_a_verification_is_a_prefill() -> None:
    """Chunks of 8 leave 1..4 tokens, what a verification with 3 drafts has."""
    for tail in (1, 2, 3, 4):
        engine = Engine(ArithmeticExecutor(EngineOptions(budget=8), 3))
        prompt = list(range(16 + tail))
        engine.add_request(prompt, SamplingParams(max_tokens=9), "a")
        batches = []
        schedule = engine.scheduler.schedule
        engine.scheduler.schedule = lambda: batches.append(schedule()) or batches[-1]  # type: ignore[method-assign]  # noqa: B023
        assert list(engine.run()["a"].tokens) == reference(prompt, 9)
        first = [batch.entries[0] for batch in batches[:4]]
        assert [(entry.length, entry.is_prefilling, entry.samples) for entry in first[:3]] == [
            (8, True, False), (8, True, False), (tail, True, True),
        ]  # fmt: skip
        assert not first[3].is_prefilling


def test_a_verification_is_trimmed_to_the_budget_and_to_what_is_left() -> None:
    engine = Engine(ArithmeticExecutor(EngineOptions(budget=6, max_requests=2), 4))
    for name in "ab":
        engine.add_request([1, 2], SamplingParams(max_tokens=12), name)
    outputs = engine.run()
    assert all(list(output.tokens) == reference([1, 2], 12) for output in outputs.values())
    assert max(outputs["a"].drafted) == 4 and 0 in outputs["b"].drafted
    lengths = [step.query_start_loc.diff().tolist() for step in engine.executor.seen]  # type: ignore[attr-defined]
    assert [5, 1] in lengths, "one step verifies different numbers of drafts"


def test_tokens_after_the_end_are_dropped() -> None:
    wanted = reference([3, 1], 40)
    engine = Engine(ArithmeticExecutor(EngineOptions(), 5))
    engine.add_request([3, 1], SamplingParams(max_tokens=40, eos=(wanted[6],)), "a")
    output = engine.run()["a"]
    assert list(output.tokens) == wanted[: wanted.index(wanted[6]) + 1]
    assert output.finish_reason == "eos" and len(output.logprobs) == len(output.tokens)
    assert not engine.unfinished


def test_the_youngest_is_preempted_and_resumes_with_what_it_generated() -> None:
    options = EngineOptions(block_size=4, num_blocks=17, max_len=48, max_requests=2, budget=32, prefix_cache=False)
    engine = Engine(ArithmeticExecutor(options, 2))
    prompts = {"old": list(range(12)), "young": list(range(20, 32))}
    for name, prompt in prompts.items():
        engine.add_request(prompt, SamplingParams(max_tokens=30), name)
    outputs = engine.run()
    assert {name: list(output.tokens) for name, output in outputs.items()} == {
        name: reference(prompt, 30) for name, prompt in prompts.items()
    }
    assert outputs["old"].preemptions == 0 and outputs["young"].preemptions > 0


def test_results_of_before_a_preemption_do_not_move_the_cursor_of_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a request that keeps its epoch when it is preempted takes an old result for a new one."""
    honest = Scheduler._preempt

    def forgetful(self: Scheduler, request: object) -> None:
        honest(self, request)  # type: ignore[arg-type]
        request.epoch -= 1  # type: ignore[attr-defined]

    monkeypatch.setattr(Scheduler, "_preempt", forgetful)
    with pytest.raises((AssertionError, PcpError, IndexError, RuntimeError, ValueError)):
        run_many(40)


def test_without_blocks_for_the_drafts_to_come_the_double_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: allocate for the target's rows alone."""
    monkeypatch.setattr(Scheduler, "_blocks_for", lambda self, end: -(-end // self.options.block_size))
    with pytest.raises(AssertionError, match="a block that the request does not have"):
        run_many(10)
