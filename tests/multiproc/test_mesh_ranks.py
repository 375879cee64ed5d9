# SPDX-License-Identifier: Apache-2.0
"""Meshes of real ranks over gloo: what one rank gives, and equal logs within each group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pcp_passes.distributed.agreement import ABSENT, _differing
from pcp_passes.distributed.process_groups import MeshGroups
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.graphs import WITHOUT
from pcp_passes.engine.group_facts import facts_of, known_of
from pcp_passes.engine.options import SamplingParams
from pcp_passes.engine.ranks import GroupExecutor
from pcp_passes.engine.request import Entry, Request, ScheduledBatch
from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import Coordinates
from pcp_passes.mesh.axes import Mesh as MeshShape
from tests import engine_schedules as schedules
from tests.mesh_programs import mesh_program
from tests.multiproc import _mesh_ranks as ranks
from tests.multiproc._workers import Group

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

Mesh = dict[str, Any]
Saved = list[list[dict[str, Any]]]

SEEDS = (20, 6, 17)
"""With aborts, preemptions, reused prefixes, both kinds of layouts and of decodes."""
EP = {"expert_parallel": True}
MESHES: list[tuple[Mesh, tuple[int, ...]]] = [
    ({"pp": 5}, SEEDS[:1]),
    ({"pp": 2, "pcp": 2}, SEEDS),
    ({"dp": 2, "pcp": 2, **EP}, SEEDS),
    ({"pp": 3}, SEEDS),
    ({"pp": 2}, SEEDS),
    ({"dp": 2, **EP}, SEEDS),
    ({"pcp": 2, "tp": 2, "fold_on_tp": True, **EP}, SEEDS),
]
WORLD = 5
TALKS = (
    {"wires", "rounds"}, {"wires", "rounds", "pcp"}, {"dp", "pcp", "proposals"}, {"wires", "rounds"},
    {"wires", "rounds"}, {"dp", "proposals"}, {"pcp"},
)  # fmt: skip
"""Kinds of groups that each mesh uses."""
COMPARED = ("tokens", "drafted", "accepted", "finish_reason", "preemptions", "cached_tokens")


def require_equal_logs(logs: list[dict[str, list[str]]]) -> dict[str, int]:
    """Entries per group; all its members must have the same."""
    counts = {}
    for key in {key for log in logs for key in log}:
        members = [int(rank) for rank in key[key.index("[") + 1 : -1].split(",")]
        for rank in members:
            assert logs[rank].get(key) == logs[members[0]].get(key), f"{key} differs between {members[0]} and {rank}"
        assert not [rank for rank, log in enumerate(logs) if key in log and rank not in members]
        counts[key] = len(logs[members[0]][key])
    return counts


def reference(seed: int, mesh: Mesh, replica: int) -> schedules.Trace:
    """The replica's requests on one rank, whose scheduler runs as many steps ahead."""
    schedule = ranks.made_schedule(seed)
    mine = ranks.split(schedule, mesh.get("dp", 1), replica)
    executor = schedules.Watched(mesh_program(1, ranks.STEPS), schedule.options)
    executor.check_steps = False
    engine = Engine(executor, depth=mesh.get("pp", 1))
    outputs = ranks.drive(engine, mine, ranks.last_event(schedule))
    return schedules.Trace(outputs, [schedules.cache_rows(executor.ranks[0].memory.caches)], executor.written, {})


def require_equal(found: dict[str, Any], wanted: schedules.Trace, where: str) -> None:
    assert found["outputs"].keys() == wanted.outputs.keys(), where
    for name, mine in found["outputs"].items():
        other = wanted.outputs[name]
        for what in COMPARED:
            assert getattr(mine, what) == getattr(other, what), f"{where}: {what} of {name}"
        worst = max((abs(a - b) for a, b in zip(mine.logprobs, other.logprobs, strict=False)), default=0.0)
        assert worst <= schedules.ATOL, f"{where}: logprobs of {name} differ by {worst:.3g}"
    for name, rows in found["caches"].items():
        _, said = schedules._compare_cache(rows, wanted.caches[0][name], wanted.written[name.split(".")[0]])
        assert not said, f"{where} {name}: {said}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Saved]:
    """By mesh and rank what was seen of each seed; all meshes in the same processes."""
    folder = tmp_path_factory.mktemp("meshes")
    with Group(WORLD, folder, ranks.trace, meshes=MESHES) as group:
        codes = group.exit_codes(list(range(WORLD)), ranks.LONG_S - 10.0)
        assert codes == dict.fromkeys(range(WORLD), 0), "\n".join(group.stderr(rank)[-2000:] for rank in range(WORLD))
    return [
        [torch.load(folder / f"trace.{place}.{rank}", weights_only=False) for rank in range(shape_of(mesh).world_size)]
        for place, (mesh, _) in enumerate(MESHES)
    ]


