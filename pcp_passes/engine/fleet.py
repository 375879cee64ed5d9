# SPDX-License-Identifier: Apache-2.0
"""All replicas of a deployment in one process: each an engine of its own, stepped one step at a time.

::

    options = EngineOptions(pcp=2, dp=2, pp=2, expert_parallel=True, ...)
    fleet = Fleet([SimulatedExecutor(program, options, replica=r) for r in range(options.dp)])
    fleet.add_request([1, 2, 3])            # to the replica with the fewest requests
    outputs = fleet.run()

Replicas that share experts run every step together; a replica without work runs a dummy step. Others know nothing of
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pcp_passes.engine.dummies import dummy_batch
from pcp_passes.engine.engine import Engine, KVProducer
from pcp_passes.engine.lockstep import Agreement
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import RequestOutput
from pcp_passes.engine.simulated import SimulatedExecutor, execute_together
from pcp_passes.errors import ConfigError
from pcp_passes.step.inputs import StepOutputs


class Fleet:
    """The engines of all replicas. Request ids are unique over all.

    Args:
        executors: one per replica, in the order of the dp axis.
        producer: of every engine, see :class:`~pcp_passes.engine.engine.KVProducer`.
        depth: see :class:`~pcp_passes.engine.engine.Engine`.

    Raises:
        ConfigError: another number of executors than ``dp``, or other replicas, or executors of different options; or
            replicas that share experts and were made of different programs.
    """

    def __init__(
        self,
        executors: Sequence[SimulatedExecutor],
        *,
        producer: KVProducer | None = None,
        depth: int | None = None,
    ) -> None:
        self._executors = list(executors)
        self.options = _require_replicas(self._executors)
        self.engines = [Engine(executor, producer=producer, depth=depth, of_fleet=True) for executor in self._executors]
        self._count = 0
        self._closed = False

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        replica: int | None = None,
    ) -> str:
        """Queue a prompt; returns its id.

        Args:
            prompt, params, request_id: see :meth:`Engine.add_request`.
            replica: that takes it; by default the first of those with the fewest unfinished requests.

        Raises:
            ConfigError: it can never run, its id is in use, there is no such replica, or the fleet was closed.
        """
        if self._closed:
            raise ConfigError("the fleet was closed and takes no more requests; make a new one.")
        name = request_id if request_id is not None else self._free_name()
        if self._owner(name) is not None:
            raise ConfigError(f"request id {name!r} is in use; ids are unique among unfinished requests.")
        loads = [len(engine.scheduler.requests) for engine in self.engines]
        chosen = loads.index(min(loads)) if replica is None else replica
        if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < len(self.engines):
            raise ConfigError(
                f"no replica {chosen!r}; there are {len(self.engines)}, from 0: give 0 to {len(self.engines) - 1}, or "
                "leave replica out."
            )
        self.engines[chosen].add_request(prompt, params, name)
        self._count += 1
        return name

    def replica_of(self, request_id: str) -> int:
        """Where an unfinished request runs. Raises ConfigError for an unknown id."""
        owner = self._owner(request_id)
        if owner is None:
            known = sorted(name for engine in self.engines for name in engine.scheduler.requests)
            raise ConfigError(f"no unfinished request {request_id!r}; unfinished: {known or 'none'}.")
        return owner

    def _owner(self, name: str) -> int | None:
        """The engines know it: one of them may also be stepped, or asked to abort, on its own."""
        return next((place for place, engine in enumerate(self.engines) if name in engine.scheduler.requests), None)

    def _free_name(self) -> str:
        while self._owner(name := f"request-{self._count}") is not None:
            self._count += 1
        return name

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now, with what it generated so far. Raises ConfigError for an unknown id."""
        return self.engines[self.replica_of(request_id)].abort(request_id)

    @property
    def unfinished(self) -> bool:
        """Whether a call of :meth:`step` has anything to do."""
        return any(engine.working for engine in self.engines)

    def step(self) -> list[RequestOutput]:
        """One step of every replica that has one, or of all together; returns the requests that finished."""
        return self._step_together() if self.options.lockstep else self._step_alone()

    def _step_alone(self) -> list[RequestOutput]:
        return [output for engine in self.engines if engine.working for output in engine.step()]

    def _step_together(self) -> list[RequestOutput]:
        agreed = Agreement(tuple(engine.propose() for engine in self.engines))
        batches = [engine.join(agreed) for engine in self.engines]
        running = [batch for batch in batches if batch is not None]
        if running:
            for engine, batch, found in zip(
                self.engines, running, execute_together(self._executors, running), strict=True
            ):
                engine.issued(batch, *found)
        return [
            output
            for engine, batch in zip(self.engines, batches, strict=True)
            for output in engine.collect(idle=batch is None or batch.dummy)
        ]

    def run(self) -> dict[str, RequestOutput]:
        """Steps until nothing is left; the finished requests by id."""
        finished: dict[str, RequestOutput] = {}
        while self.unfinished:
            finished.update((output.id, output) for output in self.step())
        return finished

    def profile(self, num_tokens: int, num_requests: int = 1) -> list[StepOutputs | None]:
        """A dummy step of that size on every replica (:meth:`Engine.profile`)."""
        if not self.options.lockstep:
            return [engine.profile(num_tokens, num_requests) for engine in self.engines]
        batches = [dummy_batch(num_tokens, num_requests) for _ in self.engines]
        pairs = list(zip(self._executors, batches, strict=True))
        agreed = Agreement(tuple(executor.propose(batch) for executor, batch in pairs))
        for executor, batch in pairs:
            executor.join(batch, agreed)
        return [outputs for outputs, _ in execute_together(self._executors, batches)]

    def close(self) -> None:
        """Leave all groups, and take no more requests; those that are unfinished may still be stepped."""
        self._closed = True
        for engine in self.engines:
            engine.close()

    def summary(self) -> dict[str, Any]:
        """:meth:`Engine.summary` of each replica."""
        return {f"replica {place}": engine.summary() for place, engine in enumerate(self.engines)}


def _require_replicas(executors: Sequence[SimulatedExecutor]) -> EngineOptions:
    """The options of all. Raises ConfigError as :class:`Fleet` does."""
    if not executors:
        raise ConfigError("a fleet needs an executor for each replica of dp; found none.")
    options, places = executors[0].options, [executor.replica for executor in executors]
    if any(executor.options != options for executor in executors):
        raise ConfigError("the executors of a fleet have different EngineOptions; make all of them with the same.")
    if places != list(range(options.dp)):
        raise ConfigError(
            f"dp={options.dp} needs executors of replicas {', '.join(map(str, range(options.dp)))} in this order; "
            f"found {places}. Make them with SimulatedExecutor(program, options, replica=r) for r in "
            f"range({options.dp})."
        )
    if options.lockstep and any(executor.program is not executors[0].program for executor in executors):
        raise ConfigError(
            "replicas that share experts run one program, and these executors were made of different ones; make all of "
            "them of the same StepProgram object."
        )
    return options
