# SPDX-License-Identifier: Apache-2.0
"""A pipeline: a literal tuple of passes whose order is checked, never sorted, and one observer seam."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import fx

from pcp_passes.errors import ConfigError
from pcp_passes.ir import invariants
from pcp_passes.passes.base import Pass, PassContext, PassResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """What an observer is told: the graph as captured (``index`` 0, no pass) and after each pass (from 1)."""

    index: int
    name: str
    graph: fx.Graph
    ctx: PassContext
    standing: frozenset[str]
    """Names of the invariants that hold at this point."""
    result: PassResult | None = None
    seconds: float = 0.0
    last: bool = False


class Observer(Protocol):
    """One seam for printing, timing, dumping and verifying."""

    def observe(self, event: Event) -> None:
        """Look at the graph; raising ends the pipeline. An observer never changes the graph."""
        ...


@dataclass(frozen=True)
class PipelineReport:
    """What each pass did, in order."""

    results: tuple[tuple[str, PassResult], ...]

    @property
    def rewrites(self) -> dict[str, int]:
        """Rewrites by pass name."""
        return {name: result.rewrites for name, result in self.results}


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order a person wrote.

    Raises:
        ConfigError: a pass needs an invariant that does not hold where it stands, two passes have one name, or an
            invariant of ``ensures`` does not hold at the end.
    """

    passes: tuple[Pass, ...]
    observers: tuple[Observer, ...] = ()
    ensures: frozenset[str] = field(default_factory=frozenset)
    """Invariants that must hold when the last pass has run."""
    always: frozenset[str] = invariants.ALWAYS
    """Invariants that no pass may break, even for a moment."""
    given: frozenset[str] = invariants.OF_A_CAPTURE
    """Invariants that hold of the graph before the first pass: more for a graph that other passes have been over."""

    def __post_init__(self) -> None:
        standing = self.given
        names: set[str] = set()
        for step in self.passes:
            if step.name in names:
                raise ConfigError(f"pipeline runs {step.name} twice; required once")
            names.add(step.name)
            unknown = (step.requires | step.establishes | step.breaks) - set(invariants.INVARIANTS)
            assert not unknown, f"{step.name} names invariants that do not exist: {sorted(unknown)}"
            if step.requires - standing:
                raise ConfigError(self._misplaced(step, step.requires - standing))
            standing = (standing - step.breaks) | step.establishes
        if self.ensures - standing:
            raise ConfigError(
                f"pipeline ends without {', '.join(sorted(self.ensures - standing))}; found "
                f"{' > '.join(p.name for p in self.passes) or 'no pass'}. Add the pass that establishes it at the end."
            )

    def _misplaced(self, step: Pass, missing: frozenset[str]) -> str:
        order = " > ".join(p.name for p in self.passes)
        makers = sorted(p.name for p in self.passes if missing & p.establishes)
        advice = f"Move {', '.join(makers)} in front of it" if makers else "Add a pass that establishes it in front"
        return f"{step.name} requires {', '.join(sorted(missing))}, which does not hold in {order}. {advice}."

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PipelineReport:
        """Rewrite ``gm`` in place and recompile it. Give it a copy: a captured graph is read again by its tracer."""
        report = self.run_graph(gm.graph, ctx)
        gm.recompile()
        return report

    def run_graph(self, graph: fx.Graph, ctx: PassContext) -> PipelineReport:
        """Rewrite ``graph`` in place; a module that owns it must be recompiled."""
        standing = self.given | self.always
        self._tell(Event(0, "captured", graph, ctx, standing, last=not self.passes))
        results: list[tuple[str, PassResult]] = []
        for index, step in enumerate(self.passes, start=1):
            began = time.perf_counter()
            result = step.run(graph, ctx)
            seconds = time.perf_counter() - began
            assert result.rewrites or result.notes, f"{step.name} did nothing and gave no reason"
            # The report carries the notes too, but not every caller keeps one.
            logger.debug("%s: %d rewrites; %s", step.name, result.rewrites, "; ".join(map(str, result.notes)))
            standing = ((standing - step.breaks) | step.establishes) | self.always
            results.append((step.name, result))
            self._tell(Event(index, step.name, graph, ctx, standing, result, seconds, index == len(self.passes)))
        return PipelineReport(tuple(results))

    def _tell(self, event: Event) -> None:
        for observer in self.observers:
            observer.observe(event)

    def uuid(self, ctx: PassContext, layout: str, options: Mapping[str, object] | None = None) -> str:
        """SHA-256 (hex) of all that decides the rewritten graph: put it in the key of every compile cache.

        Hashes the sources of this package, the passes with their options, the context, the layout's name, the caller's
        own ``options`` (JSON-able) and the PyTorch version.
        """
        parts = {
            "sources": _source_hash(),
            "passes": [repr(step) for step in self.passes],
            "ctx": [ctx.pcp, ctx.axis, ctx.variant, sorted(ctx.shared_cache_layers)],
            "layout": layout,
            "options": dict(options or {}),
            "torch": torch.__version__,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def _source_hash() -> str:
    return hash_sources(Path(__file__).resolve().parents[1])


def hash_sources(root: Path) -> str:
    """SHA-256 (hex) of every ``.py`` file under ``root``: relative paths and contents, in path order."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
