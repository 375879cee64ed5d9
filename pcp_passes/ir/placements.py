# SPDX-License-Identifier: Apache-2.0
"""Placements: where the token rows of a value live, and in which order.

Three are enough for the body of a decoder (``P`` ranks, ``M`` rank-local rows, padded to the same count on all ranks):

======================  ============  ======================================================================
placement               rows          meaning
======================  ============  ======================================================================
``Shard(dim)``          ``M``         this rank's rows, in the order the step plan gave them ("local")
``RankMajor()``         ``P * M``     rows of rank 0, then rank 1, ...: what an all-gather of ``Shard(0)`` gives
``Replicate()``         no token dim  the same value on every rank: weights, tables, scalars
======================  ============  ======================================================================

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
    """Rank-local token rows along ``dim``."""

    dim: int = 0

    def __str__(self) -> str:
        return f"shard({self.dim})"


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


Placement = Shard | RankMajor | Replicate
