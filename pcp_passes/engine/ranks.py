# SPDX-License-Identifier: Apache-2.0
"""The executor that holds one rank of a mesh of processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from pcp_passes.collectives import CollectiveLog, all_gather_rows, bound_axis, record_collectives
from pcp_passes.distributed import Heartbeat, Loss, exit_process
from pcp_passes.distributed.process_groups import MeshGroups
from pcp_passes.distributed.stages.logged_transport import LoggedTransport
from pcp_passes.distributed.stages.round_state import RoundForm
from pcp_passes.distributed.stages.rounds import RoundReceiver, RoundSender
from pcp_passes.distributed.stages.wires import WireReceiver, WireSender, require_wires
from pcp_passes.distributed.store import PrefixStore
from pcp_passes.distributed.watch.guard import Guard
from pcp_passes.distributed.watch.runlog import KEPT, RunLog, Waiting
from pcp_passes.engine.executor import OpenStep
from pcp_passes.engine.group_facts import facts_of, known_of, sources_of, texts_of
from pcp_passes.engine.lockstep import Proposal
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.programs import ProgramExecutor
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.engine.stage_rounds import StageRounds
from pcp_passes.engine.stats import StepRecord
from pcp_passes.errors import ConfigError, RankMismatch
from pcp_passes.host_reads import allowed
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.peer_rows import DP_AXIS
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs

if TYPE_CHECKING:
    from pcp_passes.distributed.store import Store
    from pcp_passes.step.program import StepProgram
    from pcp_passes.step.stages import StageProgram

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MOST_RUNNING = 64


class GroupExecutor(ProgramExecutor):
    """One rank of a mesh; every rank makes one, and an engine on it: ``Engine(executor, exchange=executor.exchange)``.

    All ranks of the mesh first agree, through a store, on options, versions, graphs and weights; graphs and weights of
    a stage among the ranks of that stage. Then each beats a heart: when a rank dies or freezes, in whatever step, the
    others end within 30 s with the reason. So they do when ranks of a group issue different collectives.

    With stages, it keeps the weights of its own one: a caller that drops the program frees the others'. Its experts
    are copies, for the same reason.

    Args:
        group: the groups of a mesh, that of ``options``; or a pcp group alone, whose rank order is the axis order and
            whose size is ``options.pcp``. Over however many nodes.
        bootstrap: a store that the ranks share; default that of the default process group.
        host: address of rank 0's machine as the other ranks reach it.
        agreement_s: seconds to wait for the others at the start.
        on_lost: what to do when a rank is lost, on a thread of its own; the default ends the process with
            :data:`pcp_passes.distributed.EXIT_CODE`, whatever it is blocked in.
        reason_file: the reason of a loss is also written there.
        keep_log: keep all of :attr:`log`, which grows with every step, instead of its last entries.

    Raises:
        ConfigError: groups of another size, or closed ones.
        RankMismatch: ranks that differ in anything that decides what a step does.
        PeerLost: a rank that did not come to the agreement.
    """

    own_experts = True

    def __init__(
        self,
        program: StepProgram,
        options: EngineOptions,
        group: dist.ProcessGroup | MeshGroups,
        *,
        device: torch.device | str = "cpu",
        bootstrap: Store | None = None,
        host: str = "127.0.0.1",
        agreement_s: float = 60.0,
        on_lost: Callable[[Loss], None] = exit_process,
        reason_file: str | os.PathLike[str] | None = None,
        keep_log: bool = False,
    ) -> None:
        groups = group if isinstance(group, MeshGroups) else None
        pcp_group = group.pcp if isinstance(group, MeshGroups) else group
        mesh = _mesh_of(options, group)
        if options.graph_collectives == "inside" and (pcp_group is None or dist.get_backend(pcp_group) != "nccl"):
            found = "none" if pcp_group is None else dist.get_backend(pcp_group)
            raise ConfigError(
                f"graph_collectives='inside' needs a group whose back end can be captured (nccl); found {found}. "
                "Set graph_collectives='outside'."
            )
        rank = group.rank if isinstance(group, MeshGroups) else group.rank()
        at = mesh.coordinates(rank)
        super().__init__(program, options, [at.pcp], device, stages=[at.pp], replica=at.dp)
        self._make_graphs()
        axis = self._axis = self.program.axis
        self._stage: StageProgram | None = None
        if self.stages:
            self._stage, self.stages = self.stages[at.pp], ()
            del self.program  # which holds the weights of all stages
        self.mesh, self.rank = mesh, rank
        self.heartbeat: Heartbeat | None = None
        self._guard: Guard | None = None
        self._wires_in: WireReceiver | None = None
        self._wires_out: WireSender | None = None
        self._rounds_out: RoundSender | None = None
        self._executed = 0
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._running: dict[int, tuple[torch.cuda.Event, Waiting]] = {}
        axes = {axis: mesh.group_of("pcp", rank), DP_AXIS: mesh.group_of("dp", rank)}
        self.log = RunLog(rank, axes, kept=None if keep_log else KEPT, source=sources_of(self._stage or program))
        """What this rank issued, by group."""
        if self.device.type == "cuda":
            self.log.queued = {}
        self.exchange: GroupExchange | None = None
        """How replicas that share experts tell each other of their steps; for :class:`~pcp_passes.engine.Engine`."""
        if mesh.world_size == 1:
            return
        shared = bootstrap if bootstrap is not None else dist.distributed_c10d._get_default_store()
        if not isinstance(group, MeshGroups):  # other pcp groups of the world may be on the same store
            shared = PrefixStore(f"pcp_passes/{dist.get_process_group_ranks(group)}", shared)
        guard = Guard(
            self.log, mesh.world_size, bootstrap=shared, host=host, timeout_s=agreement_s,
            silence_s=options.silence_s, on_lost=on_lost, reason_file=reason_file,
            name_of="pcp rank {}".format if groups is None else self._name_of, boxes=self.device.type == "cpu",
        )  # fmt: skip
        guard.start(facts_of(program, self._stage, options), texts_of(program, self._stage))
        self._guard, self.heartbeat = guard, guard.heartbeat
        if options.pcp > 1 and pcp_group is not None:
            self._groups[axis] = pcp_group
        if groups is not None:
            self._connect(groups)
        logger.info("engine: %s of %d ready, %s", self._name_of(rank), mesh.world_size, options)

    def _name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.mesh.coordinates(rank)})"

    def _connect(self, groups: MeshGroups) -> None:
        """To the other replicas, and to the other stages."""
        options, rank = self.options, self.ranks[0]
        if options.lockstep:
            assert groups.dp is not None and groups.dp_cpu is not None, "a mesh of several replicas has their groups"
            self._groups[DP_AXIS] = groups.dp
            self.exchange = GroupExchange(groups.dp_cpu, groups.ranks("dp"), self.log, self._or_lost)
        if options.pp == 1:
            return
        stage = self._stage
        assert stage is not None, "a mesh of several stages has their programs"
        assert groups.pp is not None and groups.pp_cpu is not None, "a mesh of several stages has their groups"
        ranks = groups.ranks("pp")
        form, transport = RoundForm(self.steps, "tensor"), LoggedTransport(
            groups.pp_cpu, ranks, self.log, device_group=groups.pp
        )  # fmt: skip
        if not stage.is_first:
            self._wires_in = WireReceiver(groups.pp, ranks, rank.stage, self.log, stage.wires_in, self.device)
        if stage.is_last:
            self._rounds_out = RoundSender(transport, form)
            return
        self._wires_out = WireSender(groups.pp, ranks, rank.stage, self.log, in_flight=options.pp)
        rank.rounds = StageRounds(RoundReceiver(transport, form), rank.state)

    def execute(self, batch: ScheduledBatch) -> tuple[StepOutputs | None, StepRecord]:
        """See :meth:`Executor.execute`. Raises RankMismatch when ranks know different things of the batch."""
        self._executed += 1
        with self._bound():
            if self.options.check_ranks and self.options.pcp > 1:
                self.log.begin(self._executed, "")
                self._require_same(batch)
            self.log.begin(self._executed, "sharded" if self._loaded is not None and self._loaded.plans else "plain")
            found = super().execute(batch)
        if self.device.type == "cuda" and found[0] is not None and not batch.dummy and self.log.waiting is not None:
            done = torch.cuda.Event()
            done.record()
            self._running[batch.step] = done, self.log.waiting
            if len(self._running) > _MOST_RUNNING:  # of a caller that never settles
                del self._running[next(iter(self._running))]
        self.log.rest()
        return found

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """For one step, as another executor of this process may have groups of its own."""
        with ExitStack() as stack:
            for axis, group in self._groups.items():
                stack.enter_context(bound_axis(axis, group))
            yield

    @allowed("the check of the ranks is for finding faults: switch it off, check_ranks=False, where waiting costs")
    def _require_same(self, batch: ScheduledBatch) -> None:
        known = torch.tensor([known_of(batch, self.choice_of(batch))], dtype=torch.int64, device=self.device)
        with record_collectives(self.log):
            gathered = self._or_lost(lambda: all_gather_rows(known, self.options.pcp, self._axis)).tolist()
        others = [rank for rank, digest in enumerate(gathered) if digest != gathered[0]]
        if others:
            raise RankMismatch(
                f"step {batch.step}: pcp rank {', '.join(map(str, others))} schedules another batch, or knows other "
                "tokens of it, or chose another graph, than rank 0.\n  next  give all ranks the same requests in "
                "the same order; where tokens differ by a near tie, use verify_tokens='broadcast'"
            )

    def take_over(self) -> int:
        """See :meth:`Executor.take_over`; waits for the rounds of steps in flight, so all ranks must call it."""
        self._running.clear()
        return self._or_lost(lambda: super(GroupExecutor, self).take_over())

    def settle(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """See :meth:`Executor.settle`. On a GPU it waits for the step, as whoever reads results must: a wait that the
        watch knows of."""
        if (running := self._running.pop(batch.step, None)) is not None:
            done, waiting = running
            with self.log.waiting_for(waiting):
                self._or_lost(done.synchronize)
        return self._or_lost(lambda: super(GroupExecutor, self).settle(batch))

    def _run_step(self, step: OpenStep) -> tuple[StepOutputs | None, CollectiveLog]:
        with record_collectives(self.log):
            if self._stage is None:
                return super()._run_step(step)
            with record_collectives() as log:
                return self._or_lost(lambda: self._run_stage(step)), log

    def _run_stage(self, step: OpenStep) -> StepOutputs | None:
        rank, batch, stage = self.ranks[0], step.batch, self._stage
        assert stage is not None, "the program is whole"
        plan = step.plans[0] if step.plans else None
        checked = self.options.check_ranks and self.options.pp > 1
        known = known_of(batch, self.choice_of(batch)) if checked else None
        rows = batch.num_tokens if plan is None else plan.local_rows.shape[0]
        inputs = self._prepare(rank, step)
        wires = self._wires_in.receive(self._executed, rows, known) if self._wires_in is not None else ()
        try:
            found = stage.run(rank.memory, inputs, plan, wires)
        except Exception:
            if self._rounds_out is not None and step.real:
                self._rounds_out.fail(len(batch.entries))
            raise
        if isinstance(found, StepOutputs):
            self._apply([rank], step, [found])
            if self._rounds_out is not None and step.real:
                self._rounds_out.send(batch.step, len(batch.entries), found.sampled, found.drafts)
            return found
        assert self._wires_out is not None, "a stage before the last sends"
        require_wires(found, stage.wires_out, rows)
        self._wires_out.send(self._executed, found, known)
        if step.real:
            assert rank.rounds is not None, "a stage before the last has rounds"
            rank.rounds.stash(batch)
        return None

    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        plan = plans[0] if plans else None
        with record_collectives() as log:
            return [self._or_lost(lambda: self.program.run(self.ranks[0].memory, inputs[0], plan))], log

    def _or_lost(self, call: Callable[[], T]) -> T:
        return call() if self._guard is None else self._guard.or_lost(call)

    def close(self) -> None:
        """Say goodbye to the other ranks (idempotent)."""
        if self.options.graph_collectives == "inside":  # NCCL ends a group only when no graph holds its kernels
            for rank in self.ranks:
                if rank.runner is not None:
                    rank.runner.replayer.release()
        guard, self._guard, self.heartbeat = self._guard, None, None
        if guard is None:
            return
        try:
            if self._wires_out is not None:
                guard.or_lost(self._wires_out.flush)
            if self._rounds_out is not None:
                guard.or_lost(self._rounds_out.close)
        finally:
            guard.close()


class GroupExchange:
    """A :class:`~pcp_passes.engine.lockstep.StepExchange` over the replicas' CPU group: four numbers each."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], log: RunLog, or_lost: Callable[[Callable[[], None]], None]
    ) -> None:
        self._group, self._ranks, self._log, self._or_lost = group, tuple(ranks), log, or_lost

    @property
    def replica(self) -> int:
        """Index of this replica."""
        return self._group.rank()

    def exchange(self, mine: Proposal) -> list[Proposal]:
        """What all replicas propose, in the order of the dp axis."""
        row = torch.tensor(mine.to_ints(), dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in self._ranks]
        self._log.talk("proposals", self._ranks, "exchange", row.shape, row.dtype, waits_for=self._ranks)
        self._or_lost(lambda: dist.all_gather(rows, row, group=self._group))
        self._log.wait(None)
        return [Proposal.from_ints(found.tolist()) for found in rows]


def _mesh_of(options: EngineOptions, group: dist.ProcessGroup | MeshGroups) -> Mesh:
    """The mesh that ``group`` spans, which must be that of ``options``."""
    if isinstance(group, MeshGroups):
        if group.mesh != options.mesh:
            raise ConfigError(
                f"the groups are those of {group.mesh} and EngineOptions asks for {options.mesh}; make both for one."
            )
        needed = [name for name in ("pcp", "pp", "dp") if group.mesh.size(name) > 1]
        if missing := [name for name in needed if getattr(group, name) is None]:
            raise ConfigError(
                f"the groups of {group.mesh} have no {', '.join(missing)} group, as after close(); make new ones with "
                "MeshGroups.create(mesh), on all ranks."
            )
        return group.mesh
    if options.mesh.world_size != options.pcp:
        raise ConfigError(
            f"EngineOptions asks for {options.mesh} and was given one process group; give MeshGroups.create(mesh)."
        )
    if group.size() != options.pcp:
        raise ConfigError(
            f"the process group has {group.size()} ranks and EngineOptions has pcp={options.pcp}; start as many "
            "processes as pcp asks for, over all nodes."
        )
    return options.mesh
