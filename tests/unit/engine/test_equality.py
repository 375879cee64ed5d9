# SPDX-License-Identifier: Apache-2.0
"""The engine on simulated ranks equals the engine on one, and that one equals transformers' own generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pcp_passes.engine.bodies import keeping_double
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import RequestOutput
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import RankMismatch
from pcp_passes.step import StepProgram, ops
from tests import engine_schedules as schedules
from tests import steps as small
from tests.engine_schedules import compare, glm_program, make_schedule, run_schedule, small_program

PROMPTS = (
    b"The for statement is used to iterate over the elements of a sequence (such as a string, tuple or list).",
    b"Return the number of items",
    b"import",
)


def test_random_schedules_of_small_models() -> None:
    totals: dict[str, int] = {}
    for seed in range(10):
        schedule = make_schedule(seed, vocab=small.VOCAB)
        wanted = run_schedule(schedule, 1, small_program)
        for pcp in (2, 4) if seed % 4 else (3, 8):
            found = compare(run_schedule(schedule, pcp, small_program), wanted)
            assert not found.first, (seed, pcp, found)
        for name, count in wanted.counts.items():
            totals[name] = totals.get(name, 0) + count
    hard = {name: totals[name] for name in ("preemptions", "aborts", "cached_tokens", "accepted")}
    assert all(hard.values()) and totals["accepted"] < totals["drafted"], f"the schedules reach the hard cases: {hard}"


@pytest.mark.parametrize("seed", [4])
def test_random_schedules_of_the_shipped_model(seed: int) -> None:
    schedule = make_schedule(seed)
    wanted = run_schedule(schedule, 1)
    assert wanted.counts["accepted"] > 10
    for pcp in (2, 4):
        found = compare(run_schedule(schedule, pcp), wanted)
        assert not found.first, found


def generate(pcp: int, steps: int, **options: object) -> dict[str, RequestOutput]:
    sizes = EngineOptions(pcp=pcp, max_len=160, num_blocks=64, budget=48, **options)  # type: ignore[arg-type]
    engine = Engine(SimulatedExecutor(glm_program(pcp, steps), sizes))
    for index, prompt in enumerate(PROMPTS):
        engine.add_request([schedules.BOS, *prompt], SamplingParams(max_tokens=24), str(index))
    return engine.run()


def narrow(pcp: int, cache_dtype: str) -> tuple[dict[str, RequestOutput], dict[str, torch.Tensor]]:
    sizes = EngineOptions(pcp=pcp, max_len=160, num_blocks=64, budget=48, cache_dtype=cache_dtype)
    executor = SimulatedExecutor(glm_program(pcp, 3), sizes)
    engine = Engine(executor)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request([schedules.BOS, *prompt], SamplingParams(max_tokens=12), str(index))
    return engine.run(), executor.ranks[-1].memory.caches.tensors


@pytest.mark.parametrize("cache_dtype, dtype", [("bf16", torch.bfloat16), ("fp8", torch.uint8)])
def test_a_narrow_cache_holds_the_same_bytes_on_every_rank(cache_dtype: str, dtype: torch.dtype) -> None:
    (one, held), (two, there), (exact, _) = narrow(1, cache_dtype), narrow(2, cache_dtype), narrow(2, "auto")
    for name, output in one.items():
        assert (output.tokens, output.accepted) == (two[name].tokens, two[name].accepted)
        assert output.logprobs == pytest.approx(two[name].logprobs, abs=1e-9)
        assert output.logprobs != pytest.approx(exact[name].logprobs, abs=1e-5), "the cache is not narrow"
    for name, rows in held.items():
        assert rows.dtype == dtype and there[name].dtype == dtype
        assert torch.equal(rows.view(torch.uint8), there[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[int, ...]]:
    """Greedy continuations by transformers, in float64 as our capture is."""
    found = {}
    for index, prompt in enumerate(PROMPTS):
        ids = torch.tensor([[schedules.BOS, *prompt]])
        with keeping_double(), torch.no_grad():
            out = schedules.glm_hf().generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False,
                eos_token_id=None, pad_token_id=258,
            )  # fmt: skip
        found[str(index)] = tuple(out[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("pcp, steps", [(1, 0), (1, 3), (2, 3), (4, 5)])
def test_greedy_text_is_that_of_transformers(reference: dict[str, tuple[int, ...]], pcp: int, steps: int) -> None:
    outputs = generate(pcp, steps)
    assert {name: output.tokens for name, output in outputs.items()} == reference
    if steps:
        assert sum(sum(output.accepted) for output in outputs.values()) > 15


def test_sampling_depends_on_the_seed_and_on_nothing_else() -> None:
    def sample(pcp: int, seed: int, budget: int) -> tuple[int, ...]:
        sizes = EngineOptions(pcp=pcp, max_len=64, num_blocks=32, budget=budget)
        engine = Engine(SimulatedExecutor(small_program(pcp, 0), sizes))
        engine.add_request([1, 2, 3] * 6, SamplingParams(max_tokens=20, temperature=1.0, seed=seed), "a")
        for other in range(3 if budget > 8 else 0):
            engine.add_request([4, other], SamplingParams(max_tokens=9, temperature=1.0, seed=5))
        return engine.run()["a"].tokens

    assert sample(1, 7, 8) == sample(1, 7, 64) == sample(2, 7, 8) == sample(4, 7, 64)
    assert sample(1, 7, 8) != sample(1, 8, 8)


class Connector:
    """Keeps a copy of the cache rows of each published prefill, from every rank."""

    def __init__(self, executor: SimulatedExecutor) -> None:
        self.executor = executor
        self.rows: dict[str, list[dict[str, torch.Tensor]]] = {}

    def publish(self, request_id: str, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        held = [rank.memory.caches.tensors for rank in self.executor.ranks]
        self.rows[request_id] = [
            {name: rows[list(block_ids)].flatten(0, 1)[: len(tokens)].clone() for name, rows in tensors.items()}
            for tensors in held
        ]


def test_a_published_prefill_has_all_rows_on_every_rank() -> None:
    published = {}
    for pcp in (1, 2):
        sizes = EngineOptions(pcp=pcp, max_len=64, num_blocks=64, block_size=8, budget=16)
        executor = SimulatedExecutor(small_program(pcp, 3), sizes)
        connector = Connector(executor)
        engine = Engine(executor, producer=connector)
        for length in (5, 33):
            engine.add_request([i % 7 for i in range(length)], SamplingParams(max_tokens=5), f"of-{length}")
        engine.run()
        published[pcp] = connector.rows
        assert engine.summary()["published_prefills"] == 2
    assert published[1].keys() == published[2].keys() == {"of-5", "of-33"}
    for name, (alone,) in published[1].items():
        assert set(alone) == {f"{owner}.{kind}" for owner in ("target.0", "target.1", "drafter.0") for kind in "kv"}
        for of_rank in published[2][name]:
            for cache, rows in of_rank.items():
                assert (rows.flatten(1).abs().sum(1) > 0).all(), f"{cache}: a row is missing"
                assert (rows - alone[cache]).abs().max() < schedules.ATOL


def test_random_schedules_of_a_block_drafter() -> None:
    def program(pcp: int, steps: int) -> StepProgram:
        return blocks.setdefault(pcp, small.block_program(pcp, steps))

    blocks: dict[int, StepProgram] = {}
    for seed in range(20, 24):
        schedule = make_schedule(seed, vocab=small.VOCAB, steps=3)
        found = compare(run_schedule(schedule, 2, program), run_schedule(schedule, 1, program))
        assert not found.first, (seed, found)


# What must be seen when it is broken.


def test_a_shift_by_rank_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the drafter's token after a token is the token itself."""
    honest = ops.shift.function

    def unshifted(ids: torch.Tensor, starts: torch.Tensor, last: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return ids.clone().index_copy_(0, last, token)

    schedule = make_schedule(3, vocab=small.VOCAB)
    wanted = run_schedule(schedule, 1, small_program)
    monkeypatch.setattr(ops.shift, "function", unshifted)
    assert compare(run_schedule(schedule, 2, small_program), wanted).first
    monkeypatch.setattr(ops.shift, "function", honest)
    assert not compare(run_schedule(schedule, 2, small_program), wanted).first


def test_ranks_that_sample_differently_are_named() -> None:
    schedule = make_schedule(3, vocab=small.VOCAB)
    engine = Engine(SimulatedExecutor(small_program(2, schedule.steps), replace(schedule.options, pcp=2)))
    run = engine.executor._run

    def noisy(inputs, plans):  # type: ignore[no-untyped-def]
        outputs, log = run(inputs, plans)
        outputs[1].drafts.add_(1)
        return outputs, log

    engine.executor._run = noisy  # type: ignore[method-assign]
    with pytest.raises(
        RankMismatch, match=r"(?s)ranks 0 and 1 sampled different tokens for r0.*verify_tokens='broadcast'"
    ):
        schedules.drive(engine, schedule)
