# SPDX-License-Identifier: Apache-2.0
"""Round states over a process group, written into the log of the rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from pcp_passes.distributed.stages.round_transport import GroupTransport, Ticket
from pcp_passes.distributed.watch.runlog import RunLog, Waiting


class LoggedTransport(GroupTransport):
    """:class:`GroupTransport` whose broadcasts, and the waits for them, are in ``log``.

    Args:
        group: CPU group of the stages; the last one sends.
        ranks: of the world, by stage.
        log: of this rank.
        device_group: the group of the wires.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], log: RunLog, *,
        device_group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(group, device_group=device_group)
        self._log, self._ranks = log, tuple(ranks)

    def broadcast(self, payload: torch.Tensor) -> Ticket:
        """See :class:`GroupTransport`."""
        return self._broadcast(self._log.step, payload)

    def later(self) -> Callable[[torch.Tensor], Ticket]:
        """See :class:`GroupTransport`. By then this rank may be in a later step, and the others log this one's."""
        return partial(self._broadcast, self._log.step)

    def _broadcast(self, step: int, payload: torch.Tensor) -> Ticket:
        said = self._log.talk("rounds", self._ranks, "broadcast", payload.shape, payload.dtype, step=step)
        # Receivers issue theirs ahead of time, so what a receiver waits for is the source, and the source for them.
        peers = tuple(rank for rank in self._ranks if rank != self._log.rank)
        waiting = said._replace(peers=peers if self.is_source else (self._ranks[self.source],))
        return _LoggedTicket(super().broadcast(payload), self._log, waiting)


@dataclass(frozen=True)
class _LoggedTicket:
    ticket: Ticket
    log: RunLog
    waiting: Waiting

    def wait(self, timeout_s: float) -> None:
        with self.log.waiting_for(self.waiting):
            self.ticket.wait(timeout_s)
