# SPDX-License-Identifier: Apache-2.0
"""Observers of a pipeline: dump, diff, time, verify. Each is told of the captured graph and of each pass."""

from __future__ import annotations

import difflib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pcp_passes.errors import ConfigError
from pcp_passes.ir import invariants
from pcp_passes.ir.printer import graph_fingerprint, print_graph
from pcp_passes.passes.pipeline import Event

logger = logging.getLogger(__name__)

Level = Literal["final", "every", "full"]
LEVELS: tuple[Level, ...] = ("final", "every", "full")


@dataclass
class DumpObserver:
    """Write the graph after each pass: ``<folder>/<variant>/00-captured.txt``, ``01-place-rows.txt``, and a manifest.

    The manifest lists, per file, the pass, its rewrites, its notes and the graph's fingerprint; it is rewritten after
    each pass, so a pipeline that fails leaves what it had. Give ranks folders of their own, or let one rank dump.
    """

    folder: Path
    _entries: list[dict[str, Any]] = field(default_factory=list)

    def observe(self, event: Event) -> None:
        folder = Path(self.folder) / event.ctx.variant
        folder.mkdir(parents=True, exist_ok=True)
        if event.index == 0:
            self._entries.clear()
            for stale in folder.glob("[0-9][0-9]-*.txt"):
                stale.unlink()
        file = f"{event.index:02d}-{event.name}.txt"
        (folder / file).write_text(print_graph(event.graph), encoding="utf-8")
        result = event.result
        self._entries.append({
            "file": file,
            "pass": event.name,
            "rewrites": result.rewrites if result else 0,
            "notes": [str(note) for note in result.notes] if result else [],
            "standing": sorted(event.standing),
            "fingerprint": graph_fingerprint(event.graph),
        })  # fmt: skip
        ctx = {"pcp": event.ctx.pcp, "axis": event.ctx.axis, "variant": event.ctx.variant}
        text = json.dumps({"ctx": ctx, "graphs": self._entries}, indent=2)
        (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


@dataclass
class DiffObserver:
    """Keep what each pass changed, as a unified diff of the printed graphs: ``diffs["sharded"]["mask-padding"]``."""

    diffs: dict[str, dict[str, str]] = field(default_factory=dict)
    _before: list[str] = field(default_factory=list)

    def observe(self, event: Event) -> None:
        after = print_graph(event.graph).splitlines()
        if event.index:
            lines = difflib.unified_diff(self._before, after, "before", event.name, n=0, lineterm="")
            self.diffs.setdefault(event.ctx.variant, {})[event.name] = "\n".join(lines)
        self._before = after


@dataclass
class TimeObserver:
    """Log one line per pass at INFO and keep the seconds: ``seconds["sharded"]["mask-padding"]``."""

    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def observe(self, event: Event) -> None:
        if event.result is None:
            return
        self.seconds.setdefault(event.ctx.variant, {})[event.name] = event.seconds
        logger.info(
            "%s (%s): %d rewrites, %d nodes, %.1f ms", event.name, event.ctx.variant, event.result.rewrites,
            len(event.graph.nodes), 1e3 * event.seconds,
        )  # fmt: skip
        if not event.result.rewrites:
            logger.info("%s (%s): %s", event.name, event.ctx.variant, event.result.notes[0])


@dataclass(frozen=True)
class VerifyObserver:
    """Check invariants.

    ``final``: those that stand, after the last pass; ``every``: after each pass; ``full``: after each pass, and the
    value of every node is computed anew (about a millisecond a node).

    Raises:
        ConfigError: ``level`` is unknown.
    """

    level: Level = "final"

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ConfigError(f"verify level is {self.level!r}; required one of {', '.join(LEVELS)}")

    def observe(self, event: Event) -> None:
        if self.level == "final" and not event.last:
            return
        invariants.check(event.standing | invariants.ALWAYS, event.graph, event.ctx)
        if self.level == "full":
            invariants.meta_fresh_full(event.graph, event.ctx)
