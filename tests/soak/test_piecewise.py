# SPDX-License-Identifier: Apache-2.0
"""Random schedules with graphs on, replayed by the checker: what PCP=1 gives without graphs, bucket by bucket.

Each schedule runs at PCP 1, 2 and 4 in the simulator with a graph mode and buckets of its own; a few over gloo. Under
``make soak`` all of them run for each kind of model; under ``make test`` every tenth, of one kind in turn. Replays per
bucket are in ``build/soak.json``.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.piecewise.replay_checker import ReplayChecker
from tests.engine_schedules import Trace, compare, run_schedule
from tests.graph_schedules import PROGRAMS, GraphRun, captured, draw, run_graphs, run_seed
from tests.multiproc._workers import Group
from tests.soak import _piecewise_ranks
from tests.soak.record import Part, chunks, name, require_hard_cases

SEEDS = range(4000, 4100)
PCPS = (1, 2, 4)


def add(part: Part, runs: Mapping[int, GraphRun]) -> None:
    """Note replays per bucket, by P, and steps without a graph, by reason."""
    for what, counts in (
        ("graph_hits", Counter({f"P{pcp} {key}": n for pcp, run in runs.items() for key, n in run.hits.items()})),
        ("steps_without_graph", sum((run.without for run in runs.values()), Counter[str]())),
    ):
        part.numbers[what] = dict(Counter(part.numbers.get(what, {})) + counts)


def run_some(kind: str, seeds: range) -> Part:
    part = Part(f"graphs-{kind}")
    for seed in seeds:
        schedule, wanted, runs = run_seed(kind, seed, PCPS)
        sharded = sum(run.trace.counts["sharded_steps"] for run in runs.values())
        part.add(schedule, wanted, {pcp: run.difference for pcp, run in runs.items()}, sharded)
        add(part, runs)
    return part


def require_all_graphs(hits: Mapping[str, int]) -> None:
    """Every kind of body call ran as every kind of graph that it can be."""
    seen = {key.split(" ", 1)[1].rsplit(" ", 1)[0] for key in hits}
    missing = {
        f"{role}.{how}"
        for role in ("target", "drafter")
        for how in ("sharded piecewise", "replicated piecewise", "replicated full")
    } - seen
    assert not missing, f"no schedule ran {', '.join(sorted(missing))}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", chunks(SEEDS), ids=name)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_schedules(kind: str, seeds: range) -> None:
    part = run_some(kind, seeds)
    numbers = part.save(f"graphs-{kind}-{name(seeds)}")[f"graphs-{kind}"]
    require_hard_cases(numbers, len(SEEDS))
    if numbers["schedules"] == len(SEEDS):
        require_all_graphs(numbers["graph_hits"])


@pytest.mark.unit
@pytest.mark.parametrize("kind, seed", list(zip(itertools.cycle(PROGRAMS), SEEDS[::10], strict=False)))
def test_a_tenth(kind: str, seed: int) -> None:
    part = run_some(kind, range(seed, seed + 1))
    assert part.numbers["comparisons"] == {"1": 1, "2": 1, "4": 1}
    assert sum(part.numbers["graph_hits"].values()) + sum(part.numbers["steps_without_graph"].values()) > 0


@pytest.mark.unit
def test_replays_that_are_wrong_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a replay computes nothing, or gives its rows in another order."""
    schedule, wanted, runs = run_seed("dense", 4016, [2])
    assert {key.split()[1] for key in runs[2].hits} == {"piecewise", "full"}
    original = ReplayChecker._replay

    def nothing(self: Any, key: Any, graph: Any, *given: Any) -> Any:
        return graph.outputs

    def turned(self: Any, key: Any, graph: Any, *given: Any) -> Any:
        for out in (found := original(self, key, graph, *given)):
            out.copy_(out.flip(0).clone())
        return found

    for wrong in (nothing, turned):
        monkeypatch.setattr(ReplayChecker, "_replay", wrong)
        with pytest.raises((AssertionError, IndexError)):  # NaN, other tokens, or a poisoned index
            run_graphs(schedule, 2, PROGRAMS["dense"][0], wanted)


GLOO = tuple((kind, seed) for kind in PROGRAMS for seed in range(4005, 4100, 20))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_schedules_over_gloo(tmp_path: Path) -> None:
    with Group(2, tmp_path, _piecewise_ranks.trace, runs=GLOO) as group:
        codes = group.exit_codes([0, 1], _piecewise_ranks.LIMIT_S)
        assert codes == {0: 0, 1: 0}, "\n".join(group.stderr(rank)[-2000:] for rank in range(2))
    saved: list[list[dict[str, Any]]] = [torch.load(tmp_path / f"trace.{r}", weights_only=False) for r in range(2)]
    part = Part("graphs-gloo")
    for index, (kind, seed) in enumerate(GLOO):
        schedule = draw(kind, seed)
        wanted = run_schedule(schedule, 1, PROGRAMS[kind][0])
        for rank, of_rank in enumerate(saved):
            one = of_rank[index]
            found = Trace(one["outputs"], one["caches"], {}, one["summary"])
            difference = compare(found, wanted)
            assert not difference.first, f"{kind}, seed {seed}, rank {rank}: {difference}"
            assert one["summary"]["graph_hits"] == saved[0][index]["summary"]["graph_hits"], "ranks chose other buckets"
        part.add(schedule, wanted, {2: difference}, found.counts["sharded_steps"])
        hits, without = Counter(found.summary["graph_hits"]), Counter(found.summary["steps_without_graph"])
        add(part, {2: GraphRun(found, difference, hits, without)})
    part.save("graphs-gloo")


STEPS = 300


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind, pcp, mode, how",
    [
        ("glm", 2, "full_and_piecewise", "eager"),
        ("glm", 4, "piecewise", "eager"),
        ("mla", 2, "full_and_piecewise", "inductor"),
        ("dense", 1, "full_and_piecewise", "inductor"),
    ],
)
def test_nothing_is_captured_or_compiled_after_the_warm_up(kind: str, pcp: int, mode: str, how: str) -> None:
    """Hundreds of steps of random requests, all sizes of batches among them."""
    program_of, vocab = PROGRAMS[kind]
    options = EngineOptions(
        pcp=pcp, block_size=8, num_blocks=120, max_len=120, max_requests=5, budget=48, graph_mode=mode,
        graph_compile=how, graph_rows=(4, 16, 48),
    )  # fmt: skip
    executor = SimulatedExecutor(program_of(pcp, 3), replace(options, graph_requests=(1, 2, 5)))
    engine = Engine(executor)
    assert executor.compiler is not None
    keys, counts = captured(executor), str(executor.compiler.counts)
    assert keys
    rng, number = random.Random(9), 0
    while engine.stats.steps < STEPS:
        while len(engine.scheduler.requests) < 5 and rng.random() < 0.3:
            prompt = [rng.randrange(vocab) for _ in range(rng.choice((1, 3, 20, 90)))]
            engine.add_request(prompt, SamplingParams(max_tokens=rng.randint(1, 20)), f"r{number}")
            number += 1
        if engine.unfinished:
            engine.step()
    summary = engine.summary()
    assert number > 20 and not summary["steps_without_graph"]
    assert captured(executor) == keys and str(executor.compiler.counts) == counts
    used = {key.rsplit(" ", 1)[1] for key in summary["graph_hits"] if key.startswith("target") and "piecewise" in key}
    assert used == {"4", "16", "48"}, f"buckets of rows that were hit: {sorted(used)}"
