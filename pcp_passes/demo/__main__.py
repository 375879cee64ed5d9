# SPDX-License-Identifier: Apache-2.0
"""``make demo``: first the embedded engine, then vLLM, each with one rank and with several, compared.

The engine continues real text with a trained tiny GLM-MoE-DSA whose MTP layer drafts three tokens a step, on 1, 2 and 4
ranks. vLLM answers a question about 3,500 tokens of manual with SmolLM2-135M-Instruct, on 1 and 2 ranks.

Exits with 1 when tokens, or accepted drafts, differ. It reports the ratio of the times; it does not judge it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pcp_passes.cli.generate import Comparison, compare, render_comparison
from pcp_passes.demo.prompt import reference_prompt
from pcp_passes.demo.smollm2 import fetch_smollm2
from pcp_passes.demo.tiny import render_tiny, run_tiny

console = Console()


def main() -> int:
    """Run the demonstration; 0 when all sides of both parts generated the same tokens."""
    parser = argparse.ArgumentParser(prog="python -m pcp_passes.demo", description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder for the model and demo.json")
    parser.add_argument("--engine-only", action="store_true", help="leave vLLM out")
    parser.add_argument("--pcp", type=int, default=2, help="ranks in vLLM")
    parser.add_argument("--tokens", type=int, default=3500, help="prompt length in vLLM")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to generate in vLLM")
    parser.add_argument("--repeats", type=int, default=3, help="measured first steps per vLLM engine")
    arguments = parser.parse_args()
    with console.status("") as status:
        engine = run_tiny(progress=status.update)
    console.print(render_tiny(engine))
    equal = engine.equal
    report: dict[str, object] = {"engine": engine.to_json()}
    if not arguments.engine_only:
        result, text = run(arguments)
        console.print(render_comparison(result))
        console.print(f"[dim]{text.strip()}[/]", highlight=False)
        equal = equal and result.tokens_equal
        report = result.to_json() | {"text": text} | report
    target = arguments.build / "demo.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"wrote {target}")
    return 0 if equal else 1


def run(arguments: argparse.Namespace) -> tuple[Comparison, str]:
    """Fetch SmolLM2, run both vLLM engines with a progress display; the comparison and the generated text."""
    from transformers import AutoTokenizer

    # Milestones per engine: import, start, one per group (warm-up, repeats, the text, the readings), end.
    total = 1 + 2 * (3 + arguments.repeats + 3 + 1)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("SmolLM2-135M-Instruct: converting to safetensors", total=total)

        def advance(line: str) -> None:
            progress.update(task, advance=1, description=line)

        model = fetch_smollm2(arguments.build / "models")
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompt = reference_prompt(tokenizer, arguments.tokens)
        advance("starting")
        limit = -(-(len(prompt) + arguments.max_tokens) // 128) * 128
        result = compare(
            str(model),
            prompt,
            pcp=arguments.pcp,
            max_tokens=arguments.max_tokens,
            repeats=arguments.repeats,
            warm_up=prompt[::-1],  # the same length, other text
            engine={"max_model_len": limit, "max_num_batched_tokens": limit},
            progress=advance,
        )
        progress.update(task, completed=total, description="done")
    return result, tokenizer.decode(result.many.output.tokens, skip_special_tokens=True)


if __name__ == "__main__":
    begin = time.perf_counter()
    code = main()
    console.print(f"[dim]{time.perf_counter() - begin:.0f} s[/]")
    raise SystemExit(code)