def shape_of(mesh: Mesh) -> MeshShape:
    return replace(ranks.OPTIONS, **mesh).mesh


@pytest.mark.parametrize("place", range(len(MESHES)), ids=[str(shape_of(mesh)) for mesh, _ in MESHES])
def test_every_rank_gives_what_one_rank_gives(saved: list[Saved], place: int) -> None:
    mesh, seeds = MESHES[place]
    shape = shape_of(mesh)
    seen = dict.fromkeys(("accepted", "aborts", "preemptions"), 0)
    for index, seed in enumerate(seeds):
        wanted = [reference(seed, mesh, replica) for replica in range(shape.dp)]
        held: dict[int, set[str]] = {}
        for rank, of_rank in enumerate(saved[place]):
            at = shape.coordinates(rank)
            require_equal(of_rank[index], wanted[at.dp], f"{shape}, seed {seed}, rank {rank}")
            held.setdefault(at.dp * shape.pcp + at.pcp, set()).update(of_rank[index]["caches"])
        for names in held.values():
            assert names == set(wanted[0].caches[0]), "the stages hold all layers together"
        outputs = [output for trace in wanted for output in trace.outputs.values()]
        seen["accepted"] += sum(sum(output.accepted) for output in outputs)
        seen["aborts"] += sum(output.finish_reason == "abort" for output in outputs)
        seen["preemptions"] += sum(output.preemptions for output in outputs)
    assert min(seen.values()) > 0, seen


@pytest.mark.parametrize("place", range(len(MESHES)), ids=[str(shape_of(mesh)) for mesh, _ in MESHES])
def test_logs_are_equal_within_each_group(saved: list[Saved], place: int) -> None:
    for index, _ in enumerate(MESHES[place][1]):
        counts = require_equal_logs([of_rank[index]["log"] for of_rank in saved[place]])
        assert {key.partition("[")[0] for key in counts} == TALKS[place]
        assert min(counts.values()) > 5


def test_a_rank_keeps_the_weights_of_its_stage_and_its_experts(saved: list[Saved]) -> None:
    """So that they are freed when the caller drops the program; experts are copies, so none of the program's."""
    for (mesh, _), of_mesh in zip(MESHES, saved, strict=True):
        held = [of_rank[0]["held"] for of_rank in of_mesh]
        if mesh.get("pp", 1) > 1:
            stages = [held[shape_of(mesh).rank_of(Coordinates(pp=stage))] for stage in range(mesh["pp"])]
            assert max(stages) < 0.7 and abs(sum(stages) - 1) < 0.02, (mesh, stages)
        elif mesh.get("dp", 1) > 1:
            assert max(held) < 0.7, (mesh, held)


def test_two_pcp_groups_of_a_world_and_two_engines_of_a_group_keep_apart(tmp_path: Path) -> None:
    with Group(4, tmp_path, ranks.beside) as group:
        assert group.exit_codes([0, 1, 2, 3], 120.0) == dict.fromkeys(range(4), 0), group.stderr(0)[-2000:]
    told = [(tmp_path / f"told.{rank}").read_text().split(" ", 1) for rank in range(4)]
    assert told[0][0] == told[1][0] != told[2][0] == told[3][0], "each group has a store of its own"
    assert len({tokens for _, tokens in told}) == 1


def test_the_weights_fact_covers_experts() -> None:
    program, options = mesh_program(1, ranks.STEPS), replace(ranks.OPTIONS, dp=2, expert_parallel=True)
    before = facts_of(program, None, options)["weights"]
    down = next(x for name, x in program.plain.state_dict().items() if name.endswith("down"))
    kept = down.clone()
    try:
        down.mul_(1.5)
        assert facts_of(program, None, options)["weights"] != before
    finally:
        down.copy_(kept)
    assert facts_of(program, None, options)["weights"] == before


