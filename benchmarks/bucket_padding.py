# SPDX-License-Identifier: Apache-2.0
"""Rows that buckets add to the prefill steps of real traces, beside vLLM's default capture sizes.

A scheduler packs steps from a request trace (``benchmarks/buckets/packing.py``); each step with a prompt in it is laid
out over P ranks, and takes the smallest bucket that holds its largest rank. Per trace, budget and P:

    padded / real   sum over steps and ranks of rows with padding, over that of rows that hold a token
    buckets         sizes that would be captured
    hit             share of the steps that some bucket holds; the others run without a graph, unpadded
    rows hit        share of the real rows in such steps

vLLM's columns take its sizes and its choice, once with our layout and once with its own (``compat="vllm"``).

    python benchmarks/bucket_padding.py [TRACE ...] [--budgets 2048 8192] [--pcp 2 4 8] [--drafts 0]
                                        [--load 0.8] [--requests N] [--write] [--json]

Traces are Mooncake-format ``.jsonl`` or Azure-format ``.csv`` files; without any, those of Mooncake in
``../shared/traces`` beside the repository, or made-up requests with the statistics of one. ``--write`` puts the table
into ``benchmarks/results/bucket_padding.{json,md}``. Exits with 1 when our padding is above 1.06 or the buckets are
more than 60.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))

from buckets.packing import Serving, Step, batch_of, pack  # noqa: E402
from buckets.traces import Arrival, generate, read  # noqa: E402

from pcp_passes.layout import dispatch_tokens  # noqa: E402
from pcp_passes.piecewise.buckets import derive_buckets  # noqa: E402

MOST_PADDING, MOST_BUCKETS = 1.06, 60
TRACES = ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl")


@dataclass
class Sum:
    """Rows of the steps under one set of sizes."""

    sizes: tuple[int, ...]
    pcp: int
    steps: int = 0
    hit_steps: int = 0
    real: int = 0
    hit_real: int = 0
    padded: int = 0

    def add(self, largest: int, real: int, count: int = 1) -> None:
        """``count`` steps whose largest rank has ``largest`` rows, with ``real`` rows over all ranks."""
        index = bisect_left(self.sizes, largest)
        hit = index < len(self.sizes)
        self.steps += count
        self.hit_steps += count * hit
        self.real += count * real
        self.hit_real += count * real * hit
        self.padded += count * self.pcp * (self.sizes[index] if hit else largest)

    def result(self) -> dict[str, Any]:
        return {
            "padded_over_real": round(self.padded / max(1, self.real), 4),
            "buckets": len(self.sizes),
            "hit_steps": round(self.hit_steps / max(1, self.steps), 4),
            "hit_rows": round(self.hit_real / max(1, self.real), 4),
        }


def vllm_sizes(max_requests: int, drafts: int, budget: int) -> tuple[int, ...]:
    """vLLM 0.32's default capture sizes (``VllmConfig._set_cudagraph_sizes``), except on Blackwell."""
    query = 1 + drafts
    most = min(max_requests * query * 2, 512, budget)
    grid = [n for n in (1, 2, 4) if n <= most]
    grid += range(8, min(most + 1, 256), 8)
    grid += range(256, most + 1, 16)
    if budget <= most:
        grid.append(budget)
    decodes = [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), max_requests) if n <= max_requests]
    if drafts:
        grid += [n * query for n in decodes if n * query <= most]
    elif max_requests <= most:
        grid.append(max_requests)
    return tuple(sorted(set(grid)))


