# SPDX-License-Identifier: Apache-2.0
"""Random schedules with graphs on, compared with the same ones without: nothing that a user or a cache sees differs.

``tests/engine_schedules.py`` makes the schedules. Here each gets a graph mode and few buckets, drawn from its seed; on
a CPU the replay checker stands in for CUDA graphs::

    run = run_graphs(make_schedule(7), 2, glm_program)      # fails when anything differs from PCP=1 without graphs
    run.hits["target.sharded piecewise 16"]
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from pcp_passes.engine.bodies import Model, make_bodies, prepare
from pcp_passes.engine.executor import Executor
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import PcpError
from pcp_passes.paged import kv_write, mla_attend
from pcp_passes.passes import PassContext
from pcp_passes.piecewise.buckets import derive_buckets
from pcp_passes.piecewise.replayer import GraphKey
from pcp_passes.speculative.mtp import MTP
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step.program import StepProgram
from tests import steps as small
from tests.engine_schedules import (
    VOCAB,
    Difference,
    ProgramOf,
    Schedule,
    Trace,
    Watched,
    compare,
    glm_program,
    make_schedule,
    run_schedule,
    small_program,
)

MODES = ("piecewise", "full_and_piecewise", "full_and_piecewise", "full_decode_only")
LATENT, ROPE = 8, 4


class LatentLayer(nn.Module):
    """Attention as MLA has it, with one cached latent and rope key for all heads; called as ``steps.Layer``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.q = nn.Linear(small.HIDDEN, small.HEADS * (LATENT + ROPE), bias=False)
        self.kv = nn.Linear(small.HIDDEN, LATENT + ROPE, bias=False)
        self.place = nn.Linear(2, ROPE, bias=False)
        self.out = nn.Linear(small.HEADS * LATENT, small.HIDDEN, bias=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, topk: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        angle = positions.to(x.dtype)[:, None] * 0.7
        latent, rope = self.kv(normed).split([LATENT, ROPE], -1)
        rope = rope + self.place(torch.cat([angle.sin(), angle.cos()], -1))
        dep = kv_write(latent[:, None], rope[:, None], self.name)
        q = self.q(normed).view(-1, small.HEADS, LATENT + ROPE)
        found = mla_attend(q, dep, self.name, scale=0.3, latent=LATENT)
        return x + self.out(found.reshape(-1, small.HEADS * LATENT)), None


@functools.cache
def _mla_captured() -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    target, module = small.Target(aux=False), small.Module(topk=False)
    target.layers = nn.ModuleList(LatentLayer(f"target.{i}") for i in range(2))
    module.layer = LatentLayer("drafter.0")  # type: ignore[assignment]
    ids, hidden = torch.arange(7), torch.zeros(7, small.HIDDEN, dtype=torch.float64)
    return (
        prepare(small._seeded(target, 11, torch.float64), (ids, ids)),
        prepare(small._seeded(module, 13, torch.float64), (ids, ids, hidden)),
    )


@functools.cache
def mla_program(pcp: int, steps: int) -> StepProgram:
    """Dense MLA in float64, with a next-token module of the same kind. Make schedules with ``vocab=small.VOCAB``."""
    of_target, of_drafter = _mla_captured()
    context, head = PassContext(pcp), small._head()
    sizes = (head, small.HIDDEN, small.VOCAB)
    target = Model("target", make_bodies({"": of_target}, context), *sizes, ("target.0", "target.1"), torch.float64)
    drafter = Model("drafter", make_bodies({"": of_drafter}, context), *sizes, ("drafter.0",), torch.float64)
    return StepProgram(target, MTP(drafter, steps) if steps else NoDrafter(), pcp=pcp)


PROGRAMS: dict[str, tuple[ProgramOf, int]] = {
    "dense": (small_program, small.VOCAB),
    "mla": (mla_program, small.VOCAB),
    "glm": (glm_program, VOCAB),
}
"""Kind to ``(pcp, steps) -> program`` and the vocabulary of its prompts."""


@dataclass(frozen=True, eq=False)
class GraphRun:
    """A run with graphs: what it gave, how it differs, and replays per graph of the first rank."""

    trace: Trace
    difference: Difference
    hits: Counter[str]
    without: Counter[str]


def with_graphs(schedule: Schedule, pcp: int, mode: str | None = None) -> Schedule:
    """The schedule on ``pcp`` ranks with a graph mode and two to four buckets of each kind, drawn from its seed.

    One in three leaves the largest steps, or those of the most requests, without a graph.
    """
    rng = random.Random(schedule.seed * 31 + pcp)
    options = schedule.options
    derived = derive_buckets(
        budget=options.budget, pcp=pcp, max_requests=options.max_requests, steps=schedule.steps, decode=options.decode
    )

    def some(sizes: tuple[int, ...]) -> tuple[int, ...]:
        few = sorted(rng.sample(sizes[:-1], min(len(sizes) - 1, rng.randint(1, 3))))
        return tuple(few) if few and rng.random() < 1 / 3 else (*few, sizes[-1])

    chosen = mode or rng.choice(MODES)
    rows = None if chosen == "full_decode_only" else some(derived.rows)
    graphs = replace(options, pcp=pcp, graph_mode=chosen, graph_rows=rows, graph_requests=some(derived.requests))
    return replace(schedule, options=graphs)


def run_graphs(
    schedule: Schedule,
    pcp: int,
    program_of: ProgramOf,
    wanted: Trace,
    executor: Callable[[StepProgram, EngineOptions], Executor] = Watched,
) -> GraphRun:
    """Run ``schedule`` on ``pcp`` ranks with graphs and compare with ``wanted``, what PCP=1 made of it without.

    Raises AssertionError for any difference, for a slot written that a step does not own, and for whatever the replay
    checker refuses, a graph that was not captured in warm-up among it.
    """
    drawn = with_graphs(schedule, pcp)
    where = (
        f"seed {schedule.seed}, pcp {pcp}, {drawn.options.graph_mode}, rows {drawn.options.graph_rows}, "
        f"requests {drawn.options.graph_requests}, decode {drawn.options.decode}"
    )
    try:
        found = run_schedule(drawn, pcp, program_of, executor)
    except (AssertionError, PcpError) as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    difference = compare(found, wanted)
    assert not difference.first, f"{where}: {difference}"
    return GraphRun(
        found, difference, Counter(found.summary["graph_hits"]), Counter(found.summary["steps_without_graph"])
    )


def captured(executor: SimulatedExecutor) -> set[GraphKey]:
    """Keys of everything that any rank has captured."""
    runners = [rank.runner for rank in executor.ranks]
    return {key for runner in runners if runner is not None for key in runner.replayer.keys}


def draw(kind: str, seed: int) -> Schedule:
    """The schedule of a kind, without graphs."""
    return make_schedule(seed, vocab=PROGRAMS[kind][1], max_requests=5, longest=120)


def run_seed(kind: str, seed: int, pcps: Iterable[int] = (1, 2, 4)) -> tuple[Schedule, Trace, dict[int, GraphRun]]:
    """One schedule of a kind with graphs at each of ``pcps``, each compared with PCP=1 without graphs."""
    program_of, _ = PROGRAMS[kind]
    schedule = draw(kind, seed)
    wanted = run_schedule(schedule, 1, program_of)
    return schedule, wanted, {pcp: run_graphs(schedule, pcp, program_of, wanted) for pcp in pcps}
