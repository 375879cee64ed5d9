# SPDX-License-Identifier: Apache-2.0
"""Run one vLLM engine in a process group of its own: a specification in, results out.

Engines differ in environment (threads per rank, compile caches), leave processes behind when they fail, and cannot be
built twice in one process; so the CLI, the demo, the benchmarks and the tests each start theirs through here. The
child is this module run as a script: it reads a :class:`Session` as JSON and writes one JSON event per line.

    result = run(Session(model="...", pcp=2, groups=(Group((Request([1, 2, 3], 8),)),)))
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pcp_passes.errors import PcpError
from pcp_passes.frontends.vllm import cpu_graphs, cpu_runner


class EngineFailed(PcpError):
    """The engine ended without its results. Carries the end of what it printed; in ``finished`` the results of the
    groups before the one in which it failed (``None``: it never started); in ``last_s`` how long that one took."""

    def __init__(self, message: str, finished: Result | None = None, last_s: float = 0.0) -> None:
        super().__init__(message)
        self.finished = finished
        self.last_s = last_s


@dataclass(frozen=True)
class Request:
    """One request. ``arrive`` and ``abort`` count engine steps of its group; ``abort`` 0 means never."""

    prompt: list[int] | str
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    prompt_logprobs: bool = False
    arrive: int = 0
    abort: int = 0


@dataclass(frozen=True)
class Group:
    """Requests that run together. ``rpc`` names functions ``module:function`` run on every worker first, with the
    worker as argument; ``front`` names some run in the engine's own process afterwards, without arguments. What they
    return is in the result."""

    requests: tuple[Request, ...] = ()
    rpc: tuple[str, ...] = ()
    front: tuple[str, ...] = ()


@dataclass(frozen=True)
class Session:
    """What to start and what to run. ``options`` is ``additional_config["pcp_passes"]``; ``None`` is stock vLLM.
    ``compilation`` holds further keys of ``compilation_config``."""

    model: str
    groups: tuple[Group, ...]
    pcp: int = 1
    pp: int = 1
    options: dict[str, Any] | None = field(default_factory=dict)
    mode: int = 2
    backend: str = "inductor"
    compilation: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    cpu: bool = True

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``vllm.LLM``."""
        compilation: dict[str, Any] = {"mode": self.mode}
        if self.mode:
            compilation["backend"] = self.backend
        if self.cpu:
            # The CPU rotary kernel reads MLA's strided halves wrongly; the native form is right and traceable.
            compilation["custom_ops"] = ["-rotary_embedding"]
        compilation |= self.compilation
        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": "float32" if self.cpu else "auto",
            "prefill_context_parallel_size": self.pcp,
            "pipeline_parallel_size": self.pp,
            "compilation_config": compilation,
            "distributed_executor_backend": "mp" if self.pcp * self.pp > 1 else None,
            "skip_tokenizer_init": all(not isinstance(r.prompt, str) for g in self.groups for r in g.requests),
        }
        if self.options is not None:
            arguments["additional_config"] = {"pcp_passes": self.options}
        return arguments | self.engine

    def environment(self) -> dict[str, str]:
        """The child's environment."""
        cores = self.cores or tuple(core % (os.cpu_count() or 1) for core in range(self.pcp * self.pp))
        env = dict(os.environ)
        if self.cpu:
            env |= cpu_runner.environment(cores=cores)
            env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
            if self.mode == 3:
                env["PCP_PASSES_CPU_MODE_3"] = "1"
            if self.engine.get("async_scheduling"):
                env["PCP_PASSES_CPU_ASYNC"] = "1"
            if self.compilation.get("cudagraph_mode", "NONE") != "NONE":
                env[cpu_graphs.SWITCH] = "1"
            # The scheduler runs in the child itself: one process, and one import of vLLM, less.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if any(group.rpc for group in self.groups):
            env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions travel to the workers
        return env | self.env


