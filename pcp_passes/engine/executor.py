# SPDX-License-Identifier: Apache-2.0
"""Runs one scheduled batch on the ranks: lays it out, prepares each rank's inputs, calls the step program, keeps state.

What the layout says to a rank belongs to exactly one batch *object*. :meth:`Executor.load` ties them; a step of any
other batch, a stale one, takes the global path: the plain program, no collective and no graph, nothing written and no
state advanced. :meth:`Executor.load` is the one planner: a dummy batch that is loaded (profiling, warm-up) runs the
program, the graphs and the shapes of a real batch of its sizes, and it too leaves no trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.dummies import without_writes
from pcp_passes.engine.graphs import STALE, WITHOUT, Choice, GraphPlanner, make_buckets
from pcp_passes.engine.lockstep import Agreement, Proposal, replicated_plan
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.engine.stage_rounds import StageRounds
from pcp_passes.engine.state import DeviceState
from pcp_passes.engine.stats import StepRecord
from pcp_passes.errors import ConfigError, PcpError, RankMismatch
from pcp_passes.host_reads import allowed
from pcp_passes.layout import Layout, build_layout
from pcp_passes.paged import PagedCaches
from pcp_passes.piecewise.sync_check import if_wanted
from pcp_passes.step.inputs import PlanBuffers, StepInputs, StepOutputs, StepPlanInputs
from pcp_passes.step.program import RankState

if TYPE_CHECKING:
    from pcp_passes.piecewise.compile import PieceCompiler
    from pcp_passes.piecewise.runner import BodyRunner


@dataclass(eq=False)
class Rank:
    """What one rank holds between steps: the requests, and the caches and buffers of the step program."""

    index: int
    state: DeviceState
    memory: RankState
    plan: PlanBuffers | None
    """Where a sharded step's plan is loaded; None where there is one rank."""
    stage: int = 0
    rounds: StageRounds | None = None
    """Where results come from on a stage before the last; None on the last."""

    @property
    def runner(self) -> BodyRunner | None:
        """What runs this rank's graphs; None without."""
        return self.memory.caches.runner


@dataclass(eq=False)
class _Loaded:
    """A batch and what its layout says to the ranks of this process; ``plans`` is empty for the plain program."""

    batch: ScheduledBatch
    layout: Layout
    choice: Choice
    plans: list[StepPlanInputs] = field(default_factory=list)
    agreed: Agreement | None = None
    """What the replicas agreed on for this step; None before :meth:`Executor.join`, and without lockstep."""
    ran: bool = False
    """State was advanced for it: to run it again must leave no trace."""

    @property
    def proposal(self) -> Proposal:
        """What the other replicas are told of it."""
        layout = self.layout
        rows = layout.num_tokens if layout.is_replicated or layout.pcp == 1 else layout.padded_tokens
        return Proposal(rows, len(self.batch.entries), layout.pcp > 1 and not layout.is_replicated, True)


@dataclass(frozen=True, eq=False)
class OpenStep:
    """A step that is about to run. ``real``: its rows are written and its state advances; a dummy leaves no trace."""

    loaded: _Loaded
    real: bool

    @property
    def batch(self) -> ScheduledBatch:
        """What was scheduled."""
        return self.loaded.batch

    @property
    def plans(self) -> Sequence[StepPlanInputs]:
        """One per rank here, in their order; empty for the plain program."""
        return self.loaded.plans


