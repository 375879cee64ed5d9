# SPDX-License-Identifier: Apache-2.0
"""Functions that a session runs on every worker (``collective_rpc``) to measure steps from inside.

``start`` begins, ``stop`` ends and returns plain data. CPU seconds are those of the thread that runs the model,
between entry and exit of a model step: waiting in a collective costs none, so they compare ranks fairly on a busy
machine. One thread per rank is assumed (``OMP_NUM_THREADS=1``).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pcp_passes.collectives import record_collectives
from pcp_passes.frontends.vllm import runtime as runtimes

_ATTRIBUTE = "_pcp_passes_probe"


class _Probe:
    def __init__(self, runner: Any) -> None:
        self.stack = ExitStack()
        self.log = self.stack.enter_context(record_collectives())
        self.cpu_seconds = 0.0
        self.steps: list[dict[str, Any]] = []
        self.ran: list[tuple[runtimes.Role, runtimes.Variant]] = []
        self.accepted: list[dict[str, int]] = []
        self.drafts: list[dict[str, list[int]]] = []
        for name in ("execute_model", "sample_tokens"):
            self._time(runner, name)
        self._watch(runner, "sample", self._sampled)
        if runner.speculator is not None:
            self._watch(runner.speculator, "propose", self._proposed)

    def _time(self, runner: Any, name: str) -> None:
        method = getattr(runner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.cpu_seconds += time.thread_time() - begin

        setattr(runner, name, timed)
        self.stack.callback(delattr, runner, name)

    def _watch(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            look(result, *args, **kwargs)
            return result

        setattr(owner, name, watched)
        self.stack.callback(delattr, owner, name)

    def _sampled(self, result: Any, hidden_states: Any, batch: Any, *_: Any) -> None:
        self.accepted.append(dict(zip(batch.req_ids, result[1].tolist(), strict=True)))

    def _proposed(self, result: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("dummy_run"):
            return
        batch = args[0] if args else kwargs["input_batch"]
        self.drafts.append(dict(zip(batch.req_ids, result.tolist(), strict=True)))


def start(worker: Any) -> None:
    """Begin to measure."""
    stop(worker)
    probe = _Probe(worker.model_runner)
    current = runtimes.current()
    if current is not None:
        current.observers.append(probe.steps.append)
        probe.stack.callback(current.observers.remove, probe.steps.append)
        current.ran = probe.ran
        probe.stack.callback(setattr, current, "ran", None)
    setattr(worker.model_runner, _ATTRIBUTE, probe)


def stop(worker: Any) -> dict[str, Any] | None:
    """End measuring. ``None`` when it never began.

    Returns:
        ``cpu_seconds``, ``steps`` (per step: variant, tokens per rank, padded rows, global tokens), ``collectives``
        (per call: op, shape, dtype, bytes contributed), ``ran`` (per forward: role and variant), and per step and
        request ``accepted`` (tokens sampled: one more than the drafts accepted, 0 while prefilling) and ``drafts``.
    """
    probe = getattr(worker.model_runner, _ATTRIBUTE, None)
    if probe is None:
        return None
    delattr(worker.model_runner, _ATTRIBUTE)
    probe.stack.close()
    collectives = [
        {"op": c.op, "shape": list(c.shape), "dtype": str(c.dtype), "bytes": c.bytes} for c in probe.log.entries
    ]
    return {
        "cpu_seconds": probe.cpu_seconds,
        "steps": probe.steps,
        "collectives": collectives,
        "ran": probe.ran,
        "accepted": probe.accepted,
        "drafts": probe.drafts,
    }


def report(worker: Any) -> dict[str, Any] | None:
    """The rewrite report of the compiled model as JSON data; ``None`` when nothing was rewritten."""
    current = runtimes.current()
    if current is None or not current.reports:
        return None
    return {name: found.to_json() for name, found in current.reports.items()}
