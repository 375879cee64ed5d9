# SPDX-License-Identifier: Apache-2.0
"""What the passes cost beside the compile they precede, and how that grows with the number of layers.

A dense decoder (hidden 256, grouped-query attention over a paged cache, dynamic rows) is captured by Dynamo. Passes:
``build_variants`` with the invariants checked after the last pass, as in production; both bodies. Compile: Inductor
from empty caches, both bodies, on one thread, C++ compiler included. All times are CPU seconds. Growth is judged with
Python's garbage collector paused, as ``timeit`` does: the collector's full passes walk all that the process holds, the
captured graphs of this benchmark included. It is shown with the collector too, and the share always includes it.

    OMP_NUM_THREADS=1 python benchmarks/compile_time.py [--layers 8 16 32 64] [--compile-layers 32] [--json] [--check]

``--check`` exits with 1 when the passes take more than 5 % of the cold compile, or grow faster than layers ** 1.1.
The compile of 32 layers takes one to three minutes; ``--compile-layers 0`` leaves it out.

``--vllm MODEL`` measures a real vLLM engine instead: piecewise mode, two ranks that share the machine, cold caches,
dummy weights (``config.json`` is enough). It is the wall time of ``build_variants`` in the slower worker, over vLLM's
own "torch.compile ... took", which includes the first run. vLLM compiles equal pieces once, so its compile is shorter.
The passes' own log lines (INFO of ``pcp_passes``, one a pass) are summed beside it: without copies and checks.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Before torch is imported: one thread, in this process, so that CPU time is all of the time.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import fx

from pcp_passes.passes import PassContext, build_variants
from pcp_passes.passes.observers import VerifyObserver
from tests import toy

CTX = PassContext(pcp=4)
MAX_SHARE, MAX_EXPONENT = 0.05, 1.1


class Layer(toy.DenseLayer):
    """Widths of a small real model; the ops are those of the tests."""

    hidden, heads, kv_heads, dim = 256, 8, 2, 32
    cache_width = 2 * kv_heads * dim


def rewrite(gm: fx.GraphModule) -> dict[Any, fx.GraphModule]:
    """The passes as the vLLM front end runs them."""
    return build_variants(gm, CTX, [VerifyObserver("final")])


def pass_seconds(gm: fx.GraphModule, *, collector: bool) -> float:
    """CPU seconds of :func:`rewrite`, with Python's garbage collector running or paused."""
    gc.collect()
    if not collector:
        gc.disable()
    begin = time.process_time()
    rewrite(gm)
    spent = time.process_time() - begin
    gc.enable()
    return spent


def slope(seconds: dict[int, float]) -> float:
    """Least-squares exponent ``e`` of ``seconds ~ layers ** e``."""
    xs, ys = [math.log(n) for n in seconds], [math.log(s) for s in seconds.values()]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)


def growth(layers: list[int], repeats: int) -> dict[str, Any]:
    """Per number of layers: CPU seconds of Dynamo's capture, median ones of the passes, and nodes; and the exponent
    of the passes. The sizes take turns."""
    graphs, capture = {}, {}
    for count in layers:
        model, begin = toy.decoder(Layer, count), time.process_time()
        graphs[count] = toy.capture(model).gm
        capture[count] = time.process_time() - begin
    for gm in graphs.values():
        rewrite(gm)  # fills PyTorch's caches of fake results
    found: dict[str, Any] = {"nodes": {count: len(gm.graph.nodes) for count, gm in graphs.items()}, "capture": capture}
    for name, collector in (("", False), ("_with_collector", True)):
        rounds = [{n: pass_seconds(gm, collector=collector) for n, gm in graphs.items()} for _ in range(repeats)]
        seconds = {n: statistics.median(times[n] for times in rounds) for n in graphs}
        found |= {f"seconds{name}": seconds, f"exponent{name}": slope(seconds)}
    return found


def cold_compile(layers: int) -> dict[str, float]:
    """CPU seconds of the passes, and of Inductor for each body, inside one cold ``torch.compile``."""
    from torch._inductor.compile_fx import compile_fx

    found: dict[str, float] = {}

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        begin = _cpu_seconds()
        bodies = rewrite(gm)  # the first call: what a start pays, empty caches included
        found["passes"] = _cpu_seconds() - begin
        compiled = {}
        for variant, body in bodies.items():
            begin = _cpu_seconds()
            compiled[variant] = compile_fx(body, list(inputs))
            found[variant] = _cpu_seconds() - begin
        return compiled["replicated"]

    model, world = toy.decoder(Layer, layers), toy.World((toy.Request(0, 16),), 1)
    for tokens in (world.ids, world.positions):
        torch._dynamo.mark_dynamic(tokens, 0)
    torch._dynamo.reset()
    begin = _cpu_seconds()
    with torch.no_grad(), toy.running(world.unsharded(model, torch.float32)):
        torch.compile(model, backend=backend, fullgraph=True)(world.ids, world.positions)
    found["capture"] = _cpu_seconds() - begin - sum(found.values())
    total = sum(found.values())
    return {**found, "total": total, "share": found["passes"] / total}


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


