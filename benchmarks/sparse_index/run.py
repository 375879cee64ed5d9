# SPDX-License-Identifier: Apache-2.0
"""One run of the script: its device, its clock, and what came of it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pcp_kernels import catalog
from sparse_index.cases import Inputs, small


@dataclasses.dataclass
class Run:
    """One run: where, until when, and what came of it."""

    device: torch.device
    interpret: bool
    families: frozenset[str] = frozenset()
    """Only these kernels, if there are any."""
    script: str = ""
    """Path of the script, for child processes."""
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    """What did not run, and why."""
    started: float = dataclasses.field(default_factory=time.monotonic)
    deadline: float = float("inf")
    """Of the section that runs."""

    def late(self, what: str) -> bool:
        """Whether the section's time is over; then ``what`` is written down as left out."""
        if time.monotonic() < self.deadline:
            return False
        self.skipped.append(f"{what}: no time left")
        return True

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """The result of a call; an exception is a failure of ``what``, and None."""
        try:
            result = call()
            self.sync()
            return result
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {str(error)[:500]}")
            return None

    def sync(self) -> None:
        if not self.interpret:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any], least: int = 5) -> float | None:
        """Median time of a call, warm; in the interpreter it runs once and gives None."""
        call()
        if self.interpret:
            return None
        call()
        times = []
        began = time.monotonic()
        while len(times) < least or (len(times) < 50 and time.monotonic() - began < 0.5):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        return statistics.median(times)

    @property
    def fp8(self) -> bool:
        """Whether the device multiplies fp8."""
        return self.interpret or torch.cuda.get_device_capability(self.device) >= (8, 9)

    def specs(self) -> Iterator[Any]:
        """Shipped specs; small ones, each once, in the interpreter."""
        found = {}
        for spec in catalog.shipped().values():
            made = small(spec) if self.interpret else spec
            if not self.families or made.family in self.families:
                found[made.name] = made
        for name, spec in found.items():
            if getattr(spec, "store", "") == "fp8" and spec.k_loop and not self.fp8:
                if (reason := f"{name}: this card has no fp8 products") not in self.skipped:
                    self.skipped.append(reason)
            else:
                yield spec

    def inputs(self, seed: int = 0) -> Any:
        """Of the checks: enough keys for several compactions of the candidates."""
        return Inputs(self.device, *((9, 150) if self.interpret else (257, 6000)), seed)
