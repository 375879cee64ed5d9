# SPDX-License-Identifier: Apache-2.0
"""What an engine did: rows, padding, imbalance and bytes per step; drafts and their acceptance."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from pcp_passes.speculative.acceptance import AcceptanceCounters

KEPT_STEPS = 4096
"""Step records that are kept; the totals count all."""


@dataclass(frozen=True)
class StepRecord:
    """One executed step. ``rows_per_rank`` are real rows, ``padded_rows`` is M, what every rank computes.

    ``collectives`` and ``bytes`` are those of one rank: what it sends, the same on all.
    """

    step: int
    requests: int
    tokens: int
    sharded: bool
    rows_per_rank: tuple[int, ...]
    padded_rows: int
    collectives: int
    bytes: int
    graph: str = "none"
    """How the target's call ran: ``none``, ``piecewise`` or ``full``. The drafter's pass over all tokens ran the same,
    unless ``no_graph`` names calls that ``graph_bytes`` left out."""
    no_graph: str = ""
    """Why calls of the step ran without a graph; empty when all had one."""

    @property
    def graph_padding(self) -> int:
        """Rows over all ranks that only fill up to the bucket, beyond the fullest rank's."""
        return len(self.rows_per_rank) * (self.padded_rows - max(self.rows_per_rank))

    @property
    def padding(self) -> int:
        """Rows over all ranks that only fill up to M."""
        return len(self.rows_per_rank) * self.padded_rows - sum(self.rows_per_rank)

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank over the mean; 1 is even."""
        mean = sum(self.rows_per_rank) / len(self.rows_per_rank)
        return max(self.rows_per_rank) / mean if mean else 1.0


class EngineStats:
    """Totals over all steps, the latest records, and the acceptance counters."""

    def __init__(self, pcp: int, steps: int, floor: float | None) -> None:
        self.records: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self.acceptance = AcceptanceCounters(steps, floor=floor)
        self.rows_per_rank = [0] * pcp
        self.steps = self.sharded_steps = self.padding = self.collectives = self.bytes = 0
        self.preemptions = self.cached_tokens = self.published = 0
        self.dummy_steps = 0
        self.largest_imbalance = 1.0
        self.graph_padding = 0
        self.without_graph: Counter[str] = Counter()

    def record(self, step: StepRecord) -> None:
        """Count a step."""
        self.records.append(step)
        self.steps += 1
        self.sharded_steps += step.sharded
        self.padding += step.padding
        self.graph_padding += step.graph_padding
        if step.no_graph:
            self.without_graph[step.no_graph] += 1
        self.collectives += step.collectives
        self.bytes += step.bytes
        self.largest_imbalance = max(self.largest_imbalance, step.imbalance)
        for rank, rows in enumerate(step.rows_per_rank):
            self.rows_per_rank[rank] += rows

    def summary(self) -> dict[str, Any]:
        """Plain numbers that JSON can hold."""
        return {
            "steps": self.steps,
            "sharded_steps": self.sharded_steps,
            "rows_per_rank": list(self.rows_per_rank),
            "padding_rows": self.padding,
            "largest_imbalance": self.largest_imbalance,
            "collectives": self.collectives,
            "bytes": self.bytes,
            "bytes_per_sharded_step": self.bytes / self.sharded_steps if self.sharded_steps else 0.0,
            "preemptions": self.preemptions,
            "cached_tokens": self.cached_tokens,
            "published_prefills": self.published,
            "dummy_steps": self.dummy_steps,
            "graph_padding_rows": self.graph_padding,
            "steps_without_graph": dict(self.without_graph),
            "acceptance": self.acceptance.summary(),
        }