#: A worker extension for vLLM: each worker imports it before it compiles, and it logs how long the rewrite takes.
_TIMER = """
import logging, time
from pcp_passes.frontends.vllm import backend
build = backend.build_variants
def timed(*args, **kwargs):
    begin = time.perf_counter()
    bodies = build(*args, **kwargs)
    logging.getLogger("pcp_passes.benchmark").info("rewrite took %.3f s", time.perf_counter() - begin)
    return bodies
backend.build_variants = timed
class Extension: pass
"""


def in_vllm(model: str, layers: int, pcp: int = 2) -> dict[str, float]:
    """Wall seconds of the passes, the rewrite with its checks, and vLLM's whole compile, in one cold engine start."""
    from pcp_passes.frontends.vllm import cpu_runner
    from pcp_passes.frontends.vllm.session import Group, Request, Session, run

    with tempfile.TemporaryDirectory() as folder:
        log, config = Path(folder) / "log", Path(folder) / "logging.json"
        (Path(folder) / "pcp_timer.py").write_text(_TIMER)
        loggers = {name: {"level": "INFO", "handlers": ["file"], "propagate": False} for name in ("vllm", "pcp_passes")}
        logging = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(process)d %(name)s %(message)s"}},
            "handlers": {"file": {"class": "logging.FileHandler", "filename": str(log), "formatter": "plain"}},
            "loggers": loggers,
        }
        config.write_text(json.dumps(logging))
        engine = {"load_format": "dummy", "max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 256}
        engine |= {"hf_overrides": {"num_hidden_layers": layers}, "worker_extension_cls": "pcp_timer.Extension"}
        env = {"VLLM_CACHE_ROOT": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        env |= {"VLLM_LOGGING_CONFIG_PATH": str(config), "VLLM_LOGGING_LEVEL": "INFO"}
        env |= {"PYTHONPATH": os.pathsep.join((cpu_runner.environment()["PYTHONPATH"], folder))}
        groups = (Group((Request([1, 2, 3], 1),)),)
        run(Session(model, groups, pcp, mode=3, engine=engine, env=env), timeout_s=600)
        return read_log(log.read_text())


_LINES = {
    "passes": r"pcp_passes\.passes\.observers .* nodes, ([\d.]+) ms",
    "rewrite": r"pcp_passes\.benchmark rewrite took ([\d.]+) s",
    "total": r"vllm\S* .*torch\.compile .*took ([\d.]+) s in total",
}


def read_log(text: str) -> dict[str, float]:
    """Seconds in one worker's lines; of the workers that rewrote a graph, the one whose rewrite took longest."""
    workers: dict[str, dict[str, float]] = {}
    for kind, pattern in _LINES.items():
        for worker, value in re.findall(rf"^(\d+) {pattern}$", text, re.M):
            entry = workers.setdefault(worker, dict.fromkeys(_LINES, 0.0))
            entry[kind] += float(value) / (1e3 if kind == "passes" else 1)
    complete = [entry for entry in workers.values() if all(entry.values())]
    if not complete:
        raise SystemExit(f"the engine's log lacks one of {', '.join(_LINES)}: found {workers or 'no line of them'}")
    slowest = max(complete, key=lambda entry: entry["rewrite"])
    return {**slowest, "share": slowest["rewrite"] / slowest["total"]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--compile-layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm", metavar="MODEL")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    result: dict[str, Any] = {}
    if args.vllm:
        result["vllm"] = in_vllm(args.vllm, args.compile_layers)
    else:
        result["growth"] = growth(args.layers, args.repeats)
        if args.compile_layers:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
                result["compile"] = cold_compile(args.compile_layers)
    print(json.dumps(result, indent=2) if args.json else "\n".join(_lines(result, args.compile_layers)))
    return 1 if args.check and _too_much(result) else 0


def _lines(result: dict[str, Any], layers: int) -> list[str]:
    lines = []
    if "growth" in result:
        for count, seconds in result["growth"]["seconds"].items():
            lines.append(f"{count:3} layers {result['growth']['nodes'][count]:6} nodes   passes {seconds:6.2f} s")
        exponent, collected = result["growth"]["exponent"], result["growth"]["exponent_with_collector"]
        lines.append(
            f"passes grow as layers ** {exponent:.2f}   (at most {MAX_EXPONENT}; collector on: {collected:.2f})"
        )
    for kind in ("compile", "vllm"):
        if kind in result:
            parts = ", ".join(f"{name} {value:.2f} s" for name, value in result[kind].items() if name != "share")
            share = 100 * result[kind]["share"]
            lines.append(f"cold {kind}, {layers} layers: {parts}; our share {share:.1f} %   (at most 5 %)")
    return lines


def _too_much(result: dict[str, Any]) -> bool:
    shares = [result[kind]["share"] for kind in ("compile", "vllm") if kind in result]
    exponent = result.get("growth", {}).get("exponent", 0.0)
    return bool(exponent > MAX_EXPONENT or any(share > MAX_SHARE for share in shares))


if __name__ == "__main__":
    raise SystemExit(main())
