# SPDX-License-Identifier: Apache-2.0
"""The engine with graphs is the engine without; all that a step can be is captured in warm-up, and nothing later."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pcp_passes.cli import app
from pcp_passes.engine import graphs as graphs_module
from pcp_passes.engine.dummies import dummy_batch
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.graphs import GraphPlanner, make_buckets
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.ranks import GroupExecutor
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import ConfigError, GraphError
from pcp_passes.layout import Batch
from pcp_passes.piecewise.replayer import GraphMode
from pcp_passes.step import StepProgram
from tests import steps as small
from tests.engine_schedules import VOCAB, Schedule, compare, glm_program, make_schedule, run_schedule, small_program
from tests.graph_schedules import captured, mla_program

ProgramOf = Callable[[int, int], StepProgram]


@functools.cache
def dspark_program(pcp: int, steps: int) -> StepProgram:
    return small.block_program(pcp, steps)


@functools.cache
def sharing_program(pcp: int, steps: int) -> StepProgram:
    return small.program(pcp, steps, topk=True, share_topk="owner", verify_tokens="broadcast")


PROGRAMS: dict[str, tuple[ProgramOf, int | None, int]] = {
    "dense": (small_program, None, small.VOCAB),
    "no drafter": (small_program, 0, small.VOCAB),
    "one draft": (small_program, 1, small.VOCAB),
    "mla": (mla_program, None, small.VOCAB),
    "dspark": (dspark_program, 3, small.VOCAB),
    "shared top-k, broadcast": (sharing_program, 3, small.VOCAB),
    "glm": (glm_program, 3, VOCAB),
}
RUNS = ((1, "full_and_piecewise"), (2, "piecewise"), (4, "full_and_piecewise"))
RUNS_OF = {"dense": (*RUNS, (2, "full_decode_only")), "glm": ((2, "full_and_piecewise"), (4, "piecewise"))}


def scheduled(kind: str, seed: int = 4, **options: Any) -> Schedule:
    _, steps, vocab = PROGRAMS[kind]
    made = make_schedule(seed, vocab=vocab, longest=60, max_requests=4, steps=steps)
    return replace(made, options=replace(made.options, **options))


@pytest.mark.parametrize("kind", PROGRAMS)
def test_with_graphs_as_without(kind: str) -> None:
    program_of = PROGRAMS[kind][0]
    wanted = run_schedule(scheduled(kind), 1, program_of)
    for pcp, mode in RUNS_OF.get(kind, RUNS):
        found = run_schedule(scheduled(kind, graph_mode=mode), pcp, program_of)
        difference = compare(found, wanted)
        assert not difference.first, f"pcp {pcp}, {mode}: {difference}"
        hits = found.summary["graph_hits"]
        assert (
            sum(count for name, count in hits.items() if name.startswith("target"))
            + sum(found.summary["steps_without_graph"].values())
            == found.summary["steps"]
        ), "every step of the target replays, or says why not"
        assert any("full" in name for name in hits) == mode.startswith("full")
        without = found.summary["calls_without_graph"]
        assert set(without) == ({"drafter.context"} if kind == "dspark" and pcp > 1 else set())


def test_few_buckets_leave_steps_without_a_graph_and_say_so() -> None:
    wanted = run_schedule(scheduled("dense"), 1, small_program)
    given = {"graph_mode": "full_and_piecewise", "graph_rows": (3, 9), "graph_requests": (1,)}
    found = run_schedule(scheduled("dense", **given), 2, small_program)
    assert not compare(found, wanted).first
    assert set(found.summary["steps_without_graph"]) == {
        "no bucket holds more than 9 rows of a rank", "draft steps: no bucket holds more than 1 requests",
    }  # fmt: skip


def test_a_bound_on_bytes_leaves_graphs_out_and_changes_nothing() -> None:
    wanted = run_schedule(scheduled("dense"), 1, small_program)
    made: list[SimulatedExecutor] = []

    def keeping(program: StepProgram, options: EngineOptions) -> SimulatedExecutor:
        made.append(SimulatedExecutor(program, options))
        return made[-1]

    def run(bound: int) -> Any:
        given = scheduled("dense", graph_mode="piecewise", graph_rows=(2, 24, 64), graph_bytes=bound)
        found = run_schedule(given, 2, small_program, keeping)
        found.written.update(wanted.written)
        return found

    run(1 << 30)
    runner = made[-1].ranks[0].runner
    assert runner is not None and not runner.uncaptured
    found = run(runner.captured_bytes // 2)
    runner = made[-1].ranks[0].runner
    assert runner is not None and runner.uncaptured and runner.captured_bytes <= runner.replayer.max_bytes
    assert not compare(found, wanted).first


def graphed(pcp: int = 2, steps: int = 3, mode: str = "full_and_piecewise", **options: Any) -> Engine:
    sizes = {"block_size": 4, "num_blocks": 96, "max_len": 64, "max_requests": 4, "budget": 20} | options
    made = EngineOptions(pcp=pcp, graph_mode=mode, **sizes)
    return Engine(SimulatedExecutor(small_program(pcp, steps), made))


def keep_busy(engine: Engine, steps: int, seed: int = 0) -> Iterator[None]:
    """Random requests until so many more steps have run."""
    rng, end = random.Random(seed), engine.stats.steps + steps
    while engine.stats.steps < end:
        while len(engine.scheduler.requests) < rng.randint(1, 5):
            prompt = [rng.randrange(small.VOCAB) for _ in range(rng.choice((1, 2, 7, 19, 40)))]
            engine.add_request(prompt, SamplingParams(rng.randint(1, 12), rng.choice((0.0, 0.8)), rng.randrange(99)))
        engine.step()
        yield


@pytest.mark.parametrize("mode, decode, steps", [("full_and_piecewise", "replicate", 300), ("piecewise", "owner", 60)])
def test_nothing_is_captured_or_compiled_after_warm_up(mode: str, decode: str, steps: int) -> None:
    engine = graphed(mode=mode, decode=decode)
    made = engine.executor
    assert isinstance(made, SimulatedExecutor) and made.compiler is not None
    keys, compiled = captured(made), made.compiler.counts.distinct
    assert keys and compiled
    for _ in keep_busy(engine, steps):
        pass
    assert engine.stats.steps == steps and engine.stats.sharded_steps > steps // 4
    assert captured(made) == keys and made.compiler.counts.distinct == compiled
    assert not engine.summary()["steps_without_graph"]


def test_a_dummy_step_between_real_ones_leaves_no_trace_and_no_new_graph() -> None:
    engine, quiet = graphed(), graphed()
    made = engine.executor
    assert isinstance(made, SimulatedExecutor)
    keys = captured(made)
    for _ in zip(keep_busy(engine, 20), keep_busy(quiet, 20), strict=True):
        assert engine.profile(13, 3).sampled.shape == (3, 4)
    assert captured(made) == keys
    finished, alone = engine.run(), quiet.run()
    assert finished.keys() == alone.keys() and finished
    assert all(finished[name].tokens == alone[name].tokens for name in alone)
    for mine, other in zip(made.ranks, quiet.executor.ranks, strict=True):
        for name, held in mine.memory.caches.tensors.items():
            assert held.equal(other.memory.caches.tensors[name]), name


def test_a_dummy_step_is_as_large_as_a_real_one() -> None:
    engine = graphed()
    engine.executor.load(batch := dummy_batch(17, 2))
    _, record = engine.executor.execute(batch)
    assert record.sharded and record.graph == "piecewise" and record.padded_rows == 16 and record.collectives > 0
    assert record.rows_per_rank == (9, 8) and record.graph_padding == 2 * 7
    with pytest.raises(ConfigError, match="21 tokens and 1 requests does not fit an engine with budget=20"):
        engine.profile(21)


def test_warm_up_is_done_once() -> None:
    engine = graphed()
    hits = engine.summary()["graph_hits"]
    engine.warm_up()
    assert hits == engine.summary()["graph_hits"] == {}, "warm-up does not count"


def reached(planner: GraphPlanner, batch: Batch, least_rows: int = 0) -> set[tuple[Any, ...]]:
    """The graphs that a step is made of."""
    choice = planner.choose(batch, least_rows)
    told = choice.dispatch
    full = told.mode is GraphMode.FULL
    main = ("main", told.mode, choice.padded_tokens is not None, told.rows, told.requests if full else 0)
    draft = ("draft", told.draft_mode, told.requests)
    return {key for key in (main, draft) if key[1] is not GraphMode.NONE}


def warmed(planner: GraphPlanner) -> set[tuple[Any, ...]]:
    steps = planner.warm_up()
    return {key for batch, rows in steps for key in reached(planner, batch.layout_batch, rows)}


SIZES = st.fixed_dictionaries(
    {
        "pcp": st.sampled_from((1, 2, 4)),
        "graph_mode": st.sampled_from(("piecewise", "full_decode_only", "full_and_piecewise")),
        "decode": st.sampled_from(("replicate", "owner")),
        "layout": st.sampled_from(("zigzag", "contiguous")),
        "budget": st.integers(4, 60),
        "max_requests": st.integers(1, 7),
        "max_len": st.sampled_from((12, 64)),
        "graph_requests": st.sampled_from((None, (2,), (1, 3), (16,))),
        "graph_rows": st.sampled_from((None, (5,), (3, 200))),
    }
)
STEP = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, steps=st.integers(0, 3), rows=STEP)
def test_every_step_that_can_be_scheduled_was_reached_in_warm_up(
    sizes: dict[str, Any], steps: int, rows: list[tuple[bool, int]]
) -> None:
    options = EngineOptions(**sizes, num_blocks=64)
    planner = GraphPlanner(options, steps, make_buckets(options, steps), draft_calls=steps > 1)
    left, entries = options.budget, []
    for prefills, wanted in rows[: options.max_requests]:
        length = min(wanted if prefills else 1 + wanted % (steps + 1), left)
        if length:
            entries.append((prefills, length))
            left -= length
    prefilling, lengths = (list(column) for column in zip(*entries, strict=True))
    zeros = [0] * len(lengths)
    assert reached(planner, Batch(lengths, zeros, lengths, prefilling)) <= warmed(planner)


def test_a_bucket_left_out_of_warm_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the largest bucket of each kind is not warmed."""
    original = GraphPlanner.warm_up

    def short(self: GraphPlanner) -> Iterator[Any]:
        for batch, rows in original(self):
            if rows != self.buckets.max_rows:
                yield batch, rows

    monkeypatch.setattr(GraphPlanner, "warm_up", short)
    engine = graphed()
    with pytest.raises(GraphError, match=r"target.sharded piecewise \d+ runs after the warm-up but was never captured"):
        for _ in keep_busy(engine, 40):
            pass


