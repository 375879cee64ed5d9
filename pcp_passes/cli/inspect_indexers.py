# SPDX-License-Identifier: Apache-2.0
"""Indexers of a model, as ``pcp inspect`` shows them in 80 columns: a line for each kind, then plans and kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.text import Text

from pcp_passes.cli.tables import titled
from pcp_passes.inspection.kernels import CARD, Selection
from pcp_passes.inspection.report import ModelReport
from pcp_passes.inspection.step_indexers import PAGE, StepIndexer

DIGEST = 12
"""Characters of a digest that are shown; JSON has all."""


def render_indexers(report: ModelReport) -> Iterator[RenderableType]:
    """Which layers select keys and which reuse a selection; nothing for a model that has neither."""
    if not report.indexers:
        return
    table = titled("indexers", "layers", "times", "role", "key gathered", "whole prompt")
    for line in report.indexers:
        key = "repeated, 0 B" if line.repeated else f"{line.gathered:,} B"
        table.add_row(line.kind, str(line.times), line.role, key, f"{line.gathered_prompt * line.times:,} B")
    yield table
    yield from (Text(f"  {line.kind}: {ranges(line.layers)}") for line in report.indexers if line.layers)
    full = [line for line in report.indexers if line.selection is not None]
    yield from _selections(
        ("full layers", told(line.heads, line.dim, line.topk, line.rope, line.store), line.selection)
        for line in full
        if line.selection is not None
    )
    yield (
        f"{report.layers_of('full')} full indexers, {report.layers_of('shared')} layers that share their selection; "
        f"ranks gather {report.index_keys:,} B of index keys a token"
    )
    repeated = sum(line.times for line in full if line.repeated)
    if repeated:
        yield (
            f"in {repeated} of them every rank repeats the projection of the index keys of all tokens: what that is "
            "computed from is among the collectives, and no key is gathered"
        )


def render_step_indexers(indexers: Iterable[StepIndexer]) -> Iterator[RenderableType]:
    """The same of a step of target and drafter, and what a token leaves in the caches."""
    indexers = tuple(indexers)
    if not indexers:
        return
    table = titled("indexers: what a token leaves", "layers", "role", "record", "index key", "in FP8")
    names = [f"{line.model} {line.kind}".rstrip() for line in indexers]
    for name, line in zip(names, indexers, strict=True):
        fp8 = f"{line.record_fp8:,} B / {line.index_key_fp8:,} B"
        table.add_row(name, line.role, f"{line.record:,} B", f"{line.index_key:,} B", fp8)
    yield table
    yield "the index key is part of the record; in FP8: record / index key, with FP8 caches"
    yield from (Text(f"  {name}: {ranges(line.layers)}") for name, line in zip(names, indexers, strict=True))
    chosen = (
        (call, told(line.heads, line.dim, line.topk, line.rope, line.store), selection)
        for line in indexers
        for call, selection in line.selections.items()
    )
    yield from _selections(chosen, f", pages of {PAGE} keys")


def told(heads: int, dim: int, topk: int, rope: str, store: str) -> str:
    """An indexer in words."""
    return f"{heads} heads of {dim}, best {topk:,}, rope {rope}, keys {store}"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, runs joined: ``0-2, 6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _selections(found: Iterable[tuple[str, str, Selection]], where: str = "") -> Iterator[RenderableType]:
    """Plan and kernels, each selection once."""
    yield f"selection on {CARD}{where}:"
    for who, what, chosen in dict.fromkeys(found):
        yield Text(f"  {who}: {what}")
        if chosen.why_not:
            yield Text(f"    no kernel: {chosen.why_not}")
            continue
        none = "" if chosen.kernels else ", which selects every key and runs no kernel"
        rows = "1 row" if chosen.rows == 1 else f"{chosen.rows:,} rows"
        yield Text(f"    {rows} on up to {chosen.keys:,} keys: plan {chosen.plan}{none}")
        for kernel in chosen.kernels:
            made = "" if kernel.shipped else " (made on first use)"
            yield Text(f"    {kernel.spec}  {kernel.digest[:DIGEST]}{made}")
