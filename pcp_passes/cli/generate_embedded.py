# SPDX-License-Identifier: Apache-2.0
"""``pcp generate --engine embedded``: the same prompt on one rank and on a mesh of simulated ranks, compared."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes.engine.bodies import Model
from pcp_passes.engine.fleet import Fleet
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import RequestOutput
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import ConfigError
from pcp_passes.mesh.combinations import require_allowed
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
    """One rank or a mesh: its output, what it counted, and wall seconds without loading and capture.

    ``mesh`` names one of more than PCP ranks; ``others`` are the outputs of its replicas from the second on.
    """

    pcp: int
    output: RequestOutput
    summary: dict[str, Any]
    seconds: float
    mesh: str = ""
    others: tuple[RequestOutput, ...] = ()

    @property
    def name(self) -> str:
        """For a table."""
        return self.mesh or f"PCP={self.pcp}"


@dataclass(frozen=True)
class EmbeddedComparison:
    """Both sides of one prompt."""

    text: str
    one: Side
    many: Side

    @property
    def tokens_equal(self) -> bool:
        """Whether both, with all replicas, generated the same tokens and accepted the same drafts, step by step."""
        one = self.one.output
        return all(
            (one.tokens, one.drafted, one.accepted) == (many.tokens, many.drafted, many.accepted)
            for many in (self.many.output, *self.many.others)
        )

    @property
    def max_logprob_diff(self) -> float:
        """Largest difference between the logprobs of the generated tokens; infinite where these differ."""
        if not self.tokens_equal:
            return float("inf")
        every = (self.many.output, *self.many.others)
        pairs = (zip(self.one.output.logprobs, many.logprobs, strict=True) for many in every)
        return max(abs(a - b) for pair in pairs for a, b in pair)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "tokens_equal": self.tokens_equal,
            "max_logprob_diff": self.max_logprob_diff if self.tokens_equal else None,
            "prompt_tokens": len(self.one.output.prompt),
            "text": self.text,
            "sides": {"one": _plain(self.one), "many": _plain(self.many)},
        }


def _plain(side: Side) -> dict[str, Any]:
    """Tokens of every replica; what was counted is of the first."""
    every = (side.output, *side.others)
    return {
        "mesh": side.name,
        "replicas": [{"tokens": list(one.tokens), "accepted": list(one.accepted)} for one in every],
        "seconds": side.seconds,
        **side.summary,
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
    pp: int = 1,
    dp: int = 1,
    expert_parallel: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> EmbeddedComparison:
    """Generate from ``prompt`` on 1 rank and on a mesh of simulated ranks, on each of its replicas.

    Args:
        model: a Hugging Face folder. Without a tokenizer its vocabulary must be bytes and a few marks.
        drafter: ``none``, or ``mtp`` for the module that the checkpoint brings.
        dtype: ``fp64`` judges equality; in ``fp32`` a near tie may fall differently.
        graph_mode: of the ``pcp`` ranks (:class:`EngineOptions`), under the replay checker, as everywhere on a CPU; the
            one rank that they are compared with has none.
        pp: pipeline stages. A drafter then needs an embedding of its own in the checkpoint.
        dp: replicas.
        expert_parallel: shard the experts over ``dp`` and ``pcp``.

    Raises:
        ConfigError: an unknown drafter or dtype, a folder without a model or tokenizer, a mesh that cannot run.
        Refusal: a model that cannot be captured.
    """
    if drafter not in DRAFTERS:
        raise ConfigError(unknown_choice("drafter", drafter, DRAFTERS))
    if dtype not in DTYPES:
        raise ConfigError(unknown_choice("dtype", dtype, tuple(DTYPES)))
    meshed = pp > 1 or dp > 1 or expert_parallel
    wanted = EngineOptions(pcp=pcp, pp=pp, dp=dp, expert_parallel=expert_parallel, graph_mode=graph_mode)
    require_allowed(wanted.mesh, frontend="embedded", layers=_layers(model))
    progress("loading")
    loaded, encode, decoded = _load(model, DTYPES[dtype])
    progress("capturing")
    target, module = _capture(loaded, model, drafter, pp > 1)
    tokens = encode(prompt)
    sides = []
    for size, mesh in ((1, None), (pcp, wanted)):
        progress(str(mesh.mesh) if mesh is not None and meshed else f"PCP={size}")
        context = PassContext(size)
        kind = NoDrafter() if module is None else MTP(module.over(context), steps)
        program = StepProgram(target.over(context), kind, pcp=size)
        longest = len(tokens) + max_tokens
        blocks = EngineOptions(max_len=longest).blocks_per_request(program.steps)
        # One request: no step has more tokens than its prompt, or than one verification.
        budget = 8192 if graph_mode == "none" else max(len(tokens), 1 + program.steps)
        options = replace(
            EngineOptions() if mesh is None or (size == 1 and not meshed) else mesh,
            max_len=longest, num_blocks=blocks, budget=budget, decode=decode, max_requests=1,
        )  # fmt: skip
        executors = [SimulatedExecutor(program, options, replica=place) for place in range(options.dp)]
        fleet = Fleet(executors, depth=pp)
        begin = time.perf_counter()
        params = SamplingParams(max_tokens, temperature)
        names = [fleet.add_request(tokens, params, replica=place) for place in range(options.dp)]
        found = fleet.run()
        first, *others = (found[name] for name in names)
        seconds = time.perf_counter() - begin
        label = str(options.mesh) if mesh is not None and meshed else ""
        sides.append(Side(size, first, fleet.engines[0].summary(), seconds, label, tuple(others)))
    return EmbeddedComparison(decoded(list(sides[1].output.tokens)), *sides)


def _layers(folder: str) -> int | None:
    """As the configuration tells it, before anything is loaded; None where it does not."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder!r} has no config.json; give the folder of a Hugging Face model.")
    config = json.loads(path.read_text())
    found = config.get("text_config", config).get("num_hidden_layers")
    return found if isinstance(found, int) else None


def _load(folder: str, dtype: torch.dtype) -> tuple[Any, Callable[[str], list[int]], Callable[[list[int]], str]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

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


def _capture(loaded: Any, folder: str, drafter: str, own_embedding: bool) -> tuple[Model, Model | None]:
    from pcp_passes.frontends.transformers.mtp import load_mtp
    from pcp_passes.frontends.transformers.target import load_target

    context = PassContext(1)
    target = load_target(loaded, ctx=context)
    if drafter != "mtp":
        return target, None
    return target, load_mtp(loaded, folder, ctx=context, own_embedding=own_embedding)


def render_embedded(result: EmbeddedComparison) -> RenderableType:
    """Tables and the generated text."""
    sides = (result.one, result.many)
    table = Table(title=f"{len(result.one.output.prompt)} prompt tokens", title_justify="left")
    table.add_column("")
    for side in sides:
        table.add_column(side.name, justify="right")
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
