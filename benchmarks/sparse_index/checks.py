# SPDX-License-Identifier: Apache-2.0
"""Checks of every shipped kernel: values, plans, repeats, hazards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pcp_kernels import store
from pcp_kernels.specs import KernelSpec
from sparse_index.cases import Inputs
from sparse_index.problems import ALL, mixed
from sparse_index.run import Run

REPEATS = 20


def same_bytes(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether outputs are equal bit for bit, NaN included."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(*(value.contiguous().view(torch.uint8) for value in pair)) for pair in pairs)


def correctness(run: Run) -> dict[str, Any]:
    """Every shipped kernel on mixed rows; that the kernel in question ran is checked, too."""
    found: dict[str, Any] = {}
    for spec in run.specs():
        if run.late(f"correctness {spec.name}"):
            continue
        with launched() as names:
            wrong = run.attempt(f"correctness {spec.name}", lambda spec=spec: _wrong(spec, run))
        if not wrong and wrong is not None and spec.name not in names:
            wrong = f"another kernel ran: {', '.join(names)}"
        found[spec.name] = "failed" if wrong is None else wrong or "right"
        if wrong:
            run.failures.append(f"correctness {spec.name}: {wrong}")
    return found


def _wrong(spec: KernelSpec, run: Run) -> str:
    case = ALL[spec.family](spec, run.inputs())
    return case.wrong(case.run())


@contextlib.contextmanager
def launched() -> Iterator[list[str]]:
    """Names of the specs whose kernels are launched meanwhile."""
    names: list[str] = []
    original = store.load

    def load(spec: KernelSpec, *rest: Any, **named: Any) -> Any:
        names.append(spec.name)
        return original(spec, *rest, **named)

    store.load = load
    try:
        yield names
    finally:
        store.load = original


def plans(run: Run) -> dict[str, Any]:
    """The same indices from every plan; and whether a tile of one row scores bit for bit as a shipped tile does."""
    found: dict[str, Any] = {}
    for spec in run.specs():
        if spec.family != "logits" or run.late(f"plans {spec.name}"):
            continue
        found[spec.name] = run.attempt(f"plans {spec.name}", lambda spec=spec: _plans(spec, run))
        if found[spec.name] and not found[spec.name]["equal"]:
            run.failures.append(f"plans {spec.name}: fused, tiled and split differ")
    return found


def _plans(spec: Any, run: Run) -> dict[str, bool]:
    topk = 16 if run.interpret else 2048
    given = mixed(spec, run.inputs(), topk)
    fused, tiled, split = ([given.select(topk, kind)] for kind in ("fused", "tiled", "split"))
    whole, one = (torch.zeros(given.q.shape[0], given.keys.shape[1], device=run.device) for _ in range(2))
    given.logits(spec, whole)
    given.logits(dataclasses.replace(spec, block_queries=1), one)
    return {
        "equal": same_bytes(fused, tiled) and same_bytes(fused, split),
        "one_row_tile_scores_equal": same_bytes([whole], [one]),
    }


def repeats(run: Run) -> dict[str, Any]:
    """Runs with equal outputs, of twenty; three in the interpreter, which has no races."""
    found: dict[str, Any] = {}
    times = 3 if run.interpret else REPEATS
    for spec in run.specs():
        if run.late(f"repeats {spec.name}"):
            continue
        equal = run.attempt(f"repeats {spec.name}", lambda spec=spec: _repeats(spec, run, times))
        found[spec.name] = f"{equal or 0} of {times}"
        if equal is not None and equal < times:
            run.failures.append(f"repeats {spec.name}: {equal} of {times} runs equal")
    return found


def _repeats(spec: KernelSpec, run: Run, times: int) -> int:
    case = ALL[spec.family](spec, run.inputs(1))
    first = case.run()
    return 1 + sum(same_bytes(first, case.run()) for _ in range(times - 1))


def tiny(run: Run) -> int:
    """Every shipped kernel once, on few rows and as many keys as make it compact its candidates."""
    for spec in run.specs():
        inputs = Inputs(run.device, 5, 150 if run.interpret else 4500)
        ALL[spec.family](spec, inputs).run()
        run.sync()
    return 0


def racecheck(run: Run) -> dict[str, Any]:
    """Hazards in shared memory, and accesses out of bounds, by compute-sanitizer on tiny cases.

    Scratch is in global memory, which racecheck does not watch: that its barriers are there is linted, and that runs
    repeat is checked above.
    """
    tool = shutil.which("compute-sanitizer")
    if run.interpret or tool is None:
        run.skipped.append(
            "racecheck: " + ("no CUDA device" if run.interpret else "compute-sanitizer is not on the path")
        )
        return {}
    found = {}
    for check in ("racecheck", "memcheck"):
        if run.late(f"racecheck {check}"):
            continue
        found[check] = wrong = sanitize(tool, check, run.deadline - time.monotonic(), [run.script, "--tiny"])
        if wrong.startswith("out of time"):
            run.skipped.append(f"racecheck {check}: {wrong}")
        elif wrong != "no hazard":
            run.failures.append(f"racecheck {check}: {wrong}")
    return found


def sanitize(tool: str, check: str, seconds: float, script: Sequence[str]) -> str:
    """What compute-sanitizer says about a script of ours: "no hazard", or the end of its output."""
    command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, *script]
    pipe = subprocess.PIPE
    # A session of its own, so that the script ends with the tool in front of it.
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True) as process:
        try:
            said, _ = process.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"out of time after {seconds:.0f} s"
    return "no hazard" if process.returncode == 0 else f"exit {process.returncode}: {said[-2000:]}"
