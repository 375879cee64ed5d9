# SPDX-License-Identifier: Apache-2.0
"""What compiling a split body costs beside the unsharded one, and how many pieces are compiled, by number of layers.

A dense decoder of transformers (Llama's, built from a config; hidden 64, float32) is captured, rewritten for two ranks
and split into pieces; Inductor compiles each distinct piece once for a range of rows. All are CPU seconds, those of the
C++ compiler included, on one thread. Each case runs in a process of its own with an empty cache folder, and the cases
take turns. Compiled is, in turn: the replicated body of one rank (unsharded), the sharded body of two ranks, their
replicated body, both of them by one compiler, and both again from the caches that this left behind. Shown are the
medians of ``split-piecewise`` and of the compilation; ratios are of their sum, so capture and rewrite, which are the
same work with and without ranks, do not flatter them. Before the clock starts, each process compiles a graph of one
addition: imports, what the compiler asks of the CPU and the precompiled headers belong to no body.

    python benchmarks/piecewise_compile.py [--layers 8 16 32] [--repeats 3] [--quick] [--out FOLDER] [--json] [--check]

The last number of layers is the one that is compiled. ``--out`` also writes ``piecewise_compile.json`` and ``.md``
there (``benchmarks/results``). ``--check`` exits with 1 when a body takes more than 1.25 times the unsharded one, both
more than twice, more layers give more distinct pieces, or a warm start compiles anything. Needs transformers and rich;
takes about eight minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PCP, ROWS = 2, 512
MAX_BODY, MAX_BOTH = 1.25, 2.0
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "unsharded": (1, ("replicated",)),
    "sharded": (PCP, ("sharded",)),
    "replicated": (PCP, ("replicated",)),
    "both": (PCP, ("sharded", "replicated")),
}
"""Ranks, and the bodies that one compiler compiles."""


def bodies(layers: int, pcp: int) -> Any:
    """Both bodies of a decoder, for ``pcp`` ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pcp_passes.frontends.transformers.target import load_target
    from pcp_passes.passes import PassContext

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return load_target(model, ctx=PassContext(pcp)).bodies


def measure(layers: int, case: str, backend: str) -> dict[str, Any]:
    """Seconds and counts of one case, in this process."""
    import torch

    from pcp_passes.passes import PassContext
    from pcp_passes.piecewise.compile import PieceCompiler
    from pcp_passes.piecewise.pieces import pieces_of
    from pcp_passes.piecewise.split import split_body

    torch.set_num_threads(1)
    pcp, variants = CASES[case]
    begin = cpu_seconds()
    found = bodies(layers, pcp)
    seconds = {"capture": cpu_seconds() - begin, "split": 0.0, "compile": 0.0}
    if backend == "inductor":
        with torch.no_grad():
            torch.compile(lambda x: x + 1)(torch.zeros(8))
    compiler = PieceCompiler(backend)  # type: ignore[arg-type]
    nodes, pieces = 0, 0
    for variant in variants:
        nodes += len(found[variant].graph.nodes)
        begin = cpu_seconds()
        split = split_body(found[variant], PassContext(pcp))
        seconds["split"] += cpu_seconds() - begin
        begin = cpu_seconds()
        for piece in pieces_of(split):
            compiler.callable_for(piece, ROWS)
            pieces += 1
        seconds["compile"] += cpu_seconds() - begin
    counts = compiler.counts
    return {
        "layers": layers, "seconds": seconds, "nodes": nodes, "pieces": pieces, "distinct": counts.distinct,
        "compiled": sum(counts.compiled.values()), "from_cache": sum(counts.from_cache.values()),
    }  # fmt: skip


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def in_child(layers: int, case: str, backend: str, cache: str) -> dict[str, Any]:
    """:func:`measure` in a process of its own, with ``cache`` as the folder of Inductor's caches."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", str(layers), case, backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{case} body of {layers} layers: the process ended with {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cold_and_warm(layers: int, repeats: int) -> dict[str, Any]:
    """Medians of each case from empty caches, ``warm`` for both bodies from the caches of ``both``, and the ratios."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for case in CASES:
            with tempfile.TemporaryDirectory() as cache:
                runs.setdefault(case, []).append(in_child(layers, case, "inductor", cache))
                if case == "both":
                    runs.setdefault("warm", []).append(in_child(layers, case, "inductor", cache))
    found: dict[str, Any] = {}
    for case, several in runs.items():
        seconds = {key: statistics.median(run["seconds"][key] for run in several) for key in several[0]["seconds"]}
        found[case] = several[-1] | {"seconds": seconds}
    ratios = {case: cost(found[case]) / cost(found["unsharded"]) for case in runs}
    whole = {case: sum(found[case]["seconds"].values()) for case in runs}
    return found | {"ratios": ratios, "whole_ratios": {case: whole[case] / whole["unsharded"] for case in runs}}


