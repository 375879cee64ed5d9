# SPDX-License-Identifier: Apache-2.0
"""One child process for each model: what it leaks, hangs in or crashes stays its own.

Children are forked from a server process that has imported PyTorch and transformers once. Each leads a session of its
own with limits on memory and CPU time, and is ended with everything it started, by its group. What a child has to say
comes over a pipe: where it is, and at last its result.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

Result = dict[str, Any]
Tell = Callable[[str], None]
Work = Callable[[str, Tell], Result]
"""``work(name, tell)``: importable by name, since the child is another process; ``tell`` says what it is doing."""

_PRELOAD = ["pcp_passes.zoo.row"]


@dataclass(frozen=True)
class Limits:
    """Of one child.

    Attributes:
        seconds: wall time.
        cpu_seconds: CPU time; ``None`` leaves only the wall time.
        memory_gib: address space.
    """

    seconds: float = 600.0
    cpu_seconds: int | None = None
    memory_gib: float = 12.0


@dataclass(eq=False)
class _Child:
    name: str
    process: Any
    pipe: Connection
    began: float
    stage: str = "start"
    result: Result | None = None

    def listen(self) -> None:
        """Read what has arrived."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                kind, said = self.pipe.recv()
                if kind == "stage":
                    self.stage = said
                else:
                    self.result = said


def run_children(
    names: Sequence[str], work: Work, died: Callable[[str, str], Result], *, jobs: int = 1, limits: Limits = Limits()
) -> Iterator[Result]:
    """Run ``work`` on each name in a child; yields results as they come.

    Args:
        work: a module-level function.
        died: ``died(name, why)``, the result of a child that gave none.
        jobs: children at a time.
        limits: of each child.
    """
    context = multiprocessing.get_context("forkserver")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the server imports PyTorch; a fork keeps no thread pool
    context.set_forkserver_preload(_PRELOAD)
    waiting, live = list(names), list[_Child]()
    try:
        while waiting or live:
            while waiting and len(live) < jobs:
                live.append(_start(context, waiting.pop(0), work, limits))
            wait([thing for child in live for thing in (child.process.sentinel, child.pipe)], timeout=0.5)
            for child in list(live):
                ended = not child.process.is_alive()
                child.listen()
                late = time.monotonic() - child.began > limits.seconds
                if not (ended or late or child.result is not None):
                    continue
                live.remove(child)
                exit_code = _end(child)
                yield child.result or died(child.name, _why(child, exit_code, late, limits))
    finally:
        for child in live:
            _end(child)


def _start(context: Any, name: str, work: Work, limits: Limits) -> _Child:
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(name, work, theirs, limits), name=f"zoo-{name}", daemon=False)
    process.start()
    theirs.close()
    return _Child(name, process, ours, time.monotonic())


def _end(child: _Child) -> int | None:
    """End the child and what it started. Returns its exit code, negative for a signal that somebody else sent."""
    child.process.join(timeout=2.0 if child.result is not None else 0.2)
    exit_code: int | None = child.process.exitcode
    with contextlib.suppress(ProcessLookupError, PermissionError):  # its group is named after it, unless it never ran
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.kill()
    child.process.join()
    child.pipe.close()
    return exit_code


def _why(child: _Child, exit_code: int | None, late: bool, limits: Limits) -> str:
    where = f"during {child.stage}"
    if exit_code is None and late:
        return f"no result after {limits.seconds:g} s, {where}"
    if exit_code == -signal.SIGXCPU:
        return f"used {limits.cpu_seconds} s of CPU time, {where}"
    if exit_code is not None and exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}, {where}"
    return f"ended with exit code {exit_code} and no result, {where}"


def _run(name: str, work: Work, pipe: Connection, limits: Limits) -> None:
    os.setsid()
    _limit(resource.RLIMIT_AS, int(limits.memory_gib * 2**30))
    _limit(resource.RLIMIT_CORE, 0)
    if limits.cpu_seconds is not None:
        _limit(resource.RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + 5)
    null = os.open(os.devnull, os.O_WRONLY)  # what models print would end up in the caller's JSON
    os.dup2(null, 1)
    os.dup2(null, 2)
    pipe.send(("result", work(name, lambda stage: pipe.send(("stage", stage)))))
    pipe.close()


def _limit(what: int, soft: int, hard: int | None = None) -> None:
    _, held = resource.getrlimit(what)
    wanted = soft if hard is None else hard
    allowed = wanted if held == resource.RLIM_INFINITY else min(wanted, held)
    resource.setrlimit(what, (min(soft, allowed), allowed))
