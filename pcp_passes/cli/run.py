# SPDX-License-Identifier: Apache-2.0
"""``pcp run``: passes over the graph of a dump, as a new dump and a table of what each did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes import dumps
from pcp_passes.errors import ConfigError, DumpError
from pcp_passes.ir import invariants
from pcp_passes.ir.parsing.parser import parse_graph
from pcp_passes.ir.printer import graph_fingerprint, print_graph
from pcp_passes.passes.base import Note, PassContext
from pcp_passes.passes.observers import DumpObserver, VerifyObserver
from pcp_passes.passes.pipeline import Observer, Pipeline
from pcp_passes.passes.registry import parse_passes

_SHOWN_NOTES = 8


@dataclass(frozen=True)
class Source:
    """The graph to run on, and what is known of it."""

    text: str
    name: str
    ctx: PassContext
    standing: frozenset[str]
    dump: dumps.Dump | None = None


def run_passes(passes: str, path: Path, out: Path | None = None, pcp: int | None = None) -> dict[str, Any]:
    """Run passes over a dump's captured graph, or over one file of a dump.

    Args:
        passes: a comma list of passes, or the name of a pipeline.
        path: a dump folder, or a ``.txt`` file; beside a manifest, its context and invariants are used.
        out: folder for the new dump; nothing is written without one.
        pcp: number of ranks, instead of the dump's.

    Raises:
        ConfigError: the passes do not fit what stands of the graph, or ``out`` holds a dump already.
        DumpError: the graph cannot be read back here.
        Refusal: a pass refuses the graph.
    """
    steps = parse_passes(passes)
    source = find_source(path, pcp)
    ctx = source.ctx if pcp is None else replace(source.ctx, pcp=pcp)
    observers: list[Observer] = [VerifyObserver("every")]
    if out is not None:
        target = out / ctx.variant
        if (target / dumps.MANIFEST).exists():
            raise ConfigError(f"{target} holds a dump already; required a folder without one: choose another -o")
        observers.insert(0, DumpObserver(out))
    # What its own pipeline kept at every moment is kept here too.
    always = source.standing & (invariants.ALWAYS | invariants.ON_TOKENS)
    pipeline = Pipeline(steps, tuple(observers), always=always, given=source.standing)
    constants, hints = (source.dump.read_constants(), source.dump.hints) if source.dump else ({}, {})
    graph = parse_graph(source.text, constants, where=source.name, hints=hints).graph
    before = len(graph.nodes)
    results = pipeline.run_graph(graph, ctx).results
    return {
        "source": source.name,
        "ctx": dumps.context_json(ctx),
        "nodes": [before, len(graph.nodes)],
        "passes": [
            {"pass": name, "rewrites": result.rewrites, "notes": [_note(note) for note in result.notes]}
            for name, result in results
        ],
        "fingerprint": graph_fingerprint(graph),
        "dump": None if out is None else str(out / ctx.variant),
        "graph": print_graph(graph),
    }


def find_source(path: Path, pcp: int | None) -> Source:
    """The graph that a path names: the first of a dump, or one file, with the manifest beside it when there is one."""
    if path.is_dir():
        dump = dumps.one_dump(path)
        stage = dump.stages[0]
        return Source(stage.text(), f"{dump.folder.name}/{stage.file}", dump.ctx, stage.standing, dump)
    text = dumps.read_text(path)
    if (path.parent / dumps.MANIFEST).exists():
        dump = dumps.load_dump(path.parent)
        listed = next((stage for stage in dump.stages if stage.file == path.name), None)
        if listed is not None:
            return Source(text, f"{dump.folder.name}/{path.name}", dump.ctx, listed.standing, dump)
    if pcp is None:
        raise DumpError(f"{path} has no manifest beside it that says for how many ranks it is; give --pcp")
    return Source(text, path.name, PassContext(pcp), invariants.OF_A_CAPTURE | invariants.ON_TOKENS)


def _note(note: str | Note) -> dict[str, str]:
    if isinstance(note, Note):
        return {"node": note.node, "module": note.module, "text": note.text}
    return {"node": "", "module": "", "text": note}


def render_run(data: dict[str, Any]) -> RenderableType:
    """A table of passes, rewrites and notes."""
    table = Table(box=None, pad_edge=False)
    for column in ("pass", "rewrites", "notes"):
        table.add_column(column, overflow="fold", justify="right" if column == "rewrites" else "left")
    for step in data["passes"]:
        notes = [f"%{n['node']}: {n['text']}" if n["node"] else n["text"] for n in step["notes"]]
        more = len(notes) - _SHOWN_NOTES
        shown = notes[:_SHOWN_NOTES] + ([f"... and {more} more (--json)"] if more > 0 else [])
        table.add_row(step["pass"], str(step["rewrites"]), Text("\n".join(shown)))
    before, after = data["nodes"]
    written = f"; written to {data['dump']}" if data["dump"] else "; nothing written (give -o FOLDER)"
    summary = f"{before} nodes before, {after} after; every invariant that stands was checked{written}"
    return Lines(Text(f"{data['source']} over {data['ctx']['pcp']} ranks"), table, Text(summary))
