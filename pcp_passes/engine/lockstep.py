# SPDX-License-Identifier: Apache-2.0
"""Replicas that share experts step together: what each tells the others before a step, and what they make of it.

Experts sharded over replicas meet in every body call, so a step of one replica is a step of all. Each schedules alone
and lays its batch out; then all exchange a :class:`Proposal`, and from the same proposals each takes the same
decisions::

    replica 0   prefill, 6 rows a rank, sharded      all run the sharded program
    replica 1   3 decodes, replicated                a plan from its replicated layout: 3 rows on every rank
    replica 2   nothing to do                        a dummy step of one row, which writes nothing

Counts are rank-local and padded, hence equal on all PCP ranks of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.errors import ConfigError
from pcp_passes.mesh.peer_rows import PeerRows
from pcp_passes.plan import upload
from pcp_passes.step.inputs import StepPlanInputs


@dataclass(frozen=True)
class Proposal:
    """What one replica would run next.

    Attributes:
        tokens: rows of one rank in a call over the tokens of the step, padding included; 0 when it has no step.
        requests: of the step; 0 when it has none.
        sharded: its layout deals tokens to the PCP ranks.
        unfinished: it has requests, or results to collect.
    """

    tokens: int
    requests: int
    sharded: bool
    unfinished: bool

    def to_ints(self) -> tuple[int, int, int, int]:
        """For one row i64[4] of an exchange."""
        return self.tokens, self.requests, int(self.sharded), int(self.unfinished)

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> Proposal:
        """Of :meth:`to_ints`."""
        tokens, requests, sharded, unfinished = values
        return cls(tokens, requests, bool(sharded), bool(unfinished))


NOTHING = Proposal(0, 0, False, False)


class StepExchange(Protocol):
    """How the replicas tell each other, in the order of the ``dp`` axis. Every replica calls it once per step."""

    @property
    def replica(self) -> int:
        """Index of this one."""

    def exchange(self, mine: Proposal) -> Sequence[Proposal]:
        """Those of all replicas, :attr:`replica`'s among them."""


@dataclass(frozen=True)
class Agreement:
    """The proposals of all replicas for one step."""

    proposals: tuple[Proposal, ...]

    @property
    def runs(self) -> bool:
        """Whether any replica has a step: then all run one."""
        return any(one.tokens for one in self.proposals)

    @property
    def sharded(self) -> bool:
        """Which program all run."""
        return any(one.sharded for one in self.proposals)

    @property
    def unfinished(self) -> bool:
        """Whether another step may follow; the same on all replicas."""
        return any(one.unfinished for one in self.proposals)

    def peers(self, replica: int) -> PeerRows:
        """Rows per replica; one without a step brings a dummy of one row."""
        tokens = tuple(max(1, one.tokens) for one in self.proposals)
        requests = tuple(max(1, one.requests) for one in self.proposals)
        return PeerRows(tokens, requests, replica)

    def require_matches(self, replica: int, mine: Proposal) -> None:
        """Whether the exchange gave back what this replica brought.

        Raises:
            ConfigError: it did not, so replicas are numbered otherwise than the exchange orders them.
        """
        count = len(self.proposals)
        found = self.proposals[replica] if replica < count else None
        if found != mine:
            raise ConfigError(
                f"replica {replica} proposed {mine} and the exchange of {count} replicas holds {found} in its place; "
                "order the exchange by the dp axis."
            )


STEP_TOGETHER = (
    "dp={dp} replicas that share experts run every step together; step them through a Fleet, or with GroupExecutors "
    "give each engine an exchange: Engine(executor, exchange=executor.exchange)."
)
"""Why an engine alone refuses a step; formatted with ``dp``."""


def replicated_plan(batch: ScheduledBatch, pcp: int, device: torch.device | str) -> StepPlanInputs:
    """The plan of a rank that holds every token of ``batch``, for a step that runs the sharded program.

    All ranks hold the same rows in the global order, M = T; the cache is written from rank 0's copy. The plan is the
    same on every rank.
    """
    tokens, requests = batch.num_tokens, len(batch.entries)
    order, logits = np.arange(tokens, dtype=np.int64), batch.logit_rows
    starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(batch.lengths, dtype=np.int64)))

    def put(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return upload(values, torch.device(device))

    return StepPlanInputs(
        local_rows=put(order),
        gather_index=put(np.tile(order, pcp)),
        write_mask=put(np.arange(pcp * tokens) < tokens),
        row_request=put(np.arange(requests, dtype=np.int64)),
        row_query_start_loc=put(starts),
        restore_index=put(order),
        sampled_local=put(logits),
        sampled_restore=put(np.arange(len(logits), dtype=np.int64)),
    )
