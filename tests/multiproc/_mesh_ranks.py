# SPDX-License-Identifier: Apache-2.0
"""What ranks of a mesh run in ``test_divergence``, ``test_mesh_ranks`` and ``test_mesh_loss``."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist

from pcp_passes.collectives import CollectiveLog, all_gather_rows, bind_axis, record_collectives
from pcp_passes.distributed import Heartbeat, open_store
from pcp_passes.distributed.process_groups import MeshGroups
from pcp_passes.distributed.stages.wires import WireReceiver, WireSender
from pcp_passes.distributed.watch.blackbox import BlackBox, exchange_boxes
from pcp_passes.distributed.watch.divergence import DivergenceWatch, loss_of
from pcp_passes.distributed.watch.runlog import RunLog
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.executor import OpenStep
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.ranks import GroupExecutor
from pcp_passes.engine.request import RequestOutput
from pcp_passes.errors import PcpError
from pcp_passes.mesh.axes import Mesh
from pcp_passes.step.inputs import StepOutputs
from pcp_passes.step.stages import Wire
from tests import engine_schedules as schedules
from tests.mesh_programs import VOCAB, mesh_program
from tests.multiproc._workers import mark

HEARTBEAT_S = 10.0
LONG_S = 280
OPTIONS = EngineOptions(block_size=4, num_blocks=64, max_len=48, budget=16, silence_s=HEARTBEAT_S)
WIRE = Wire("hidden", (4,), torch.float64)


def diverging(rank: int, world: int, folder: Path, what: str) -> None:
    """Two ranks, of two stages that also gather, without an engine; in step 3 one of them goes astray."""
    torch.set_num_threads(1)
    bootstrap = dist.FileStore(str(folder / "rendezvous"), world)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", bootstrap), rank=rank, world_size=world)
    group, pipe = dist.group.WORLD, dist.new_group([0, 1])
    assert group is not None
    bind_axis("pcp", group)
    stores = [
        open_store("127.0.0.1", rank=rank, world=world, bootstrap=dist.PrefixStore(name, bootstrap), name=name)
        for name in ("beat", "watch")
    ]
    log = RunLog(rank, {"pcp": (0, 1)}, source=lambda variant, order: f"body {variant} %gather_{order}")
    watch = DivergenceWatch(
        stores[1], log, world, lambda found: beat.tell(loss_of(found, rank)), stall_s=2.0, tick_s=0.25
    )
    log.box = BlackBox()
    watch.boxes = exchange_boxes(stores[1], log.box, rank, world)
    reason = folder / f"reason.{rank}"
    beat = Heartbeat(stores[0], rank=rank, world=world, interval_s=0.5, reason_file=reason, explain=watch.explain)
    beat.start()
    if what != "unwatched":
        watch.start()
    sender = WireSender(pipe, (0, 1), 0, log, in_flight=2) if rank == 0 else None
    receiver = WireReceiver(pipe, (0, 1), 1, log, [WIRE], torch.device("cpu")) if rank == 1 else None
    rows = torch.ones(4, 4, dtype=torch.float64)

    def step(number: int) -> None:
        log.begin(number, "sharded")
        astray = number == 3 and rank == 1
        all_gather_rows(rows, world, "pcp")
        if sender is not None and not (what in ("unsent", "unwatched") and number == 3):
            sender.send(number, [rows])
        if receiver is not None:
            receiver.receive(number, 4)
        if astray and what == "slow":
            time.sleep(6.0)
        if not (astray and what == "skip"):
            dtype = torch.float32 if astray and what == "dtype" else torch.float64
            count = 5 if astray and what == "shape" else 4
            all_gather_rows(torch.ones(count, 4, dtype=dtype), world, "pcp")

    mark(folder, "begun", rank)
    told = "ended"
    with record_collectives(log):
        try:
            for number in range(6):
                step(number)
            if sender is not None:
                sender.flush()
        except RuntimeError as error:
            try:
                with watch.suspecting():
                    beat.raise_if_lost(10.0)
                told = f"unexplained {error}"
            except PcpError as named:
                told = f"{type(named).__name__}: {named}"
    mark(folder, "told", rank, told)
    watch.stop()
    beat.stop(linger_s=1.0)


STEPS = 2
"""Drafts of every schedule, so that a process captures and splits once."""


def split(schedule: schedules.Schedule, dp: int, replica: int) -> schedules.Schedule:
    """What one replica gets of a schedule: the first all but every third request, so that the others idle at times."""
    if dp == 1:
        return schedule
    owner = {one.id: int(index % 3 == 2) for index, one in enumerate(schedule.arrivals)}
    return replace(
        schedule,
        arrivals=tuple(one for one in schedule.arrivals if owner[one.id] == replica),
        aborts=tuple(one for one in schedule.aborts if owner[one[1]] == replica),
    )


def drive(engine: Engine, schedule: schedules.Schedule, last: int) -> dict[str, RequestOutput]:
    """:func:`schedules.drive`, with a step at each time up to ``last``: replicas step equally often."""
    outputs: dict[str, RequestOutput] = {}
    now = 0
    while now <= last or engine.unfinished:
        for one in schedule.arrivals:
            if one.step == now:
                engine.add_request(one.prompt, one.params, one.id)
        for step, name in schedule.aborts:
            if step == now and name in engine.scheduler.requests:
                outputs[name] = engine.abort(name)
        outputs.update((output.id, output) for output in engine.step())
        now += 1
    return outputs


def made_schedule(seed: int) -> schedules.Schedule:
    return schedules.make_schedule(seed, vocab=VOCAB, longest=60, steps=STEPS)


def last_event(schedule: schedules.Schedule) -> int:
    return max(*(one.step for one in schedule.arrivals), *(step for step, _ in schedule.aborts), 0)


def trace(rank: int, world: int, folder: Path, meshes: Sequence[tuple[dict[str, Any], Sequence[int]]]) -> None:
    """Run schedules on one mesh after another, each over the first ranks; save what this rank saw of each."""
    signal.alarm(LONG_S)
    torch.set_num_threads(1)
    for place, (shape, seeds) in enumerate(meshes):
        mesh = replace(OPTIONS, **shape).mesh
        if rank >= mesh.world_size:
            continue
        groups = join(rank, folder / f"rendezvous.{place}", mesh)
        found = [_trace_one(groups, shape, seed, folder / f"reason.{rank}") for seed in seeds]
        torch.save(found, folder / f"trace.{place}.{rank}")
        groups.close()
        dist.destroy_process_group()


def _trace_one(groups: MeshGroups, shape: dict[str, Any], seed: int, reason: Path) -> dict[str, Any]:
    schedule = made_schedule(seed)
    options = replace(schedule.options, silence_s=HEARTBEAT_S, **shape)
    program = mesh_program(options.pcp, STEPS)
    executor = GroupExecutor(program, options, groups, keep_log=True, reason_file=reason)
    whole = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in program.plain.state_dict().values()}
    held = sum(size for place, size in whole.items() if place in _storages(executor)) / sum(whole.values())
    engine = Engine(executor, exchange=executor.exchange)
    outputs = drive(engine, split(schedule, options.dp, groups.coordinates.dp), last_event(schedule))
    engine.close()
    caches = schedules.cache_rows(executor.ranks[0].memory.caches)
    return {"outputs": outputs, "caches": caches, "log": executor.log.comparable(), "held": held}


def _storages(root: object) -> set[int]:
    """Of all tensors that ``root`` keeps alive."""
    found, seen, left = set(), set(), [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | dist.ProcessGroup):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.add(one.untyped_storage().data_ptr())
        left += gc.get_referents(one)
    return found


def join(rank: int, rendezvous: Path, mesh: Mesh) -> MeshGroups:
    """The gloo groups of a mesh."""
    store = dist.FileStore(str(rendezvous), mesh.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.world_size)
    return MeshGroups.create(mesh)


def lost(rank: int, world: int, folder: Path, shape: dict[str, Any]) -> None:
    """Step for ever; the test ends one rank in the middle."""
    torch.set_num_threads(1)
    options = replace(OPTIONS, **shape)
    groups = join(rank, folder / "rendezvous", options.mesh)
    program = mesh_program(options.pcp, 1, layers=2)
    executor = GroupExecutor(program, options, groups, reason_file=folder / f"reason.{rank}")
    engine = Engine(executor, exchange=executor.exchange)
    while True:
        engine.add_request([i % VOCAB for i in range(13)], SamplingParams(max_tokens=12))
        engine.run()
        mark(folder, "ready", rank)


def straying(rank: int, world: int, folder: Path, shape: dict[str, Any], what: str) -> None:
    """An engine in whose fifth step rank 0 does not send its wires, or rank 1 runs the plain program."""
    torch.set_num_threads(1)
    options = replace(OPTIONS, silence_s=6.0, **shape)
    groups = join(rank, folder / "rendezvous", options.mesh)
    program = mesh_program(options.pcp, 1, layers=2)
    executor = _Straying(program, options, groups, reason_file=folder / f"reason.{rank}")
    executor.astray = {"unsent": 0, "plain": 1}[what] == rank
    engine = Engine(executor, exchange=executor.exchange)
    engine.add_request([i % VOCAB for i in range(13)], SamplingParams(max_tokens=12))
    mark(folder, "begun", rank)
    engine.run()
    mark(folder, "ended", rank)


def parting(rank: int, world: int, folder: Path, what: str, check: bool = True) -> None:
    """Two stages of which one is given another prompt of the same length, or an abort."""
    torch.set_num_threads(1)
    options = replace(OPTIONS, silence_s=6.0, pp=2, check_ranks=check)
    groups = join(rank, folder / "rendezvous", options.mesh)
    engine = Engine(GroupExecutor(mesh_program(1, 1, layers=2), options, groups, reason_file=folder / f"reason.{rank}"))
    for place in range(2):
        prompt = [i % VOCAB for i in range(7)]
        prompt[3] += what == "prompt" and rank == 1
        engine.add_request(prompt, SamplingParams(max_tokens=9), f"r{place}")
    mark(folder, "begun", rank)
    steps, told = 0, "ended"
    try:
        while engine.unfinished:
            steps += 1
            if what == "abort" and steps == 4 and rank == 1:
                engine.abort("r0")
            engine.step()
        engine.close()
    except PcpError as error:
        told = f"{type(error).__name__}: {error}"
        raise
    finally:
        mark(folder, "told", rank, told)


def beside(rank: int, world: int, folder: Path) -> None:
    """Two pcp groups in one world of four, each with two engines at a time of which the first is closed first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "rendezvous"), 4), rank=rank, world_size=4)
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    program = mesh_program(2, 1, layers=2)
    engines = [Engine(GroupExecutor(program, replace(OPTIONS, pcp=2), group, agreement_s=30.0)) for _ in range(2)]
    guard = cast(GroupExecutor, engines[0].executor)._guard
    assert guard is not None
    engines[0].close()
    engines[1].add_request([i % VOCAB for i in range(13)], SamplingParams(max_tokens=4))
    tokens = [output.tokens for output in engines[1].run().values()]
    engines[1].close()
    mark(folder, "told", rank, f"{guard._watching.port} {tokens}")
    dist.barrier()


class _Straying(GroupExecutor):
    astray = False

    def _run_step(self, step: OpenStep) -> tuple[StepOutputs | None, CollectiveLog]:
        if not self.astray or self._executed != 5:
            return super()._run_step(step)
        sender = self._wires_out
        if sender is None:
            return super()._run_step(OpenStep(replace(step.loaded, plans=[]), step.real))
        honest, sender.send = sender.send, lambda *args: None  # type: ignore[method-assign]
        try:
            return super()._run_step(step)
        finally:
            sender.send = honest  # type: ignore[method-assign]
