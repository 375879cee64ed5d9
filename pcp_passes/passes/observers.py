# SPDX-License-Identifier: Apache-2.0
"""Observers of a pipeline: dump, diff, time, verify. Each is told of the captured graph and of each pass."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from pcp_passes import dumps
from pcp_passes.errors import ConfigError
from pcp_passes.ir import invariants
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes.pipeline import Event

logger = logging.getLogger(__name__)

Level = Literal["final", "every", "full"]
LEVELS: tuple[Level, ...] = ("final", "every", "full")


@dataclass
class DumpObserver:
    """Write the graph after each pass: ``<folder>/<variant>/00-captured.txt``, ``01-place-rows.txt``, and a manifest.

    The manifest lists, per file, the pass, its rewrites, its notes and digests of the graph; it is rewritten after each
    pass, so a pipeline that fails leaves what it had. Small constants are in ``constants.safetensors``. Give ranks
    folders of their own, or let one rank dump. ``pcp_passes.dumps`` reads it all back.

    Raises:
        ConfigError: the graph holds small constants, and safetensors is not installed.
    """

    folder: Path
    _entries: list[dict[str, Any]] = field(default_factory=list)
    _constants: dict[str, torch.Tensor] = field(default_factory=dict)
    _hints: dict[str, int] = field(default_factory=dict)

    def observe(self, event: Event) -> None:
        folder = Path(self.folder) / event.ctx.variant
        folder.mkdir(parents=True, exist_ok=True)
        if event.index == 0:
            self._entries.clear()
            self._constants.clear()
            self._hints = dumps.size_hints(event.graph)
            for stale in (*folder.glob("[0-9][0-9]*-*.txt"), folder / dumps.CONSTANTS):
                stale.unlink(missing_ok=True)
        result = event.result
        self._entries.append({
            **dumps.write_graph(folder, f"{event.index:02d}-{event.name}.txt", event.graph),
            "pass": event.name,
            "rewrites": result.rewrites if result else 0,
            "notes": [str(note) for note in result.notes] if result else [],
            "standing": sorted(event.standing),
        })  # fmt: skip
        constants = dumps.small_constants(event.graph)
        if not constants.keys() <= self._constants.keys():
            self._constants |= constants
            dumps.write_constants(folder, self._constants)
        dumps.write_manifest(folder, event.ctx, self._entries, self._constants, self._hints)


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
        invariants.check(event.standing, event.graph, event.ctx)
        if self.level == "full":
            invariants.meta_fresh_full(event.graph, event.ctx)
