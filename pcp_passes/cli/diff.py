# SPDX-License-Identifier: Apache-2.0
"""``pcp diff``: two graphs, two dumps, or the stages of one, as unified diffs and counts of ops."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from pcp_passes import dumps
from pcp_passes.errors import DumpError
from pcp_passes.ir.parsing.syntax import Statement, read_statements

_STYLE = {"+": "green", "-": "red", "@": "cyan"}


@dataclass(frozen=True)
class Show:
    """What to compare: ``comments`` are modules, source lines and passes; ``context`` lines stand around a change."""

    comments: bool = False
    placements: bool = True
    context: int = 3


@dataclass(frozen=True)
class _Side:
    label: str
    text: str

    def lines(self, show: Show) -> tuple[list[str], Counter[str]]:
        statements = read_statements(self.text, self.label)
        lines = self.text.splitlines()
        shown = [_shown(line, statement, show) for line, statement in zip(lines, statements, strict=True)]
        return shown, Counter(statement.called for statement in statements if statement.op != "output")


def _shown(line: str, statement: Statement, show: Show) -> str:
    text = line if show.comments else statement.text
    where = statement.kind.placement_text
    return text if show.placements or not where else text.replace(f" {where} =", " =", 1)


def diff_graphs(a: Path, b: Path | None = None, show: Show | None = None) -> dict[str, Any]:
    """Compare graphs as text; what they call need not be loaded here.

    Args:
        a: a dump folder or a file.
        b: another of the same kind; without it, each stage of ``a`` is compared with the one before it. Two dumps are
            compared pass by pass.
        show: what of a line to compare; by default everything but the comment.

    Returns:
        ``equal``; ``parts``, each with two labels, ``diff`` (lines of a unified diff), and ``added`` and ``removed``,
        counts by what is called.

    Raises:
        DumpError: a path is no dump or printed graph, or the two are of different kinds.
    """
    parts = [_compare(one, other, show or Show()) for one, other in _pairs(a, b)]
    return {"equal": not any(part["diff"] for part in parts), "parts": parts}


def _pairs(a: Path, b: Path | None) -> Iterator[tuple[_Side | str, _Side | str]]:
    """Sides to compare; a string stands for a stage that one dump does not have."""
    if b is None:
        stages = dumps.one_dump(a).stages
        if len(stages) < 2:
            raise DumpError(f"{a} has one graph, {stages[0].file}; name a second dump or file to compare it with")
        yield from pairwise(_Side(stage.file, stage.text()) for stage in stages)
        return
    if a.is_dir() != b.is_dir():
        raise DumpError(f"{a} and {b} are a folder and a file; required two dumps, or two files")
    if not a.is_dir():
        yield _Side(str(a), dumps.read_text(a)), _Side(str(b), dumps.read_text(b))
        return
    left, right = dumps.one_dump(a), dumps.one_dump(b)
    for name in dict.fromkeys(stage.name for stage in (*left.stages, *right.stages)):
        yield _side(left, name), _side(right, name)


def _side(dump: dumps.Dump, name: str) -> _Side | str:
    stage = dump.stage(name)
    return f"{dump.folder}: no stage {name}" if stage is None else _Side(f"{dump.folder}/{stage.file}", stage.text())


def _compare(one: _Side | str, other: _Side | str, show: Show) -> dict[str, Any]:
    if isinstance(one, str) or isinstance(other, str):
        labels = [side if isinstance(side, str) else side.label for side in (one, other)]
        gone = f"-{labels[0]}", f"+{labels[1]}"
        return {"from": labels[0], "to": labels[1], "added": {}, "removed": {}, "diff": list(gone)}
    (before, old), (after, new) = one.lines(show), other.lines(show)
    return {
        "from": one.label,
        "to": other.label,
        "added": dict(sorted((new - old).items())),
        "removed": dict(sorted((old - new).items())),
        "diff": list(difflib.unified_diff(before, after, one.label, other.label, n=show.context, lineterm="")),
    }


def render_diff(data: dict[str, Any]) -> RenderableType:
    """The diffs, coloured, each with its counts."""
    shown: list[RenderableType] = []
    for part in data["parts"]:
        if not part["diff"]:
            shown.append(Text(f"{part['from']} and {part['to']} are equal", style="dim"))
            continue
        shown += [Text(line, style=_STYLE.get(line[:1], ""), no_wrap=True, overflow="ignore") for line in part["diff"]]
        for sign, key in (("+", "added"), ("-", "removed")):
            counts = ", ".join(f"{count} {name}" for name, count in part[key].items())
            shown.append(Text(f"{key}: {counts or 'no op'}", style=f"bold {_STYLE[sign]}"))
    return Lines(*shown)
