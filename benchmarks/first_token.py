# SPDX-License-Identifier: Apache-2.0
"""Time to the first token with one and with P ranks: the demonstration's comparison, with more repeats.

SmolLM2-135M-Instruct, about 3,500 real prompt tokens, real vLLM on CPU, one core per rank. The judged number is CPU
seconds of the slowest worker inside the model step, PCP=1 over PCP=P: unlike wall time it does not count waiting for
a core or for a peer, so it holds on a shared machine. Both engines run in one invocation; the range is over all pairs
of repeats (fastest over slowest to slowest over fastest).

    python benchmarks/first_token.py [--pcp 2] [--repeats 5] [--json] [--check]

``--check`` exits with 1 when the median ratio is below 1.75 (stated for PCP=2), or when the tokens differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

MIN_RATIO = 1.75


def measure(pcp: int, repeats: int, build: Path) -> dict[str, Any]:
    """Run both engines; the comparison as ``build/demo.json`` holds it, without the generated tokens."""
    from pcp_passes.demo.__main__ import run

    arguments = argparse.Namespace(build=build, pcp=pcp, tokens=3500, max_tokens=8, repeats=repeats)
    with contextlib.redirect_stdout(sys.stderr):  # the progress display
        comparison, _ = run(arguments)
    found: dict[str, Any] = comparison.to_json()
    del found["outputs"], found["text"]
    return found


def too_slow(found: dict[str, Any]) -> bool:
    """Whether the target is missed: too small a ratio, or a comparison that is none since the tokens differ."""
    return bool(found["step_cpu_ratio"]["median"] < MIN_RATIO or not found["tokens_equal"])


def lines(found: dict[str, Any]) -> list[str]:
    """The result as text."""
    ratio = found["step_cpu_ratio"]
    cpu = (
        f"PCP={pcp}  first token {found['ttft_s'][pcp]:6.2f} s   slowest worker, CPU seconds of each step: "
        + " ".join(f"{s:.2f}" for s in seconds)
        for pcp, seconds in found["step_cpu_s"].items()
    )
    return [
        f"{found['prompt_tokens']} prompt tokens, rows per rank {found['rows_per_rank']}, "
        f"tokens {'equal' if found['tokens_equal'] else 'DIFFERENT'}",
        *cpu,
        f"CPU time of the slowest worker {ratio['median']:.2f}x [{ratio['low']:.2f} .. {ratio['high']:.2f}]   "
        f"(at least {MIN_RATIO});   wall time {found['ttft_ratio']:.2f}x",
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pcp", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder for the model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    found = measure(args.pcp, args.repeats, args.build)
    print(json.dumps(found, indent=2) if args.json else "\n".join(lines(found)))
    return 1 if args.check and too_slow(found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
