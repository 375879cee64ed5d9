# SPDX-License-Identifier: Apache-2.0
"""Executors of a step program: all ranks in one process, or one rank of a process group."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import fx

from pcp_passes.collectives import CollectiveLog, all_gather_rows, bind_axis, record_collectives, unbind_axis
from pcp_passes.distributed import Heartbeat, Loss, exit_process, open_store, require_agreement
from pcp_passes.engine.executor import Executor
from pcp_passes.engine.graphs import GraphPlanner
from pcp_passes.engine.options import CACHE_DTYPES, EngineOptions
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.engine.requirements import RECORDS, require_full_graphs, require_kernels
from pcp_passes.engine.stats import StepRecord
from pcp_passes.errors import ConfigError, RankMismatch
from pcp_passes.host_reads import allowed
from pcp_passes.ir.printer import graph_fingerprint, print_graph
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs
from pcp_passes.step.placement import body_of

if TYPE_CHECKING:
    from pcp_passes.distributed.store import Store
    from pcp_passes.piecewise.compile import Backend
    from pcp_passes.piecewise.cuts import Collectives
    from pcp_passes.step.program import StepProgram

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _ProgramExecutor(Executor):
    """Shared by both: the program, with bodies that write what the caches hold, and its graphs."""

    def __init__(self, program: StepProgram, options: EngineOptions, ranks: Sequence[int], device: torch.device | str):
        if program.pcp != options.pcp:
            raise ConfigError(
                f"the step program was built for {program.pcp} pcp ranks and EngineOptions has pcp={options.pcp}; "
                "build both for one size."
            )
        program = program.storing(RECORDS[options.cache_dtype])
        bodies = [body.graph for name, body in _graphs(program) if "." in name]
        require_kernels(bodies, options, program.target.dtype, torch.device(device))
        require_full_graphs(bodies, options, program.drafter.steps, torch.device(device))
        dtype = CACHE_DTYPES[options.cache_dtype] or program.target.dtype
        super().__init__(options, program.drafter.steps, ranks, cache_dtype=dtype, device=device)
        self.program, self.vocab_size = program, program.target.vocab_size

    def _make_graphs(self) -> None:
        """A planner, and on every rank here a runner, when a graph mode is on."""
        options = self.options
        if self.buckets is None:
            return
        # Read when a graph mode asks for them: splitting runs passes, and compiling imports the compiler.
        from pcp_passes.piecewise.compile import PieceCompiler
        from pcp_passes.piecewise.prepare import prepare
        from pcp_passes.piecewise.runner import BodyRunner

        calls = [body_of(node) for node in self.program.plain.graph.nodes if str(node.target).startswith("drafter.")]
        draft_calls = sum(call is not None for call in calls) > 1
        planner = GraphPlanner(options, self.steps, self.buckets, draft_calls=draft_calls)
        if planner.why_nothing:
            logger.warning("graphs: graph_mode=%r captures nothing: %s", options.graph_mode, planner.why_nothing)
        collectives, backend = cast("Collectives", options.graph_collectives), cast("Backend", options.graph_compile)
        self.compiler = PieceCompiler(backend)
        prepared = prepare(self.program, collectives=collectives, compiler=self.compiler)
        for rank in self.ranks:
            caches = rank.memory.caches
            caches.runner = BodyRunner(
                prepared, caches, rows_max=planner.max_rows, requests_max=planner.max_requests,
                columns=options.blocks_per_request(self.steps), max_bytes=options.graph_bytes,
            )  # fmt: skip
        self.planner = planner


class SimulatedExecutor(_ProgramExecutor):
    """All ``options.pcp`` ranks in this process, each with its own state and caches."""

    def __init__(self, program: StepProgram, options: EngineOptions, *, device: torch.device | str = "cpu") -> None:
        super().__init__(program, options, range(options.pcp), device)
        if options.graph_collectives == "inside":
            raise ConfigError(
                "graph_collectives='inside' needs a process group whose back end can be captured (nccl), and the "
                "simulator exchanges rows in this process; set graph_collectives='outside'."
            )
        self._make_graphs()

    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        memories = [rank.memory for rank in self.ranks]
        if self.options.pcp == 1:
            return [self.program.run(memories[0], inputs[0])], CollectiveLog()
        logs: list[CollectiveLog] = []
        return self.program.simulate(memories, inputs, plans or None, logs=logs), logs[0]


class GroupExecutor(_ProgramExecutor):
    """One rank of a process group whose rank order is the axis order; every rank makes one, and an engine on it.

    Ranks first agree, through a store, on options, versions, graphs and weights. Then each beats a heart: when a rank
    dies or freezes, in whatever step, the others end within 30 s with the reason.

    Args:
        group: the pcp group; its size must be ``options.pcp``, over however many nodes.
        bootstrap: a store that the ranks share; default that of the default process group.
        host: address of rank 0's machine as the other ranks reach it.
        agreement_s: seconds to wait for the others at the start.
        on_lost: what to do when a rank is lost, on a thread of its own; the default ends the process with
            :data:`pcp_passes.distributed.EXIT_CODE`, whatever it is blocked in.
        reason_file: the reason of a loss is also written there.

    Raises:
        ConfigError: a group of another size.
        RankMismatch: ranks that differ in anything that decides what a step does.
        PeerLost: a rank that did not come to the agreement.
    """

    def __init__(
        self,
        program: StepProgram,
        options: EngineOptions,
        group: dist.ProcessGroup,
        *,
        device: torch.device | str = "cpu",
        bootstrap: Store | None = None,
        host: str = "127.0.0.1",
        agreement_s: float = 60.0,
        on_lost: Callable[[Loss], None] = exit_process,
        reason_file: str | os.PathLike[str] | None = None,
    ) -> None:
        if group.size() != options.pcp:
            raise ConfigError(
                f"the process group has {group.size()} ranks and EngineOptions has pcp={options.pcp}; start as many "
                "processes as pcp asks for, over all nodes."
            )
        if options.graph_collectives == "inside" and dist.get_backend(group) != "nccl":
            raise ConfigError(
                f"graph_collectives='inside' needs a group whose back end can be captured (nccl); found "
                f"{dist.get_backend(group)}. Set graph_collectives='outside'."
            )
        super().__init__(program, options, [group.rank()], device)
        self._make_graphs()
        self.heartbeat: Heartbeat | None = None
        if options.pcp == 1:
            return
        rank, world = group.rank(), group.size()
        shared = bootstrap if bootstrap is not None else dist.distributed_c10d._get_default_store()

        def connect(name: str) -> Any:
            return open_store(host, rank=rank, world=world, bootstrap=shared, name=name, timeout_s=agreement_s)

        # Both before the agreement: nobody leaves it, and perhaps closes the store, before all are connected.
        self._store, beating = connect("engine/agreement"), connect("engine/heartbeat")
        require_agreement(
            self._store,
            rank=rank,
            world=world,
            topic="engine",
            facts=_facts(program, options),
            texts=_texts(program),
            timeout_s=agreement_s,
        )
        self.heartbeat = Heartbeat(
            beating,
            rank=rank,
            world=world,
            silence_s=options.silence_s,
            on_lost=on_lost,
            reason_file=reason_file,
        )
        self.heartbeat.start()
        bind_axis(program.axis, group)
        logger.info("engine: rank %d of %d ready, %s", rank, world, options)

    def execute(self, batch: ScheduledBatch) -> tuple[StepOutputs, StepRecord]:
        """See :meth:`Executor.execute`. Raises RankMismatch when ranks know different things of the batch."""
        if self.options.check_ranks and self.options.pcp > 1:
            self._require_same(batch)
        return super().execute(batch)

    @allowed("the check of the ranks is for finding faults: switch it off, check_ranks=False, where waiting costs")
    def _require_same(self, batch: ScheduledBatch) -> None:
        choice = self.choice_of(batch)
        seen = repr((batch.digest, choice.dispatch, choice.padded_tokens))
        digest = int.from_bytes(hashlib.sha256(seen.encode()).digest()[:8], "big") >> 1
        known = torch.tensor([digest], dtype=torch.int64, device=self.device)
        gathered = self._or_lost(lambda: all_gather_rows(known, self.options.pcp, self.program.axis)).tolist()
        others = [rank for rank, digest in enumerate(gathered) if digest != gathered[0]]
        if others:
            raise RankMismatch(
                f"step {batch.step}: pcp rank {', '.join(map(str, others))} schedules another batch, or knows other "
                "tokens of it, or chose another graph, than rank 0.\n  next  give all ranks the same requests in "
                "the same order; where tokens differ by a near tie, use verify_tokens='broadcast'"
            )

    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        plan = plans[0] if plans else None
        with record_collectives() as log:
            return [self._or_lost(lambda: self.program.run(self.ranks[0].memory, inputs[0], plan))], log

    def _or_lost(self, call: Callable[[], T]) -> T:
        """A collective that fails is often the first sign of a lost peer: say which one, if that is why."""
        try:
            return call()
        except RuntimeError:
            if self.heartbeat is not None:
                self.heartbeat.raise_if_lost(wait_s=self.options.silence_s)
            raise

    def close(self) -> None:
        """Say goodbye to the other ranks (idempotent)."""
        if self.options.graph_collectives == "inside":  # NCCL ends a group only when no graph holds its kernels
            for rank in self.ranks:
                if rank.runner is not None:
                    rank.runner.replayer.release()
        if self.heartbeat is not None:
            self.heartbeat.stop(linger_s=1.0)
            self.heartbeat = None
            unbind_axis(self.program.axis)


def _graphs(program: StepProgram) -> Iterator[tuple[str, fx.GraphModule]]:
    yield "plain", program.plain
    if program.sharded is not None:
        yield "sharded", program.sharded
    for model in (program.target, program.drafter.model):
        if model is not None:
            for variant, body in model.bodies.items():
                yield f"{model.name}.{variant}", body


def _facts(program: StepProgram, options: EngineOptions) -> dict[str, str]:
    facts = {"options": options.digest(), "torch": torch.__version__, "weights": _weights(program.plain)}
    return facts | {name: graph_fingerprint(gm) for name, gm in _graphs(program)}


def _texts(program: StepProgram) -> dict[str, str]:
    return {name: print_graph(gm) for name, gm in _graphs(program)}


def _weights(gm: fx.GraphModule) -> str:
    """Hash of a few values of every parameter: enough to tell checkpoints apart, cheap for large ones."""
    digest = hashlib.sha256()
    for name, held in sorted(gm.state_dict().items()):
        flat = held.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)].double().cpu()
        digest.update(f"{name} {list(held.shape)} {held.dtype}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]
