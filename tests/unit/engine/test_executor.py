# SPDX-License-Identifier: Apache-2.0
"""What a layout says to the ranks belongs to one batch object; a prefill is published after the whole step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pcp_passes.engine.dummies import dummy_batch
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import Entry, Request, ScheduledBatch
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import ConfigError
from tests import steps as small
from tests.engine_double import EMPTY, ArithmeticExecutor, reference
from tests.mesh_programs import mesh_program

OPTIONS = EngineOptions(block_size=4, num_blocks=64, max_len=48, max_requests=4, budget=16)


class Recording(ArithmeticExecutor):
    """Remembers with how many plans each step ran."""

    def __init__(self, options: EngineOptions, steps: int) -> None:
        super().__init__(options, steps)
        self.plans: list[int] = []

    def _run(self, inputs, plans):  # type: ignore[no-untyped-def]
        self.plans.append(len(plans))
        return super()._run(inputs, plans)

    def contents(self) -> torch.Tensor:
        return torch.stack((self.token, self.position, self.after)).clone()


def scheduled(engine: Engine) -> ScheduledBatch:
    batch = engine.scheduler.schedule()
    assert batch is not None
    for entry in batch.entries:
        engine._upload(entry)
    return batch


def test_prefills_run_sharded_and_decodes_replicated() -> None:
    for decode, wanted in (("replicate", [1, 1, 0]), ("owner", [1, 1, 1])):
        executor = Recording(EngineOptions(**{**OPTIONS.__dict__, "pcp": 2, "decode": decode}), 2)
        engine = Engine(executor)
        engine.add_request(list(range(20)), SamplingParams(max_tokens=3), "a")
        assert list(engine.run()["a"].tokens) == reference(list(range(20)), 3)
        assert executor.plans[:3] == wanted
        first = engine.stats.records[0]
        assert first.sharded and first.rows_per_rank == (8, 8) and first.padded_rows == 8 and first.imbalance == 1.0
    assert engine.summary()["rows_per_rank"][0] >= 10


def test_a_batch_that_is_not_the_loaded_one_takes_the_global_path() -> None:
    executor = Recording(EngineOptions(**{**OPTIONS.__dict__, "pcp": 2}), 2)
    engine = Engine(executor)
    engine.add_request(list(range(12)), SamplingParams(max_tokens=3))
    stale = scheduled(engine)
    executor.load(stale)
    equal_but_other = ScheduledBatch(stale.step, stale.entries)
    before, computed = executor.contents(), executor.ranks[0].state.computed.clone()
    executor.execute(equal_but_other)
    executor.load(equal_but_other)
    executor.execute(stale)
    assert executor.plans == [0, 0]
    assert torch.equal(executor.contents(), before) and torch.equal(executor.ranks[0].state.computed, computed)
    executor.execute(equal_but_other)
    assert executor.plans == [0, 0, 1] and int(executor.ranks[0].state.computed.sum()) == 12


def test_equality_instead_of_identity_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: any batch counts as the loaded one, so a plan of another batch runs."""
    executor = Recording(EngineOptions(**{**OPTIONS.__dict__, "pcp": 2}), 2)
    engine = Engine(executor)
    engine.add_request(list(range(12)), SamplingParams(max_tokens=3))
    stale = scheduled(engine)
    executor.load(stale)
    before = executor.contents()
    assert executor._loaded is not None
    executor._loaded.batch = other = ScheduledBatch(stale.step, stale.entries)
    executor.execute(other)
    assert not torch.equal(executor.contents(), before)


def test_a_dummy_step_has_the_shapes_of_a_real_one_and_writes_nothing() -> None:
    executor = Recording(EngineOptions(**{**OPTIONS.__dict__, "pcp": 2}), 2)
    engine = Engine(executor)
    engine.add_request(list(range(8)), SamplingParams(max_tokens=9), "a")
    engine.step()
    before, computed = executor.contents(), executor.ranks[0].state.computed.clone()
    outputs = engine.profile(11, 3)
    assert outputs.sampled.shape == (3, 3)
    assert [len(entry.request.prompt) for entry in dummy_batch(11, 3).entries] == [4, 4, 3]
    assert torch.equal(executor.contents(), before) and torch.equal(executor.ranks[0].state.computed, computed)
    assert list(engine.run()["a"].tokens) == reference(list(range(8)), 9), "a dummy step between two real ones"


