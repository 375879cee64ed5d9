# SPDX-License-Identifier: Apache-2.0
"""Round state: what the last pipeline stage decided in a step, told to the stages before it.

Only the last stage samples and drafts, and every stage needs the outcome: the next step's input ids are the sampled
token and the drafts after it, and its positions follow from how many drafts were accepted. So after each step the last
stage ships two payloads of shapes that every stage knows from the schedule alone (R requests, K drafts)::

    sampled  i64[R, K+1]    accepted drafts and the token after them, then -1      (K = 0: one payload, i64[R, 1])
    drafts   i64[R, K]      for the next step; only when K > 0

A receiver derives the rest from ``sampled`` and from what it stashed when it executed the step itself. With K = 2::

    sampled      [[7, 9, -1], [4, -1, -1], [-1, -1, -1]]    the third request is in the middle of its prefill,
    scheduled    [2, 1, 0]                                  whose next prompt token is 5
    accepted     [1, 0, 0]      leading valid tokens, less the one that the target adds
    num_rejected [1, 1, 0]
    next_token   [9, 4, 5]

Several rounds may be in flight, first in, first out. A row of the device state that was freed and given to another
request in between is told by its generation: :meth:`Round.current`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pcp_passes.errors import ConfigError

Drafts = Literal["tensor", "list"]


@dataclass(frozen=True)
class RoundForm:
    """What both ends fix by construction.

    Attributes:
        steps: K, drafts per request and step; 0 without a drafter.
        drafts: ``"tensor"``: the drafts are sent; ``"list"``: they are lists on the host (n-gram), which the scheduler
            hands to every stage; zeros travel in their place and are never read.
    """

    steps: int
    drafts: Drafts = "tensor"

    def __post_init__(self) -> None:
        if self.steps < 0 or self.drafts not in ("tensor", "list"):
            raise ConfigError(
                f"a round needs steps >= 0 and drafts 'tensor' or 'list'; found steps={self.steps}, "
                f"drafts={self.drafts!r}."
            )

    def shapes(self, requests: int) -> tuple[tuple[int, int], ...]:
        """Shapes of the payloads of a step of ``requests`` requests, in the order they are sent."""
        sampled = (requests, self.steps + 1)
        return (sampled,) if self.steps == 0 else (sampled, (requests, self.steps))


@dataclass(frozen=True, eq=False)
class Derived:
    """i64[R] each, as :class:`pcp_passes.step.inputs.StepOutputs` has them on the last stage."""

    accepted: torch.Tensor
    """Drafts of the step that were accepted."""
    num_rejected: torch.Tensor
    """Drafts of the step that were not."""
    num_sampled: torch.Tensor
    """0 for a request in the middle of its prefill."""
    next_token: torch.Tensor
    """Last sampled token, or the next prompt token."""


def derive(sampled: torch.Tensor, scheduled_drafts: torch.Tensor, next_prefill: torch.Tensor) -> Derived:
    """What a step did, from the tokens it sampled. Nothing is read back; see the example above.

    Args:
        sampled: i64 ``[R, K + 1]``; the leading tokens that are not negative count.
        scheduled_drafts: i64 ``[R]``, drafts that the step verified.
        next_prefill: i64 ``[R]``, the next prompt token of a request in the middle of its prefill, else -1.
    """
    num_sampled = (sampled >= 0).long().cumprod(1).sum(1)
    accepted = (num_sampled - 1).clamp(min=0)
    last = sampled.gather(1, accepted[:, None]).squeeze(1)
    prefilling = next_prefill >= 0
    return Derived(accepted, scheduled_drafts - accepted, num_sampled, torch.where(prefilling, next_prefill, last))


@dataclass(frozen=True)
class StashedStep:
    """What a stage keeps of a step until its round arrives: one number per request of the batch each.

    Attributes:
        step: number of the step.
        rows: of the device state.
        generations: of these rows when the step was executed.
        lengths: tokens of the step.
        drafts: drafts among them.
        next_prefill: the next prompt token of a request in the middle of its prefill, else -1.
    """

    step: int
    rows: tuple[int, ...]
    generations: tuple[int, ...]
    lengths: tuple[int, ...]
    drafts: tuple[int, ...]
    next_prefill: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = [len(x) for x in (self.rows, self.generations, self.lengths, self.drafts, self.next_prefill)]
        assert len(set(sizes)) == 1, f"step {self.step}: a stash of {sizes} values, one per request each"


@dataclass(frozen=True, eq=False)
class Round:
    """One step's outcome on a stage that did not sample; tensors are on the CPU.

    Attributes:
        stash: what the stage kept of the step.
        sampled: i64[R, K+1].
        drafts: i64[R, K], empty for K = 0; None for drafts that are lists on the host.
        derived: what follows from ``sampled``.
    """

    stash: StashedStep
    sampled: torch.Tensor
    drafts: torch.Tensor | None
    derived: Derived

    @property
    def advance(self) -> torch.Tensor:
        """i64[R], tokens of the step that stay: the optimistic length less what was rejected."""
        return torch.tensor(self.stash.lengths, dtype=torch.int64) - self.derived.num_rejected

    def current(self, generations: Sequence[int]) -> torch.Tensor:
        """bool[R], requests whose row was not given to another since; ``generations`` holds one per row *now*."""
        pairs = zip(self.stash.rows, self.stash.generations, strict=True)
        return torch.tensor([generations[row] == held for row, held in pairs], dtype=torch.bool)
