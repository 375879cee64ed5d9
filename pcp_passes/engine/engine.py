# SPDX-License-Identifier: Apache-2.0
"""The engine: takes requests, runs steps, gives outputs. A reference to read and to compare with; serve with vLLM.

SPMD: with real ranks every process runs this same code on the same requests, in the same order, and so comes to the
same batches; nothing is sent between schedulers. One step is in flight::

    schedule t+1  ->  execute t+1  ->  collect t        results are read one step late
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Protocol

import torch

from pcp_passes.engine.dummies import dummy_batch
from pcp_passes.engine.executor import Executor
from pcp_passes.engine.options import SamplingParams
from pcp_passes.engine.request import Entry, Request, RequestOutput, ScheduledBatch
from pcp_passes.engine.scheduler import Scheduler
from pcp_passes.engine.stats import EngineStats
from pcp_passes.errors import ConfigError, PcpError
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
    sampled: torch.Tensor
    logprobs: torch.Tensor
    ready: torch.cuda.Event | None

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and their log probabilities. Raises PcpError for a row of logits that holds a NaN."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens = [[token for token in row if token >= 0] for row in self.sampled.tolist()]
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

    Raises:
        ConfigError: sizes that do not fit together.
    """

    def __init__(self, executor: Executor, *, producer: KVProducer | None = None) -> None:
        self.executor, self.producer = executor, producer
        self.options, self.steps = executor.options, executor.steps
        self.scheduler = Scheduler(self.options, self.steps)
        self.stats = EngineStats(self.options.pcp, self.steps, self.options.acceptance_floor)
        self._in_flight: _InFlight | None = None
        self._count = 0
        self.warm_up()

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a prompt; returns its id.

        Raises:
            ConfigError: it can never run, or it holds a token that the model does not know.
        """
        name = request_id if request_id is not None else f"request-{self._count}"
        tokens = tuple(map(int, prompt))
        if self.executor.vocab_size is not None:
            _require_known(name, tokens, self.executor.vocab_size)
        self.scheduler.add(Request(name, tokens, params or SamplingParams()))
        self._count += 1
        return name

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now, with what it generated so far. Raises ConfigError for an unknown id."""
        return self._output(self.scheduler.abort(request_id))

    @property
    def unfinished(self) -> bool:
        """Whether a call of :meth:`step` has anything to do."""
        return self.scheduler.unfinished or self._in_flight is not None

    def step(self) -> list[RequestOutput]:
        """Schedule and issue one step, collect the one before; returns the requests that finished."""
        batch = self.scheduler.schedule()
        before, self._in_flight = self._in_flight, None
        if batch is not None:
            self._in_flight = self._issue(batch)
        elif before is None and self.scheduler.unfinished:
            raise PcpError(
                f"nothing can be scheduled and nothing is in flight, with {len(self.scheduler.waiting)} waiting and "
                f"{len(self.scheduler.running)} running requests; this is a bug of the scheduler, please report it."
            )
        return [] if before is None else self._collect(before)

    def run(self) -> dict[str, RequestOutput]:
        """Steps until nothing is left; the finished requests by id."""
        finished: dict[str, RequestOutput] = {}
        while self.unfinished:
            finished.update((output.id, output) for output in self.step())
        return finished

    def profile(self, num_tokens: int, num_requests: int = 1) -> StepOutputs:
        """Run a dummy step of that size: the program, graphs, time and memory of a real one, and nothing is written.

        With real ranks all must call it, as for a real step.

        Raises:
            ConfigError: more tokens or requests than the engine was built for.
        """
        batch = dummy_batch(num_tokens, num_requests)
        self.executor.load(batch)
        return self.executor.execute(batch)[0]

    def warm_up(self) -> None:
        """Capture every graph that a step can be (:meth:`Executor.warm_up`); without effect the second time."""
        self.executor.warm_up()

    def close(self) -> None:
        """Leave the group of ranks, if there is one."""
        self.executor.close()

    def _issue(self, batch: ScheduledBatch) -> _InFlight:
        for entry in batch.entries:
            self._upload(entry)
        self.executor.load(batch)
        outputs, record = self.executor.execute(batch)
        self.stats.record(record)
        self._publish(batch)
        sampled, logprobs = outputs.sampled, outputs.logprobs
        if not sampled.is_cuda:
            return _InFlight(batch, sampled, logprobs, None)
        sampled, logprobs = sampled.to("cpu", non_blocking=True), logprobs.to("cpu", non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return _InFlight(batch, sampled, logprobs, ready)

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
        tokens, logprobs = step.read()
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


def _require_known(name: str, prompt: Sequence[int], vocab_size: int) -> None:
    """Before the step, where an embedding would raise in the middle of a batch, or end a process on CUDA."""
    wrong = next((place for place, token in enumerate(prompt) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ConfigError(
            f"request {name!r}: token {prompt[wrong]} at place {wrong} of the prompt is outside the model's vocabulary "
            f"of {vocab_size}; give ids from 0 to {vocab_size - 1}, made by this model's tokenizer."
        )
