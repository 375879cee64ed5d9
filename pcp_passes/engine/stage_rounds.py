# SPDX-License-Identifier: Apache-2.0
"""How a rank that is not on the last pipeline stage keeps its state: from the round state that the last stage ships.

Such a rank runs a step, but what was sampled is known on the last stage alone. Rows of a step that sample wait for
their round; rows in the middle of a prefill do not, for nothing of theirs can be rejected. A later step waits only for
the rounds that it needs: those up to the last one that shares a sampling row with it, in the order of the steps::

    step 4  A B     step 5  C D     step 6  A      before step 6 the round of step 4 is applied, that of 5 is not

A row may have been freed and given to another request in between: its generation tells.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from pcp_passes.distributed.stages.round_state import StashedStep
from pcp_passes.distributed.stages.rounds import RoundReceiver
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.engine.state import DeviceState
from pcp_passes.errors import PcpError


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A step that ran here and whose round was not applied: its sampling rows, each with its generation."""

    step: int
    batch: ScheduledBatch
    sampling: frozenset[tuple[int, int]]


class StageRounds:
    """Rounds of one rank. ``receiver``: its end of the transport; ``state``: what rounds advance."""

    def __init__(self, receiver: RoundReceiver, state: DeviceState) -> None:
        self.receiver, self.state = receiver, state
        self._waiting: deque[_Waiting] = deque()
        self._sampled: dict[int, torch.Tensor] = {}

    @property
    def waiting(self) -> tuple[int, ...]:
        """Steps whose rounds are still to come, oldest first."""
        return tuple(one.step for one in self._waiting)

    def stash(self, batch: ScheduledBatch) -> None:
        """A real step ran: remember what its round will be about, and advance the rows that sample nothing."""
        entries, generations = batch.entries, self.state.generations
        self.receiver.stash(
            StashedStep(
                batch.step,
                rows=tuple(entry.row for entry in entries),
                generations=tuple(int(generations[entry.row]) for entry in entries),
                lengths=tuple(entry.length for entry in entries),
                drafts=tuple(entry.drafts for entry in entries),
                next_prefill=tuple(entry.next_prefill for entry in entries),
            )
        )
        sampling = frozenset((entry.row, int(generations[entry.row])) for entry in entries if entry.samples)
        self._waiting.append(_Waiting(batch.step, batch, sampling))
        self.state.advance_prefills(batch)

    def catch_up(self, batch: ScheduledBatch) -> None:
        """Before ``batch`` is prepared: apply the rounds that its rows depend on, and no later one."""
        generations = self.state.generations
        rows = {(entry.row, int(generations[entry.row])) for entry in batch.entries}
        needed = [place for place, one in enumerate(self._waiting) if rows & one.sampling]
        for _ in range(needed[-1] + 1 if needed else 0):
            self._apply()

    def sampled_of(self, step: int) -> torch.Tensor:
        """Sampled tokens i64[R, K+1] of a step that ran here, once; waits for its round.

        Raises:
            PcpError: no such step waits, or its tokens were taken already.
        """
        while step not in self._sampled:
            if not self._waiting or self._waiting[0].step > step:
                raise PcpError(
                    f"step {step} has no round to come on this stage; waiting are {list(self.waiting)}. Take the "
                    "results of each step once, in the order of the steps."
                )
            self._apply()
        return self._sampled.pop(step)

    def drain(self) -> None:
        """Take in all rounds that are still to come, and forget their tokens: those of an engine that was left."""
        while self._waiting:
            self._apply()
        self._sampled.clear()

    def _apply(self) -> None:
        one, found = self._waiting.popleft(), self.receiver.receive()
        if found.stash.step != one.step:
            raise PcpError(f"a round of step {found.stash.step} came where that of step {one.step} is due.")
        self._sampled[one.step] = found.sampled
        current = found.current(self.state.generations)
        self.state.apply_round(one.batch, current, found.advance, found.derived.next_token, found.drafts)
