# SPDX-License-Identifier: Apache-2.0
"""What one rank told its groups, in order: collectives, wires between stages, round states, exchanges of replicas.

Each group has a log of its own, for only within a group must the order be the same. An entry is written *before* the
call, so the last entry of a rank that waits names what it waits for. Writing is one append to a list; all else (text,
comparison, publishing) is done by whoever reads, see :mod:`pcp_passes.distributed.watch.divergence`.

Of two ranks that talk by ``send`` and ``recv`` both log the transfer, under one name, in a group of the two.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pcp_passes.collectives import Collective, CollectiveLog

if TYPE_CHECKING:
    from pcp_passes.distributed.watch.blackbox import BlackBox

KEPT = 512
"""Entries kept per group: enough for the first difference of ranks that still run into a common wait."""


class Entry(NamedTuple):
    """One call. ``order``: which collective of the program ``variant`` it is; ``variant`` is "" beside a program."""

    step: int
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    variant: str = ""
    order: int = 0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"step {self.step} {self.op.removeprefix('pcp::')}({dtype}{list(self.shape)})"


class Waiting(NamedTuple):
    """Where a rank may wait: in entry number ``number`` of a group (from 1), until ``peers`` have come as far."""

    group: str
    number: int
    peers: tuple[int, ...]


def group_key(name: str, ranks: Sequence[int]) -> str:
    """Name of one group among those of the same kind: ``pcp[2,3]``."""
    return f"{name}[{','.join(map(str, ranks))}]"


class GroupLog:
    """The last :data:`KEPT` entries of one group, and how many there were."""

    def __init__(self, members: tuple[int, ...], kept: int | None) -> None:
        self.members, self.count = members, 0
        self.tail: deque[Entry] = deque(maxlen=kept)

    def append(self, entry: Entry) -> int:
        """Returns the entry's number, from 1."""
        self.tail.append(entry)
        self.count += 1
        return self.count