def test_the_comparisons_can_fail(saved: list[Saved]) -> None:
    """Sabotage: another token, cache rows that moved, and logs of which one entry is missing."""
    mesh, seeds = MESHES[1]
    wanted, mine = reference(seeds[0], mesh, 0), saved[1][0][0]
    name, output = next((name, one) for name, one in mine["outputs"].items() if one.tokens)
    other = replace(output, tokens=(*output.tokens[:-1], output.tokens[-1] ^ 1))
    with pytest.raises(AssertionError, match=f"here: tokens of {name}"):
        require_equal({**mine, "outputs": {**mine["outputs"], name: other}}, wanted, "here")
    with pytest.raises(AssertionError, match=r"target\.0"):
        require_equal({**mine, "caches": {name: x.roll(1, 0) for name, x in mine["caches"].items()}}, wanted, "here")
    logs = [of_rank[0]["log"] for of_rank in saved[1]]
    key = next(key for key in logs[1] if key.startswith("pcp"))
    with pytest.raises(AssertionError, match="differs between 0 and 1"):
        require_equal_logs([logs[0], {**logs[1], key: logs[1][key][:3] + logs[1][key][4:]}, *logs[2:]])


def test_a_fact_of_a_stage_is_compared_within_the_stage() -> None:
    posted = {
        0: {"options": "a", "stage 0 | plain": "x"}, 1: {"options": "a", "stage 0 | plain": "y"},
        2: {"options": "a", "stage 1 | plain": "z"}, 3: {"options": "b", "stage 1 | plain": "z"},
    }  # fmt: skip
    assert _differing(posted) == {"options": {"a": [0, 1, 2], "b": [3]}, "stage 0 | plain": {"x": [0], "y": [1]}}
    del posted[3]["stage 1 | plain"]
    posted[3]["stage 1 | sharded"] = "z"
    assert _differing(posted)["stage 1 | plain"] == {"z": [2], ABSENT: [3]}


def test_groups_that_are_not_those_of_the_options_are_refused() -> None:
    program, world = mesh_program(1, ranks.STEPS), cast(Any, None)
    mesh, other = MeshShape(pp=2), MeshShape(dp=2)
    with pytest.raises(ConfigError, match=f"the groups are those of {mesh} and EngineOptions asks for {other};"):
        GroupExecutor(program, replace(ranks.OPTIONS, dp=2), MeshGroups(mesh, 0, world))

    with pytest.raises(ConfigError, match=rf"{mesh} have no pp group, as after close\(\)"):
        GroupExecutor(program, replace(ranks.OPTIONS, pp=2), MeshGroups(mesh, 0, world))

    class Two:
        def size(self) -> int:
            return 2

    with pytest.raises(ConfigError, match=r"was given one process group; give MeshGroups\.create"):
        GroupExecutor(program, replace(ranks.OPTIONS, pp=2), cast(Any, Two()))


def test_what_ranks_compare_of_a_step_holds_the_prompt_and_how_it_is_sampled() -> None:
    def known(prompt: tuple[int, ...] = (1, 2, 3), chunk: int = 3, **params: Any) -> int:
        request = Request("r", prompt, SamplingParams(**params), prefill_len=len(prompt))
        return known_of(ScheduledBatch(1, (Entry(request, 0, 0, 0, chunk, 0, True, -1),)), WITHOUT)

    assert known() == known()
    assert len({known(), known((1, 2, 4)), known(seed=1), known(temperature=0.5), known(chunk=2)}) == 5


def test_a_close_that_fails_still_says_goodbye() -> None:
    class Broken:
        closed = False

        def flush(self) -> None:
            raise RuntimeError("Connection closed by peer")

        def or_lost(self, call: Callable[[], None]) -> None:
            call()

        def close(self) -> None:
            self.closed = True

    executor: Any = object.__new__(GroupExecutor)
    executor.options, executor.ranks, executor._rounds_out = ranks.OPTIONS, [], None
    executor._guard = executor._wires_out = broken = Broken()
    with pytest.raises(RuntimeError, match="Connection closed"):
        executor.close()
    assert broken.closed
    executor.close()