def test_collectives_inside_need_a_group_that_can_be_captured() -> None:
    options = EngineOptions(pcp=2, graph_mode="piecewise", graph_collectives="inside")
    with pytest.raises(ConfigError, match="'inside' needs a process group whose back end can be captured"):
        SimulatedExecutor(small_program(2, 3), options)


def test_collectives_inside_are_refused_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        def size(self) -> int:
            return 2

    monkeypatch.setattr("pcp_passes.engine.ranks.dist.get_backend", lambda group: "gloo")
    options = EngineOptions(pcp=2, graph_mode="piecewise", graph_collectives="inside")
    with pytest.raises(ConfigError, match=r"can be captured \(nccl\); found gloo"):
        GroupExecutor(small_program(2, 3), options, Two())  # type: ignore[arg-type]


def test_compiled_pieces_give_the_same_tokens() -> None:
    wanted = run_schedule(scheduled("no drafter"), 1, small_program)
    given = {"graph_mode": "piecewise", "graph_rows": (8, 64), "graph_compile": "inductor"}
    found = run_schedule(scheduled("no drafter", **given), 2, small_program)
    assert not compare(found, wanted).first


def test_the_command_takes_a_graph_mode_for_its_own_engine() -> None:
    done = CliRunner().invoke(app, ["generate", "nowhere", "--graph-mode", "piecewise"])
    assert isinstance(done.exception, ConfigError)
    assert "--graph-mode piecewise is for --engine embedded" in str(done.exception)


