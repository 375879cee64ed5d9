# SPDX-License-Identifier: Apache-2.0
"""One workload on an engine, with graphs and without, and what came of it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from graph_runs.models import Size
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.executor import Executor
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import RequestOutput
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.piecewise.replayer import Captured, Function, GraphKey, Replayer, Tensors
from pcp_passes.step.program import StepProgram

WAYS = ("none", "padded", "piecewise", "full_and_piecewise")
"""Without graphs; the split bodies on buckets without graphs; and with them."""

Make = Callable[[StepProgram, EngineOptions], Executor]


@dataclass(frozen=True)
class Workload:
    """Requests of random prompts: ``(prompt, tokens to generate)``, all there from the start."""

    requests: tuple[tuple[int, int], ...]
    options: EngineOptions


def workload(size: Size, pcp: int, device: torch.device, quick: bool) -> Workload:
    """Prompts in chunks beside decodes, then decodes alone until each request ends at another step."""
    large = device.type == "cuda" and not quick
    requests = ((700, 40), (33, 64), (1, 80), (256, 48), (130, 24)) if large else ((41, 6), (9, 10), (1, 12))
    budget = 256 if large else 24
    options = EngineOptions(
        pcp=pcp, block_size=64 if device.type == "cuda" else 8, num_blocks=64 if large else 32,
        max_len=max(map(sum, requests)), max_requests=len(requests), budget=budget,
    )  # fmt: skip
    rows = (8, 32, 128, 256) if large else (4, 16, 24)
    most = replace(options, graph_mode="piecewise", graph_rows=rows, graph_requests=(1, 2, len(requests)))
    return Workload(requests, most)


@dataclass(frozen=True, eq=False)
class Kept(Captured):
    """What is run in the place of a graph."""

    function: Function


class Uncaptured(Replayer[Kept]):
    """Runs what would be captured, each time: the same shapes and buffers as a graph, and no graph."""

    def _capture(self, key: GraphKey, function: Function, inputs: Tensors, names: Any) -> tuple[Kept, Tensors]:
        return Kept((), 0, function), tuple(function(*inputs))

    def _replay(self, key: GraphKey, graph: Kept, inputs: Tensors, names: Any) -> Tensors:
        return tuple(graph.function(*inputs))


@dataclass(frozen=True)
class Result:
    """Of one way. Seconds are the median of a step, with the results read; ``prefill``: steps that hold a chunk."""

    outputs: dict[str, RequestOutput]
    seconds: dict[str, float]
    hits: dict[str, int]
    without: dict[str, int]
    graphs: int
    captured_bytes: int
    static_bytes: int
    warm_up_s: float


def serve(program: StepProgram, work: Workload, way: str, device: torch.device, make: Make | None = None) -> Result:
    """Run the workload twice, the second time on the clock. ``make`` an executor; the simulator by default."""
    if way == "none":
        options = replace(work.options, graph_mode="none", graph_rows=None, graph_requests=None)
    else:
        options = replace(work.options, graph_mode="full_and_piecewise" if way == "padded" else way)
    executor = SimulatedExecutor(program, options, device=device) if make is None else make(program, options)
    runners = [rank.runner for rank in executor.ranks if rank.runner is not None]
    if way == "padded":
        for runner in runners:
            runner.replayer = Uncaptured()
    began = time.monotonic()
    engine = Engine(executor)
    synchronize(device)
    warm_up_s = time.monotonic() - began
    try:
        _drive(engine, work, "warm", device)
        outputs, seconds = _drive(engine, work, "timed", device)
        summary = engine.summary()
    finally:
        engine.close()
    captured = [len(runner.replayer.keys) for runner in runners] if way != "padded" else []
    return Result(
        outputs,
        {kind: statistics.median(times) for kind, times in seconds.items() if times},
        summary["graph_hits"],
        summary["steps_without_graph"],
        max(captured, default=0),
        max((runner.captured_bytes for runner in runners), default=0),
        max((runner.static_bytes for runner in runners), default=0),
        round(warm_up_s, 2),
    )


def _drive(
    engine: Engine, work: Workload, name: str, device: torch.device
) -> tuple[dict[str, RequestOutput], dict[str, list[float]]]:
    vocab = engine.executor.program.target.vocab_size  # type: ignore[attr-defined]
    rng = random.Random(name == "warm")
    for index, (length, count) in enumerate(work.requests):
        prompt = [rng.randrange(vocab) for _ in range(length)]
        engine.add_request(prompt, SamplingParams(max_tokens=count), f"{name}-{index}")
    outputs: dict[str, RequestOutput] = {}
    seconds: dict[str, list[float]] = {"prefill": [], "decode": []}
    while engine.unfinished:
        synchronize(device)
        began, before = time.perf_counter(), engine.stats.steps
        prefill = any(request.is_prefilling for request in engine.scheduler.requests.values())
        for output in engine.step():
            outputs[output.id.removeprefix(f"{name}-")] = output
        synchronize(device)
        if engine.stats.steps > before:
            seconds["prefill" if prefill else "decode"].append(time.perf_counter() - began)
    return outputs, seconds


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def differences(mine: dict[str, RequestOutput], other: dict[str, RequestOutput], atol: float) -> list[str]:
    """What differs, in words: tokens, drafts that were accepted, log probabilities by more than ``atol``."""
    if mine.keys() != other.keys():
        return [f"requests {sorted(mine)} and {sorted(other)}"]
    said = []
    for name, one in sorted(mine.items()):
        two = other[name]
        for what in ("tokens", "drafted", "accepted", "finish_reason"):
            if getattr(one, what) != getattr(two, what):
                said.append(f"request {name}: {what} {getattr(one, what)[:12]} and {getattr(two, what)[:12]}")
        worst = max((abs(a - b) for a, b in zip(one.logprobs, two.logprobs, strict=False)), default=0.0)
        if not worst <= atol:
            said.append(f"request {name}: log probabilities differ by {worst:.3g}, at most {atol:g}")
    return said


def same_tokens(mine: dict[str, RequestOutput], other: dict[str, RequestOutput]) -> float:
    """Share of the tokens of all requests, up to the first that differs in each."""
    same = total = 0
    for name, one in mine.items():
        pairs = list(zip(one.tokens, other[name].tokens, strict=False))
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        total += len(one.tokens)
    return same / max(1, total)