class Executor(ABC):
    """The ranks that this process holds: all of them in the simulator, one of a real group.

    Args:
        options: of the engine.
        steps: drafts per step.
        ranks: which pcp ranks are here, of each of ``stages``.
        stages: which pipeline stages are here; all by default.
        replica: place on the dp axis.
        cache_dtype: of the KV caches.

    Raises:
        ConfigError: a replica that dp does not have.
    """

    needs_fleet = False
    """Replicas that share experts meet in this process, not over a group: only a fleet can step them."""

    def __init__(
        self,
        options: EngineOptions,
        steps: int,
        ranks: Sequence[int],
        *,
        stages: Sequence[int] | None = None,
        replica: int = 0,
        cache_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.options, self.steps, self.device = options, steps, torch.device(device)
        if isinstance(replica, bool) or not isinstance(replica, int) or not 0 <= replica < options.dp:
            raise ConfigError(f"replica must be 0 to {options.dp - 1}, a place of dp={options.dp}; found {replica!r}.")
        self.replica = replica
        self.engines = 0
        """Engines that were made on it; the last one alone may step it."""
        self.ranks: list[Rank] = []
        """Stage by stage, in pcp order."""
        self.vocab_size: int | None = None
        """Tokens that a prompt is made of; None without a model that has so many."""
        self.planner: GraphPlanner | None = None
        """Chooses graphs; None without a program to capture, and when ``graph_mode`` is ``none``."""
        self.buckets = None if options.graph_mode == "none" else make_buckets(options, steps)
        self.compiler: PieceCompiler | None = None
        """Of the pieces of all bodies; None without graphs."""
        self._warm = False
        for stage in range(options.pp) if stages is None else stages:
            for index in ranks:
                caches = PagedCaches(options.num_blocks, options.block_size, cache_dtype, device, options.sparse)
                memory = RankState(caches)
                # Zigzag gives a request two attention rows, so the buffer never has to move.
                memory.table_buffer(2 * options.max_requests, options.blocks_per_request(steps))
                state, plan = DeviceState(options, steps, device), self._plan_buffers(index)
                self.ranks.append(Rank(index, state, memory, plan, stage))
        self._loaded: _Loaded | None = None

    def _plan_buffers(self, rank: int) -> PlanBuffers | None:
        options = self.options
        if options.pcp == 1:
            return None
        rows = max(options.budget, self.buckets.max_rows if self.buckets is not None else 0)
        sampled = options.max_requests * (1 + self.steps)
        return PlanBuffers(
            options.pcp, rank, max_tokens=rows, max_rows=2 * options.max_requests, max_sampled=sampled,
            device=self.device,
        )  # fmt: skip

    def take_over(self) -> int:
        """A new engine begins, with no request: what is in flight of the one before is dropped. Its number."""
        for rank in self.ranks:
            if rank.rounds is not None:
                rank.rounds.drain()
        self._loaded = None
        self.engines += 1
        return self.engines

    def admit(self, row: int, tokens: Sequence[int], computed: int, params: SamplingParams) -> None:
        """See :meth:`DeviceState.admit`; on every rank here."""
        for rank in self.ranks:
            rank.state.admit(row, tokens, computed, params)

    def set_blocks(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """See :meth:`DeviceState.set_blocks`; on every rank here."""
        for rank in self.ranks:
            rank.state.set_blocks(row, first, blocks)

    def load(self, batch: ScheduledBatch, least_rows: int = 0) -> Layout:
        """Lay ``batch`` out and tie the ranks' local parts to it; whatever was loaded before is stale from now on.

        Args:
            batch: scheduled, or a dummy one.
            least_rows: rows per rank that its graph has at least (warm-up).

        Raises:
            ConfigError: a batch of more tokens or requests, or of a longer request, than the engine was built for.
            GraphError: a bucket that is not the smallest for the fullest rank.
        """
        options = self.options
        count, requests = batch.num_tokens, len(batch.entries)
        if count > options.budget or requests > options.max_requests:
            raise ConfigError(
                f"a step of {count} tokens and {requests} requests does not fit an engine with budget={options.budget} "
                f"and max_requests={options.max_requests}; make it smaller, or raise the options."
            )
        furthest = max((entry.start + entry.length for entry in batch.entries), default=0)
        holds = options.blocks_per_request(self.steps) * options.block_size
        if furthest > holds:  # attention that reads nothing on the host would cut it there without a word
            raise ConfigError(
                f"a request of the step reaches {furthest} tokens, and a row of the block table holds {holds} "
                f"(max_len={options.max_len}); raise max_len, or end the request."
            )
        choice = WITHOUT if self.planner is None else self.planner.choose(batch.layout_batch, least_rows)
        layout = build_layout(
            batch.layout_batch, options.pcp, kind=options.layout, decode=options.decode,
            padded_tokens=choice.padded_tokens,
        )  # fmt: skip
        if self.planner is not None:
            self.planner.require_smallest(layout, choice, least_rows)
        self._loaded = None
        loaded = _Loaded(batch, layout, choice)
        if options.pcp > 1 and not layout.is_replicated:
            plans = (rank.plan for rank in self.ranks if rank.plan is not None)
            loaded.plans = [plan.load(layout, batch.logit_rows) for plan in plans]
        self._loaded = loaded
        return layout

    def propose(self, batch: ScheduledBatch) -> Proposal:
        """:meth:`load`, and what the other replicas are told of the batch. For a lockstep step, before :meth:`join`."""
        self.load(batch)
        assert self._loaded is not None
        return self._loaded.proposal

    def join(self, batch: ScheduledBatch, agreed: Agreement) -> None:
        """Tie what all replicas agreed on to the loaded ``batch``: which program runs, and how many rows each brings.

        Raises:
            PcpError: another batch is loaded: what it agreed on would be another step's.
        """
        loaded = self._loaded
        if loaded is None or loaded.batch is not batch:
            raise PcpError(f"step {batch.step} joins the other replicas, and another batch is loaded; load it first.")
        if agreed.sharded and loaded.layout.is_replicated:
            plan = replicated_plan(batch, self.options.pcp, self.device)
            loaded.plans = [plan] * len(self.ranks)
        loaded.agreed = agreed
        for rank in self.ranks:
            rank.memory.caches.peers = agreed.peers(self.replica)

    def execute(self, batch: ScheduledBatch) -> tuple[StepOutputs | None, StepRecord]:
        """Run a step and advance the state of every rank here.

        Returns:
            the outputs of the first rank of the last stage, None where no rank is of it (:meth:`settle`); and a record.

        Raises:
            RankMismatch: ranks of this process sampled different tokens.
            PcpError: replicas step together, and did not agree on this batch.
        """
        step = self._open(batch)
        with if_wanted():
            outputs, log = self._run_step(step)
        return outputs, self._record(step.loaded, log)

    def settle(self, batch: ScheduledBatch) -> torch.Tensor | None:
        """Take the round of a step in, on the ranks here that wait for it; once per real step, in their order.

        Returns:
            sampled tokens i64[R, K+1] on the CPU, -1 padded; None where every rank is of the last stage.

        Raises:
            RankMismatch: stages of this process were told different tokens.
        """
        told = [rank.rounds.sampled_of(batch.step) for rank in self.ranks if rank.rounds is not None]
        if any(not torch.equal(told[0], other) for other in told[1:]):
            raise RankMismatch(f"step {batch.step}: its round state differs between ranks that did not sample it.")
        return told[0] if told else None

    def _open(self, batch: ScheduledBatch) -> OpenStep:
        """The loaded step of ``batch``, or the global path for a batch that is not the loaded one."""
        loaded = self._loaded
        if loaded is None or loaded.batch is not batch:
            loaded = _Loaded(batch, build_layout(batch.layout_batch, 1), STALE)
        real = loaded is self._loaded and not batch.dummy and not loaded.ran
        if self.options.lockstep and loaded.agreed is None:
            raise PcpError(
                f"step {batch.step}: dp={self.options.dp} replicas that share experts run a step together, and did not "
                "agree on this one. Step them through a Fleet, or an engine with an exchange."
            )
        for rank in self.ranks:
            if rank.runner is not None:
                rank.runner.begin(loaded.choice.dispatch, counts=real)
        loaded.ran = loaded.ran or real
        return OpenStep(loaded, real)

    def _run_step(self, step: OpenStep) -> tuple[StepOutputs | None, CollectiveLog]:
        """Prepare, run and finish on all ranks here, which are of one stage: the only one."""
        outputs, log = self._run([self._prepare(rank, step) for rank in self.ranks], step.plans)
        self._apply(self.ranks, step, outputs)
        return outputs[0], log

    def _prepare(self, rank: Rank, step: OpenStep) -> StepInputs:
        """A rank's inputs; those of a step that leaves no trace write nothing and depend on no state."""
        if step.real and rank.rounds is not None:
            rank.rounds.catch_up(step.batch)
        if step.real:
            return rank.state.prepare(step.batch)
        return without_writes(rank.state.prepare(step.batch, real=False), self.options.block_size)

    def _apply(self, ranks: Sequence[Rank], step: OpenStep, outputs: Sequence[StepOutputs]) -> None:
        """On ranks of the last stage, after a real step."""
        if not step.real:
            return
        self._require_equal(ranks, step.batch, outputs)
        for rank, mine in zip(ranks, outputs, strict=True):
            rank.state.apply(step.batch, mine)

    def choice_of(self, batch: ScheduledBatch) -> Choice:
        """How :meth:`execute` would run ``batch`` now."""
        loaded = self._loaded
        return loaded.choice if loaded is not None and loaded.batch is batch else STALE

    def warm_up(self) -> None:
        """Capture every graph that a step can be, by dummy batches; afterwards none is captured any more. Once.

        With real ranks all must call it, as they do when each makes its engine.
        """
        if self.planner is None or self._warm:
            return
        for batch, rows in self.planner.warm_up():
            self.load(batch, rows)
            self.execute(batch)
        for rank in self.ranks:
            assert rank.runner is not None, "a planner without a runner"
            rank.runner.freeze()
        if self.compiler is not None:
            self.compiler.freeze()
        self._warm = True

    def graph_hits(self) -> dict[str, int]:
        """Replays of real steps by graph, on the first rank here: ``{"target.sharded piecewise 64": 12}``."""
        runner = self.ranks[0].runner
        return {} if runner is None else dict(sorted((str(key), count) for key, count in runner.hits.items()))

    def calls_without_graph(self) -> dict[str, int]:
        """Body calls of real steps that ran without a graph in a step that has one, on the first rank here."""
        runner = self.ranks[0].runner
        return {} if runner is None else dict(sorted(runner.plain.items()))

    def _record(self, loaded: _Loaded, log: CollectiveLog) -> StepRecord:
        batch, layout, choice = loaded.batch, loaded.layout, loaded.choice
        pcp, tokens = self.options.pcp, batch.num_tokens
        dealt = loaded.plans and not layout.is_replicated
        rows = tuple(layout.per_rank_tokens.tolist()) if dealt else (tokens,) * pcp
        padded = choice.dispatch.rows or max(rows)
        mode, reason, runner = choice.dispatch.mode.value, choice.reason, self.ranks[0].runner
        if runner is not None and runner.dropped:
            many = f"graph_bytes leaves {len(runner.dropped)} of the step's body calls without a graph"
            reason = f"{reason}; {many}" if reason else many
            mode = "none" if any(key.role == "target" for key in runner.dropped) else mode
        return StepRecord(
            batch.step, len(batch.entries), tokens, bool(loaded.plans), rows, padded, log.calls, log.bytes,
            mode, reason,
        )  # fmt: skip

    @allowed("ranks of one process share a host that compares them; a rank of its own reads nothing")
    def _require_equal(self, ranks: Sequence[Rank], batch: ScheduledBatch, outputs: Sequence[StepOutputs]) -> None:
        """The scheduler is one for all ranks, so it cannot go on when they accepted different tokens."""
        for rank, mine in zip(ranks[1:], outputs[1:], strict=True):
            if torch.equal(mine.sampled, outputs[0].sampled) and torch.equal(mine.drafts, outputs[0].drafts):
                continue
            differs = (mine.sampled != outputs[0].sampled).any(1) | (mine.drafts != outputs[0].drafts).any(1)
            names = [entry.request.id for entry, other in zip(batch.entries, differs.tolist(), strict=True) if other]
            raise RankMismatch(
                f"step {batch.step}: pcp ranks {ranks[0].index} and {rank.index} sampled different tokens for "
                f"{', '.join(names)}. Either a near tie fell differently, or a rank read other cache rows.\n"
                "  next  use verify_tokens='broadcast'; when acceptance then falls, compare with pcp=1 in float64"
            )

    @abstractmethod
    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        """One step on every rank here: the sharded program with ``plans``, the plain one without.

        The log holds what one rank sent.
        """

    def close(self) -> None:  # noqa: B027  # a subclass without a group has nothing to leave
        """Leave the group of ranks, if there is one."""