def test_large_steps_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger=graphs_module.__name__):
        make_buckets(EngineOptions(graph_mode="piecewise", graph_rows=(8,), budget=61), 0)
    assert "steps of more than 8 rows of a rank (up to 61) run without a graph" in caplog.text
    caplog.clear()
    make_buckets(EngineOptions(graph_mode="piecewise", graph_rows=(61,), budget=61), 0)
    assert not caplog.text, "what holds the largest step there can be is enough, aligned or not"


def test_sizes_that_no_step_needs_take_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The largest are captured first: useless ones would take the bytes of those that are used."""
    sizes: dict[str, Any] = {"graph_rows": (8, 24, 4096), "graph_requests": (2, 16, 512), "budget": 20}
    made = make_buckets(EngineOptions(graph_mode="piecewise", max_requests=4, **sizes), 2)
    assert (made.rows, made.requests) == ((8, 24), (2, 16))
    assert "graph_rows (4096,) are left out, since no step is larger than 20 and 24 holds it" in caplog.text
    assert "graph_requests (512,) are left out" in caplog.text
    caplog.clear()
    made = make_buckets(EngineOptions(graph_mode="full_decode_only", max_requests=4, **sizes), 2)
    assert (made.rows, made.requests) == ((), (2, 16)), "nothing runs in pieces, so no buffer has their rows"
    assert "graph_rows=(8, 24, 4096) is not used, since full_decode_only runs nothing in pieces" in caplog.text
    assert "rows of a rank" not in caplog.text


@pytest.mark.parametrize("tokens, requests", [(0, 1), (0, 0), (5, 0), (1, 2), (-1, 1)])
def test_a_dummy_step_that_cannot_be_is_refused(tokens: int, requests: int) -> None:
    with pytest.raises(ConfigError, match=f"a token for each; found {tokens} tokens and {requests} requests"):
        dummy_batch(tokens, requests)
