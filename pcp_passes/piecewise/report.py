# SPDX-License-Identifier: Apache-2.0
"""What a split body consists of, how often, and what keeps CUDA graphs from holding it: lines for reports.

A body may stand for a longer one, of which only some layers were captured. ``weigh(before, after)`` then says how often
what lies between the layers ``before`` and ``after`` occurs: within one layer they are equal, and ``None`` is outside.
``number(layer)`` is what the longer one calls a layer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from torch import fx

from pcp_passes.ir import meta
from pcp_passes.ir.invariants import Offence
from pcp_passes.ir.targets import target_text
from pcp_passes.piecewise.capturable import offences
from pcp_passes.piecewise.listing import EagerEntry, PieceEntry, listing
from pcp_passes.piecewise.pieces import Collectives, InputKind, Slot, static_slots

Weigh = Callable[[int | None, int | None], Fraction]

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True)
class PieceLine:
    """A kind of piece: equal ones share what is compiled.

    Attributes:
        key: of its graph, the first 12 digits.
        times: how often the body runs it.
        kernels: calls that compute.
        modules: of the first and the last of them, at its first place.
        held: static slots that it reads.
        parameters, made: inputs that are parameters, and results of other pieces.
        results: types.
    """

    key: str
    times: int
    kernels: int
    modules: tuple[str, ...]
    held: tuple[str, ...]
    parameters: int
    made: int
    results: tuple[str, ...]


@dataclass(frozen=True)
class CutLine:
    """Why the body is cut at an op, ``times`` times; module and source line of the first."""

    op: str
    reason: str
    times: int
    module: str
    source: str


@dataclass(frozen=True)
class SlotLine:
    """A static input: bytes of each row, and of a value without rows."""

    name: str
    type: str
    bytes_per_row: int
    constant_bytes: int


@dataclass(frozen=True)
class BodyReport:
    """One body in pieces.

    Attributes:
        name: ``target.sharded``, ...
        pieces, cuts: by kind, in the order of their first.
        slots: static inputs of the body.
        stops: what keeps the whole body from being one graph; empty when nothing does.
        faults: what keeps a piece from being captured; empty when nothing does.
    """

    name: str
    pieces: tuple[PieceLine, ...]
    cuts: tuple[CutLine, ...]
    slots: tuple[SlotLine, ...]
    stops: tuple[CutLine, ...]
    faults: tuple[CutLine, ...]

    @property
    def piece_count(self) -> int:
        """Pieces that a call of the body runs."""
        return sum(line.times for line in self.pieces)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "piece_count": self.piece_count}


def report_body(
    name: str,
    body: fx.GraphModule,
    split: fx.GraphModule,
    weigh: Weigh = lambda before, after: Fraction(1),
    number: Callable[[int], int] = int,
    collectives: Collectives = "outside",
) -> BodyReport:
    """Read a body and its split form.

    Args:
        name: of the body.
        body, split: before and after :func:`pcp_passes.piecewise.split.split_body`.
        weigh, number: see the module's text.
        collectives: as the body was split.
    """
    entries = listing(split)
    spans = _spans(entries)
    counts: dict[Any, Fraction] = defaultdict(Fraction)
    pieces: dict[str, PieceEntry] = {}
    cuts: dict[tuple[str, str], EagerEntry] = {}
    for entry, (before, after) in zip(entries, spans, strict=True):
        kind: Any = entry.key if isinstance(entry, PieceEntry) else (entry.op, entry.reason)
        counts[kind] += weigh(before, after)
        if isinstance(entry, PieceEntry):
            pieces.setdefault(entry.key, entry)
        else:
            cuts.setdefault((entry.op, entry.reason), entry)
    return BodyReport(
        name,
        tuple(_piece_line(entry, round(counts[key]), number) for key, entry in pieces.items()),
        tuple(
            CutLine(e.op, e.reason, round(counts[key]), _renumbered(e.module, number), e.source)
            for key, e in cuts.items()
        ),
        tuple(map(_slot_line, static_slots(split))),
        _lines(offences(body, collectives), weigh, number),
        _lines(offences(split, collectives), weigh, number),
    )


def _spans(entries: Sequence[PieceEntry | EagerEntry]) -> list[tuple[int | None, int | None]]:
    """The layers around each entry. Eager calls say theirs; equal pieces share a graph, and so a module path."""
    own = [_layer(entry.module) if isinstance(entry, EagerEntry) else None for entry in entries]
    before, after = _last_known(own), _last_known(own[::-1])[::-1]
    return [(a, b) if layer is None else (layer, layer) for layer, a, b in zip(own, before, after, strict=True)]


def _last_known(layers: Sequence[int | None]) -> list[int | None]:
    known: list[int | None] = []
    for layer in layers:
        known.append(layer if layer is not None or not known else known[-1])
    return known


def _layer(module: str) -> int | None:
    found = _LAYER.search(module)
    return int(found.group(1)) if found else None


def _renumbered(module: str, number: Callable[[int], int]) -> str:
    return _LAYER.sub(lambda found: found.group(0).replace(found.group(1), str(number(int(found.group(1))))), module, 1)


def _piece_line(entry: PieceEntry, times: int, number: Callable[[int], int]) -> PieceLine:
    kinds = Counter[InputKind](given.kind for given in entry.inputs)
    held = tuple(dict.fromkeys(given.slot for given in entry.inputs if given.kind == "held"))
    modules = tuple(_renumbered(module, number) for module in entry.modules)
    return PieceLine(
        entry.key[:12], times, entry.kernels, modules, held, kinds["parameter"], kinds["made"], entry.results
    )


def _slot_line(slot: Slot) -> SlotLine:
    sizes = ", ".join("rows" if size is None else str(size) for size in slot.shape)
    return SlotLine(
        slot.name, f"{str(slot.dtype).removeprefix('torch.')}[{sizes}]", slot.bytes_per_row, slot.constant_bytes
    )


def _lines(found: Iterable[Offence], weigh: Weigh, number: Callable[[int], int]) -> tuple[CutLine, ...]:
    counts: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for node, why in found:
        op = target_text(node) if node.op == "call_function" else f"%{node.name}"
        module = meta.info(node).layer or meta.module_path(node)
        layer = _layer(module)
        counts[op, why] += weigh(layer, layer)
        first.setdefault((op, why), (_renumbered(module, number), meta.source_line(node)))
    return tuple(CutLine(*kind, round(counts[kind]), *place) for kind, place in first.items())
