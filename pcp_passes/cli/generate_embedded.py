# SPDX-License-Identifier: Apache-2.0
"""``pcp generate --engine embedded``: the same prompt on one rank and on P simulated ranks, compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes.engine.bodies import Model
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.ranks import SimulatedExecutor
from pcp_passes.engine.request import RequestOutput
from pcp_passes.errors import ConfigError
from pcp_passes.options import unknown_choice
from pcp_passes.passes import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step.program import StepProgram

DRAFTERS = ("none", "mtp")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
_BYTES = 256
"""Tokens of a byte-level vocabulary that stand for themselves; the one after them begins a text."""


@dataclass(frozen=True)
class Side:
    """One engine: its output, what it counted, and wall seconds without loading and capture."""

    pcp: int
    output: RequestOutput
    summary: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class EmbeddedComparison:
    """Both sides of one prompt."""

    text: str
    one: Side
    many: Side

    @property
    def tokens_equal(self) -> bool:
        """Whether both generated the same tokens and accepted the same drafts, step by step."""
        one, many = self.one.output, self.many.output
        return (one.tokens, one.drafted, one.accepted) == (many.tokens, many.drafted, many.accepted)

    @property
    def max_logprob_diff(self) -> float:
        """Largest difference between the logprobs of the generated tokens; infinite where these differ."""
        if not self.tokens_equal:
            return float("inf")
        pairs = zip(self.one.output.logprobs, self.many.output.logprobs, strict=True)
        return max(abs(a - b) for a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "tokens_equal": self.tokens_equal,
            "max_logprob_diff": self.max_logprob_diff if self.tokens_equal else None,
            "prompt_tokens": len(self.one.output.prompt),
            "text": self.text,
            "sides": {
                str(side.pcp): {
                    "tokens": list(side.output.tokens),
                    "accepted": list(side.output.accepted),
                    "seconds": side.seconds,
                    **side.summary,
                }
                for side in (self.one, self.many)
            },
        }


def compare_embedded(
    model: str,
    prompt: str,
    *,
    pcp: int = 2,
    drafter: str = "none",
    steps: int = 3,
    max_tokens: int = 32,
    temperature: float = 0.0,
    decode: str = "replicate",
    dtype: str = "fp64",
    graph_mode: str = "none",
    progress: Callable[[str], None] = lambda line: None,
) -> EmbeddedComparison:
    """Generate from ``prompt`` on 1 and on ``pcp`` simulated ranks.

    Args:
        model: a Hugging Face folder. Without a tokenizer its vocabulary must be bytes and a few marks.
        drafter: ``none``, or ``mtp`` for the module that the checkpoint brings.
        dtype: ``fp64`` judges equality; in ``fp32`` a near tie may fall differently.
        graph_mode: of the ``pcp`` ranks (:class:`EngineOptions`), under the replay checker, as everywhere on a CPU; the
            one rank that they are compared with has none.

    Raises:
        ConfigError: an unknown drafter or dtype, a folder without a model or tokenizer.
        Refusal: a model that cannot be captured.
    """
    if drafter not in DRAFTERS:
        raise ConfigError(unknown_choice("drafter", drafter, DRAFTERS))
    if dtype not in DTYPES:
        raise ConfigError(unknown_choice("dtype", dtype, tuple(DTYPES)))
    progress("loading")
    loaded, encode, decoded = _load(model, DTYPES[dtype])
    progress("capturing")
    target, module = _capture(loaded, model, drafter)
    tokens = encode(prompt)
    sides = []
    for size in (1, pcp):
        progress(f"PCP={size}")
        context = PassContext(size)
        kind = NoDrafter() if module is None else MTP(module.over(context), steps)
        program = StepProgram(target.over(context), kind, pcp=size)
        longest = len(tokens) + max_tokens
        blocks = EngineOptions(max_len=longest).blocks_per_request(program.steps)
        # One request: no step has more tokens than its prompt, or than one verification.
        budget = 8192 if graph_mode == "none" else max(len(tokens), 1 + program.steps)
        options = EngineOptions(
            pcp=size, max_len=longest, num_blocks=blocks, budget=budget, decode=decode, max_requests=1,
            graph_mode="none" if size == 1 else graph_mode,
        )  # fmt: skip
        engine = Engine(SimulatedExecutor(program, options))
        begin = time.perf_counter()
        name = engine.add_request(tokens, SamplingParams(max_tokens, temperature))
        output = engine.run()[name]
        sides.append(Side(size, output, engine.summary(), time.perf_counter() - begin))
    return EmbeddedComparison(decoded(list(sides[1].output.tokens)), *sides)


def _load(folder: str, dtype: torch.dtype) -> tuple[Any, Callable[[str], list[int]], Callable[[list[int]], str]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{folder!r} has no config.json; give the folder of a Hugging Face model.")
    hf_logging.set_verbosity_error()  # it reports an MTP layer, which it does not know, as unexpected weights
    hf_logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        return loaded, tokenizer.encode, tokenizer.decode
    vocab_size = loaded.config.get_text_config().vocab_size
    if not _BYTES < vocab_size <= _BYTES + 64:
        raise ConfigError(
            f"{folder!r} has no tokenizer, and a vocabulary of {vocab_size} is not one of bytes; add the tokenizer's "
            "files."
        )
    return (
        loaded,
        lambda text: [_BYTES, *text.encode()],
        lambda tokens: bytes(token for token in tokens if token < _BYTES).decode(errors="replace"),
    )


def _capture(loaded: Any, folder: str, drafter: str) -> tuple[Model, Model | None]:
    from pcp_passes.frontends.transformers.mtp import load_mtp
    from pcp_passes.frontends.transformers.target import load_target

    context = PassContext(1)
    return load_target(loaded, ctx=context), load_mtp(loaded, folder, ctx=context) if drafter == "mtp" else None


def render_embedded(result: EmbeddedComparison) -> RenderableType:
    """Tables and the generated text."""
    sides = (result.one, result.many)
    table = Table(title=f"{len(result.one.output.prompt)} prompt tokens", title_justify="left")
    table.add_column("")
    for side in sides:
        table.add_column(f"PCP={side.pcp}", justify="right")
    table.add_row("steps, sharded", *(f"{s.summary['steps']}, {s.summary['sharded_steps']}" for s in sides))
    table.add_row("rows per rank", *(" ".join(map(str, s.summary["rows_per_rank"])) for s in sides))
    table.add_row("padding rows", *(str(s.summary["padding_rows"]) for s in sides))
    table.add_row("largest imbalance", *(f"{s.summary['largest_imbalance']:.3f}" for s in sides))
    table.add_row("bytes per sharded step and rank", *(f"{s.summary['bytes_per_sharded_step']:,.0f}" for s in sides))
    acceptance = [side.summary["acceptance"] for side in sides]
    if acceptance[0]["rounds"]:
        rates = [" ".join(f"{rate:.3f}" for rate in one["rate_per_position"] if rate is not None) for one in acceptance]
        table.add_row("accepted per position", *rates)
        table.add_row("acceptance length", *(f"{one['acceptance_length']:.2f}" for one in acceptance))
    hits, without = result.many.summary["graph_hits"], result.many.summary["steps_without_graph"]
    if hits:
        table.add_row("body calls by graph", "", "\n".join(f"{name}: {count}" for name, count in hits.items()))
        table.add_row("rows that fill buckets", "", str(result.many.summary["graph_padding_rows"]))
    if without:
        table.add_row("steps without a graph", "", "\n".join(f"{reason}: {count}" for reason, count in without.items()))
    verdict = "[green]equal[/]" if result.tokens_equal else "[bold red]DIFFERENT[/]"
    return Lines(
        Text(result.text),
        table,
        f"tokens and accepted drafts {verdict}; largest logprob difference {result.max_logprob_diff:.1e}",
    )
