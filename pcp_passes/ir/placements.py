# SPDX-License-Identifier: Apache-2.0
"""Placements: where the token rows of a value live, and in which order.

``P`` ranks, ``M`` rank-local rows, padded to the same count on all ranks:

======================  ============  ======================================================================
placement               rows          meaning
======================  ============  ======================================================================
``Shard(dim)``          ``M``         this rank's rows, in the order the step plan gave them ("local")
``RankMajor()``         ``P * M``     rows of rank 0, then rank 1, ...: what an all-gather of ``Shard(0)`` gives
``Replicate()``         all of them   the same value on every rank: weights, scalars, and rows restored to global order
``Partial()``           any           each rank holds a summand; the value is the sum over the ranks
======================  ============  ======================================================================

A dimension that merges tokens with others is ``Shard(dim, outer, inner)``: its size is ``outer * M * inner``, and token
``t`` of the local rows is at ``(o, t, i)`` of that product. ``view(T, k) -> view(T * k)`` gives ``inner = k``.

Which tokens the rows are (zigzag, interleave, ...) is the layout's business; a graph never says it.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARD = "shard"
"""Marker word for rank-local rows."""

RANK_MAJOR = "rank_major"
"""Marker word for the rows of all ranks, rank after rank."""


@dataclass(frozen=True)
class Shard:
    """Rank-local token rows along ``dim``, which merges ``outer`` blocks of tokens with ``inner`` values per token."""

    dim: int = 0
    outer: int = 1
    inner: int = 1

    def __str__(self) -> str:
        merged = "" if self.outer == self.inner == 1 else f", {self.outer}, {self.inner}"
        return f"shard({self.dim}{merged})"


@dataclass(frozen=True)
class RankMajor:
    """Token rows of every rank along dim 0, rank after rank; padded rows included."""

    def __str__(self) -> str:
        return RANK_MAJOR


@dataclass(frozen=True)
class Replicate:
    """No token dimension; equal on every rank."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Partial:
    """Rows of which each rank holds a summand: what its experts make of the rows that were dispatched to it."""

    def __str__(self) -> str:
        return "partial"


@dataclass(frozen=True)
class Tied:
    """Local rows in an order, or numbers of local rows, that mean something only with the sort ``by`` (a node's name).

    No such value is a selection of its global one, so none can be restored (see :mod:`pcp_passes.aten.experts`).
    """

    by: str
    inner: int

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({self.by}, {self.inner})"


Placement = Shard | RankMajor | Replicate | Partial | Tied
