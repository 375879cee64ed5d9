# SPDX-License-Identifier: Apache-2.0
"""How a selection is cut into launches, from bounds that the host knows; lengths on the device are never read.

All plans select the same keys. ``fused`` streams the keys past every tile of rows; ``tiled`` writes the scores of as
many rows as fit into a workspace and selects from there; ``split`` gives the keys of few rows to several programs and
merges; ``all`` is for keys so few that every one is selected.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from pcp_kernels.specs import MergeSpec, SelectSpec, TopKSpec

Kind = Literal["all", "fused", "tiled", "split"]
KINDS: tuple[Kind, ...] = ("all", "fused", "tiled", "split")

WORD = 4
"""Bytes of a score, an order key or an index."""

SELECTORS = 2
"""Programs of the selector and of the merge that one multiprocessor runs at once: registers allow no more."""

ROW_STEP = 16
"""Rows whose scores are in the workspace at once are a multiple of it, unless all fit: no tile is cut then, and the 4
bytes a row of bounds and requests begin at a multiple of 16 in every launch, so Triton compiles once."""

MOST_RANGES = 64
"""Ranges of keys in a split; the merge of more would take longer than they save."""


@dataclass(frozen=True)
class Shape:
    """What the choice depends on."""

    rows: int
    keys: int
    """Upper bound of the keys of a row: what the tensors have room for."""
    topk: int
    units: int
    """Programs that the device runs at once: its multiprocessors."""


@dataclass(frozen=True)
class Plan:
    """One way to run a selection, and the workspace it takes."""

    kind: Kind
    programs: int = 0
    """Of the kernel that holds candidates, on the first axis of its grid."""
    ranges: int = 1
    """Into which the keys of a row are split."""
    mergers: int = 0
    """Programs of the merge."""
    rows: int = 0
    """Whose scores are in the workspace at once."""
    columns: int = 0
    """Scores of one of these rows; a multiple of 16."""
    held_words: int = 0
    """Order keys of candidates, and as many indices, of the programs of one launch."""
    part_words: int = 0
    """Order keys of the ranges' results, and as many indices."""

    @property
    def workspace_bytes(self) -> int:
        """All temporaries together."""
        return WORD * (2 * self.held_words + 2 * self.part_words + self.rows * self.columns)


@functools.lru_cache(maxsize=1024)
def choose(
    shape: Shape,
    streaming: TopKSpec,
    selector: SelectSpec,
    merger: MergeSpec,
    workspace_bytes: int,
    *,
    longest_tiled: int,
    kind: Kind | None = None,
) -> Plan:
    """The plan for ``shape`` whose temporaries stay within ``workspace_bytes``.

    Args:
        shape: bounds known on the host.
        streaming, selector, merger: launch settings (``block_queries``, ``capacity``) of the kernels.
        workspace_bytes: bound of the temporaries.
        longest_tiled: keys of a row above which the fused plan is preferred.
        kind: this plan and no other, for measurements and tests.

    Raises:
        ValueError: the workspace is too small, also for the fused plan on one program; or ``kind`` cannot run.
    """
    if workspace_bytes < 0:
        raise ValueError(f"workspace_bytes: found {workspace_bytes}; required at least 0, and what the selection takes")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"plan: found {kind!r}; supported: {', '.join(KINDS)}")
    if kind == "all" and shape.keys > shape.topk:
        raise ValueError(f"plan 'all': found up to {shape.keys} keys; required at most topk={shape.topk}")
    if kind in (None, "all") and shape.keys <= shape.topk:
        return Plan("all")
    plans = {
        "split": _split(shape, streaming, merger, workspace_bytes, forced=kind == "split"),
        "tiled": _tiled(shape, selector, workspace_bytes, forced=kind == "tiled"),
        "fused": _fused(shape, streaming, workspace_bytes),
    }
    if shape.keys > longest_tiled and kind is None:
        plans["tiled"] = None
    for name, plan in plans.items():
        if plan is not None and kind in (None, name):
            assert plan.workspace_bytes <= workspace_bytes, f"{plan} exceeds its workspace of {workspace_bytes} bytes"
            return plan
    least = _fused_words(streaming) * 2 * WORD
    raise ValueError(
        f"selection of {shape.topk} of up to {shape.keys} keys for {shape.rows} rows, plan {kind or 'any'}: found a "
        f"workspace of {workspace_bytes} bytes, too few; plan 'fused' runs with {least} and is fastest with "
        f"{least * max(1, min(shape.units, _tiles(shape, streaming)))}. Raise workspace_bytes."
    )


def _tiles(shape: Shape, streaming: TopKSpec) -> int:
    return -(-shape.rows // streaming.block_queries)


def _fused_words(streaming: TopKSpec) -> int:
    """Order keys that one program holds."""
    return streaming.block_queries * streaming.capacity


def _fused(shape: Shape, streaming: TopKSpec, workspace_bytes: int) -> Plan | None:
    one = _fused_words(streaming)
    programs = min(_tiles(shape, streaming), shape.units, workspace_bytes // (2 * WORD * one))
    return Plan("fused", programs=programs, held_words=programs * one) if programs else None


def _split(shape: Shape, streaming: TopKSpec, merger: MergeSpec, workspace_bytes: int, forced: bool) -> Plan | None:
    tiles = _tiles(shape, streaming)
    # A range of fewer than four times topk keys leaves the merge as many candidates as there were keys.
    ranges = min(-(-2 * shape.units // max(tiles, 1)), shape.keys // (4 * shape.topk), MOST_RANGES)
    if forced:
        ranges = max(ranges, 2)
    mergers = min(shape.rows, SELECTORS * shape.units)
    while ranges > 1:
        held = max(tiles * ranges * _fused_words(streaming), mergers * merger.capacity)
        parts = shape.rows * ranges * shape.topk
        plan = Plan("split", programs=tiles, ranges=ranges, mergers=mergers, held_words=held, part_words=parts)
        if plan.workspace_bytes <= workspace_bytes:
            return plan
        ranges -= 1
    return None


def _tiled(shape: Shape, selector: SelectSpec, workspace_bytes: int, forced: bool) -> Plan | None:
    programs = min(shape.rows, SELECTORS * shape.units)
    columns = -(-shape.keys // 16) * 16
    held = programs * selector.capacity
    rows = min(shape.rows, (workspace_bytes // WORD - 2 * held) // columns)
    # With fewer rows at a time the launches, each with its tail, would take longer than the fused plan.
    if rows < (1 if forced else min(shape.rows, 4 * shape.units)):
        return None
    if ROW_STEP < rows < shape.rows:
        rows -= rows % ROW_STEP
    return Plan("tiled", programs=programs, rows=rows, columns=columns, held_words=held)