class RunLog(CollectiveLog):
    """Everything this rank issues, by group.

    Args:
        rank: of the world.
        axes: ranks of the world in this rank's group of each axis that a graph names.
        kept: entries kept per group; None keeps all (tests).
        source: ``(variant, n)`` to where the n-th collective of that program stands; may answer "".
    """

    def __init__(
        self,
        rank: int,
        axes: Mapping[str, Sequence[int]],
        *,
        kept: int | None = KEPT,
        source: Callable[[str, int], str] | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.source = rank, source
        self._kept = kept
        self._axes = {axis: tuple(ranks) for axis, ranks in axes.items()}
        self._keys = {axis: group_key(axis, ranks) for axis, ranks in self._axes.items()}
        self._lock = threading.Lock()
        self.logs: dict[str, GroupLog] = {}
        self.step, self.variant, self._order = -1, "", 0
        self.total = 0
        """Entries so far; a reader sees by it that this rank goes on."""
        self.waiting: Waiting | None = None
        self.inside, self.closed = False, False
        """Whether this rank is in a step; whether it has left."""
        self.queued: dict[str, Waiting] | None = None
        """Last call by group where a call returns before it is done, as on a GPU: an earlier one may be what hangs."""
        self.box: BlackBox | None = None
        """Where entries are also kept for the others to read when this rank dies."""

    def begin(self, step: int, variant: str) -> None:
        """The entries that follow belong to the program ``variant`` of step ``step``."""
        self.step, self.variant, self._order = step, variant, 0
        self.inside = True

    def rest(self) -> None:
        """The step is over: until the next one this rank waits for nobody."""
        self.inside, self.waiting = False, None

    def add(self, entry: Collective) -> None:
        """A collective of a graph; see :class:`CollectiveLog`."""
        ranks = self._axes.get(entry.axis)
        if ranks is None:  # an axis of one rank, or one of somebody else's program
            return
        key = self._keys[entry.axis]
        number = self._append(
            key, ranks, Entry(self.step, entry.op, entry.shape, entry.dtype, self.variant, self._order)
        )
        self._order += 1
        self.wait(Waiting(key, number, ranks), queued=True)

    def talk(
        self, name: str, ranks: Sequence[int], op: str, shape: Sequence[int], dtype: torch.dtype, *,
        step: int | None = None, waits_for: Sequence[int] = (),
    ) -> Waiting:  # fmt: skip
        """A call beside the graphs: a wire, a round state, an exchange.

        Args:
            name, ranks: the group; both ends of a transfer give the same.
            step: which step it is about, when not the one that runs.
            waits_for: ranks that must issue theirs before the call returns; none for an asynchronous send.

        Returns:
            what to give to :meth:`wait` if it is waited for later.
        """
        key = group_key(name, ranks)
        number = self._append(key, tuple(ranks), Entry(self.step if step is None else step, op, tuple(shape), dtype))
        peers = tuple(rank for rank in (waits_for or ranks) if rank != self.rank)
        waiting = Waiting(key, number, peers)
        if waits_for:  # else nobody waits yet; and another thread may be sending while this rank waits
            self.wait(waiting, queued=True)
        return waiting

    def wait(self, waiting: Waiting | None, *, queued: bool = False) -> None:
        """From now on this rank waits for an earlier asynchronous call; None: no longer.

        ``queued``: a device may still have it to do when the call returns.
        """
        self.waiting = waiting
        if queued and waiting is not None and self.queued is not None:
            with self._lock:
                self.queued[waiting.group] = waiting

    @contextmanager
    def waiting_for(self, call: Waiting | None) -> Iterator[None]:
        """This rank waits for ``call`` inside the block. One that raises stays: it is what the watch has to name."""
        before = self.waiting
        self.wait(call)
        yield
        self.wait(before)

    def _append(self, key: str, ranks: tuple[int, ...], entry: Entry) -> int:
        with self._lock:
            log = self.logs.get(key)
            if log is None:
                log = self.logs[key] = GroupLog(ranks, self._kept)
            self.total += 1
            number = log.append(entry)
            if self.box is not None:
                self.box.write(key, number, str(entry))
        return number

    def post(self, stalled_s: float) -> Post:
        """What the other ranks are told, a consistent copy."""
        with self._lock:
            groups = {
                key: (log.members, log.count, tuple(log.tail)) for key, log in self.logs.items()
            }  # fmt: skip
            waiting, closed, inside = self.waiting, self.closed, self.inside
            queued = () if waiting is None or self.queued is None else tuple(self.queued.values())
        found = {}
        for key, (members, count, tail) in groups.items():
            texts = tuple(str(entry) for entry in tail)
            found[key] = Tail(members, count, texts, tuple(self._source(entry) for entry in tail))
        return Post(self.rank, stalled_s, closed, waiting, found, inside, queued)

    def _source(self, entry: Entry) -> str:
        return self.source(entry.variant, entry.order) if self.source is not None and entry.variant else ""

    def comparable(self) -> dict[str, list[str]]:
        """All kept entries of each group as text: equal on all members."""
        with self._lock:
            return {key: [str(entry) for entry in log.tail] for key, log in sorted(self.logs.items())}


@dataclass(frozen=True)
class Tail:
    """A group's log as published: the texts are entries ``count - len(texts) + 1`` to ``count``."""

    members: tuple[int, ...]
    count: int
    texts: tuple[str, ...]
    sources: tuple[str, ...]

    def at(self, number: int) -> str | None:
        """Entry ``number``, None when it is not here."""
        index = number - 1 - (self.count - len(self.texts))
        return self.texts[index] if 0 <= index < len(self.texts) else None

    def source(self, number: int) -> str:
        """Where entry ``number`` comes from, "" when unknown."""
        index = number - 1 - (self.count - len(self.texts))
        return self.sources[index] if 0 <= index < len(self.sources) else ""


@dataclass(frozen=True)
class Post:
    """What one rank publishes: for how long it issued nothing, whether it has left, where it may wait, its logs.

    ``inside``: it is in a step. ``queued``: what its device may have to do before what it waits for.
    """

    rank: int
    stalled_s: float
    closed: bool
    waiting: Waiting | None
    groups: Mapping[str, Tail]
    inside: bool = True
    queued: tuple[Waiting, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON; see :func:`post_of`."""
        return {
            "rank": self.rank, "stalled_s": self.stalled_s, "closed": self.closed, "waiting": self.waiting,
            "groups": {key: [t.members, t.count, t.texts, t.sources] for key, t in self.groups.items()},
            "inside": self.inside, "queued": self.queued,
        }  # fmt: skip


def post_of(plain: Mapping[str, Any]) -> Post:
    """The inverse of :meth:`Post.plain`."""
    waiting = plain["waiting"]
    groups = {key: Tail(tuple(m), n, tuple(t), tuple(s)) for key, (m, n, t, s) in plain["groups"].items()}
    place = None if waiting is None else _place(waiting)
    queued = tuple(map(_place, plain["queued"]))
    return Post(plain["rank"], plain["stalled_s"], plain["closed"], place, groups, plain["inside"], queued)


def _place(plain: Sequence[Any]) -> Waiting:
    return Waiting(plain[0], plain[1], tuple(plain[2]))
