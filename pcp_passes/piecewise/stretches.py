# SPDX-License-Identifier: Apache-2.0
"""Which kernels of a body are one piece, and which stay eager: decided, before anything is rewritten."""

from __future__ import annotations

from typing import Any

from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.ir import meta
from pcp_passes.piecewise.cuts import (
    NO_ROWS,
    base_of,
    has_rows,
    is_size,
    is_view,
    odd_value,
    part_of,
    reason_to_cut,
)
from pcp_passes.piecewise.pieces import Collectives, is_hold

_CALLS = ("call_function", "call_method")


class Stretches:
    """Kernels of a body by the piece they belong to.

    An eager kernel is one whose op is a cut, one that makes or reads a value with an odd size across a border, or one
    of a stretch without a row input; each has a reason. Kernels that nothing reads belong to no piece.

    Attributes:
        reasons: eager calls in graph order, each with why.
        pieces: members of each piece in graph order; parts of several results count as members.
        piece_of: piece of each member.
        readers: of each value that is no view, the kernels (and the output node) that read it, also through views.
    """

    def __init__(self, graph: fx.Graph, symbol: Any, collectives: Collectives) -> None:
        self.symbol = symbol
        self.collectives = collectives
        self.reasons: dict[fx.Node, str] = {}
        self.pieces: list[list[fx.Node]] = []
        self.piece_of: dict[fx.Node, int] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self._reads: dict[fx.Node, list[fx.Node]] = {}
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self._kernels = self._find_kernels()
        while True:
            self._group()
            if not self._cut_misfits():
                break
        self.reasons = dict(sorted(self.reasons.items(), key=lambda found: self._order[found[0]]))

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The values a kernel reads, seen through views, in the order of its arguments."""
        return self._reads[node]

    def _find_kernels(self) -> list[fx.Node]:
        """Kernels that are eager or that something reads; fills ``readers``."""
        kernels: list[fx.Node] = []
        live: set[fx.Node] = set()
        for node in reversed(self._order):
            if node.op != "output" and (node.op not in _CALLS or is_hold(node) or is_size(node) or is_view(node)):
                continue
            reason = reason_to_cut(node, self.collectives) if node.op in _CALLS and part_of(node) is node else None
            if reason is not None:
                self.reasons[node] = reason
            if reason is None and node.op != "output" and node not in live:
                continue
            operands = (n for n in node.all_input_nodes if not is_size(n) and meta.holds_tensor(n))
            self._reads[node] = list(dict.fromkeys(map(base_of, operands)))
            live.update(self._reads[node])
            for base in self._reads[node]:
                self.readers.setdefault(base, []).append(node)
            if node.op != "output":
                kernels.append(node)
        return kernels[::-1]

    def _group(self) -> None:
        self.pieces, self.piece_of = [], {}
        within = False
        for node in self._kernels:
            if part_of(node) in self.reasons:
                within = False
                continue
            if not within:
                self.pieces.append([])
                within = True
            self.pieces[-1].append(node)
            self.piece_of[node] = len(self.pieces) - 1

    def outside(self, node: fx.Node, index: int) -> bool:
        """Whether a value is made or used outside piece ``index``."""
        return self.piece_of.get(node) != index

    def leaves(self, node: fx.Node) -> bool:
        """Whether a member's value is read outside its piece."""
        return any(self.outside(reader, self.piece_of[node]) for reader in self.readers.get(node, ()))

    def _cut_misfits(self) -> bool:
        """Make eager what does not fit a border; whether there was any."""
        before = len(self.reasons)
        for index, members in enumerate(self.pieces):
            inputs = [base for node in members for base in self._reads[node] if self.outside(base, index)]
            if not any(has_rows(base, self.symbol) for base in inputs):
                self.reasons.update((part_of(node), NO_ROWS) for node in members)
                continue
            for node in members:
                reason = self._misfit(node, index)
                if reason is not None:
                    self.reasons[part_of(node)] = reason
                    self.piece_of.pop(node)  # so that what reads it is seen to read across a border
        return len(self.reasons) > before

    def _misfit(self, node: fx.Node, index: int) -> str | None:
        for base in self._reads[node]:
            if self.outside(base, index) and (why := odd_value(base, self.symbol)):
                return why
        inside = self.collectives == "inside" and is_collective(part_of(node))
        return odd_value(node, self.symbol) if self.leaves(node) and not inside else None