def cost(run: dict[str, Any]) -> float:
    """Seconds that turn a body into compiled pieces."""
    return float(run["seconds"]["split"] + run["seconds"]["compile"])


def growth(layers: list[int]) -> list[dict[str, Any]]:
    """Pieces, distinct ones, and seconds of the split of the sharded body, by number of layers; nothing is compiled."""
    measure(2, "sharded", "eager")  # imports and first calls
    return [measure(count, "sharded", "eager") for count in layers]


def faults(result: dict[str, Any]) -> list[str]:
    """What is above the numbers to reach."""
    found = []
    distinct = {run["layers"]: run["distinct"] for run in result["growth"]}
    if len(set(distinct.values())) > 1:
        found.append(f"distinct pieces by layers: {distinct}; required: the same for all")
    if "cold" in result:
        for case, most in (("sharded", MAX_BODY), ("replicated", MAX_BODY), ("both", MAX_BOTH)):
            if (ratio := result["cold"]["ratios"][case]) > most:
                found.append(f"{case}: {ratio:.2f} times the unsharded body; required: at most {most}")
        if compiled := result["cold"]["warm"]["compiled"]:
            found.append(f"a warm start compiled {compiled} pieces; required: none")
    return found


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows of what is shown."""
    rows = [
        [str(run["layers"]), str(run["nodes"]), str(run["pieces"]), str(run["distinct"]),
         f"{run['seconds']['split']:.2f}", f"{1e3 * run['seconds']['split'] / run['layers']:.1f}"]
        for run in result["growth"]
    ]  # fmt: skip
    columns = ["layers", "nodes", "pieces", "distinct", "split, s", "split, ms a layer"]
    shown = [(f"split-piecewise, sharded body of {PCP} ranks", columns, rows)]
    if "cold" in result:
        cold = result["cold"]
        rows = [
            [case, str(cold[case]["pieces"]), str(cold[case]["compiled"]), str(cold[case]["from_cache"]),
             *(f"{cold[case]['seconds'][part]:.2f}" for part in ("capture", "split", "compile")),
             f"{cold['ratios'][case]:.2f}", f"{cold['whole_ratios'][case]:.2f}"]
            for case in (*CASES, "warm")
        ]  # fmt: skip
        columns = [
            "case",
            "pieces",
            "compiled",
            "from cache",
            "capture, s",
            "split, s",
            "compile, s",
            "ratio",
            "with capture",
        ]
        shown.append((f"Inductor, {cold['both']['layers']} layers, CPU seconds", columns, rows))
    return shown


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 110))
    for title, columns, rows in tables(result):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print("\n".join(faults(result)) or "all numbers are reached", markup=False)


def write(result: dict[str, Any], folder: Path) -> None:
    """``piecewise_compile.json`` and ``.md`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "piecewise_compile.json").write_text(json.dumps(result, indent=2) + "\n")
    where = result["machine"]
    lines = [
        "# Compiling pieces",
        "",
        f"`benchmarks/piecewise_compile.py`, {where['date']}: {where['cpu']}, {where['cores']} cores, Python "
        f"{where['python']}, torch {where['torch']}, medians of {where['repeats']}. CPU only; nothing ran on a GPU.",
    ]
    for title, columns, rows in tables(result):
        lines += ["", f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", "\n".join(f"- {fault}" for fault in faults(result)) or "All numbers are reached."]
    (folder / "piecewise_compile.md").write_text("\n".join(lines) + "\n")


def machine(repeats: int) -> dict[str, Any]:
    """What ran, and when."""
    import torch

    return {
        "date": date.today().isoformat(), "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(), "torch": torch.__version__, "repeats": repeats,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure, show, and check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="count pieces and time the split; compile nothing")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--child", nargs=3, metavar=("LAYERS", "CASE", "BACKEND"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    if args.child:
        layers, case, backend = args.child
        print(json.dumps(measure(int(layers), case, backend)))
        return 0
    begin = time.perf_counter()
    result: dict[str, Any] = {"machine": machine(args.repeats), "growth": growth(args.layers)}
    if not args.quick:
        result["cold"] = cold_and_warm(args.layers[-1], args.repeats)
    result["wall_s"] = time.perf_counter() - begin
    if args.out:
        write(result, args.out)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return int(args.check and bool(faults(result)))


if __name__ == "__main__":
    raise SystemExit(main())
