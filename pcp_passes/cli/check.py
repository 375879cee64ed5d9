# SPDX-License-Identifier: Apache-2.0
"""``pcp check``: is a dump whole, is each graph the one that was written, and do its invariants hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes import dumps
from pcp_passes.errors import PcpError
from pcp_passes.ir import invariants
from pcp_passes.ir.parsing.parser import Parsed
from pcp_passes.ir.printer import graph_fingerprint
from pcp_passes.passes.registry import pass_registry


@dataclass(frozen=True)
class Finding:
    """One result: a ``problem`` makes the dump unhealthy, a ``note`` limits what was looked at."""

    stage: str
    check: str
    status: str
    text: str = ""


def check_dumps(path: Path) -> dict[str, Any]:
    """Check every dump in or under ``path``; nothing of a dump is run, a broken one is a finding and never an error.

    Per dump: the manifest; per graph: that the file is there and unchanged, that it reads back, that its fingerprint is
    the manifest's, and every invariant that stands.

    Returns:
        ``healthy`` and ``dumps``, each with ``folder`` and ``findings``.

    Raises:
        DumpError: there is no dump at ``path``.
    """
    pass_registry()  # the modules of all passes are loaded, and with them the invariants that they name
    found = [(folder, list(_check(folder))) for folder in dumps.find_dumps(path)]
    healthy = all(finding.status != "problem" for _, findings in found for finding in findings)
    return {
        "healthy": healthy,
        "dumps": [{"folder": str(folder), "findings": [asdict(f) for f in findings]} for folder, findings in found],
    }


def _check(folder: Path) -> Iterator[Finding]:
    try:
        dump = dumps.load_dump(folder)
        constants = dump.read_constants()
    except PcpError as error:
        yield Finding("", "readable", "problem", str(error))
        return
    yield from _unlisted(dump)
    if constants:
        yield Finding("", "constants", "ok", f"{len(constants)} of {len(constants)} are those of their digests")
    for stage in dump.stages:
        yield from _check_stage(dump, stage)


def _unlisted(dump: dumps.Dump) -> Iterator[Finding]:
    listed = {stage.file for stage in dump.stages}
    extra = sorted(path.name for path in dump.folder.glob("*.txt") if path.name not in listed)
    if extra:
        names = ", ".join(map(ascii, extra[:10]))
        yield Finding("", "files", "problem", f"not in the manifest: {names}. Was it written by another run?")


def _check_stage(dump: dumps.Dump, stage: dumps.Stage) -> Iterator[Finding]:
    try:
        text = stage.text()
        parsed = dump.read(stage, strict=False)
    except PcpError as error:
        yield Finding(stage.file, "readable", "problem", str(error))
        return
    fingerprint = graph_fingerprint(parsed.graph)
    if fingerprint != stage.fingerprint:
        found = f"the graph is not the one that was written: fingerprint {fingerprint[:12]}, manifest "
        yield Finding(stage.file, "fingerprint", "problem", found + stage.fingerprint[:12])
    elif hashlib.sha256(text.encode()).hexdigest() != stage.sha256:
        yield Finding(
            stage.file, "sha256", "problem", "the file was edited: names or comments differ, the graph does not"
        )
    else:
        yield Finding(stage.file, "unchanged", "ok")
    yield from _check_invariants(dump, stage, parsed)


def _check_invariants(dump: dumps.Dump, stage: dumps.Stage, parsed: Parsed) -> Iterator[Finding]:
    if parsed.unknown:
        what = "; ".join(sorted({line.partition(":")[0] for line in parsed.unknown}))
        yield Finding(stage.file, "loaded", "note", f"not loaded here, so taken as pure and as stated: {what}")
    unknown = stage.standing - set(invariants.INVARIANTS)
    if unknown:
        text = f"this version has no invariant {', '.join(sorted(unknown))}; the dump is of another"
        yield Finding(stage.file, "standing", "problem", text)
    held: list[str] = []
    for name in invariants.INVARIANTS:
        if name not in stage.standing | invariants.ON_TOKENS:
            continue
        try:
            invariants.check([name], parsed.graph, dump.ctx)
        except PcpError as error:
            yield Finding(stage.file, name, "problem", str(error))
        except Exception as error:  # a graph of a stranger can be nonsense that no pass would write
            yield Finding(stage.file, name, "problem", f"cannot be checked: {type(error).__name__}: {error}")
        else:
            held.append(name)
    yield Finding(stage.file, "invariants", "ok", ", ".join(held))


_STYLE = {"ok": "green", "note": "yellow", "problem": "bold red"}


def render_check(data: dict[str, Any]) -> RenderableType:
    """A table per dump, and a verdict."""
    shown: list[RenderableType] = []
    for dump in data["dumps"]:
        shown.append(Text(dump["folder"], "bold"))
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in dump["findings"]:
            status = Text(finding["status"], style=_STYLE[finding["status"]])
            table.add_row(finding["stage"], finding["check"], status, Text(finding["text"]))
        shown.append(table)
    count = sum(finding["status"] == "problem" for dump in data["dumps"] for finding in dump["findings"])
    verdict = Text("healthy", "bold green") if data["healthy"] else Text(f"{count} problem(s)", "bold red")
    return Lines(*shown, verdict)
