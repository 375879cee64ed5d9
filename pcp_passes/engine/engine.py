# SPDX-License-Identifier: Apache-2.0
"""The engine: takes requests, runs steps, gives outputs. A reference to read and to compare with; serve with vLLM.

SPMD: with real ranks every process runs this same code on the same requests, in the same order, and so comes to the
same batches; nothing is sent between schedulers. So many steps are in flight as there are pipeline stages, S::

    schedule t+S  ->  execute t+S  ->  collect t        results are read S steps late, on every stage alike

Replicas that share experts first tell each other what they would run (:mod:`pcp_passes.engine.lockstep`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any, Protocol

import torch

from pcp_passes.engine.dummies import dummy_batch, dummy_decodes
from pcp_passes.engine.executor import Executor
from pcp_passes.engine.lockstep import NOTHING, STEP_TOGETHER, Agreement, Proposal, StepExchange
from pcp_passes.engine.options import SamplingParams
from pcp_passes.engine.request import Entry, Request, RequestOutput, ScheduledBatch
from pcp_passes.engine.scheduler import Scheduler
from pcp_passes.engine.stats import EngineStats, StepRecord
from pcp_passes.errors import ConfigError, PcpError, RankMismatch
from pcp_passes.step.inputs import StepOutputs


class KVProducer(Protocol):
    """Takes finished prefills, for example to send their cache blocks to a decoding instance."""

    def publish(self, request_id: str, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """``block_ids`` hold the cache rows of ``tokens``, those of the drafter too.

        Called once per finished prefill, after the whole step was issued: on CUDA, copy on the current stream. The rows
        stay valid until this returns; a preempted request is prefilled, and published, again.
        """


@dataclass(eq=False)
class _InFlight:
    """A step whose results are on their way to the host."""

    batch: ScheduledBatch
    sampled: torch.Tensor | None
    logprobs: torch.Tensor | None
    ready: torch.cuda.Event | None

    def read(self, told: torch.Tensor | None) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and their log probabilities, of which there are none without the last stage.

        Args:
            told: the round state of the step, as :meth:`Executor.settle` gives it.

        Raises:
            PcpError: a row of logits holds a NaN.
            RankMismatch: the round state holds other tokens than the last stage, which is in this process too.
        """
        if self.ready is not None:
            self.ready.synchronize()
        if self.sampled is not None and told is not None and not torch.equal(self.sampled, told):
            raise RankMismatch(f"step {self.batch.step}: the round state differs from what the last stage sampled.")
        sampled = told if self.sampled is None else self.sampled
        assert sampled is not None, "a step without results"
        tokens = [[token for token in row if token >= 0] for row in sampled.tolist()]
        if self.logprobs is None:
            return tokens, []
        kept = [row[: len(new)] for row, new in zip(self.logprobs.tolist(), tokens, strict=True)]
        bad = [entry.request.id for entry, row in zip(self.batch.entries, kept, strict=True) if any(map(isnan, row))]
        if bad:
            raise PcpError(
                f"step {self.batch.step}: the logits of {', '.join(bad)} hold NaN; look for the first NaN of the model "
                "on that prompt."
            )
        return tokens, kept


