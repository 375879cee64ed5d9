# SPDX-License-Identifier: Apache-2.0
"""How the rounds of the last pipeline stage travel to the others: over a CPU process group, or within one process.

A transport has one verb. On the last stage ``broadcast`` sends a payload; on the others it fills one; the calls are in
the same order on all of them, and none waits: what it returns does.

The group is one of gloo that nothing else uses. A broadcast on the devices' group would share its communicator with the
sends and receives between stages, whose order against it differs from stage to stage: they wait for each other for
ever. And the receivers issue a broadcast as soon as they know its shape, long before they need what it brings: a
broadcast passes through receivers, and one that issued it late would hold up those behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from pcp_passes.errors import ConfigError, PcpError, PeerLost


class Ticket(Protocol):
    """A broadcast on its way."""

    def wait(self, timeout_s: float) -> None:
        """Return when the payload is sent, or filled.

        Raises:
            PeerLost: not within ``timeout_s`` seconds.
            RuntimeError: the connection to a peer broke.
        """


class RoundTransport(Protocol):
    """One end of a channel from the last stage to the others."""

    is_source: bool

    def broadcast(self, payload: torch.Tensor) -> Ticket:
        """Begin to send ``payload``, or to fill it; it is a contiguous CPU tensor that nobody touches before a wait."""

    def later(self) -> Callable[[torch.Tensor], Ticket]:
        """:meth:`broadcast` for a round of the step that runs now, to be called on another thread when it is ready."""


class GroupTransport:
    """Broadcasts over a process group of gloo whose ranks are the stages, in order.

    Args:
        group: used for nothing else.
        source: rank in ``group`` that sends; by default the last.
        device_group: the group of the sends and receives between stages, if there is one, to refuse it here.
        on_issue: called with each payload when its broadcast is issued, for a log of collectives.

    Raises:
        ConfigError: a group of devices, or the one that the stages send hidden states on.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int | None = None,
        *,
        device_group: dist.ProcessGroup | None = None,
        on_issue: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        backend = str(dist.get_backend(group))
        if backend != "gloo" or group is device_group:
            found = f"one of {backend!r}" if backend != "gloo" else "the group that the stages send hidden states on"
            raise ConfigError(
                f"the round state travels on a CPU group of its own (gloo), for a broadcast hangs among the sends and "
                f"receives of a device group; found {found}. Make another: dist.new_group(ranks, backend='gloo')."
            )
        self.group, self.on_issue = group, on_issue
        self.source = group.size() - 1 if source is None else source
        self.is_source = group.rank() == self.source

    def broadcast(self, payload: torch.Tensor) -> Ticket:
        """See :class:`RoundTransport`."""
        if self.on_issue is not None:
            self.on_issue(payload)
        work = dist.broadcast(payload, group=self.group, group_src=self.source, async_op=True)
        return _Work(work, payload, f"stage {self.source}" if not self.is_source else "the other stages")

    def later(self) -> Callable[[torch.Tensor], Ticket]:
        """See :class:`RoundTransport`."""
        return self.broadcast


class _Work:
    """Holds the payload, which gloo reads or writes on a thread of its own."""

    def __init__(self, work: dist.Work, payload: torch.Tensor, peers: str) -> None:
        self.work, self.payload, self.peers = work, payload, peers

    def wait(self, timeout_s: float) -> None:
        begin = time.monotonic()
        try:
            self.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - begin < timeout_s:
                raise
            raise PeerLost(
                f"a round of {list(self.payload.shape)} was not passed on by {self.peers} within {timeout_s:.0f} s.\n"
                "  next  look at the first error of these stages, then restart all ranks"
            ) from error


class Mailbox:
    """The stages of one process: what the source broadcasts, each receiver finds in its own box, in order.

    Attributes:
        source: the end of the last stage.
        receivers: one end per other stage, in stage order.
    """

    def __init__(self, receivers: int) -> None:
        boxes: list[deque[torch.Tensor]] = [deque() for _ in range(receivers)]
        self.source: RoundTransport = _Outbox(boxes)
        self.receivers: tuple[RoundTransport, ...] = tuple(_Inbox(box) for box in boxes)


class _Outbox:
    is_source = True

    def __init__(self, boxes: list[deque[torch.Tensor]]) -> None:
        self.boxes = boxes

    def broadcast(self, payload: torch.Tensor) -> Ticket:
        for box in self.boxes:
            box.append(payload.clone())
        return _Sent()

    def later(self) -> Callable[[torch.Tensor], Ticket]:
        return self.broadcast


class _Sent:
    def wait(self, timeout_s: float) -> None:
        """It is in the boxes."""


class _Inbox:
    is_source = False

    def __init__(self, box: deque[torch.Tensor]) -> None:
        self.box = box

    def broadcast(self, payload: torch.Tensor) -> Ticket:
        return _Awaited(self.box, payload)

    def later(self) -> Callable[[torch.Tensor], Ticket]:
        return self.broadcast


class _Awaited:
    """Waits are in the order of the broadcasts, so the oldest letter is the one."""

    def __init__(self, box: deque[torch.Tensor], payload: torch.Tensor) -> None:
        self.box, self.payload = box, payload

    def wait(self, timeout_s: float) -> None:
        if not self.box:
            raise PcpError(
                "a stage waits for a round that the last stage of this process has not sent, and nobody else runs: "
                "run the last stage of a step before a stage asks for the step's round."
            )
        letter = self.box.popleft()
        # As gloo does, a letter of another size fills what it reaches; the reader finds out.
        count = min(letter.numel(), self.payload.numel())
        self.payload.view(-1)[:count] = letter.view(-1)[:count]
