# SPDX-License-Identifier: Apache-2.0
"""How many rows each data-parallel replica brings to a collective over ``dp``: the token metadata of a lockstep step.

Replicas schedule alone, so their batches have other sizes. What meets over ``dp`` are rank-local rows, so the counts
are those *after* the layout dealt a batch to the PCP ranks and padded them, never the tokens of the global batch::

    replica 0: 11 tokens, PCP=2    ranks hold 6 and 5 rows, padded to 6        tokens[0] = 6
    replica 1:  3 decodes          every rank holds all of them                tokens[1] = 3

They are the same on all PCP ranks of a replica, because the padded count is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcp_passes.errors import ConfigError

DP_AXIS = "dp"
"""Axis of the replicas in graphs that dispatch rows to experts."""


@dataclass(frozen=True)
class PeerRows:
    """What every replica brings to one step. All replicas hold equal counts.

    Attributes:
        tokens: per replica, padded rows of one rank in a call over the tokens of the step.
        requests: per replica, requests of the step. A draft query has a constant number of rows for each.
        replica: index of this rank's replica in both.

    Raises:
        ConfigError: counts of other lengths, or below 1: every replica joins every call with at least a row.
    """

    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    replica: int

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.requests) or not 0 <= self.replica < len(self.tokens):
            raise ConfigError(
                f"peer rows: found {len(self.tokens)} token counts and {len(self.requests)} request counts for replica "
                f"{self.replica}; required one of each per replica."
            )
        if min(*self.tokens, *self.requests) < 1:
            raise ConfigError(
                f"peer rows: found tokens {self.tokens} and requests {self.requests}; required at least 1 each. "
                "A replica without work runs a dummy step."
            )

    @property
    def replicas(self) -> int:
        """Size of the ``dp`` axis."""
        return len(self.tokens)


def rows_of_call(peers: PeerRows, per_request: int) -> tuple[int, ...]:
    """Rows that each replica brings to one body call.

    Args:
        peers: of the step.
        per_request: 0 where the call runs the tokens of the step; otherwise the rows of each request in a draft query.
    """
    if per_request < 0:
        raise ConfigError(f"rows per request must be at least 0 (rows of tokens), found {per_request}.")
    return tuple(count * per_request for count in peers.requests) if per_request else peers.tokens


def flattened_sizes(
    tokens: Sequence[int], pcp: int, tp: int = 1, *, sequence_parallel: bool = False
) -> tuple[int, ...]:
    """Rows of every expert-parallel rank, in the flattened order ``(dp, pcp, tp)``.

    Args:
        tokens: rank-local padded rows per replica (:attr:`PeerRows.tokens`).
        pcp, tp: sizes of the axes within a replica.
        sequence_parallel: rows of a rank are dealt to the tp ranks, ``ceil(n / tp)`` each; the sizes repeat over PCP.
    """
    if pcp < 1 or tp < 1:
        raise ConfigError(f"sizes of pcp and tp must be at least 1, found {pcp} and {tp}.")
    held = [-(-count // tp) if sequence_parallel else count for count in tokens]
    return tuple(count for count in held for _ in range(pcp * tp))
