# SPDX-License-Identifier: Apache-2.0
"""A rank's last log entries where the others on its machine can read them after its death.

gloo ends a process, without a word to Python, when a peer sends more bytes than it expects. So of two ranks that gather
different shapes one dies in the very call, and what it had issued last is what names the divergence. Each rank of a
gloo group therefore also writes its entries into a file that all ranks of the machine have mapped since the start; the
file has no name any more once all have it, so nothing stays behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence

from pcp_passes.distributed.store import TCPStore
from pcp_passes.distributed.watch.procstate import ProcessIdentity, this_process
from pcp_passes.distributed.watch.runlog import Post, Tail

_SLOTS, _SLOT = 256, 192
_HEADER = 8
_SIZE = _HEADER + _SLOTS * _SLOT
_OPEN_S = 10.0


class BlackBox:
    """A ring of the last entries; one writer, any number of readers. Meant for :attr:`RunLog.box`."""

    def __init__(self) -> None:
        file, self.path = tempfile.mkstemp(prefix="pcp_passes-log-")
        try:
            os.ftruncate(file, _SIZE)
            self._map = mmap.mmap(file, _SIZE)
        finally:
            os.close(file)
        self._count = 0

    def write(self, key: str, number: int, text: str) -> None:
        """Keep one entry. One that does not fit is left out: a reader would take a cut one for another call."""
        record = f"{key}\t{number}\t{text}".encode()
        record = record if len(record) <= _SLOT else b""
        at = _HEADER + self._count % _SLOTS * _SLOT
        self._map[at : at + _SLOT] = record.ljust(_SLOT, b"\0")
        self._count += 1
        self._map[:_HEADER] = self._count.to_bytes(_HEADER, "little")

    def unlink(self) -> None:
        """Take the name away; who has it open keeps it. Idempotent."""
        if self.path:
            os.unlink(self.path)
            self.path = ""


def exchange_boxes(store: TCPStore, box: BlackBox, rank: int, world: int) -> dict[int, mmap.mmap]:
    """Open the boxes of all other ranks of this machine; every rank calls it once, about the same time.

    Raises:
        RuntimeError: the store is gone. The caller talks to it through :func:`~pcp_passes.distributed.store.bounded`.
    """
    prefix, me = "pcp_passes/blackbox", this_process()
    store.set(f"{prefix}/path/{rank}", f"{me.encode()}\n{box.path}")
    deadline = time.monotonic() + _OPEN_S
    opened: dict[int, mmap.mmap] = {}
    for other in range(world):
        while not store.check([f"{prefix}/path/{other}"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if other == rank or not store.check([f"{prefix}/path/{other}"]):
            continue
        owner, path = store.get(f"{prefix}/path/{other}").decode().split("\n", 1)
        if not me.machine or ProcessIdentity.decode(owner).machine != me.machine:
            continue
        try:
            with open(path, "rb") as file:
                opened[other] = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        except OSError:  # another mount namespace: as good as another machine
            continue
    done = store.add(f"{prefix}/opened", 1)
    while done < world and time.monotonic() < deadline:
        time.sleep(0.02)
        done = store.add(f"{prefix}/opened", 0)
    box.unlink()
    return opened


def read_post(rank: int, box: mmap.mmap) -> Post:
    """What ``rank`` had issued last, as far as the box goes back."""
    count = int.from_bytes(box[:_HEADER], "little")
    groups: dict[str, list[tuple[int, str]]] = {}
    for index in range(max(0, count - _SLOTS), count):
        at = _HEADER + index % _SLOTS * _SLOT
        record = box[at : at + _SLOT].rstrip(b"\0").decode(errors="replace").split("\t", 2)
        if len(record) == 3 and record[1].isdecimal():
            groups.setdefault(record[0], []).append((int(record[1]), record[2]))
    return Post(rank, 0.0, True, None, {key: _tail(key, entries) for key, entries in groups.items()})


def _tail(key: str, entries: Sequence[tuple[int, str]]) -> Tail:
    """The entries without a gap up to the last; a rank that lives may be writing over the oldest."""
    members, count = tuple(map(int, key[key.index("[") + 1 : -1].split(","))), entries[-1][0]
    texts: list[str] = []
    for number, text in reversed(entries):
        if number != count - len(texts):
            break
        texts.append(text)
    return Tail(members, count, tuple(reversed(texts)), ("",) * len(texts))