class Engine:
    """Continuous batching over an executor. ``producer``: see :class:`KVProducer`.

    With a ``graph_mode``, making an engine captures its graphs: no step waits for one, and all real ranks do it in the
    same order because each makes its engine.

    Args:
        executor: of the ranks in this process, which are of one replica.
        depth: steps in flight; by default the pipeline stages.
        exchange: how this replica and its peers tell each other of their steps, where they share experts. Then every
            replica must be stepped as often as the others, without requests too, as :meth:`run` and
            :attr:`unfinished` do.
        of_fleet: a :class:`~pcp_passes.engine.fleet.Fleet` made the engine, and steps all replicas of one process.

    Raises:
        ConfigError: sizes that do not fit together, or replicas that step together without an exchange.

    An executor serves the engine that was made on it last; steps in flight of the one before are dropped.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        producer: KVProducer | None = None,
        depth: int | None = None,
        exchange: StepExchange | None = None,
        of_fleet: bool = False,
    ) -> None:
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise ConfigError(
                f"depth must be an integer of at least 1, the steps in flight, found {depth!r}; leave it out for one "
                "per pipeline stage."
            )
        if executor.options.lockstep and not of_fleet and (exchange is None or executor.needs_fleet):
            raise ConfigError(STEP_TOGETHER.format(dp=executor.options.dp))
        self.executor, self.producer, self.exchange = executor, producer, exchange
        self.options, self.steps = executor.options, executor.steps
        self.scheduler = Scheduler(self.options, self.steps)
        self.stats = EngineStats(self.options.pcp, self.steps, self.options.acceptance_floor)
        self.depth = self.options.pp if depth is None else depth
        self._in_flight: deque[_InFlight] = deque()
        self._next: ScheduledBatch | None = None
        self._agreed: Agreement | None = None
        self._count = 0
        self._turn = executor.take_over()
        self.warm_up()

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a prompt; returns its id.

        Raises:
            ConfigError: it can never run, or it holds a token that the model does not know.
        """
        name = request_id if request_id is not None else self._free_name()
        tokens = tuple(map(int, prompt))
        if self.executor.vocab_size is not None:
            _require_known(name, tokens, self.executor.vocab_size)
        self.scheduler.add(Request(name, tokens, params or SamplingParams()))
        self._count += 1
        return name

    def _free_name(self) -> str:
        """Of a request whose caller gave none: callers' own names are passed by."""
        while (name := f"request-{self._count}") in self.scheduler.requests:
            self._count += 1
        return name

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now, with what it generated so far. Raises ConfigError for an unknown id."""
        return self._output(self.scheduler.abort(request_id))

    @property
    def unfinished(self) -> bool:
        """Whether a call of :meth:`step` has anything to do."""
        peers = self._agreed is not None and self._agreed.unfinished
        return self.working or peers

    @property
    def working(self) -> bool:
        """Whether this replica has requests, or results to collect."""
        return self.scheduler.unfinished or bool(self._in_flight)

    def step(self) -> list[RequestOutput]:
        """Schedule and issue one step, collect the oldest one that is due; returns the requests that finished.

        In lockstep a replica without a step of its own runs a dummy one beside the others'.

        Raises:
            ConfigError: a later engine has the executor, or a Fleet steps this one. Nothing was scheduled.
        """
        self._require_may_step()
        if self.options.lockstep:
            mine = self.propose()
            batch = self.join(self._ask(mine))
        elif (batch := self._schedule()) is not None:
            self.executor.load(batch)
        if batch is not None:
            self._issue(batch)
        return self.collect(idle=batch is None or batch.dummy)

    def run(self) -> dict[str, RequestOutput]:
        """Steps until nothing is left, in lockstep on no replica; the finished requests by id."""
        finished: dict[str, RequestOutput] = {}
        first = self.options.lockstep  # peers may have work that this replica has not heard of
        while first or self.unfinished:
            finished.update((output.id, output) for output in self.step())
            first = False
        return finished

    def propose(self) -> Proposal:
        """Schedule the next step, lay it out, and say what the other replicas must know of it."""
        self._next = self._schedule()
        if self._next is None:
            return replace(NOTHING, unfinished=self.working)
        return self.executor.propose(self._next)

    def join(self, agreed: Agreement) -> ScheduledBatch | None:
        """What this replica runs of the step that all agreed on: its own, or a dummy; None when nobody has one."""
        batch, self._next, self._agreed = self._next, None, agreed
        if not agreed.runs:
            return None
        if batch is None:
            batch = dummy_decodes(1, 0)
            self.executor.load(batch)
        self.executor.join(batch, agreed)
        return batch

    def _require_may_step(self) -> None:
        """Before anything is scheduled: a request of a step that is refused later would be lost."""
        if self._turn != self.executor.engines:
            raise ConfigError("a later engine was made on this executor; use that one, or an executor of its own.")
        if self.options.lockstep and self.exchange is None:
            raise ConfigError(STEP_TOGETHER.format(dp=self.options.dp))

    def _ask(self, mine: Proposal) -> Agreement:
        assert self.exchange is not None, "a step of one replica was refused before"
        agreed = Agreement(tuple(self.exchange.exchange(mine)))
        agreed.require_matches(self.executor.replica, mine)
        return agreed

    def profile(self, num_tokens: int, num_requests: int = 1) -> StepOutputs | None:
        """Run a dummy step of that size: the program, graphs, time and memory of a real one, and nothing is written.

        With real ranks all must call it, as for a real step; in lockstep the replicas may ask for other sizes.

        Returns:
            the outputs; None where this process has no rank of the last stage.

        Raises:
            ConfigError: more tokens or requests than the engine was built for.
        """
        self._require_may_step()
        batch = dummy_batch(num_tokens, num_requests)
        if self.options.lockstep:
            mine = replace(self.executor.propose(batch), unfinished=self.working)
            self._next = batch
            self.join(self._ask(mine))
        else:
            self.executor.load(batch)
        return self.executor.execute(batch)[0]

    def warm_up(self) -> None:
        """Capture every graph that a step can be (:meth:`Executor.warm_up`); without effect the second time."""
        self.executor.warm_up()

    def close(self) -> None:
        """Leave the group of ranks, if there is one."""
        self.executor.close()

    def _schedule(self) -> ScheduledBatch | None:
        """The next step, with its requests and blocks known on the device; None when all wait for results."""
        batch = self.scheduler.schedule()
        if batch is None and not self._in_flight and self.scheduler.unfinished:
            raise PcpError(
                f"nothing can be scheduled and nothing is in flight, with {len(self.scheduler.waiting)} waiting and "
                f"{len(self.scheduler.running)} running requests; this is a bug of the scheduler, please report it."
            )
        for entry in () if batch is None else batch.entries:
            self._upload(entry)
        return batch

    def _issue(self, batch: ScheduledBatch) -> None:
        self.issued(batch, *self.executor.execute(batch))

    def issued(self, batch: ScheduledBatch, outputs: StepOutputs | None, record: StepRecord) -> None:
        """Take note of a step that was executed; its results are read later. A dummy has none."""
        if batch.dummy:
            self.stats.dummy_steps += 1
            return
        self.stats.record(record)
        self._publish(batch)
        self._in_flight.append(_in_flight(batch, outputs))

    def collect(self, *, idle: bool) -> list[RequestOutput]:
        """Read the oldest step in flight, if it is due; the requests that it finished.

        ``idle``: this replica added no step, so nothing is gained by waiting longer.
        """
        if not self._in_flight or not (idle or len(self._in_flight) > self.depth):
            return []
        return self._collect(self._in_flight.popleft())

    def _upload(self, entry: Entry) -> None:
        """Tell the device about a request that was admitted or got more blocks."""
        request = entry.request
        if request.uploaded < 0:
            self.executor.admit(entry.row, request.tokens, entry.start, request.params)
            self.stats.cached_tokens += entry.start
            request.uploaded = 0
        if len(request.blocks) > request.uploaded:
            self.executor.set_blocks(entry.row, request.uploaded, request.blocks[request.uploaded :])
            request.uploaded = len(request.blocks)

    def _publish(self, batch: ScheduledBatch) -> None:
        """After the whole step: the drafter's rows of a prefill are written in the same step, after the target's."""
        if self.producer is None:
            return
        for entry in batch.entries:
            if entry.is_prefilling and entry.samples:
                request, count = entry.request, entry.start + entry.length
                blocks = request.blocks[: -(-count // self.options.block_size)]
                self.producer.publish(request.id, request.tokens[:count], tuple(blocks))
                self.stats.published += 1

    def _collect(self, step: _InFlight) -> list[RequestOutput]:
        tokens, logprobs = step.read(self.executor.settle(step.batch))
        finished = self.scheduler.collect(step.batch, tokens, logprobs)
        verified = [
            (entry.drafts, len(new) - 1)
            for entry, new in zip(step.batch.entries, tokens, strict=True)
            if not entry.is_prefilling
        ]
        self.stats.acceptance.record([drafted for drafted, _ in verified], [accepted for _, accepted in verified])
        return [self._output(request) for request in finished]

    def _output(self, request: Request) -> RequestOutput:
        self.stats.preemptions += request.preemptions
        return RequestOutput.of(request)

    def summary(self) -> dict[str, Any]:
        """See :meth:`EngineStats.summary`; and what the executor counts of its graphs."""
        counted = {
            "graph_hits": self.executor.graph_hits(), "calls_without_graph": self.executor.calls_without_graph(),
        }  # fmt: skip
        return self.stats.summary() | counted


def _in_flight(batch: ScheduledBatch, outputs: StepOutputs | None) -> _InFlight:
    """A step that was issued; on CUDA its results begin their way to the host."""
    if outputs is None:
        return _InFlight(batch, None, None, None)
    sampled, logprobs = outputs.sampled, outputs.logprobs
    if not sampled.is_cuda:
        return _InFlight(batch, sampled, logprobs, None)
    sampled, logprobs = sampled.to("cpu", non_blocking=True), logprobs.to("cpu", non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return _InFlight(batch, sampled, logprobs, ready)


def _require_known(name: str, prompt: Sequence[int], vocab_size: int) -> None:
    """Before the step, where an embedding would raise in the middle of a batch, or end a process on CUDA."""
    wrong = next((place for place, token in enumerate(prompt) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ConfigError(
            f"request {name!r}: token {prompt[wrong]} at place {wrong} of the prompt is outside the model's vocabulary "
            f"of {vocab_size}; give ids from 0 to {vocab_size - 1}, made by this model's tokenizer."
        )
