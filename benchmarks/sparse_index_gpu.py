# SPDX-License-Identifier: Apache-2.0
"""Everything about the sparse-index kernels that only a GPU can show, in one run of under ten minutes.

Sections, in this order; what one leaves of its time the next may use:

    ceilings     a matrix product per dtype and a copy, timed here: what the other times are a share of
    correctness  every shipped kernel against the references
    plans        fused, tiled and split select the same keys, bit for bit
    repeats      twenty runs of every shipped kernel, bit for bit equal
    times        logits, selection, fused and decode: TFLOP/s, GB/s and share of the ceiling
    racecheck    compute-sanitizer on tiny cases, in a child process

    python benchmarks/sparse_index_gpu.py [--minutes 9] [--only SECTION ...] [--families FAMILY ...] [--out FOLDER]

Needs PyTorch with CUDA and Triton alone. Results go to ``benchmarks/results/<card>-<date>.json``, with a line in
``sparse_index.md`` beside it. Without a CUDA device, or with ``--interpret``, tiny shapes run in Triton's interpreter:
the same code, no speeds, and no file unless ``--out`` says where. Exits with 1 when a check fails.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parent / "kernels"))
sys.path.insert(0, str(HERE))

SHARES = {"ceilings": 0.05, "correctness": 0.35, "plans": 0.1, "repeats": 0.1, "times": 0.25, "racecheck": 0.15}
"""Section -> share of the time."""
GRACE_S = 60
"""Past its time a run is ended."""


def where(interpret: bool) -> dict[str, Any]:
    """What ran where: card, versions, date."""
    import triton

    from pcp_kernels.generate import generator_version

    found: dict[str, Any] = {
        "card": "none: Triton's interpreter on CPU",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "generator": generator_version()[:16],
    }
    if not interpret:
        card = torch.cuda.get_device_properties(0)
        capability = f"{card.major}.{card.minor}"
        found |= {"card": card.name, "capability": capability, "multiprocessors": card.multi_processor_count}
        found |= {"memory_gib": round(card.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return found


def line(report: dict[str, Any]) -> str:
    """A row of the table in ``sparse_index.md``."""
    right = sum(value == "right" for value in report.get("correctness", {}).values())
    best = {}
    for row in report.get("times", []):
        if row["ms"] is not None:
            best[row["what"]] = max(best.get(row["what"], 0.0), row.get("tflops_share") or row.get("gbps_share") or 0.0)
    shares = ", ".join(f"{what} {share:.0%}" for what, share in best.items()) or "not measured"
    cells = (
        report["date"], report["card"], f"torch {report['torch']}, Triton {report['triton']}",
        f"{right} of {len(report.get('correctness', {}))} kernels right", f"{len(report['failures'])} failures",
        shares, f"{len(report['skipped'])} left out",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def write(report: dict[str, Any], folder: Path) -> Path:
    """Keep a report; one of the same card and day is replaced, its line stays in the table."""
    folder.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", report["card"].lower()).strip("-")
    path = folder / f"{card}-{report['date']}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    table = folder / "sparse_index.md"
    if not table.exists():
        table.write_text(
            "| date | card | versions | correctness | checks | best share of the ceiling | left out |\n"
            "|---|---|---|---|---|---|---|\n"
        )
    with table.open("a") as file:
        file.write(line(report) + "\n")
    return path


def finish(run: Any, folder: Path | None) -> tuple[dict[str, Any], Path | None]:
    """The report of a run, and where it was written."""
    report = {**where(run.interpret), "seconds": round(time.monotonic() - run.started, 1), **run.results}
    report |= {"failures": run.failures, "skipped": run.skipped}
    return report, None if folder is None else write(report, folder)


def give_up(run: Any, folder: Path | None) -> None:
    """Write what there is and end the process: a kernel hangs, and nothing else ends it."""
    run.failures.append(f"still running after {time.monotonic() - run.started:.0f} s")
    report, _ = finish(run, folder)
    print(line(report), *run.failures, sep="\n", flush=True)
    os._exit(3)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=9.0, help="end within this time, leaving out the rest")
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES), metavar="SECTION")
    parser.add_argument("--families", nargs="+", default=[], help="only these kernels: topk, logits, pack, ...")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes in Triton's interpreter, on CPU")
    parser.add_argument("--tiny", action="store_true", help="run each kernel once on few rows; for compute-sanitizer")
    parser.add_argument("--json", action="store_true", help="print the whole report")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the sections in order and write what came of them."""
    given = parse(argv)
    interpret = given.interpret or not torch.cuda.is_available()
    if interpret and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads it when it is imported, which may have happened already.
        environment = os.environ | {"TRITON_INTERPRET": "1", "PCP_KERNELS": "interpreter"}
        arguments = sys.argv[1:] if argv is None else argv
        os.execve(sys.executable, [sys.executable, str(Path(__file__).resolve()), *arguments], environment)
    from sparse_index import checks, speeds
    from sparse_index.run import Run

    device = torch.device("cpu" if interpret else "cuda")
    run = Run(device, interpret, frozenset(given.families), str(Path(__file__).resolve()))
    if given.tiny:
        return checks.tiny(run)
    sections = {
        "ceilings": speeds.ceilings, "correctness": checks.correctness, "plans": checks.plans,
        "repeats": checks.repeats, "times": speeds.times, "racecheck": checks.racecheck,
    }  # fmt: skip
    folder = given.out or (None if interpret else HERE / "results")
    watch = threading.Timer(60 * given.minutes + GRACE_S, give_up, (run, folder))
    watch.daemon = True
    watch.start()
    share = 0.0
    for name in SHARES:
        share += SHARES[name] if name in given.only else 0.0
        if name in given.only:
            run.deadline = run.started + 60 * given.minutes * share / sum(SHARES[one] for one in given.only)
            run.results[name] = run.attempt(name, functools.partial(sections[name], run)) or {}
    watch.cancel()
    report, path = finish(run, folder)
    if given.json:
        print(json.dumps(report))
    else:
        print(line(report), *(f"FAILED {what}" for what in run.failures), sep="\n")
        print(*(f"left out {what}\n" for what in run.skipped), sep="", end="")
        print(f"{report['seconds']} s; " + (f"written to {path}" if path else "nothing written"))
    return int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main())
