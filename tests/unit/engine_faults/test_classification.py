# SPDX-License-Identifier: Apache-2.0
"""Prefill or decode by state, and batches that are not the one that was laid out: dummies, profiles, stale ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pcp_passes.engine import executor as executor_module
from pcp_passes.engine.dummies import dummy_batch
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import Entry, Request, ScheduledBatch
from pcp_passes.engine.scheduler import Scheduler
from pcp_passes.engine.simulated import SimulatedExecutor
from tests import steps as small
from tests.unit.engine_faults.world import engine_run, schedule, verdict

K = 3
LAST_CHUNKS = tuple(
    schedule((16 + last, 5), long_prefill_threshold=8, every=1, prefix_cache=False, steps=K) for last in range(1, 2 + K)
)
"""The first request's last chunk has 1 to 1 + K tokens, as many as a verification has."""


@pytest.mark.parametrize("given", LAST_CHUNKS, ids=lambda s: f"last={len(s.arrivals[0].prompt) - 16}")
@pytest.mark.parametrize("pcp", [2, 4])
def test_a_short_last_chunk_is_a_prefill(given: Any, pcp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    last = len(given.arrivals[0].prompt) - 16
    wanted, chunks, original = engine_run(given, 1), [], Scheduler._entry

    def watch(self: Scheduler, request: Request, length: int, drafts: int) -> Entry:
        entry = original(self, request, length, drafts)
        if request.id == "r0" and entry.is_prefilling:
            chunks.append(length)
        return entry

    monkeypatch.setattr(Scheduler, "_entry", watch)
    assert not verdict(lambda: engine_run(given, pcp), wanted)
    assert chunks == [8, 8, last]


@pytest.mark.parametrize("given", LAST_CHUNKS, ids=lambda s: f"last={len(s.arrivals[0].prompt) - 16}")
def test_a_classification_by_length_would_be_seen(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: what is as short as a verification is taken for one."""
    wanted, original = engine_run(given, 1), Scheduler._entry

    def by_length(self: Scheduler, request: Request, length: int, drafts: int) -> Entry:
        entry = original(self, request, length, drafts)
        return replace(entry, is_prefilling=length > 1 + K)

    monkeypatch.setattr(Scheduler, "_entry", by_length)
    assert verdict(lambda: engine_run(given, 2), wanted)


@pytest.mark.parametrize("prefix, extend", [(1, 37), (4, 36), (4, 33), (8, 47), (12, 1)])
@pytest.mark.parametrize("pcp", [2, 4])
def test_positions_after_a_prefix_hit_are_those_of_the_prompt(prefix: int, extend: int, pcp: int) -> None:
    """A request whose first tokens are in the cache is dealt out from where it goes on, padding or not."""
    given = with_prefix(prefix, extend)
    wanted = engine_run(given, 1)
    assert wanted.outputs["r1"].cached_tokens == prefix
    assert not verdict(lambda: engine_run(given, pcp), wanted)


def with_prefix(prefix: int, extend: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, small.VOCAB, (prefix + extend,), generator=generator).tolist()
    # With a drafter a block is found by the token after it too.
    first = [*tokens[: prefix + 1], (tokens[prefix] + 1) % small.VOCAB]
    size = 1 if prefix == 1 else 4
    return schedule((), prompts=(first, tokens), every=4, block_size=size, max_len=72, num_blocks=400, budget=64)


def test_a_prefix_counted_with_its_padding_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the cached length is rounded up to what the ranks' padded rows would hold."""
    given, original = with_prefix(8, 33), executor_module.Executor.admit
    wanted = engine_run(given, 1)

    def padded(self: Any, row: int, tokens: Any, computed: int, params: SamplingParams) -> None:
        pcp = self.options.pcp
        original(self, row, tokens, -(-computed // (2 * pcp + 1)) * (2 * pcp + 1), params)

    monkeypatch.setattr(executor_module.Executor, "admit", padded)
    assert verdict(lambda: engine_run(given, 2), wanted)


def two_steps_in(pcp: int) -> tuple[Engine, SimulatedExecutor]:
    made = SimulatedExecutor(small.program(pcp), EngineOptions(pcp=pcp, max_len=64, budget=20))
    engine = Engine(made)
    for index, length in enumerate((17, 9)):
        engine.add_request(
            torch.arange(length).remainder(small.VOCAB).tolist(), SamplingParams(max_tokens=8), f"r{index}"
        )
    engine.step()
    return engine, made


def contents(made: SimulatedExecutor) -> list[torch.Tensor]:
    caches = [held.clone() for rank in made.ranks for held in rank.memory.caches.tensors.values()]
    return caches + [rank.state.computed.clone() for rank in made.ranks]


def unchanged(made: SimulatedExecutor, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, contents(made), before))


@pytest.mark.parametrize("pcp", [2, 4])
def test_a_dummy_batch_has_the_shapes_of_a_real_one_and_leaves_no_trace(pcp: int) -> None:
    engine, made = two_steps_in(pcp)
    before = contents(made)
    outputs = engine.profile(13, 3)
    assert unchanged(made, before)
    assert outputs.sampled.shape == (3, K + 1) and outputs.drafts.shape == (3, K)
    quiet, _ = two_steps_in(pcp)
    assert {n: o.tokens for n, o in engine.run().items()} == {n: o.tokens for n, o in quiet.run().items()}


def test_a_dummy_batch_that_wrote_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = two_steps_in(2)
    before = contents(made)
    monkeypatch.setattr(executor_module, "without_writes", lambda inputs, block_size: inputs)
    engine.profile(13, 2)
    assert not unchanged(made, before)


def laid_out() -> tuple[SimulatedExecutor, ScheduledBatch]:
    """An executor that was given a batch, and another batch of other requests and the same sizes."""
    engine, made = two_steps_in(2)
    batch = engine.scheduler.schedule()
    assert batch is not None
    for entry in batch.entries:
        engine._upload(entry)
    made.load(batch)
    return made, batch


def test_rank_local_state_belongs_to_one_batch_object() -> None:
    made, batch = laid_out()
    before = contents(made)
    twin = ScheduledBatch(batch.step, batch.entries)
    _, record = made.execute(twin)
    assert not record.sharded and record.collectives == 0 and unchanged(made, before), "a stale batch: the global path"
    _, record = made.execute(dummy_batch(batch.num_tokens, len(batch.entries)))
    assert not record.sharded and unchanged(made, before)
    _, record = made.execute(batch)
    assert record.sharded and not unchanged(made, before)


def test_rank_local_state_by_equal_sizes_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a batch with the sizes of the one that was laid out is taken for it."""
    made, batch = laid_out()
    before = contents(made)
    assert made._loaded is not None
    made._loaded.batch = other = ScheduledBatch(batch.step, tuple(reversed(batch.entries)))
    _, record = made.execute(other)
    assert record.sharded and not unchanged(made, before)