class Connector:
    """Keeps what the caches held when a prefill was published."""

    def __init__(self, executor: ArithmeticExecutor) -> None:
        self.executor = executor
        self.published: list[tuple[str, tuple[int, ...], list[int], list[int]]] = []

    def publish(self, request_id: str, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        size = self.executor.options.block_size
        slots = torch.cat([torch.arange(block * size, (block + 1) * size) for block in block_ids])[: len(tokens)]
        held = self.executor
        self.published.append((request_id, tuple(tokens), held.token[slots].tolist(), held.after[slots].tolist()))


def publish_all(executor: ArithmeticExecutor, engine_type: type[Engine] = Engine) -> Connector:
    connector = Connector(executor)
    engine = engine_type(executor, producer=connector)
    for length in (3, 21, 40):
        engine.add_request([7 + i % 5 for i in range(length)], SamplingParams(max_tokens=4), f"of-{length}")
    engine.run()
    assert sorted(name for name, *_ in connector.published) == ["of-21", "of-3", "of-40"]
    return connector


def complete(connector: Connector) -> bool:
    return all(
        token == list(tokens) and after[:-1] == list(tokens[1:]) and after[-1] not in (EMPTY, -1)
        for _, tokens, token, after in connector.published
    )


def test_a_published_prefill_has_the_rows_of_target_and_drafter() -> None:
    assert complete(publish_all(ArithmeticExecutor(OPTIONS, 2)))


def test_publishing_before_the_step_ended_would_be_seen() -> None:
    """Sabotage: publish when the target is done, before the drafter wrote."""

    class Early(Engine):
        def _publish(self, batch: ScheduledBatch) -> None:
            pass

        def _issue(self, batch):  # type: ignore[no-untyped-def]
            executor = self.executor
            assert isinstance(executor, ArithmeticExecutor)
            executor.between = lambda: Engine._publish(self, batch)
            return super()._issue(batch)

    connector = publish_all(ArithmeticExecutor(OPTIONS, 2), Early)
    assert all(token == list(tokens) for _, tokens, token, _ in connector.published), "the target's rows are there"
    assert not complete(connector)


def test_a_request_longer_than_its_block_table_is_refused() -> None:
    """Attention that reads no length on the host would cut it at the table's end."""
    executor = Recording(OPTIONS, 2)
    held = OPTIONS.blocks_per_request(2) * OPTIONS.block_size
    request = Request("long", tuple(range(held + 1)), SamplingParams(), prefill_len=held + 1)
    with pytest.raises(ConfigError, match=f"reaches {held + 1} tokens.*holds {held} .*raise max_len"):
        executor.load(ScheduledBatch(0, (Entry(request, 0, 0, held - 3, 4, 0, True, -1),)))
    executor.load(ScheduledBatch(0, (Entry(request, 0, 0, held - 4, 4, 0, True, -1),)))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_profiled_step_depends_on_no_request_that_was_there(steps: int) -> None:
    """Its rows belonged to a request as long as the block table: positions on top of it have no column."""
    options = EngineOptions(block_size=4, max_len=48, max_requests=3, budget=32, num_blocks=64)
    engine = Engine(SimulatedExecutor(small.program(1, steps), options))
    engine.add_request([1] * 40, SamplingParams(max_tokens=8))
    engine.run()
    fresh = Engine(SimulatedExecutor(small.program(1, steps), options))
    used, new = engine.profile(32), fresh.profile(32)
    assert used is not None and new is not None and used.sampled.shape == new.sampled.shape


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("left", [1, 3])
def test_an_engine_that_was_left_leaves_nothing_to_the_next(pp: int, left: int) -> None:
    options = EngineOptions(block_size=4, max_len=48, max_requests=3, budget=32, num_blocks=64, pp=pp)
    params = SamplingParams(max_tokens=6)

    def tokens(engine: Engine) -> tuple[int, ...]:
        name = engine.add_request([5, 6, 7], params)
        return engine.run()[name].tokens

    executor = SimulatedExecutor(mesh_program(1, 2, 2), options)
    old = Engine(executor)
    old.add_request([5] * 20, SamplingParams(max_tokens=8))
    for _ in range(left):
        old.step()
    assert tokens(Engine(executor)) == tokens(Engine(SimulatedExecutor(mesh_program(1, 2, 2), options)))
    with pytest.raises(ConfigError, match="a later engine was made on this executor"):
        old.step()


@pytest.mark.parametrize("pp", [1, 2])
def test_a_loaded_batch_that_runs_twice_advances_once(pp: int) -> None:
    options = EngineOptions(block_size=4, max_len=48, max_requests=3, budget=32, num_blocks=64, pp=pp)
    found = []
    for again in (False, True):
        engine = Engine(SimulatedExecutor(mesh_program(1, 2, 2), options))
        name = engine.add_request([1] * 9, SamplingParams(max_tokens=5))
        engine.step()
        if again:
            engine.executor.execute(engine._in_flight[0].batch)
        found.append(engine.run()[name].tokens)
    assert found[0] == found[1]
