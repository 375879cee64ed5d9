# SPDX-License-Identifier: Apache-2.0
"""``pcp generate``: the same prompt with PCP=1 and PCP=P in real vLLM, compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes.frontends.vllm.session import Group, Output, Request, Result, Session, run

_PROBE = "pcp_passes.frontends.vllm.probe"


@dataclass(frozen=True)
class Side:
    """One engine. Times are those of each repeat: wall seconds to the first token, and CPU seconds of the slowest
    worker inside the model step."""

    pcp: int
    output: Output
    ttft_s: list[float]
    step_cpu_s: list[float]
    rows_per_rank: list[int]
    padded_rows: int
    collectives: int
    sent_bytes: int
    report: dict[str, Any] | None


@dataclass(frozen=True)
class Comparison:
    """Both sides of one prompt."""

    prompt_tokens: int
    one: Side
    many: Side

    @property
    def tokens_equal(self) -> bool:
        """Whether both sides generated the same tokens."""
        return self.one.output.tokens == self.many.output.tokens

    @property
    def max_logprob_diff(self) -> float:
        """Largest difference between the logprobs of the generated tokens."""
        pairs = zip(self.one.output.logprobs, self.many.output.logprobs, strict=True)
        return max(abs(a - b) for a, b in pairs)

    @property
    def ttft_ratio(self) -> float:
        """Wall time to the first token, PCP=1 over PCP=P (medians)."""
        return median(self.one.ttft_s) / median(self.many.ttft_s)

    @property
    def step_cpu_ratio(self) -> tuple[float, float, float]:
        """CPU time of the slowest worker inside the first step, PCP=1 over PCP=P: lowest, median, highest."""
        one, many = self.one.step_cpu_s, self.many.step_cpu_s
        return min(one) / max(many), median(one) / median(many), max(one) / min(many)

    @property
    def bytes_per_layer(self) -> int:
        """Bytes that one rank sends per layer in the prefill step (the largest layer)."""
        layers = [layer for report in (self.many.report or {}).values() for layer in report["layers"]]
        return max((layer["sent"] for layer in layers), default=0) * self.many.padded_rows

    def to_json(self) -> dict[str, Any]:
        """Plain data; the keys that ``build/demo.json`` promises are at the top level."""
        return {
            "tokens_equal": self.tokens_equal,
            "max_logprob_diff": self.max_logprob_diff,
            "ttft_s": {str(side.pcp): median(side.ttft_s) for side in (self.one, self.many)},
            "ttft_ratio": self.ttft_ratio,
            "step_cpu_s": {str(side.pcp): side.step_cpu_s for side in (self.one, self.many)},
            "step_cpu_ratio": dict(zip(("low", "median", "high"), self.step_cpu_ratio, strict=True)),
            "rows_per_rank": self.many.rows_per_rank,
            "collectives": self.many.collectives,
            "bytes_per_layer": self.bytes_per_layer,
            "sent_bytes": self.many.sent_bytes,
            "prompt_tokens": self.prompt_tokens,
            "text": self.many.output.text,
            "outputs": {str(side.pcp): asdict(side.output) for side in (self.one, self.many)},
        }


def compare(
    model: str,
    prompt: str | list[int],
    *,
    pcp: int = 2,
    max_tokens: int = 32,
    repeats: int = 1,
    warm_up: list[int] | None = None,
    engine: dict[str, Any] | None = None,
    mode: int = 2,
    backend: str = "inductor",
    options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run ``prompt`` through two engines.

    Args:
        repeats: measured first steps per engine.
        warm_up: token ids of a prompt run first and not measured; other text, similar length.
    """
    sides = []
    for size in (1, pcp):
        measured = [
            Group((Request(prompt, max_tokens if last else 1),), (f"{_PROBE}:stop", f"{_PROBE}:start"))
            for last in [False] * repeats + [True]
        ]
        warm = [Group((Request(warm_up, 2),))] if warm_up else []
        session = Session(
            model=model,
            pcp=size,
            groups=(*warm, *measured, Group(rpc=(f"{_PROBE}:stop", f"{_PROBE}:report"))),
            mode=mode,
            backend=backend,
            options=options or {},
            engine={"enable_prefix_caching": False, "max_num_seqs": 4} | (engine or {}),
        )
        result = run(session, timeout_s=900, progress=lambda line: progress(f"PCP={size}: {line}"))  # noqa: B023
        sides.append(_side(size, result, repeats, bool(warm)))
    one, many = sides
    count = len(prompt) if isinstance(prompt, list) else one.padded_rows
    return Comparison(count, one, many)


def _side(pcp: int, result: Result, repeats: int, warmed: bool) -> Side:
    first = int(warmed)
    # Group k's probe is read by the first call of group k + 1, one entry per worker.
    probes = [result.rpc[first + k + 1][0] for k in range(repeats)]
    steps = probes[0][0]["steps"]
    output = result.outputs[first + repeats][0]
    assert output is not None, "nothing was aborted"
    wall = result.seconds[first : first + repeats]
    rows = steps[0]["rows_per_rank"] if steps else [0]
    return Side(
        pcp=pcp,
        output=output,
        ttft_s=wall,
        step_cpu_s=[max(worker["cpu_seconds"] for worker in probe) for probe in probes],
        rows_per_rank=rows,
        padded_rows=steps[0]["padded_rows"] if steps else 0,
        collectives=len(probes[0][0]["collectives"]),
        sent_bytes=sum(c["bytes"] for c in probes[0][0]["collectives"]),
        report=result.rpc[-1][1][0],
    )


def render_comparison(result: Comparison) -> RenderableType:
    """Tables and the generated text."""
    table = Table(title=f"{result.prompt_tokens} prompt tokens" if result.prompt_tokens else None, title_justify="left")
    table.add_column("")
    for side in (result.one, result.many):
        table.add_column(f"PCP={side.pcp}", justify="right")
    table.add_row("time to first token", *(f"{median(s.ttft_s):.2f} s" for s in (result.one, result.many)))
    table.add_row("CPU time, slowest worker", *(f"{median(s.step_cpu_s):.2f} s" for s in (result.one, result.many)))
    table.add_row("rows per rank", "all", " ".join(map(str, result.many.rows_per_rank)))
    table.add_row("collectives in the prefill step", "0", str(result.many.collectives))
    table.add_row("bytes per layer and rank", "0", f"{result.bytes_per_layer:,}")
    low, middle, high = result.step_cpu_ratio
    verdict = "[green]equal[/]" if result.tokens_equal else "[bold red]DIFFERENT[/]"
    return Lines(
        Text(result.many.output.text.strip()),
        table,
        f"tokens {verdict}; largest logprob difference {result.max_logprob_diff:.1e}",
        f"time to first token {result.ttft_ratio:.2f}x; CPU time of the slowest worker {middle:.2f}x "
        f"[{low:.2f} .. {high:.2f}]",
    )
