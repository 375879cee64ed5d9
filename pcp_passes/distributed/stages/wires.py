# SPDX-License-Identifier: Apache-2.0
"""Rows of one pipeline stage to the next, over the ``pp`` group of this PCP rank.

Shapes are not sent: both ends know a step's row count from its layout and the wires from the split. Stages whose
schedulers parted would read rows of other tokens, or fill a buffer only in part, without a word; so a number that
stands for what a stage knows of the step may travel in front, and is compared before anything else is received.

Sends are asynchronous, so that a stage can start on its next step while its rows travel; a tensor is kept until it has
left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from pcp_passes.distributed.watch.runlog import RunLog, Waiting
from pcp_passes.errors import ConfigError, RankMismatch
from pcp_passes.host_reads import allowed
from pcp_passes.plan import upload

NAME = "wires"
SENT, KNOWN = "transfer", "batch"


class WireLike(Protocol):
    """What is known of a wire beforehand: its trailing shape, without rows, and its dtype."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class WireSender:
    """Sends to the next stage.

    Args:
        group: device group of the stages; its ranks are the stages in order.
        ranks: of the world, by stage.
        stage: of this rank.
        log: of this rank.
        in_flight: steps whose rows may be on their way before the oldest is waited for.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], stage: int, log: RunLog, *, in_flight: int
    ) -> None:
        assert 0 <= stage < len(ranks) - 1, f"stage {stage} of {len(ranks)} has no next one"
        self._group, self._log, self._in_flight = group, log, in_flight
        self._pair, self._to = (ranks[stage], ranks[stage + 1]), stage + 1
        self._leaving: deque[tuple[list[torch.Tensor], list[dist.Work], Waiting | None]] = deque()

    def send(self, step: int, wires: Sequence[torch.Tensor], known: int | None = None) -> None:
        """Send ``wires`` of ``step``, in their order. Nobody may write over them afterwards.

        ``known``: 63 bits that the next stage must know as well; None where nobody compares.
        """
        kept, works, waiting = [], [], None
        head = [] if known is None else [(KNOWN, upload(np.array([known], dtype=np.int64), wires[0].device))]
        for op, wire in [*head, *((SENT, wire) for wire in wires)]:
            rows = _as_bytes(wire.contiguous())
            waiting = self._log.talk(NAME, self._pair, op, wire.shape, wire.dtype, step=step)
            if rows.numel():
                kept.append(rows)
                work = dist.isend(rows, group=self._group, group_dst=self._to)
                assert work is not None, "this rank is in the group of its stages"
                works.append(work)
        self._leaving.append((kept, works, waiting))
        while len(self._leaving) > self._in_flight:
            self._wait_for_oldest()

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._leaving:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        _, works, waiting = self._leaving[0]
        with self._log.waiting_for(waiting):
            for work in works:
                work.wait()
        self._leaving.popleft()


class WireReceiver:
    """Receives from the stage before; arguments as of :class:`WireSender`."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], stage: int, log: RunLog, wires: Sequence[WireLike],
        device: torch.device,
    ) -> None:  # fmt: skip
        assert 0 < stage < len(ranks), f"stage {stage} of {len(ranks)} has none before it"
        self._group, self._log, self._wires, self._device = group, log, tuple(wires), device
        self._pair, self._from = (ranks[stage - 1], ranks[stage]), stage - 1

    def receive(self, step: int, rows: int, known: int | None = None) -> tuple[torch.Tensor, ...]:
        """The wires of ``step``, each ``[rows, *wire.shape]``; returns when they are here.

        ``known``: as of :meth:`WireSender.send`, given by both ends or by none.

        Raises:
            RankMismatch: the stage before knows something else of the step; its wires were not received.
            RuntimeError: the other end is gone, or sent another number of bytes.
        """
        if known is not None:
            self._require_same(step, known)
        found = tuple(self._take(step, SENT, (rows, *wire.shape), wire.dtype) for wire in self._wires)
        self._log.wait(None)
        return found

    @allowed("the check of the ranks is for finding faults: switch it off, check_ranks=False, where waiting costs")
    def _require_same(self, step: int, known: int) -> None:
        if int(self._take(step, KNOWN, (1,), torch.int64)) != known:
            raise RankMismatch(
                f"step {step}: stage {self._from} (rank {self._pair[0]}) schedules another batch, or knows other "
                f"tokens of it, than stage {self._from + 1} (rank {self._pair[1]}).\n  next  give all ranks the same "
                "requests, and the same aborts between the same steps, in the same order"
            )

    def _take(self, step: int, op: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype, device=self._device)
        self._log.talk(NAME, self._pair, op, out.shape, out.dtype, step=step, waits_for=self._pair)
        if out.numel():
            work = dist.irecv(_as_bytes(out), group=self._group, group_src=self._from)
            assert work is not None, "this rank is in the group of its stages"
            work.wait()
        return out


def require_wires(wires: Sequence[torch.Tensor], known: Sequence[WireLike], rows: int) -> None:
    """The other end sizes its buffers from these. Raises ConfigError for another shape or dtype."""
    for wire, expected in zip(wires, known, strict=True):
        if tuple(wire.shape) != (rows, *expected.shape) or wire.dtype != expected.dtype:
            raise ConfigError(
                f"wire {expected.name}: the stage gave {wire.dtype}{list(wire.shape)}, and the next one sizes its "
                f"buffer for {expected.dtype}{[rows, *expected.shape]}; split the program again for these inputs."
            )


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats travel as bytes: not every back end knows them."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x
