# SPDX-License-Identifier: Apache-2.0
"""What an engine says of its graphs: what has none and why, what counts, and options that lead nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from pcp_passes.engine import ranks as ranks_module
from pcp_passes.engine.dummies import dummy_batch
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.graphs import STALE, make_buckets
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import ConfigError
from tests import steps as small
from tests.engine_double import VOCAB, ArithmeticExecutor
from tests.engine_schedules import small_program

SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 96, "max_len": 64, "max_requests": 4, "budget": 20}


def engine_with(mode: str = "full_and_piecewise", pcp: int = 2, steps: int = 3, **options: Any) -> Engine:
    made = EngineOptions(pcp=pcp, graph_mode=mode, **SIZES | {"graph_rows": (8, 24), "graph_requests": (4,)} | options)
    return Engine(SimulatedExecutor(small_program(pcp, steps), made))


def generate(engine: Engine) -> Engine:
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=9))
    engine.run()
    return engine


@pytest.mark.parametrize("name", ["graph_rows", "graph_requests"])
def test_a_bucket_far_beyond_every_step_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} has a bucket of 1,099,511,627,776, and no step .* Lower it to"):
        SimulatedExecutor(
            small_program(2, 3), EngineOptions(pcp=2, graph_mode="piecewise", **SIZES | {name: (1 << 40,)})
        )
    with pytest.raises(ConfigError, match=f"{name} has a bucket of 257, .* at most 256"):
        make_buckets(EngineOptions(graph_mode="piecewise", **SIZES | {name: (2, 257)}), 3)
    made = make_buckets(EngineOptions(graph_mode="piecewise", **SIZES | {name: (2, 256)}), 3)
    assert getattr(made, name.removeprefix("graph_")) == (2, 256)
    made = make_buckets(EngineOptions(graph_mode="piecewise", **SIZES | {"budget": 400, "graph_rows": (1600,)}), 3)
    assert made.rows == (1600,)


def test_a_bucket_behind_one_that_holds_every_step_is_only_left_out() -> None:
    assert make_buckets(EngineOptions(graph_mode="piecewise", **SIZES | {"graph_rows": (24, 1 << 40)}), 3).rows == (24,)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"mode": "full_decode_only", "decode": "owner", "steps": 1, "graph_rows": None}, "decode='owner' gathers"),
        ({"mode": "full_decode_only", "graph_rows": None, "graph_requests": ()}, "graph_requests is empty"),
        ({"mode": "piecewise", "steps": 1, "graph_rows": ()}, "graph_rows is empty"),
        ({"mode": "full_decode_only", "decode": "owner", "graph_rows": None}, ""),  # its draft steps
        ({"mode": "full_decode_only", "steps": 1, "graph_rows": None}, ""),
        ({"mode": "full_decode_only", "decode": "owner", "steps": 1, "pcp": 1, "graph_rows": None}, ""),
        ({"mode": "piecewise", "decode": "owner", "steps": 1}, ""),
    ],
)
def test_options_that_capture_nothing_say_so_once(
    given: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger=ranks_module.__name__):
        runner = engine_with(**given).executor.ranks[0].runner
    assert runner is not None
    found = [record.getMessage() for record in caplog.records if "captures nothing" in record.getMessage()]
    assert len(found) == bool(said) and all(said in one for one in found), found
    assert bool(runner.captured) == (not said), "what is said of the options is what happened"


def test_a_step_whose_calls_graph_bytes_left_out_says_so() -> None:
    records = generate(engine_with()).stats.records
    assert {record.graph for record in records} == {"piecewise", "full"} and not any(one.no_graph for one in records)
    engine = generate(engine_with("piecewise", graph_bytes=1))
    counted = engine.summary()
    assert {record.graph for record in engine.stats.records} == {"none"}
    # Target, the drafter's pass over all tokens, and two draft steps.
    said = "graph_bytes leaves 4 of the step's body calls without a graph"
    assert counted["steps_without_graph"] == {said: counted["steps"]}
    assert sum(counted["calls_without_graph"].values()) == 4 * counted["steps"] and not counted["graph_hits"]


def test_a_step_that_lost_only_its_drafters_graphs_keeps_the_targets() -> None:
    engine = engine_with("piecewise")
    for rank in engine.executor.ranks:
        assert rank.runner is not None
        for key in rank.runner.keys:
            if key.role == "drafter":
                rank.runner.replayer._drop(key)
    assert {record.graph for record in generate(engine).stats.records} == {"piecewise"}
    assert set(engine.summary()["steps_without_graph"]) == {
        "graph_bytes leaves 3 of the step's body calls without a graph"
    }


def test_a_profiled_step_is_no_replay_of_a_real_one() -> None:
    for bound in (1 << 30, 1):
        engine = engine_with("piecewise", graph_bytes=bound)
        engine.profile(13, 3)
        counted = engine.summary()
        assert not counted["graph_hits"] and not counted["calls_without_graph"] and not counted["steps"]
        counted = generate(engine).summary()
        engine.profile(13, 3)
        after = engine.summary()
        assert after["graph_hits"] == counted["graph_hits"] and bool(after["graph_hits"]) == (bound > 1)
        assert after["calls_without_graph"] == counted["calls_without_graph"]


def test_a_block_drafters_plain_pass_of_a_profiled_step_does_not_count() -> None:
    options = EngineOptions(pcp=2, graph_mode="piecewise", graph_rows=(24,), graph_requests=(4,), **SIZES)
    engine = Engine(SimulatedExecutor(small.block_program(2, 3), options))
    engine.profile(13, 3)
    assert not engine.summary()["calls_without_graph"]
    assert generate(engine).summary()["calls_without_graph"]["drafter.context"] == 1


def test_the_choice_of_a_batch_that_is_not_loaded_is_none() -> None:
    """Ranks compare it: one that holds a stale batch must not tell the graph of another batch."""
    executor = engine_with().executor
    stale, loaded = dummy_batch(9, 2), dummy_batch(9, 2)
    assert executor.choice_of(loaded) is STALE
    executor.load(stale)
    executor.load(loaded)
    assert executor.choice_of(loaded).dispatch.rows == 8
    assert executor.choice_of(stale) is STALE


@pytest.mark.parametrize("wrong", [small.VOCAB, -1, 1 << 40])
def test_a_token_outside_the_vocabulary_is_refused_and_nothing_is_lost(wrong: int) -> None:
    engine, quiet = engine_with("none", **NO_GRAPHS), engine_with("none", **NO_GRAPHS)
    engine.add_request([0, small.VOCAB - 1], SamplingParams(max_tokens=5))
    engine.step()
    with pytest.raises(ConfigError, match=rf"token {wrong} at place 1 of the prompt .* vocabulary of {small.VOCAB};"):
        engine.add_request([1, wrong], SamplingParams(max_tokens=5))
    for other in (engine, quiet):
        if other is quiet:
            other.add_request([0, small.VOCAB - 1], SamplingParams(max_tokens=5))
        assert other.add_request([2], SamplingParams(max_tokens=3)) == "request-1", "a refused one takes no name"
    found, alone = engine.run(), quiet.run()
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in alone.items()}


NO_GRAPHS: dict[str, Any] = {"graph_rows": None, "graph_requests": None}


def test_an_executor_without_a_vocabulary_takes_any_token() -> None:
    engine = Engine(ArithmeticExecutor(EngineOptions(max_len=20), 0))
    engine.add_request([VOCAB + 7], SamplingParams(max_tokens=2))
    assert len(engine.run()["request-0"].tokens) == 2
