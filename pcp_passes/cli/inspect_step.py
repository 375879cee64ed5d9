# SPDX-License-Identifier: Apache-2.0
"""``pcp inspect --drafter``: what a step of target and drafter moves, read off its program."""

from __future__ import annotations

from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from pcp_passes.cli.inspect_indexers import render_step_indexers
from pcp_passes.errors import ConfigError
from pcp_passes.inspection.sources import load_config
from pcp_passes.inspection.step import ModelStep, inspect_step_config
from pcp_passes.ir.printer import print_graph
from pcp_passes.step.report import StepReport


def inspect_step(model: str, *, vllm: bool = False, **options: Any) -> tuple[ModelStep, str]:
    """The report of a model's step, and the text of its program.

    Options and errors as for :func:`pcp_passes.inspection.step.inspect_step_config`; ``model`` as for
    :func:`pcp_passes.inspection.sources.load_config`.
    """
    if vllm:
        raise ConfigError("--drafter counts the step program, which vLLM does not run; found --vllm. Give one of them")
    found, program = inspect_step_config(load_config(model), name=model, **options)
    assert program.sharded is not None, "a step program of several ranks has a sharded part"
    return found, print_graph(program.sharded)


def render_step(found: ModelStep) -> RenderableType:
    """Tables of calls and restores, and what lies between target and drafter."""
    return Lines(_calls(found), _restores(found.step), *render_step_indexers(found.indexers), *_lines(found))


def _calls(found: ModelStep) -> Table:
    step = found.step
    table = Table(
        title=f"{found.model} with {found.drafter}, {step.drafts} drafts: a prompt of {step.sizes.tokens:,} tokens on "
        f"{step.pcp} PCP ranks, {found.layout}, {found.dtype}",
        title_justify="left",
    )
    for column in ("call", "rows of a rank", "collectives", "sent by a rank"):
        table.add_column(column, overflow="fold")
    for line in step.calls:
        table.add_row(line.body, f"{line.rows:,}", str(line.collectives), f"{line.bytes:,} B")
    return table


def _restores(step: StepReport) -> Table:
    table = Table(title="rows restored to global order", title_justify="left")
    for column in ("of", "restored", "sent by a rank", "bytes sent by a rank"):
        table.add_column(column, overflow="fold")
    for line in step.restores:
        table.add_row(line.source, f"{line.restored:,}", f"{line.sent:,}", f"{line.bytes:,} B")
    return table


def _lines(found: ModelStep) -> list[str]:
    step, boundary = found.step, found.step.boundary
    lines = [
        f"{step.sizes.logit_rows:,} of {step.sizes.tokens:,} rows are sampled from",
        f"{step.collectives} collectives a step; each rank sends {step.bytes:,} B",
    ]
    if boundary is not None:
        lines.append(
            f"between target and first draft pass: {boundary.copies} copies, {boundary.bytes:,} B sent, attention "
            f"inputs {'shared' if boundary.same_inputs else 'made again'}, tokens "
            f"{'written over those of the target' if boundary.same_tokens else 'in a buffer of their own'}"
        )
    if found.captured < found.layers:
        lines.append(
            f"{found.captured} of {found.layers} layers were captured, one of each kind; what they gather is counted "
            "as often as the kind occurs (--full captures all)"
        )
    return lines
