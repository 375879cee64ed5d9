# SPDX-License-Identifier: Apache-2.0
"""What one rank of a running engine has beside its collectives: agreement, heartbeat, log and divergence watch.

All of them span every rank of the mesh, whatever group it is in: a replica cannot go on without another one that holds
experts of its own, and no stage without the others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from pcp_passes.distributed.agreement import require_agreement
from pcp_passes.distributed.store import Store, TCPStore, bounded, first_line, open_store
from pcp_passes.distributed.watch.blackbox import BlackBox, exchange_boxes
from pcp_passes.distributed.watch.divergence import DivergenceWatch, NameOf, loss_of
from pcp_passes.distributed.watch.heartbeat import Heartbeat
from pcp_passes.distributed.watch.loss import Loss
from pcp_passes.distributed.watch.runlog import RunLog
from pcp_passes.errors import PeerLost

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Guard:
    """Of one rank, from :meth:`start` to :meth:`close`. Every rank of the world makes one, and starts it.

    Args:
        log: of this rank; also says which rank it is.
        world: ranks of the mesh.
        bootstrap: a store that they share.
        host: address of rank 0's machine.
        timeout_s: seconds to wait for the others at the start.
        silence_s: see :class:`Heartbeat`; after two thirds of it, a rank that waits raises the alarm.
        on_lost, reason_file: see :class:`Heartbeat`.
        name_of: how a rank is called in messages.
        boxes: keep a black box; where a group is one of gloo.

    Raises:
        PeerLost: rank 0 cannot be reached.
    """

    def __init__(
        self, log: RunLog, world: int, *, bootstrap: Store, host: str, timeout_s: float, silence_s: float,
        on_lost: Callable[[Loss], None], reason_file: str | os.PathLike[str] | None, name_of: NameOf, boxes: bool,
    ) -> None:  # fmt: skip
        self.log, self.world, self.silence_s, self._timeout_s, self._boxes = log, world, silence_s, timeout_s, boxes
        self._name_of = name_of

        def connect(name: str) -> TCPStore:
            return open_store(host, rank=log.rank, world=world, bootstrap=bootstrap, name=name, timeout_s=timeout_s)

        # Both before the agreement: nobody leaves it, and perhaps closes the store, before all are connected.
        self._agreeing, self._watching = connect("engine/agreement"), connect("engine/heartbeat")
        self.watch = DivergenceWatch(
            self._watching, log, world, self._found, stall_s=2 * silence_s / 3, name_of=name_of
        )  # fmt: skip
        self.heartbeat = Heartbeat(
            self._watching, rank=log.rank, world=world, silence_s=silence_s, on_lost=on_lost, reason_file=reason_file,
            name_of=name_of, explain=self.watch.explain,
        )  # fmt: skip

    def start(self, facts: Mapping[str, str], texts: Mapping[str, str]) -> None:
        """Agree on ``facts`` and ``texts`` with all ranks (:func:`require_agreement`), then watch them.

        Raises:
            RankMismatch: ranks that differ in one.
            PeerLost: a rank that did not come.
        """
        rank, world = self.log.rank, self.world
        require_agreement(
            self._agreeing, rank=rank, world=world, topic="engine", facts=facts, texts=texts, timeout_s=self._timeout_s
        )
        if self._boxes:
            box = self.log.box = BlackBox()
            try:
                self.watch.boxes = bounded(
                    lambda: exchange_boxes(self._agreeing, box, rank, world), timeout_s=self._timeout_s,
                    waiting_for="rank 0, which hosts the store, about the logs of this machine",
                )  # fmt: skip
            except RuntimeError as error:
                raise PeerLost(
                    f"rank {rank} lost the store of rank 0 at the start: {first_line(error)}\n"
                    "  next  look at the first error of rank 0, then restart all ranks"
                ) from error
            finally:
                box.unlink()
        self.heartbeat.start()
        self.watch.start()

    def _found(self, divergence: object) -> None:
        assert self.watch.found is not None
        self.heartbeat.tell(loss_of(self.watch.found, self.log.rank))

    def or_lost(self, call: Callable[[], T]) -> T:
        """``call()``; a collective that fails is often the first sign of a lost peer: say which, if that is why.

        Raises:
            PeerLost, RankMismatch: the reason behind a RuntimeError, where one is found within ``silence_s`` seconds.
        """
        try:
            return call()
        except RuntimeError as error:
            if left := self._left():
                raise PeerLost(
                    f"{left}; then {first_line(error)}\n  next  look at the first error of that rank, and see that no "
                    "rank is closed before the others are done; restart all ranks"
                ) from error
            slow = self.watch.slow  # what it waited for until it failed, e.g. by the timeout of its group
            with self.watch.suspecting():
                self.heartbeat.raise_if_lost(wait_s=self.silence_s)
            if slow:
                raise PeerLost(
                    f"{slow}; then {first_line(error)}\n  next  look at what that rank does, and see that every rank "
                    "is stepped as often as the others; restart all ranks"
                ) from error
            raise

    def _left(self) -> str:
        """Says that this rank waits for one that has closed its engine, as after an error of its own."""
        waiting = self.log.waiting
        gone = [] if waiting is None else [rank for rank in waiting.peers if rank in self.heartbeat.departed]
        if waiting is None or not gone:
            return ""
        entry = self.log.post(0.0).groups[waiting.group].at(waiting.number) or "an earlier step"
        mine, names = self._name_of(self.log.rank), ", ".join(map(self._name_of, gone))
        return f"{mine} waits in {entry} of group {waiting.group} for {names}, which said goodbye"

    def close(self) -> None:
        """Say goodbye to the other ranks."""
        self.watch.stop()
        self.heartbeat.stop(linger_s=1.0)
