# SPDX-License-Identifier: Apache-2.0
"""What the soak did, in numbers: one file per part under ``build/soak/``, and ``build/soak.json`` over all of them.

Parts may run in several processes. Each writes its own file, so nothing is lost when one fails; a part of other sources
of the package is left out of the summary.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from pcp_passes.errors import PcpError
from pcp_passes.passes.pipeline import hash_sources
from tests.engine_schedules import Difference, ProgramOf, Schedule, Trace, compare, make_schedule, run_schedule

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
SOURCES = hash_sources(ROOT / "pcp_passes")[:16]
"""As this process has imported them; they may change while it runs."""
LARGEST = ("largest_kv_difference", "largest_logprob_difference")


class Part:
    """Numbers of some schedules of one kind (``mtp``, ``dspark``, ``gloo``, ``float32``)."""

    def __init__(self, kind: str) -> None:
        self.numbers: dict[str, Any] = {"kind": kind, "schedules": 0, "comparisons": {}, "drafts_per_step": {}}
        self.numbers |= dict.fromkeys(LARGEST, 0.0)

    def add(
        self, schedule: Schedule, wanted: Trace, differences: Mapping[int, Difference], sharded_steps: int = 0
    ) -> None:
        """A schedule, what PCP=1 made of it, how others differ by their P, and how many of their steps were sharded."""
        held = self.numbers
        held["schedules"] += 1
        _count(held["drafts_per_step"], str(schedule.steps))
        for name, count in (wanted.counts | {"sharded_steps": sharded_steps}).items():
            held[name] = held.get(name, 0) + count
        for pcp, difference in differences.items():
            _count(held["comparisons"], str(pcp))
            for name, value in zip(LARGEST, (difference.cache, difference.logprob), strict=True):
                held[name] = max(held[name], value)

    def count(self, totals: Mapping[str, int]) -> None:
        """More numbers of the schedules, to be summed."""
        for name, count in totals.items():
            self.numbers[name] = self.numbers.get(name, 0) + count

    def save(self, name: str, build: Path = BUILD) -> dict[str, Any]:
        """Write the part, then the summary over all parts; returns the summary."""
        folder = build / "soak"
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{name}.json", self.numbers | {"sources": SOURCES})
        summary = summarise(folder)
        _write(build / "soak.json", summary)
        logger.info("%s: %s", name, json.dumps(self.numbers))
        return summary


def summarise(folder: Path) -> dict[str, Any]:
    """Sums, and largest differences, by kind, over the parts that ran these sources."""
    kinds: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        part = json.loads(path.read_text())
        if part.pop("sources") != SOURCES:
            continue
        total = kinds.setdefault(part.pop("kind"), {})
        for name, value in part.items():
            if isinstance(value, dict):
                held = total.setdefault(name, {})
                for key, count in value.items():
                    held[key] = held.get(key, 0) + count
            elif name in LARGEST:
                total[name] = max(total.get(name, 0.0), value)
            else:
                total[name] = total.get(name, 0) + value
    return {"torch": torch.__version__, "sources": SOURCES, **kinds}


def run_part(
    kind: str,
    seeds: Iterable[int],
    program_of: ProgramOf,
    pcps: Iterable[int] = (2, 4, 8),
    cache_dtype: str = "auto",
) -> Part:
    """Run schedules at each of ``pcps`` in the simulator and compare with PCP=1; the first that differs fails."""
    part = Part(kind)
    for seed in seeds:
        schedule = make_schedule(seed, cache_dtype=cache_dtype)
        wanted = run_schedule(schedule, 1, program_of)
        found = {pcp: _compared(schedule, pcp, program_of, wanted) for pcp in pcps}
        sharded = sum(trace.counts["sharded_steps"] for trace, _ in found.values())
        part.add(schedule, wanted, {pcp: difference for pcp, (_, difference) in found.items()}, sharded)
    return part


def _compared(schedule: Schedule, pcp: int, program_of: ProgramOf, wanted: Trace) -> tuple[Trace, Difference]:
    where = f"seed {schedule.seed}, pcp {pcp}"
    try:
        found = run_schedule(schedule, pcp, program_of)
    except (AssertionError, PcpError) as error:
        raise AssertionError(f"{where}: {error}") from error
    difference = compare(found, wanted)
    assert not difference.first, f"{where}: {difference}"
    return found, difference


def require_hard_cases(kind: Mapping[str, Any], schedules: int) -> None:
    """When all schedules of a kind have run: what is hard happened, and often."""
    if kind["schedules"] < schedules:
        return
    missing = [name for name in ("preemptions", "aborts", "cached_tokens", "sharded_steps") if not kind[name]]
    assert not missing, f"{schedules} schedules without any {', '.join(missing)}"
    assert 0 < kind["accepted"] < kind["drafted"], "drafts are accepted and rejected"


def chunks(seeds: range, size: int = 10) -> list[range]:
    """``seeds`` in pieces, each a test of its own."""
    return [seeds[start : start + size] for start in range(0, len(seeds), size)]


def name(seeds: range) -> str:
    """Of a piece, for tests and files."""
    return f"{seeds[0]}-{seeds[-1]}"


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _write(path: Path, content: Any) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)
