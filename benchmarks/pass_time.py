# SPDX-License-Identifier: Apache-2.0
"""CPU time of the passes on a captured decoder, by number of layers, and how it grows with the number of nodes.

A plain PyTorch decoder is captured as functional ATen at 8 to 80 layers; the token pipeline runs on each capture and is
timed pass by pass. Computing values of changed nodes on fake tensors is shown apart ("values"): it is what a full
re-propagation would cost for those nodes.

    python benchmarks/pass_time.py [--layers 8 16 40 80] [--pcp 4] [--json] [--check]

``--check`` exits with 1 when the growth exponent is above 1.1 or a node takes more than 1 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from scaling import VOCABULARY, Dense

MAX_EXPONENT = 1.1
MAX_MS_PER_NODE = 1.0


def captured(layers: int) -> Any:
    """A capture of a decoder with that many layers."""
    from pcp_passes.frontends.torch.capture import DynamoGraph, capture

    model = Dense(layers, hidden=64, heads=4, key_heads=2).eval().requires_grad_(False)
    held: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        held.append((DynamoGraph.read(gm), inputs))
        return gm.forward

    ids = torch.randint(0, VOCABULARY, (1, 64))
    torch._dynamo.mark_dynamic(ids, 1)
    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(ids)
    graph, inputs = held[0]
    torch._dynamo.reset()
    return capture(graph, inputs, rows=16)


def measure(layers: int, pcp: int) -> dict[str, Any]:
    """CPU seconds of each pass and of value computation, and the number of nodes."""
    from pcp_passes.ir.revalue import Revalue
    from pcp_passes.passes import PassContext
    from pcp_passes.passes.tokens.pipeline import TokenOptions, rewrite_tokens

    found = captured(layers)
    values = 0.0
    compute = Revalue._run

    def timed(self: Revalue, node: Any) -> Any:
        nonlocal values
        began = time.process_time()
        result = compute(self, node)
        values += time.process_time() - began
        return result

    Revalue._run = timed  # type: ignore[method-assign]
    marks: list[tuple[str, float]] = []

    class Clock:
        def observe(self, event: Any) -> None:
            marks.append((event.name, time.process_time()))

    try:
        rewritten = rewrite_tokens(found.gm, found.space, PassContext(pcp), options=TokenOptions(), observers=[Clock()])
    finally:
        Revalue._run = compute  # type: ignore[method-assign]
    passes = {name: now - before for (_, before), (name, now) in pairwise(marks)}
    return {
        "layers": layers, "nodes": len(found.gm.graph.nodes), "rewritten_nodes": len(rewritten.gm.graph.nodes),
        "passes_s": passes, "values_s": values, "total_s": sum(passes.values()),
    }  # fmt: skip


def exponent(found: list[dict[str, Any]]) -> float:
    """Slope of log(seconds without values) over log(nodes), from the smallest to the largest.

    Values are remembered by call, so they cost the same for any number of layers and would flatter the slope.
    """
    first, last = ((f["total_s"] - f["values_s"], f["nodes"]) for f in (found[0], found[-1]))
    return math.log(last[0] / first[0]) / math.log(last[1] / first[1])


def main(argv: list[str] | None = None) -> int:
    """Measure each number of layers and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 40, 80])
    parser.add_argument("--pcp", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    measure(2, arguments.pcp)  # imports and first calls
    found = [measure(layers, arguments.pcp) for layers in arguments.layers]
    slope = exponent(found) if len(found) > 1 else 1.0
    worst = max(1e3 * (f["total_s"] - f["values_s"]) / f["nodes"] for f in found)
    if arguments.json:
        print(json.dumps({"measured": found, "exponent": slope, "ms_per_node": worst}, indent=2))
    else:
        for f in found:
            parts = "  ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in f["passes_s"].items())
            print(f"{f['layers']:>3} layers {f['nodes']:>5} nodes  {1e3 * f['total_s']:.0f} ms, of it values "
                  f"{1e3 * f['values_s']:.0f} ms   ({parts})")  # fmt: skip
        print(f"growth exponent {slope:.2f} (at most {MAX_EXPONENT}), {worst:.2f} ms a node without values (at most 1)")
    return int(arguments.check and (slope > MAX_EXPONENT or worst > MAX_MS_PER_NODE))


if __name__ == "__main__":
    sys.exit(main())
