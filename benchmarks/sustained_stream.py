# SPDX-License-Identifier: Apache-2.0
"""A stream of tokens beside two long prefills: what the prefills cost the stream, on one rank and on P.

The scenario that vLLM publishes, scaled to the shipped GLM-DSA: one request generates 128 tokens, five drafts a step,
while two prefills of 3,073 tokens arrive and generate 8 each; budget 8,192, long-prefill threshold 4,096. All ranks
run in this process, one after another, so the CPU time of a rank is that of a step over their number.

    python benchmarks/sustained_stream.py [--pcp 1 8] [--prefill 3073] [--stream 128] [--steps 5] [--json]

Exits with 1 when tokens or accepted counts depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pcp_passes.demo.checkpoints import checkpoint
from pcp_passes.demo.text import held_out_prompts
from pcp_passes.engine.bodies import Model
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import RequestOutput
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.passes import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step import StepProgram

BLOCK = 64
Run = tuple[dict[str, RequestOutput], list[float], Engine]
"""Outputs, CPU seconds of each step, and the engine."""


@dataclass(frozen=True)
class Line:
    """A run. ``prefill_*`` are of the longest step, the one that the stream feels."""

    pcp: int
    steps: int
    prefill_tokens: int
    prefill_rows: int
    prefill_imbalance: float
    prefill_bytes: int
    prefill_cpu_s: float
    decode_cpu_s: float
    acceptance_length: float
    equal: bool


def models() -> tuple[Model, Model]:
    """The shipped target and its MTP layer, in float64: equality is judged there."""
    from transformers import AutoModelForCausalLM

    from pcp_passes.frontends.transformers.mtp import load_mtp
    from pcp_passes.frontends.transformers.target import load_target

    folder = checkpoint()
    hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    return load_target(hf, ctx=PassContext(1)), load_mtp(hf, folder, ctx=PassContext(1))


def run(program: StepProgram, prefill: int, stream: int) -> Run:
    """The scenario on ``program``; outputs, CPU seconds of each step, and the engine."""
    text = held_out_prompts(3, max(prefill, BLOCK)).tolist()
    longest = max(prefill + 8, BLOCK + stream)
    sizes = EngineOptions(
        pcp=program.pcp, block_size=BLOCK, num_blocks=3 * (longest // BLOCK + 2), max_len=longest, max_requests=3,
        budget=8192, long_prefill_threshold=4096,
    )  # fmt: skip
    engine = Engine(SimulatedExecutor(program, sizes))
    arrivals = {4: ("prefill-1", text[1]), 9: ("prefill-2", text[2])}
    engine.add_request(text[0][:BLOCK], SamplingParams(max_tokens=stream), "stream")
    outputs: dict[str, RequestOutput] = {}
    seconds: list[float] = []
    step = 0
    while engine.unfinished or arrivals:
        if step in arrivals:
            name, prompt = arrivals.pop(step)
            engine.add_request(prompt[:prefill], SamplingParams(max_tokens=8), name)
        issued, began = engine.stats.steps, time.thread_time()
        outputs.update((output.id, output) for output in engine.step())
        if engine.stats.steps > issued:
            seconds.append(time.thread_time() - began)
        step += 1
    return outputs, seconds, engine


def line(pcp: int, found: Run, wanted: dict[str, RequestOutput]) -> Line:
    """What a run shows, beside the outputs of one rank."""
    outputs, seconds, engine = found
    records = list(engine.stats.records)
    longest = max(records, key=lambda record: record.tokens)
    decodes = [spent for spent, record in zip(seconds, records, strict=True) if record.tokens < BLOCK]
    equal = seen(outputs) == seen(wanted)
    return Line(
        pcp, len(records), longest.tokens, longest.padded_rows, longest.imbalance, longest.bytes,
        seconds[records.index(longest)] / pcp, sorted(decodes)[len(decodes) // 2] / pcp,
        engine.summary()["acceptance"]["acceptance_length"], equal,
    )  # fmt: skip


def seen(outputs: dict[str, RequestOutput]) -> dict[str, Any]:
    """What must not depend on the number of ranks."""
    return {name: (output.tokens, output.accepted) for name, output in outputs.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--pcp", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prefill", type=int, default=3073)
    parser.add_argument("--stream", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    target, drafter = models()
    lines: list[Line] = []
    wanted: dict[str, RequestOutput] | None = None
    for pcp in dict.fromkeys([1, *given.pcp]):
        over = PassContext(pcp)
        program = StepProgram(target.over(over), MTP(drafter.over(over), given.steps), pcp=pcp)
        found = run(program, given.prefill, given.stream)
        wanted = wanted or found[0]
        lines.append(line(pcp, found, wanted))
    if given.json:
        print(json.dumps([asdict(one) for one in lines], indent=2))
    else:
        print("           ---------------- longest step ----------------   decode step  drafts")
        print(" P  steps  tokens  rows/rank  imbalance  bytes/rank   CPU s         CPU s  length")
        for one in lines:
            print(
                f"{one.pcp:>2} {one.steps:>6} {one.prefill_tokens:>7} {one.prefill_rows:>10} "
                f"{one.prefill_imbalance:>10.2f} {one.prefill_bytes:>11} {one.prefill_cpu_s:>7.3f} "
                f"{one.decode_cpu_s:>13.3f} {one.acceptance_length:>7.2f}  {'equal' if one.equal else 'DIFFERS'}"
            )
    return int(not all(one.equal for one in lines))


if __name__ == "__main__":
    sys.exit(main())
