# SPDX-License-Identifier: Apache-2.0
"""Schedules of ``tests/engine_schedules.py`` on a mesh: all replicas in one process, each compared with one rank.

Arrivals are dealt to the replicas unevenly, so some replicas idle while others work. A replica schedules as an engine
alone does, so it must equal *one rank* on its own part of the schedule in everything, block numbers included, when that
rank keeps as many steps in flight as there are stages.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from pcp_passes.engine.fleet import Fleet
from pcp_passes.engine.request import RequestOutput
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import PcpError
from tests.engine_schedules import (
    ProgramOf,
    Schedule,
    Trace,
    Watched,
    cache_rows,
    compare,
    make_schedule,
    run_schedule,
)
from tests.mesh_programs import VOCAB

#: By name: what :class:`EngineOptions` is given beside a schedule's own.
MESHES: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp3": {"pp": 3},
    "pp5": {"pp": 5},
    "dp2": {"dp": 2, "expert_parallel": True},
    "dp2-independent": {"dp": 2},
    "pp2-pcp2": {"pp": 2, "pcp": 2},
    "pcp2-ep2": {"pcp": 2, "expert_parallel": True},
    "dp2-pcp2-ep4": {"dp": 2, "pcp": 2, "expert_parallel": True},
    "dp2-pcp2-pp2-ep4": {"dp": 2, "pcp": 2, "pp": 2, "expert_parallel": True},
    "fold2": {"pcp": 2, "tp": 2, "fold_on_tp": True},
    "fold2-dp2-ep4": {"dp": 2, "pcp": 2, "tp": 2, "fold_on_tp": True, "expert_parallel": True},
}


def part_of(schedule: Schedule, replica: int, replicas: int) -> Schedule:
    """What one replica gets of a schedule: most arrivals go to a favourite, a function of the seed."""
    rng = random.Random(schedule.seed + 77_000)
    weights = [rng.choice((1, 1, 5)) for _ in range(replicas)]
    owners = {one.id: rng.choices(range(replicas), weights)[0] for one in schedule.arrivals}
    return replace(
        schedule,
        arrivals=tuple(one for one in schedule.arrivals if owners[one.id] == replica),
        aborts=tuple((step, name) for step, name in schedule.aborts if owners[name] == replica),
    )


def run_fleet(schedule: Schedule, mesh: Mapping[str, Any], program_of: ProgramOf) -> tuple[list[Trace], Fleet]:
    """Run a schedule on a mesh; what each replica gave. The caches of a PCP rank are those of all its stages."""
    options = replace(schedule.options, **mesh)
    program = program_of(options.pcp, schedule.steps)
    fleet = Fleet([SimulatedExecutor(program, options, replica=place) for place in range(options.dp)])
    outputs = drive_fleet(fleet, [part_of(schedule, place, options.dp) for place in range(options.dp)])
    traces = []
    for engine, own in zip(fleet.engines, outputs, strict=True):
        caches: list[dict[str, torch.Tensor]] = [{} for _ in range(options.pcp)]
        states = [rank.state for rank in engine.executor.ranks]
        for rank in engine.executor.ranks:
            assert rank.rounds is None or not rank.rounds.waiting, "a round was never applied"
            rows = cache_rows(rank.memory.caches)
            assert not rows.keys() & caches[rank.index].keys(), "two stages hold a cache of one layer"
            caches[rank.index] |= rows
        assert all(torch.equal(state.computed, states[0].computed) for state in states), "stages end at other positions"
        traces.append(Trace(own, caches, {}, engine.summary()))
    fleet.close()
    return traces, fleet


def drive_fleet(fleet: Fleet, parts: list[Schedule]) -> list[dict[str, RequestOutput]]:
    """Feed each replica its part, and step all to the end."""
    outputs: list[dict[str, RequestOutput]] = [{} for _ in parts]
    owner = {one.id: place for place, part in enumerate(parts) for one in part.arrivals}
    waiting, now = [list(part.arrivals) for part in parts], 0
    while any(waiting) or fleet.unfinished:
        for place, part in enumerate(parts):
            while waiting[place] and waiting[place][0].step <= now:
                one = waiting[place].pop(0)
                fleet.add_request(one.prompt, one.params, one.id, replica=place)
            for step, name in part.aborts:
                if step == now and name in fleet.engines[place].scheduler.requests:
                    outputs[place][name] = fleet.abort(name)
        if fleet.unfinished:
            for output in fleet.step():
                outputs[owner[output.id]][output.id] = output
        now += 1
    return outputs


class Alone(Watched):
    """One rank, whose steps are checked elsewhere."""

    check_steps = False


@functools.cache
def _alone(part: Schedule, program_of: ProgramOf, depth: int) -> Trace:
    return run_schedule(part, 1, program_of, Alone, depth)


def check_mesh(
    name: str, seeds: Iterable[int], program_of: ProgramOf, *, vocab: int = VOCAB, longest: int = 40
) -> dict[str, int]:
    """Compare a mesh with one rank on random schedules; the first difference fails. How much of each thing happened."""
    mesh, totals = MESHES[name], dict.fromkeys(("accepted", "preemptions", "aborts", "dummies", "sharded", "cached"), 0)
    for seed in seeds:
        # Three numbers of drafts, so that few programs are built.
        schedule = make_schedule(seed, max_requests=5, vocab=vocab, longest=longest, steps=1 + seed % 3)
        replicas, depth = int(mesh.get("dp", 1)), int(mesh.get("pp", 1))
        try:
            found, fleet = run_fleet(schedule, mesh, program_of)
        except (AssertionError, PcpError) as error:
            raise AssertionError(f"{name}, seed {seed}: {error}") from error
        for place, trace in enumerate(found):
            part = part_of(schedule, place, replicas)
            wanted = _alone(part, program_of, depth)
            difference = compare(trace, wanted) if part.arrivals else None
            assert difference is None or not difference.first, f"{name}, seed {seed}, replica {place}: {difference}"
            assert part.arrivals or not any(held.any() for ranks in trace.caches for held in ranks.values())
            totals["accepted"] += trace.counts["accepted"]
            totals["preemptions"] += trace.counts["preemptions"]
            totals["aborts"] += trace.counts["aborts"]
            totals["cached"] += trace.counts["cached_tokens"]
            totals["sharded"] += trace.counts["sharded_steps"]
            totals["dummies"] += fleet.engines[place].stats.dummy_steps
    return totals
