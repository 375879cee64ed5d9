# SPDX-License-Identifier: Apache-2.0
"""Capture and replay of bodies as CUDA graphs, in one run of under ten minutes; on a CPU with the replay checker.

Sections, in this order; what does not fit into the time is left out and named:

    dense tiny, glm-dsa tiny        an engine on one rank: without graphs; the same buckets without graphs; piecewise;
    dense medium, glm-dsa medium    full and piecewise. Outputs must be equal; time per step, bytes, replays per bucket
    two ranks                       two processes on the device over gloo, collectives outside the pieces: equal to one
    memcheck                        compute-sanitizer on a tiny case, in a child process, where the tool is on the path

    python benchmarks/piecewise_graphs_gpu.py [--device cuda] [--minutes 9] [--only SECTION ...] [--quick]
                                              [--out FOLDER]

Needs PyTorch, and Triton on CUDA; models have random weights and are made here. Results go to
``benchmarks/results/graphs-<card>-<date>.json``, with a line in ``piecewise_graphs.md`` beside it. On a CPU no time
means anything, and no file is written unless ``--out`` says where. Exits with 1 when a check fails.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parent / "kernels"))
sys.path.insert(0, str(HERE))

from graph_runs import ranks  # noqa: E402
from graph_runs.models import MEDIUM_DENSE, MEDIUM_GLM, SIZES, TINY_DENSE, TINY_GLM, Size, make_program, on_cpu  # noqa: E402
from graph_runs.serve import WAYS, Result, differences, same_tokens, serve, workload  # noqa: E402

ONE_RANK = {size.name: size for size in (TINY_DENSE, TINY_GLM, MEDIUM_DENSE, MEDIUM_GLM)}
TWO_RANKS, MEMCHECK = "two ranks", "memcheck"
SECTIONS = (*ONE_RANK, TWO_RANKS, MEMCHECK)
GRACE_S = 45
"""Past its time a run is ended."""
ATOL = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.02}
"""Of log probabilities. In bf16 only runs of the same shapes are compared: another row count may round otherwise."""


@dataclass
class Run:
    """One run: where, until when, and what came of it."""

    device: torch.device
    quick: bool
    minutes: float
    results: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return 60 * self.minutes - (time.monotonic() - self.started)

    def size(self, name: str) -> Size:
        """The model of a section, as small as the device asks for."""
        return ONE_RANK[name] if self.device.type == "cuda" else on_cpu(ONE_RANK[name])

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """The result of a call; an exception is a failure of ``what``, and None."""
        try:
            return call()
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {str(error)[:800]}")
            return None

    def require(self, what: str, said: list[str]) -> None:
        """Every difference is a failure; the first three are written down."""
        self.failures.extend(f"{what}: {one}" for one in said[:3])


def one_rank(run: Run, name: str) -> dict[str, Any]:
    """All ways on one rank, and their comparison."""
    size = run.size(name)
    program = make_program(size, 1, run.device)
    work = workload(size, 1, run.device, run.quick)
    found: dict[str, Result] = {}
    for way in WAYS:
        if run.left_s < 5:
            run.skipped.append(f"{name}, {way}: no time left")
            continue
        result = run.attempt(f"{name}, {way}", lambda way=way: serve(program, work, way, run.device))
        if result is not None:
            found[way] = result
    compare(run, name, size, found)
    return {"dtype": str(size.dtype).removeprefix("torch."), **{way: shown(run, found, way) for way in found}}


def compare(run: Run, name: str, size: Size, found: dict[str, Result]) -> None:
    """Graphs give what no graphs give, replayed, and nothing ran without one."""
    atol = ATOL[size.dtype]
    if "padded" in found and "full_and_piecewise" in found:
        said = differences(found["full_and_piecewise"].outputs, found["padded"].outputs, atol)
        run.require(f"{name}: graphs against the same buckets without", said)
    for way in ("padded", "piecewise", "full_and_piecewise"):
        if way in found and "none" in found and size.dtype != torch.bfloat16:
            run.require(f"{name}: {way} against none", differences(found[way].outputs, found["none"].outputs, atol))
    for way in ("piecewise", "full_and_piecewise"):
        if way in found:
            run.require(f"{name}, {way}", replayed(found[way], way))


def replayed(result: Result, way: str) -> list[str]:
    """What is missing of a run that should have been graphs alone."""
    said = [f"{count} steps without a graph: {reason}" for reason, count in result.without.items()]
    wanted = ("piecewise",) if way == "piecewise" else ("piecewise", "full")
    said += [f"no {mode} graph was replayed" for mode in wanted if not any(f" {mode} " in key for key in result.hits)]
    return said


def shown(run: Run, found: dict[str, Result], way: str) -> dict[str, Any]:
    """What a report holds of a way."""
    one, none = found[way], found.get("none")
    timed = run.device.type == "cuda"
    row: dict[str, Any] = {
        "warm_up_s": one.warm_up_s, "graphs": one.graphs, "captured_bytes": one.captured_bytes,
        "static_bytes": one.static_bytes, "hits": one.hits, "steps_without_graph": one.without,
        "ms_per_step": {kind: round(1e3 * seconds, 3) for kind, seconds in one.seconds.items()} if timed else None,
    }  # fmt: skip
    if none is not None and none is not one:
        row["tokens_equal_to_none"] = round(same_tokens(one.outputs, none.outputs), 4)
        if timed:
            row["speed_against_none"] = {
                kind: round(none.seconds[kind] / s, 2) for kind, s in one.seconds.items() if kind in none.seconds
            }
    return row


def two_ranks(run: Run) -> dict[str, Any]:
    """Two processes against one rank without graphs, for the tiny models."""
    rows: dict[str, Any] = {}
    for name in (TINY_DENSE.name, TINY_GLM.name):
        if run.left_s < 20:
            run.skipped.append(f"{TWO_RANKS}, {name}: no time left")
            continue
        rows[name] = run.attempt(f"{TWO_RANKS}, {name}", lambda name=name: _two_ranks(run, name))
    return rows


def _two_ranks(run: Run, name: str) -> dict[str, Any]:
    size = run.size(name)
    alone = serve(make_program(size, 1, run.device), workload(size, 1, run.device, run.quick), "none", run.device)
    script = str(Path(__file__).resolve())
    results = ranks.start(script, "full_and_piecewise", run.device, run.quick, name, min(240.0, run.left_s))
    first = Result(**results[0])
    run.require(f"{TWO_RANKS}, {name}: against one", differences(first.outputs, alone.outputs, ATOL[size.dtype]))
    for other in results[1:]:
        run.require(f"{TWO_RANKS}, {name}: ranks", differences(other["outputs"], first.outputs, 0.0))
        if other["hits"] != first.hits:
            run.failures.append(f"{TWO_RANKS}, {name}: replays {first.hits} and {other['hits']}")
    run.require(f"{TWO_RANKS}, {name}", replayed(first, "full_and_piecewise"))
    if not any(".sharded piecewise" in key for key in first.hits):
        run.failures.append(f"{TWO_RANKS}, {name}: no sharded body was replayed")
    return shown(run, {"full_and_piecewise": first, "none": alone}, "full_and_piecewise")


def memcheck(run: Run) -> dict[str, Any]:
    """The tiny GLM-DSA again, with every access of every kernel checked."""
    tool = shutil.which("compute-sanitizer")
    if run.device.type != "cuda" or tool is None:
        why = "no CUDA device" if run.device.type != "cuda" else "compute-sanitizer is not on the path"
        run.skipped.append(f"{MEMCHECK}: {why}")
        return {}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(Path(__file__).resolve())]
    command += ["--only", TINY_GLM.name, "--quick", "--no-write", "--minutes", str(max(1.0, run.left_s / 60))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(30.0, run.left_s), check=False)
    except subprocess.TimeoutExpired:
        run.skipped.append(f"{MEMCHECK}: did not end in time")
        return {}
    said = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    if done.returncode or not said or "0 errors" not in said[-1]:
        run.failures.append(f"{MEMCHECK}: exit code {done.returncode}: {done.stdout[-800:]}")
    return {"exit_code": done.returncode, "said": said[-1:]}


def where(device: torch.device) -> dict[str, Any]:
    """What ran where: card, versions, date."""
    found: dict[str, Any] = {
        "card": "none: the replay checker on a CPU",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "captured": "no CUDA graph: a replay is a checked call",
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= {"card": card.name, "capability": f"{card.major}.{card.minor}", "cuda": torch.version.cuda}
        found |= {"memory_gib": round(card.total_memory / 2**30, 1), "captured": "CUDA graphs"}
        if importlib.util.find_spec("triton") is not None:
            import triton

            found["triton"] = triton.__version__
    return found


def line(report: dict[str, Any]) -> str:
    """A row of the table in ``piecewise_graphs.md``."""
    ratios, graphs, bytes_held = [], 0, 0
    for name in ONE_RANK:
        row = (report.get(name) or {}).get("full_and_piecewise")
        if row:
            graphs, bytes_held = graphs + row["graphs"], bytes_held + row["captured_bytes"]
            if row.get("speed_against_none"):
                ratios.append(f"{name} " + ", ".join(f"{k} {v}x" for k, v in row["speed_against_none"].items()))
    ran = [name for name in SECTIONS if report.get(name)]
    cells = (
        report["date"], report["card"], f"torch {report['torch']}", report["captured"], ", ".join(ran) or "nothing",
        f"{len(report['failures'])} failures", f"{graphs} graphs, {bytes_held / 2**20:.1f} MiB",
        "; ".join(ratios) or "not measured", "; ".join(report["skipped"]) or "nothing",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def write(report: dict[str, Any], folder: Path) -> Path:
    """Keep a report; one of the same card and day is replaced, its line stays in the table."""
    folder.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", report["card"].lower()).strip("-")
    path = folder / f"graphs-{card}-{report['date']}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    table = folder / "piecewise_graphs.md"
    if not table.exists():
        table.write_text(
            "Runs of `benchmarks/piecewise_graphs_gpu.py`; ratios are time without graphs over time with them.\n\n"
            "| date | card | versions | what was captured | sections | checks | on one rank "
            "| full and piecewise against eager | left out |\n|---|---|---|---|---|---|---|---|---|\n"
        )
    with table.open("a") as file:
        file.write(line(report) + "\n")
    return path


def finish(run: Run, folder: Path | None) -> tuple[dict[str, Any], Path | None]:
    """The report of a run, and where it was written."""
    report = {**where(run.device), "seconds": round(time.monotonic() - run.started, 1), **run.results}
    report |= {"failures": run.failures, "skipped": run.skipped}
    return report, None if folder is None else write(report, folder)


def give_up(run: Run, folder: Path | None) -> None:
    """Write what there is and end the process: something hangs, and nothing else ends it."""
    run.failures.append(f"still running after {time.monotonic() - run.started:.0f} s")
    report, _ = finish(run, folder)
    print(line(report), *run.failures, sep="\n", flush=True)
    os._exit(3)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--minutes", type=float, default=9.0, help="end within this time, leaving out the rest")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--quick", action="store_true", help="a few short requests")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--no-write", action="store_true", help="write no file")
    parser.add_argument("--json", action="store_true", help="print the whole report")
    of_a_rank = parser.add_argument_group("of a rank's process")
    of_a_rank.add_argument("--rank", type=int)
    of_a_rank.add_argument("--rank-folder", type=Path)
    of_a_rank.add_argument("--way", choices=WAYS)
    of_a_rank.add_argument("--model", choices=[size.name for size in SIZES])
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the sections in order and write what came of them."""
    given = parse(argv)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_grad_enabled(False)
    if device.type == "cpu":
        torch.set_num_threads(1)
    run = Run(device, given.quick, given.minutes)
    if given.rank is not None:
        ranks.rank_main(given.rank, given.rank_folder, run.size(given.model), given.way, device, given.quick)
        return 0
    folder = None if given.no_write else given.out or (HERE / "results" if device.type == "cuda" else None)
    watch = threading.Timer(60 * given.minutes + GRACE_S, give_up, (run, folder))
    watch.daemon = True
    watch.start()
    for name in SECTIONS:
        if name not in given.only:
            continue
        if run.left_s < 10:
            run.skipped.append(f"{name}: no time left")
            continue
        section = {TWO_RANKS: two_ranks, MEMCHECK: memcheck}.get(name, lambda run, name=name: one_rank(run, name))
        run.results[name] = run.attempt(name, lambda section=section: section(run)) or {}
    watch.cancel()
    report, path = finish(run, folder)
    if given.json:
        print(json.dumps(report))
    else:
        print(line(report), *(f"FAILED {what}" for what in run.failures), sep="\n")
        print(f"{report['seconds']} s; " + (f"written to {path}" if path else "nothing written"))
    return int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main())
