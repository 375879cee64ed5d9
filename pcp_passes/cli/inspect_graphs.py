# SPDX-License-Identifier: Apache-2.0
"""``pcp inspect --cudagraph``: the pieces of a model's bodies, why they are cut where they are, and their buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from pcp_passes.cli.tables import titled
from pcp_passes.errors import ConfigError
from pcp_passes.inspection.graphs import PAGE, STATIC_IS_NOT_CAPTURE, ModelGraphs, inspect_graphs_config
from pcp_passes.inspection.sources import load_config
from pcp_passes.piecewise.report import BodyReport, CutLine, SlotLine


def inspect_graphs(model: str, *, vllm: bool = False, **options: Any) -> ModelGraphs:
    """The report of a model's CUDA graphs.

    Options and errors as for :func:`pcp_passes.inspection.graphs.inspect_graphs_config`; ``model`` as for
    :func:`pcp_passes.inspection.sources.load_config`.
    """
    if vllm:
        raise ConfigError("--cudagraph splits the bodies of a step program, which vLLM does not run; found --vllm too")
    return inspect_graphs_config(load_config(model), name=model, **options)


def render_graphs(found: ModelGraphs) -> RenderableType:
    """For each body a table of pieces and one of cuts; then static inputs, buckets and the verdict."""
    parts: list[RenderableType] = []
    for body in found.bodies:
        parts += [_pieces(body), _cuts(f"{body.name}: why it is cut", body.cuts), *_stops(body)]
    return Lines(*parts, _slots(found), *_lines(found))


def _pieces(body: BodyReport) -> Table:
    inside = _common(name for line in body.pieces for name in line.modules)
    title = f"{body.name}: {body.piece_count} pieces of {len(body.pieces)} kinds"
    if inside:
        title += f", modules of {inside}"
    table = titled(title, "piece", "times", "kernels", "from, to", "reads, gives")
    for line in body.pieces:
        ends = dict.fromkeys(name.removeprefix(f"{inside}.") for name in (line.modules[0], line.modules[-1]))
        counted = ((line.parameters, "parameter", ""), (line.made, "result", " of pieces"))
        read = [*line.held, *(f"{count} {what}{'s' * (count > 1)}{rest}" for count, what, rest in counted if count)]
        text = f"reads {', '.join(read)}\ngives {', '.join(line.results)}"
        table.add_row(line.key, str(line.times), str(line.kernels), "\n".join(ends), escape(text))
    return table


def _common(names: Iterable[str]) -> str:
    """The innermost module that all ``names`` are in, without the dot; empty when there is none."""
    parents = [name.split(".")[:-1] for name in names]
    same = takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    return ".".join(parts[0] for parts in same)


def _cuts(title: str, lines: Sequence[CutLine]) -> Table:
    table = titled(title, "op", "times", "why", "first in")
    for line in lines:
        table.add_row(line.op, str(line.times), line.reason, f"{line.module}\n{line.source}")
    return table


def _stops(body: BodyReport) -> Iterator[RenderableType]:
    if body.stops:
        yield _cuts(f"{body.name}: what stops a full graph", body.stops)
    else:
        yield f"{body.name}: nothing stops a full graph; steps without a prefill, and draft steps, may be one"
    if body.faults:
        yield _cuts(f"{body.name}: what keeps pieces from being captured", body.faults)


def _slots(found: ModelGraphs) -> Table:
    table = titled(
        f"static inputs of a rank, for up to {found.static_rows:,} rows", "bodies", "slot", "type", "a row", "largest"
    )
    readers: dict[tuple[str, SlotLine], list[str]] = {}
    for body in found.bodies:
        role, _, variant = body.name.partition(".")
        for line in body.slots:
            readers.setdefault((role, line), []).append(variant)
    for (role, line), variants in readers.items():
        most = line.bytes_per_row * found.static_rows + line.constant_bytes
        body_names = f"{role} ({', '.join(variants)})"
        table.add_row(body_names, line.name, escape(line.type), f"{line.bytes_per_row:,} B", f"{most:,} B")
    return table


def _lines(found: ModelGraphs) -> Iterator[str]:
    yield (
        f"static inputs take {found.static_bytes:,} B a rank, bodies sharing what has one type and name; of these "
        f"{found.attention_bytes:,} B are slots, positions, lengths and block tables ({found.max_requests:,} requests "
        f"of {found.max_len:,} tokens in blocks of {PAGE})"
    )
    for what, sizes, meaning in (
        ("rows", found.buckets.rows, "rows of the fullest rank"),
        ("requests", found.buckets.requests, "requests of decode and draft steps"),
    ):
        yield f"{len(sizes)} buckets by {what} ({meaning}): {', '.join(map(str, sizes))}"
    count = sum(body.piece_count for body in found.bodies)
    yield f"{count:,} pieces, of {found.distinct} kinds over all bodies: so many to compile"
    verdict = "yes: nothing keeps a piece from being captured" if found.capturable else "no: see above"
    yield f"CAPTURABLE {verdict}"
    yield STATIC_IS_NOT_CAPTURE
    yield (
        "sM: rows of a rank, padded. A slot is a buffer at a fixed address: ids, positions and hidden hold what a body "
        "is given, held.N results of what runs between pieces, result what the body gives. target.0: the target's "
        "layer 0"
    )
    if found.captured < found.layers:
        yield (
            f"{found.captured} of {found.layers} layers were captured, every pair of neighbours at least once; times "
            "are those of all layers (--full captures all)"
        )