def measure(arrivals: list[Arrival], serving: Serving, pcps: list[int]) -> Iterator[dict[str, Any]]:
    """One row of the table per number of ranks; equal steps are counted, then laid out once."""
    steps: Counter[tuple[tuple[int, ...], int, int]] = Counter()
    for step in pack(arrivals, serving):
        steps[(step.chunks, step.decodes, step.decode_tokens)] += 1
    prefills = [(Step(*key), count) for key, count in steps.items() if key[0]]
    theirs = vllm_sizes(serving.max_requests, serving.drafts, serving.budget)
    for pcp in pcps:
        buckets = derive_buckets(
            budget=serving.budget, pcp=pcp, max_requests=serving.max_requests, steps=serving.drafts, limit=MOST_BUCKETS
        )
        ours, sizes_only, layout_too = Sum(buckets.rows, pcp), Sum(theirs, pcp), Sum(theirs, pcp)
        for step, count in prefills:
            batch = batch_of(step, serving.drafts)
            # Every chunk is on one rank, every decode on each.
            real = sum(step.chunks) + pcp * step.decode_tokens
            largest = dispatch_tokens(batch, pcp)
            ours.add(largest, real, count)
            sizes_only.add(largest, real, count)
            layout_too.add(dispatch_tokens(batch, pcp, compat="vllm"), real, count)
        decodes = Sum(buckets.requests, 1)
        for (chunks, requests, _), count in steps.items():
            if not chunks:
                decodes.add(requests, requests, count)
        yield {
            "budget": serving.budget, "pcp": pcp, "drafts": serving.drafts, "prefill_steps": ours.steps,
            "decode_steps": decodes.steps, "ours": ours.result(), "vllm_sizes": sizes_only.result(),
            "vllm_sizes_and_layout": layout_too.result(), "decode_requests": decodes.result(),
        }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = [
        "| trace | budget | P | drafts | prefill steps | ours: padded / real | buckets | hit "
        "| vLLM sizes: padded / real | sizes | hit | rows hit | and its layout: padded / real "
        "| decode steps: padded / real requests | buckets |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        ours, sizes, both, decodes = (
            row[k] for k in ("ours", "vllm_sizes", "vllm_sizes_and_layout", "decode_requests")
        )
        cells = (
            row["trace"], f"{row['budget']:,}", row["pcp"], row["drafts"], f"{row['prefill_steps']:,}",
            f"**{ours['padded_over_real']:.3f}**", ours["buckets"], f"{ours['hit_steps']:.0%}",
            f"{sizes['padded_over_real']:.3f}", sizes["buckets"], f"{sizes['hit_steps']:.0%}",
            f"{sizes['hit_rows']:.0%}", f"{both['padded_over_real']:.3f}", f"{decodes['padded_over_real']:.3f}",
            decodes["buckets"],
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def failures(report: dict[str, Any]) -> list[str]:
    """What is above the bounds, in words."""
    found = []
    for row in report["rows"]:
        where = f"{row['trace']}, budget {row['budget']}, P {row['pcp']}, {row['drafts']} drafts"
        if row["ours"]["padded_over_real"] > MOST_PADDING:
            found.append(f"{where}: {row['ours']['padded_over_real']} padded over real rows, at most {MOST_PADDING}")
        if row["ours"]["buckets"] > MOST_BUCKETS:
            found.append(f"{where}: {row['ours']['buckets']} buckets, at most {MOST_BUCKETS}")
        if row["ours"]["hit_steps"] < 1:
            found.append(f"{where}: {1 - row['ours']['hit_steps']:.2%} of the prefill steps are above every bucket")
    return found


def sources(paths: list[Path], limit: int | None) -> dict[str, list[Arrival]]:
    """Requests by the name of their trace."""
    shared = HERE.parent.parent / "shared" / "traces"
    paths = paths or [shared / name for name in TRACES if (shared / name).exists()]
    if not paths:
        return {"made up": generate(limit or 2000)}
    return {path.stem: read(path, limit) for path in paths}


def main(argv: list[str] | None = None) -> int:
    """Measure, print and perhaps write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--budgets", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--pcp", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--drafts", nargs="+", type=int, default=[0])
    parser.add_argument("--max-requests", type=int, default=256)
    parser.add_argument("--load", type=float, default=0.8, help="share of the time the server is busy")
    parser.add_argument("--requests", type=int, help="only the first so many of each trace")
    parser.add_argument("--generate", type=int, metavar="N", help="N made-up requests in place of a trace")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    parser.add_argument("--json", action="store_true", help="print the whole report")
    given = parser.parse_args(argv)
    began = time.monotonic()
    traces = {"made up": generate(given.generate)} if given.generate else sources(given.traces, given.requests)
    rows = []
    for name, arrivals in traces.items():
        for budget in given.budgets:
            for drafts in given.drafts:
                serving = Serving(budget, given.max_requests, drafts, given.load)
                rows += [{"trace": name, **row} for row in measure(arrivals, serving, given.pcp)]
    report: dict[str, Any] = {
        "requests": {name: len(arrivals) for name, arrivals in traces.items()},
        "max_requests": given.max_requests,
        "load": given.load,
        "rows": rows,
    }
    problems = failures(report)
    text = table(report)
    if given.write:
        write(report, text)
    if given.json:
        print(json.dumps(report))
    else:
        print(text + "\n".join(f"FAILED {one}" for one in problems))
        print(f"{time.monotonic() - began:.1f} s")
    return int(bool(problems))


def write(report: dict[str, Any], text: str) -> None:
    """Into the folder of the results."""
    folder = HERE / "results"
    (folder / "bucket_padding.json").write_text(json.dumps(report, indent=1) + "\n")
    requests = ", ".join(f"{name} ({count:,} requests)" for name, count in report["requests"].items())
    (folder / "bucket_padding.md").write_text(
        "# Rows that buckets add\n\n"
        f"Written by `benchmarks/bucket_padding.py --write` from {requests}; at most {report['max_requests']} requests "
        f"run at a time, and the server is busy {report['load']:.0%} of the time. Counted, not timed, so no GPU was "
        "used.\n\n"
        + text
        + "\nPadded / real: rows over all ranks and prefill steps, with padding over those that hold a token. A step "
        "above every size runs without a graph and without padding, which is why vLLM's ratio is near 1 where its "
        "sizes hit little.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
