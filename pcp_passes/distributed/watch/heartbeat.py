# SPDX-License-Identifier: Apache-2.0
"""Notice a killed or frozen rank of the group within seconds, and say which one.

A rank that dies or freezes leaves the others blocked in a collective for the collective's own timeout (half an hour by
default), and a short collective timeout would also end ranks that merely wait for a peer's 60 s compile. So each rank
beats a counter in the group's store, from a daemon thread, and watches the counters of the others.

Two threads, because an operation on the store of a frozen host never returns (``store.py``): one beats and reads; the
other only looks at clocks and at what the first one read, and decides.

What it does not notice by itself: a rank whose threads run but whose main thread is stuck. A collective that nobody
else entered is found by ``divergence.py``, which ends the ranks through :meth:`Heartbeat.tell`; an endless loop by
nobody. And a C extension that keeps the GIL for longer than ``silence_s`` looks frozen to the others;
ordinary Python and ``torch.compile`` do not.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pcp_passes.distributed.store import TCPStore, first_line, identity_of, new_connection
from pcp_passes.distributed.watch.loss import EXIT_CODE, How, Loss, exit_process
from pcp_passes.distributed.watch.procstate import ProcessIdentity, state_of, this_process
from pcp_passes.errors import ConfigError, PeerLost, RankMismatch

__all__ = ["EXIT_CODE", "Heartbeat", "Loss", "exit_process"]

logger = logging.getLogger(__name__)

HOST = 0
"""The rank that hosts the store."""

_GOODBYE, _EXIT, _NOBODY = b"goodbye", b"exit", b"-"


class _Peer:
    """What this rank last read about another. Written by the beating thread, read by the watching one."""

    __slots__ = ("beat", "beat_at_mark", "changed_at", "gone_reads", "identity", "rank")

    def __init__(self, rank: int, now: float) -> None:
        self.rank = rank
        self.beat = _NOBODY
        self.beat_at_mark: int | None = None
        self.changed_at = now
        self.gone_reads = 0
        self.identity: ProcessIdentity | None = None


class Heartbeat:
    """Beats for this rank and watches the others, from :meth:`start` to :meth:`stop`.

    - ``store``: from ``open_store``; each rank passes its own.
    - ``interval_s``: seconds between beats.
    - ``silence_s``: a rank whose counter did not change for so long is lost, and so is a store that did not answer.
    - ``join_s``: how long after this rank's start another, still alive, may take until its first beat.
    - ``on_lost``: called once, on the watching thread, with the :class:`Loss`; the default ends the process.
    - ``reason_file``: the loss is also written there, before ``on_lost``.
    - ``name_of``: how a rank is called in messages, e.g. with its coordinates in a mesh.
    - ``explain``: asked for the cause behind a loss that this rank found; gives that loss, or a better one.

    A death on the same machine is noticed after about three intervals, anything else after ``silence_s`` plus two
    intervals. A process that ends without :meth:`stop` counts as lost, for its peers would wait for it forever; it
    first waits some intervals, to name another rank if that is why it ends, then leaves an exit mark. When this
    process was itself suspended (a debugger, SIGSTOP to the whole group) it does not blame others for that time: a gap
    of more than half of ``silence_s`` between two of its own ticks gives everyone a fresh window.

    Raises :class:`ConfigError` when a late beat or two would already count as a loss.
    """

    def __init__(
        self,
        store: TCPStore,
        *,
        rank: int,
        world: int,
        interval_s: float = 1.0,
        silence_s: float = 20.0,
        join_s: float = 60.0,
        on_lost: Callable[[Loss], None] = exit_process,
        reason_file: str | os.PathLike[str] | None = None,
        name_of: Callable[[int], str] = "pcp rank {}".format,
        explain: Callable[[Loss], Loss] | None = None,
    ) -> None:
        assert 0 <= rank < world, f"rank {rank} is not in a group of {world}"
        if not 0 < 4 * interval_s <= silence_s <= join_s:
            raise ConfigError(
                f"heartbeat: interval_s={interval_s:g}, silence_s={silence_s:g}, join_s={join_s:g}; required is "
                "4 * interval_s <= silence_s <= join_s, so that a late beat or two is no loss.\n"
                "  next  raise silence_s and join_s"
            )
        self._store, self._rank, self._world = store, rank, world
        self._interval_s, self._silence_s, self._join_s = interval_s, silence_s, join_s
        self._late_s = silence_s / 2  # a shorter suspension leaves peers half a window to beat again
        self._on_lost_within_s = 5 * interval_s + 4.0  # bounds the default on_lost from finding a loss to its end
        self._on_lost, self._name_of, self._explain = on_lost, name_of, explain
        self._reason_file = None if reason_file is None else Path(reason_file)
        self._me = this_process()
        self._peers: dict[int, _Peer] = {}
        self._read_at = 0.0
        self._store_error: str | None = None
        self._verdict: bytes = _NOBODY
        self._loss: Loss | None = None
        self._told: Loss | None = None
        self._leave: bytes | None = None
        self._linger_until = 0.0
        self._at_exit: Finalize[Any] | None = None
        self._wake = threading.Event()
        self._found = threading.Event()
        self._posted = threading.Event()
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="pcp-heartbeat", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="pcp-heartbeat-watch", daemon=True)

    def start(self) -> None:
        """Start beating and watching; returns at once. Once per object."""
        if self._world == 1:
            return
        now = time.monotonic()
        self._peers = {r: _Peer(r, now) for r in range(self._world) if r != self._rank}
        self._read_at = now
        self._beating.start()
        self._watching.start()
        # Unlike atexit, this also runs at the end of a multiprocessing child.
        self._at_exit = Finalize(None, self._exiting, exitpriority=100)
        logger.info("heartbeat: rank %d of %d, loss after %g s of silence", self._rank, self._world, self._silence_s)

    def stop(self, linger_s: float | None = None) -> None:
        """Say goodbye and end both threads: the others will not miss this rank.

        Rank 0 hosts the store, so it first waits until every rank still beating has read its goodbye (about two
        intervals), at most ``linger_s`` seconds (default ``silence_s``). While rank 0's process lives, the others keep
        watching each other; when it ends after a goodbye, they log that and stop watching.
        """
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._over.set()
        self._part(_GOODBYE, self._silence_s if linger_s is None else linger_s)
        if self._beating.is_alive():
            logger.warning("rank %d could not leave its goodbye in the store; the others may report a loss", self._rank)
        if self._watching.is_alive() and threading.current_thread() is not self._watching:
            self._watching.join(self._on_lost_within_s)

    def reason(self, wait_s: float = 0.0) -> str | None:
        """Why the group is lost, or None. ``wait_s``: seconds to wait for a finding, e.g. after a collective raised."""
        self._found.wait(wait_s)
        return None if self._loss is None else str(self._loss)

    def raise_if_lost(self, wait_s: float = 0.0) -> None:
        """Raise :class:`PeerLost` with :meth:`reason`, if there is one; RankMismatch when the ranks diverged."""
        reason = self.reason(wait_s)
        if reason is not None:
            raise (RankMismatch if self._loss is not None and self._loss.how == "diverged" else PeerLost)(reason)

    @property
    def departed(self) -> frozenset[int]:
        """Ranks that have said goodbye."""
        return frozenset(rank for rank, peer in self._peers.items() if peer.beat == _GOODBYE)

    def tell(self, loss: Loss) -> None:
        """End all ranks for a reason found elsewhere, as if this heartbeat had found it. Returns at once."""
        self._told = loss

    # The beating thread: the only one that talks to the store. No judgement here.

    def _beat(self) -> None:
        try:
            self._beat_until_left()
        except Exception as error:  # a dead store, or a bug here; either way nobody is watched any more, so say so
            if self._host_said_goodbye():
                logger.info(
                    "heartbeat of rank %d ends: rank %d, which hosts the store, ended cleanly", self._rank, HOST
                )
                self._over.set()
            elif self._leave is None:
                time.sleep(self._interval_s)  # sockets close before /proc shows that their process ended
                self._store_error = first_line(error)
                expected = isinstance(error, (RuntimeError, OSError))
                level = logging.DEBUG if expected else logging.ERROR
                logger.log(level, "heartbeat of rank %d lost its store", self._rank, exc_info=True)

    def _beat_until_left(self) -> None:
        store = new_connection(self._store)
        # Counts the heartbeats this rank started on this store: a second one must not read the marks of the first.
        prefix = f"pcp_passes/heartbeat/{store.add(f'pcp_passes/heartbeat/started/{self._rank}', 1)}"
        keys = [f"{prefix}/beat/{r}" for r in range(self._world)] + [f"{prefix}/verdict"]
        for key in keys:
            store.compare_set(key, "", _NOBODY.decode())  # now every key exists and a read never waits for one
        count = 0
        while True:
            leave, count = self._leave, count + 1
            try:
                self._exchange(store, keys, str(count) if leave is None else leave.decode())
            except RuntimeError:
                store = self._reconnect(keys[self._rank])
                time.sleep(self._interval_s)
                continue
            if leave is not None and self._may_leave():
                return
            self._wake.wait(self._interval_s if leave is None else self._interval_s / 4)
            self._wake.clear()

    def _exchange(self, store: TCPStore, keys: list[str], beat: str) -> None:
        """Beat and read everyone's beat. ``set`` has no reply, but the read after it proves that it arrived."""
        store.set(keys[self._rank], beat)
        if self._loss is not None and not self._posted.is_set():
            store.compare_set(keys[-1], _NOBODY.decode(), json.dumps(asdict(self._loss)))
            self._posted.set()
        *beats, verdict = store.multi_get(keys)
        now = time.monotonic()
        for peer in self._peers.values():
            if peer.identity is None:
                peer.identity = identity_of(store, peer.rank)
            if beats[peer.rank] != peer.beat:
                peer.beat, peer.changed_at, peer.gone_reads = beats[peer.rank], now, 0
            elif peer.identity is not None and state_of(peer.identity, self._me) == "gone":
                peer.gone_reads += 1
        self._verdict = verdict
        self._read_at = now

    def _reconnect(self, my_key: str) -> TCPStore:
        """A connection may break though the host lives; one that cannot be opened again means that the host is gone."""
        # Probed with a plain socket first: a refused TCPStore client retries for twice its timeout.
        socket.create_connection((self._store.host, self._store.port), timeout=self._interval_s).close()
        store = new_connection(self._store)
        if not store.check([my_key]):
            raise ConnectionError("another store answers at the address of ours")
        return store

    def _host_said_goodbye(self) -> bool:
        return self._rank != HOST and self._peers[HOST].beat == _GOODBYE

    # Leaving.

    def _part(self, mark: bytes, linger_s: float) -> None:
        if self._beating.ident is None:
            return
        self._linger_until = time.monotonic() + linger_s
        self._leave = mark
        self._wake.set()
        # Of the others nobody waits for readers: they are through after one exchange, unless the host is frozen.
        self._beating.join(2 * self._interval_s + (linger_s if self._rank == HOST else 2 * self._interval_s))

    def _may_leave(self) -> bool:
        """Everyone still beating has read our mark. Called after each read that follows the mark."""
        if self._rank != HOST or time.monotonic() > self._linger_until:
            return True
        return all(self._has_read_mark(peer) for peer in self._peers.values())

    def _has_read_mark(self, peer: _Peer) -> bool:
        if peer.beat in (_NOBODY, _GOODBYE, _EXIT) or peer.gone_reads >= 2:
            return True
        if peer.beat_at_mark is None:
            peer.beat_at_mark = int(peer.beat)
        # Beat n+1 came after the mark, so the read that follows it has the mark; beat n+2 shows that this read is done.
        return int(peer.beat) >= peer.beat_at_mark + 2

    def _exiting(self) -> None:
        """At interpreter exit without :meth:`stop`.

        A collective that raised is often the first sign of a lost peer: give the watching thread the time to name it,
        unless all others are heard beating after it.
        """
        begin = time.monotonic()
        while not self._found.wait(self._interval_s / 4) and not self._over.is_set():
            if self._all_heard_since(begin) or time.monotonic() > begin + self._on_lost_within_s:
                break
        if self._found.is_set():
            # on_lost decides how this process ends, and needs an interpreter to run in.
            self._watching.join(self._on_lost_within_s)
        elif not self._over.is_set():
            self._over.set()
            self._part(_EXIT, 3 * self._interval_s)

    def _all_heard_since(self, begin: float) -> bool:
        later = begin + 2 * self._interval_s  # by then a beat that was set before ``begin`` has been read
        return all(peer.beat in (_GOODBYE, _EXIT) or peer.changed_at > later for peer in self._peers.values())

    # The watching thread: never touches the store.

    def _watch(self) -> None:
        tick = self._interval_s / 4
        fresh = previous = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            if now - previous > self._late_s:
                fresh = now
            previous = now
            loss = self._judge(now, fresh)
            # A suspension in the middle of judging mixes old and new clocks; the next tick will see the gap and forgive
            # it.
            if loss is not None and time.monotonic() - now < self._late_s and not self._over.is_set():
                self._lose(loss)
                return

    def _judge(self, now: float, fresh: float) -> Loss | None:
        if self._verdict != _NOBODY:
            fields = json.loads(self._verdict)
            return Loss(**{**fields, "also_silent": tuple(fields["also_silent"])})
        if self._told is not None:
            return self._told
        # Silence counts up to the last answer of the store: while the store does not answer, nobody can be heard.
        silent = {p.rank: self._read_at - max(p.changed_at, fresh) for p in self._peers.values() if p.beat != _GOODBYE}
        for rank, silent_s in silent.items():
            if self._peers[rank].beat == _EXIT:
                return self._loss_of(rank, None, silent_s, silent, "it exits without stopping its heartbeat", "left")
        stalled = now - max(self._read_at, fresh)
        if self._store_error is not None or stalled > self._silence_s:
            if self._host_said_goodbye():
                self._over.set()
                return None
            detail = f"its store failed: {self._store_error}" if self._store_error else "its store does not answer"
            host = self._peers[HOST].identity if self._rank != HOST else self._me
            return self._loss_of(HOST, host, stalled, silent, detail)
        for rank, silent_s in silent.items():
            peer = self._peers[rank]
            # Twice gone: the second read came after its death was seen, and still found no goodbye.
            if peer.gone_reads >= 2 or silent_s > (self._join_s if peer.beat == _NOBODY else self._silence_s):
                detail = "its heartbeat never started" if peer.beat == _NOBODY else "its counter stands still"
                return self._loss_of(rank, peer.identity, silent_s, silent, detail)
        return None

    def _loss_of(
        self,
        rank: int,
        process: ProcessIdentity | None,
        silent_s: float,
        silent: dict[int, float],
        detail: str,
        how: How = "silent",
    ) -> Loss:
        if process is not None:
            state = state_of(process, self._me)
            how = {"gone": "killed", "stopped": "frozen"}.get(state, "silent")  # type: ignore[assignment]  # a Literal
            words = {"gone": "no longer exists", "stopped": "is stopped", "running": "still runs"}
            detail = f"{process} {words.get(state, 'cannot be inspected from here')}; {detail}"
        also = tuple(r for r, s in silent.items() if r != rank and s > self._silence_s / 2)
        return Loss(rank, how, max(silent_s, 0.0), detail, self._rank, also, self._name_of(rank))

    def _lose(self, loss: Loss) -> None:
        if self._explain is not None and loss.seen_by == self._rank:
            try:
                loss = self._explain(loss)
            except Exception:  # this thread is what ends the process
                logger.exception("no explanation for the loss of rank %d", loss.rank)
        self._loss = loss
        if self._reason_file is not None:
            try:
                self._reason_file.write_text(f"{loss}\n", encoding="utf-8")
            except OSError as error:
                logger.warning("cannot write %s: %s", self._reason_file, error)
        self._found.set()
        # Let the others read the verdict while the store is still there; else they would name the host that left, not
        # the culprit.
        self._wake.set()
        if self._store_error is None and loss.rank != HOST:
            self._posted.wait(2 * self._interval_s)
            if self._rank == HOST:
                self._keep_the_store(loss.rank)
        self._on_lost(loss)

    def _keep_the_store(self, lost: int) -> None:
        """Two intervals, and two more while another rank, perhaps on a busy machine, has not ended yet."""
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < 4 * self._interval_s:
            others = (peer for peer in self._peers.values() if peer.rank != lost)
            if waited > 2 * self._interval_s and all(
                peer.beat in (_GOODBYE, _EXIT) or peer.gone_reads >= 2 for peer in others
            ):
                return
            time.sleep(self._interval_s / 4)