@dataclass(frozen=True)
class Output:
    """Tokens and logprobs of one request; ``prompt_logprobs`` is empty unless asked for."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    text: str


@dataclass(frozen=True)
class Result:
    """Outputs per group and request (``None``: aborted), and per group the values returned by its ``rpc`` calls,
    one list entry per worker, and by its ``front`` calls."""

    outputs: list[list[Output | None]]
    rpc: list[list[list[Any]]]
    seconds: list[float]
    start_seconds: float
    front: list[list[Any]] = field(default_factory=list)


def run(session: Session, *, timeout_s: float = 300.0, progress: Callable[[str], None] | None = None) -> Result:
    """Start the engine, run every group, end every process that it left.

    Args:
        progress: called with a short line whenever the engine passes a milestone.

    Raises:
        EngineFailed: when the engine fails or outlasts ``timeout_s``; the message ends with its last output lines.
    """
    events: list[dict[str, Any]] = []
    last = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pcp-session-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, "-m", "pcp_passes.frontends.vllm.session"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=session.environment(),
                start_new_session=True,
            )
        try:
            timer = threading.Timer(timeout_s, kill_group, (child.pid,))
            timer.start()
            assert child.stdin is not None and child.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(asdict(session)).encode())
                child.stdin.close()
            for line in child.stdout:
                if line.startswith(b"{"):
                    events.append(json.loads(line))
                    last = time.monotonic()
                    if progress is not None:
                        progress(events[-1]["event"])
            code, last_s = child.wait(), time.monotonic() - last
            timed_out = not timer.is_alive()
        finally:
            timer.cancel()
            kill_group(child.pid)
        if not events or events[-1]["event"] != "done":
            text = log.read_text(errors="replace")
            # The reason for which a rank gave up may be far above what its end set off.
            above = text.splitlines()[:-40]
            lost = [line for line in above if " is lost: " in line][:3]
            ours = [line for line in above if "pcp_passes" in line and line not in lost][-5:]
            tail = "\n".join([*lost, *ours, text[-6000:]])
            why = f"outlasted {timeout_s:.0f} s" if timed_out else f"ended with exit status {code}"
            finished = _result(events) if any(event["event"] == "started" for event in events) else None
            raise EngineFailed(f"the vLLM engine {why}. The end of its log:\n{tail}", finished, last_s)
    return _result(events)


def kill_group(pid: int) -> None:
    """End every process of the group that ``pid`` leads (workers outlive a failed engine)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _result(events: list[dict[str, Any]]) -> Result:
    groups = [event for event in events if event["event"] == "group"]
    outputs = [[Output(**o) if o is not None else None for o in group["outputs"]] for group in groups]
    start = next(event["seconds"] for event in events if event["event"] == "started")
    return Result(
        outputs,
        rpc=[group["rpc"] for group in groups],
        seconds=[group["seconds"] for group in groups],
        start_seconds=start,
        front=[group["front"] for group in groups],
    )


def _main() -> None:
    """The child."""
    raw = json.load(sys.stdin)
    raw["groups"] = tuple(
        Group(tuple(Request(**r) for r in group["requests"]), tuple(group["rpc"]), tuple(group["front"]))
        for group in raw["groups"]
    )
    session = Session(**raw)
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints goes to the log

    def emit(event: str, **values: Any) -> None:
        events.write(json.dumps({"event": event, **values}) + "\n")

    begin = time.perf_counter()
    _end_with_parent()
    if session.cpu:
        cpu_runner.install()
    emit("importing vllm")
    from vllm import LLM

    emit(f"starting pcp={session.pcp}" + (f" pp={session.pp}" if session.pp > 1 else ""))
    llm = LLM(**session.engine_arguments())
    emit("started", seconds=time.perf_counter() - begin)
    for index, group in enumerate(session.groups):
        replies = [llm.collective_rpc(_resolve(name)) for name in group.rpc]
        began = time.perf_counter()
        outputs = list(_run_group(llm, index, group))
        seconds = time.perf_counter() - began
        front = [_resolve(name)() for name in group.front]
        emit("group", outputs=outputs, rpc=replies, front=front, seconds=seconds)
    emit("done")


def _end_with_parent() -> None:
    """Ask Linux to end this process when its parent is gone; vLLM's workers then end by themselves."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _run_group(llm: Any, index: int, group: Group) -> Iterator[dict[str, Any] | None]:
    from vllm import SamplingParams

    engine = llm.llm_engine
    finished: dict[str, Any] = {}
    waiting = {f"{index}-{i}": request for i, request in enumerate(group.requests)}
    names = list(waiting)
    step = 0
    while waiting or engine.has_unfinished_requests():
        for name in [n for n, r in waiting.items() if r.arrive <= step]:
            request = waiting.pop(name)
            params = SamplingParams(
                temperature=request.temperature,
                seed=request.seed,
                max_tokens=request.max_tokens,
                logprobs=0,
                prompt_logprobs=0 if request.prompt_logprobs else None,
                ignore_eos=True,
                detokenize=isinstance(request.prompt, str),
            )
            prompt = request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": request.prompt}
            engine.add_request(name, prompt, params)
        aborted = [n for n, r in zip(names, group.requests, strict=True) if r.abort and r.abort == step]
        if aborted:
            engine.abort_request(aborted)
        # A step without requests would wait for one.
        for output in engine.step() if engine.has_unfinished_requests() else ():
            if output.finished:
                finished[output.request_id] = output
        step += 1
    for name, request in zip(names, group.requests, strict=True):
        yield None if request.abort else _output(finished[name])


def _output(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    prompt = zip(output.prompt_token_ids or (), output.prompt_logprobs or (), strict=False)
    return asdict(
        Output(
            tokens=list(completion.token_ids),
            logprobs=[e[t].logprob for e, t in zip(completion.logprobs or (), completion.token_ids, strict=False)],
            prompt_logprobs=[entry[token].logprob for token, entry in prompt if entry is not None],
            text=completion.text,
        )
    )


def _resolve(name: str) -> Callable[..., Any]:
    import importlib

    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


if __name__ == "__main__":
    _main()
