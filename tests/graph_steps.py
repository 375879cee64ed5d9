# SPDX-License-Identifier: Apache-2.0
"""The small step programs of :mod:`tests.steps`, run through graphs on buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pcp_passes.layout import Batch, Layout, build_layout
from pcp_passes.piecewise.prepare import Prepared, prepare
from pcp_passes.piecewise.replayer import GraphMode
from pcp_passes.piecewise.runner import BodyRunner, StepDispatch
from pcp_passes.step import StepInputs
from tests import steps

ROWS, REQUESTS = (4, 8, 16, 24), (1, 2, 4)
MAX_BYTES = 1 << 24


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds ``count``."""
    return next(size for size in sizes if size >= count)


@dataclass
class GraphHost(steps.Host):
    """A host whose ranks have runners; ``mode`` of prefill steps, ``decode_mode`` of decoding and of draft steps."""

    mode: GraphMode = GraphMode.PIECEWISE
    decode_mode: GraphMode = GraphMode.FULL
    max_bytes: int | None = MAX_BYTES
    compiler: Any = None
    prepared: Prepared = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prepared = prepare(self.program, compiler=self.compiler)
        for state in self.states:
            state.caches.runner = BodyRunner(
                self.prepared, state.caches, rows_max=ROWS[-1], requests_max=REQUESTS[-1], columns=steps.COLUMNS,
                max_bytes=self.max_bytes,
            )  # fmt: skip

    @property
    def runners(self) -> list[BodyRunner]:
        """Of all ranks."""
        return [state.caches.runner for state in self.states if state.caches.runner is not None]

    def batch(self, scheduled: Sequence[tuple[int, int]]) -> tuple[StepInputs, Layout]:
        inputs, layout = super().batch(scheduled)
        requests = bucket(len(scheduled), REQUESTS)
        computed = [self.requests[r].computed for r, _ in scheduled]
        prompts = [self.requests[r].prompt for r, _ in scheduled]
        decode = all(done >= prompt for done, prompt in zip(computed, prompts, strict=True))
        rows, mode = requests * (1 + self.program.steps), self.decode_mode
        if not decode:
            rows, mode = bucket(int(layout.padded_tokens), ROWS), self.mode
            described = Batch(inputs.query_start_loc.diff().tolist(), computed, prompts)
            if self.program.pcp > 1 and not layout.is_replicated:
                layout = build_layout(described, self.program.pcp, decode=self.decode, padded_tokens=rows)
        for runner in self.runners:
            runner.begin(StepDispatch(mode, rows, requests, decode, self.decode_mode))
        return inputs, layout


def run(program: Any, scheduled: Any = steps.MIXED, **given: Any) -> GraphHost:
    """All steps on fresh requests."""
    host = GraphHost(program, steps.requests(), **given)
    for one in scheduled:
        host.step(one)
    return host
