# SPDX-License-Identifier: Apache-2.0
"""Counters of drafted and accepted tokens, per draft position.

Acceptance is the most sensitive alarm for a corrupted cache or a misplaced row: the target's own tokens hide a wrong
drafter, its acceptance does not. The definitions are vLLM's: a *round* is one request verifying at least one draft;
acceptance rate is accepted over drafted tokens; acceptance length is tokens per round, the bonus token included.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from pcp_passes.errors import ConfigError

logger = logging.getLogger(__name__)


class AcceptanceSummary(TypedDict):
    """What ``AcceptanceCounters.summary`` returns; ratios are None until something was drafted."""

    rounds: int
    drafted: int
    accepted: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    rate_per_position: list[float | None]
    acceptance_rate: float | None
    acceptance_length: float | None


@dataclass(frozen=True)
class StepRecord:
    """One step: drafts verified and accepted of each request that verified any."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class AcceptanceCounters:
    """Counts over steps, on the host.

    Args:
        steps: K, the most drafts a request verifies in a step; 0 for no drafter.
        floor: acceptance rate in 0..1 below which a window is warned of; None never warns.
        window: rounds per window. A window closes at the end of the step that fills it, with at most one warning.
        keep_steps: how many of the latest steps ``records`` holds; None keeps all.

    Raises:
        ConfigError: a negative count or a floor outside 0..1.
    """

    def __init__(
        self, steps: int, *, floor: float | None = None, window: int = 1000, keep_steps: int | None = 0
    ) -> None:
        if steps < 0 or window < 1 or (keep_steps is not None and keep_steps < 0):
            raise ConfigError(
                f"AcceptanceCounters needs steps >= 0, window >= 1 and keep_steps >= 0 or None; found steps={steps}, "
                f"window={window}, keep_steps={keep_steps}."
            )
        if floor is not None and not 0.0 <= floor <= 1.0:
            raise ConfigError(f"The acceptance floor is a share of drafted tokens, 0 to 1; found {floor}.")
        self.steps, self.floor, self.window = steps, floor, window
        self.rounds = 0
        self.drafted = [0] * steps
        """Tokens drafted at each position."""
        self.accepted = [0] * steps
        """Tokens accepted at each position."""
        self.records: deque[StepRecord] = deque(maxlen=keep_steps)
        self._seen = (0, 0, 0)
        """Rounds, drafted and accepted tokens when the window opened."""

    def record(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count one step: for each request, drafts verified and how many of them were accepted.

        A request that verified none may be listed with 0; it does not count as a round.

        Raises:
            ConfigError: counts that cannot be, before anything is counted.
        """
        pairs = list(zip(map(int, drafted), map(int, accepted), strict=False))
        wrong = [f"request {r}: {d} drafted, {a} accepted" for r, (d, a) in enumerate(pairs) if not 0 <= a <= d]
        wrong += [
            f"request {r}: {d} drafted of at most {self.steps}" for r, (d, _) in enumerate(pairs) if d > self.steps
        ]
        if len(drafted) != len(accepted):
            wrong.append(f"{len(drafted)} requests drafted and {len(accepted)} accepted")
        if wrong:
            raise ConfigError(
                f"A step cannot have these counts: {'; '.join(wrong)}. Pass the drafts that were verified."
            )
        rounds = [(d, a) for d, a in pairs if d > 0]
        if not rounds:
            return
        self.rounds += len(rounds)
        for d, a in rounds:
            for position in range(d):
                self.drafted[position] += 1
                self.accepted[position] += position < a
        self.records.append(StepRecord(tuple(d for d, _ in rounds), tuple(a for _, a in rounds)))
        self._close_window()

    def _close_window(self) -> None:
        now = (self.rounds, sum(self.drafted), sum(self.accepted))
        rounds, drafted, accepted = (new - old for new, old in zip(now, self._seen, strict=True))
        if rounds < self.window:
            return
        self._seen = now
        if self.floor is not None and accepted < self.floor * drafted:
            logger.warning(
                "Draft acceptance is %.1f %% over the last %d rounds, under the floor of %.1f %%. A drafter that fits "
                "its target does not drop on its own: compare acceptance with PCP=1 (pcp generate).",
                100.0 * accepted / drafted, rounds, 100.0 * self.floor,
            )  # fmt: skip

    def merge(self, other: AcceptanceCounters) -> AcceptanceCounters:
        """The counts of both, with this one's floor, a fresh window, and this one's records before the other's.

        Raises:
            ConfigError: counters of a different number of draft steps.
        """
        if other.steps != self.steps:
            raise ConfigError(
                f"Acceptance counters of {self.steps} and {other.steps} draft steps do not add up; merge equal ones."
            )
        both = AcceptanceCounters(self.steps, floor=self.floor, window=self.window, keep_steps=self.records.maxlen)
        both.rounds = self.rounds + other.rounds
        both.drafted = [mine + theirs for mine, theirs in zip(self.drafted, other.drafted, strict=True)]
        both.accepted = [mine + theirs for mine, theirs in zip(self.accepted, other.accepted, strict=True)]
        both.records.extend([*self.records, *other.records])
        both._seen = (both.rounds, sum(both.drafted), sum(both.accepted))
        return both

    def summary(self) -> AcceptanceSummary:
        """Totals and ratios, as plain numbers that JSON can hold."""
        drafted, accepted = sum(self.drafted), sum(self.accepted)
        return AcceptanceSummary(
            rounds=self.rounds,
            drafted=drafted,
            accepted=accepted,
            drafted_per_position=list(self.drafted),
            accepted_per_position=list(self.accepted),
            rate_per_position=[a / d if d else None for d, a in zip(self.drafted, self.accepted, strict=True)],
            acceptance_rate=accepted / drafted if drafted else None,
            acceptance_length=1 + accepted / self.rounds if self.rounds else None,
        )
