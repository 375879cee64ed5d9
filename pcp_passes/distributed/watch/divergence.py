# SPDX-License-Identifier: Apache-2.0
"""Name the first call in which ranks of a group differ, instead of waiting in it for ever.

A rank that skips a collective, or issues another one, leaves its group waiting: everybody is alive, so the heartbeat
sees nothing. Each rank therefore has a log (:mod:`~pcp_passes.distributed.watch.runlog`). When a rank that may be
waiting has issued nothing for ``stall_s`` seconds it raises an alarm in the store; then all ranks publish the tails of
their logs, and whoever reads them all compares::

    rank 0: ... all_gather_rows(f64[8, 64])          rank 1: ... gather_ragged(u8[*, 88])
    -> the two differ, whoever is slow

    rank 0 waits in pcp for rank 1, rank 1 waits in dp for rank 0
    -> a circle, though no two entries differ

A rank that computes for long is neither: what it issued equals what the others issued, as far as it has come, and it
waits for nobody. Whether a rank waits is read from the logs as well: the last thing it issued needs peers, and one of
them has not come as far.
"""

from __future__ import annotations

import json
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pcp_passes.distributed.store import TCPStore, new_connection
from pcp_passes.distributed.watch.blackbox import read_post
from pcp_passes.distributed.watch.loss import Loss
from pcp_passes.distributed.watch.runlog import Post, RunLog, Waiting, post_of

logger = logging.getLogger(__name__)

NameOf = Callable[[int], str]
_PREFIX = "pcp_passes/divergence"


@dataclass(frozen=True)
class Divergence:
    """``rank`` issues something else than the rest of ``group``, or keeps it waiting for ever; ``text`` says what.

    ``certain``: two entries differ. A circle is read from posts of different instants, so it must be found twice.
    """

    rank: int
    group: str
    text: str
    certain: bool

    def __str__(self) -> str:
        return self.text


def diagnose(
    posts: Mapping[int, Post], world: int, stall_s: float, name_of: NameOf = "rank {}".format
) -> Divergence | None:
    """What is wrong between ranks that published ``posts``; None when nothing is, or not yet.

    A difference of two entries is reported at once. A circle of waiting ranks only when all ``world`` ranks posted and
    those in it have issued nothing for ``stall_s`` seconds: posts are not taken at one instant.
    """
    return _difference(posts, name_of) or _circle(posts, world, stall_s, name_of)


def _difference(posts: Mapping[int, Post], name_of: NameOf) -> Divergence | None:
    """The earliest entry in which two members of a group differ, over all groups."""
    found: list[tuple[int, Divergence]] = []
    for key in sorted({key for post in posts.values() for key in post.groups}):
        holders = [rank for rank in sorted(posts) if key in posts[rank].groups]
        tails = {rank: posts[rank].groups[key] for rank in holders}
        oldest = max(tail.count - len(tail.texts) + 1 for tail in tails.values())
        for number in range(oldest, max(tail.count for tail in tails.values()) + 1):
            said = {rank: text for rank, tail in tails.items() if (text := tail.at(number)) is not None}
            if len(set(said.values())) < 2:
                continue
            odd, most = _odd_one(said)
            source = tails[odd].source(number) or tails[most].source(number)
            text = (
                f"{name_of(odd)} of group {key} issues {said[odd]} as its {_ordinal(number)} call where "
                f"{name_of(most)} issues {said[most]}" + (f"; source: {source}" if source else "")
            )
            found.append((_step_of(said.values()), Divergence(odd, key, text, certain=True)))
            break
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _odd_one(said: Mapping[int, str]) -> tuple[int, int]:
    """The rank that stands alone, or the later one of two, and one that the most agree with."""
    by_text: dict[str, list[int]] = {}
    for rank, text in said.items():
        by_text.setdefault(text, []).append(rank)
    parties = sorted(by_text.values(), key=lambda ranks: (-len(ranks), ranks))
    return parties[-1][0], parties[0][0]


def _step_of(texts: Iterable[str]) -> int:
    return min((int(text.split()[1]) for text in texts if text.startswith("step ")), default=0)


def _stuck_at(post: Post, posts: Mapping[int, Post]) -> list[tuple[Waiting, list[int]]]:
    """What ``post``'s rank waits in, as the logs tell, and for whom; nothing when it can go on."""
    if post.waiting is None or post.closed:
        return []
    found = []
    for waiting in (post.waiting, *post.queued):
        behind = []
        for rank in waiting.peers:
            tail = posts[rank].groups.get(waiting.group) if rank in posts else None
            if rank != post.rank and rank in posts and (tail is None or tail.count < waiting.number):
                behind.append(rank)
        if behind:
            found.append((waiting, behind))
    return found


def _sentence(rank: int, stuck: tuple[Waiting, list[int]], posts: Mapping[int, Post], name_of: NameOf) -> str:
    waiting, peers = stuck
    tail = posts[rank].groups[waiting.group]

    def there(peer: int) -> str:
        other, post = posts[peer].groups.get(waiting.group), posts[peer]
        state = " and has ended" if post.closed else "" if post.inside or post.waiting else " and is in no step"
        return f"{name_of(peer)}, which issued {0 if other is None else other.count} there{state}"

    source = tail.source(waiting.number)
    return (
        f"{name_of(rank)} waits in {tail.at(waiting.number) or 'an earlier step'}, its {_ordinal(waiting.number)} call "
        f"of group {waiting.group}, for {', '.join(map(there, peers))}" + (f"; source: {source}" if source else "")
    )


def _circle(posts: Mapping[int, Post], world: int, stall_s: float, name_of: NameOf) -> Divergence | None:
    """Ranks none of which can go on, because each waits for another one of them, or for one that has ended."""
    if len(posts) < world:
        return None
    stops = {rank: _stuck_at(post, posts) for rank, post in posts.items()}
    waits = {rank: [peer for _, peers in stops[rank] for peer in peers] for rank in posts}
    able = {rank for rank, post in posts.items() if not post.closed and not waits[rank]}
    while more := {r for r in posts if r not in able and waits[r] and all(peer in able for peer in waits[r])}:
        able |= more
    stuck = [rank for rank in sorted(posts) if rank not in able and waits[rank]]
    if not stuck or any(posts[rank].stalled_s < stall_s for rank in stuck):
        return None
    places = {rank: next(stop for stop in stops[rank] if not able.issuperset(stop[1])) for rank in stuck}

    # Who is furthest behind is where it began: its peers of the same step have gone on.
    def begun(rank: int) -> tuple[bool, int]:
        waiting, peers = places[rank]
        text = posts[rank].groups[waiting.group].at(waiting.number)
        return not any(posts[peer].closed for peer in peers), _step_of([text or ""])

    first = min(stuck, key=begun)
    order = [first, *(rank for rank in stuck if rank != first)]
    text = "; ".join(_sentence(rank, places[rank], posts, name_of) for rank in order)
    return Divergence(places[first][1][0], places[first][0].group, text, certain=False)


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


class DivergenceWatch:
    """A thread per rank that raises the alarm, publishes and compares; from :meth:`start` to :meth:`stop`.

    Args:
        store: of the world; every rank makes a watch on it, once.
        log: of this rank.
        world: ranks.
        on_found: called once, on the watch's thread, with what was found.
        stall_s: seconds without a call after which a rank that may be waiting raises the alarm. A step that computes
            for longer raises false alarms: they cost a few messages, nothing else.
        tick_s: seconds between looks.
        name_of: how a rank is called in messages.
    """

    def __init__(
        self, store: TCPStore, log: RunLog, world: int, on_found: Callable[[Divergence], None], *,
        stall_s: float = 8.0, tick_s: float = 1.0, name_of: NameOf = "rank {}".format,
    ) -> None:  # fmt: skip
        self.log, self.world, self._on_found = log, world, on_found
        self.stall_s, self.tick_s, self._name_of = stall_s, tick_s, name_of
        self._store = store
        self.boxes: Mapping[int, mmap.mmap] = {}
        """Of the other ranks of this machine, see :mod:`pcp_passes.distributed.watch.blackbox`."""
        self.found: Divergence | None = None
        self.slow = ""
        """For whom this rank has been waiting too long, though nothing is wrong as far as the logs tell."""
        self._suspect = threading.Event()
        self._over = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pcp-divergence", daemon=True)

    def start(self) -> None:
        """Start watching; returns at once. Once per object."""
        self._thread.start()

    def stop(self) -> None:
        """Tell the others that this rank issues nothing any more, and end the thread."""
        self.log.closed = True
        self._over.set()
        self._wake.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(3 * self.tick_s)

    @contextmanager
    def suspecting(self) -> Iterator[None]:
        """All ranks compare their logs inside the block, e.g. because a collective raised."""
        self._suspect.set()
        self._wake.set()
        try:
            yield
        finally:
            self._suspect.clear()

    def _watch(self) -> None:
        try:
            self._watch_until_over(new_connection(self._store))
        except (RuntimeError, OSError) as error:  # the store is gone: the heartbeat says why, or its host ended cleanly
            logger.debug("divergence watch of rank %d ends: %s", self.log.rank, error)
        except Exception:  # a bug here: say that nobody watches any more
            logger.exception("divergence watch of rank %d ends", self.log.rank)

    def _watch_until_over(self, store: TCPStore) -> None:
        mine, alarm = f"{_PREFIX}/log/{self.log.rank}", f"{_PREFIX}/alarms"
        seen, changed_at, heard, before = -1, time.monotonic(), 0, ""
        while not self._over.is_set():
            self._wake.wait(self.tick_s)
            self._wake.clear()
            now = time.monotonic()
            if self.log.total != seen:
                seen, changed_at, self.slow = self.log.total, now, ""
            stalled_s = now - changed_at
            suspicious = self._suspect.is_set() or (self.log.waiting is not None and stalled_s > self.stall_s)
            # Counts on while anybody waits, so that all publish at each tick until that rank goes on.
            alarms = store.add(alarm, 1 if suspicious else 0)
            if alarms == heard:
                continue
            heard = alarms
            store.set(mine, json.dumps(self.log.post(stalled_s).plain()))
            posts = self._posts(store)
            found = diagnose(posts, self.world, self.stall_s, self._name_of)
            if found is not None and (found.certain or found.text == before):
                self.found = found
                self._on_found(found)
                return
            before = "" if found is None else found.text
            if found is None and suspicious and not self.slow:
                self._notice(posts, stalled_s)
        store.set(mine, json.dumps(self.log.post(0.0).plain()))
        store.check([mine])  # ``set`` has no reply: a read after it proves that it arrived

    def _posts(self, store: TCPStore) -> dict[int, Post]:
        keys = {rank: f"{_PREFIX}/log/{rank}" for rank in range(self.world)}
        return {rank: post_of(json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}

    def _notice(self, posts: Mapping[int, Post], stalled_s: float) -> None:
        """Once for each wait that is long: a rank that computes, or is not asked to step, looks the same from here."""
        for stuck in _stuck_at(posts[self.log.rank], posts)[:1]:
            self.slow = _sentence(self.log.rank, stuck, posts, self._name_of)
            logger.warning("for %.0f s %s; it is slow, or nobody steps its engine", stalled_s, self.slow)

    def explain(self, loss: Loss) -> Loss:
        """``loss``, or the divergence that was behind it: gloo ends a rank that is sent more than it expects."""
        if loss.how == "diverged":
            return loss
        posts = {rank: read_post(rank, box) for rank, box in self.boxes.items()} | {self.log.rank: self.log.post(0.0)}
        found = diagnose(posts, self.world + 1, self.stall_s, self._name_of)  # one more: no circle of the dead
        return loss if found is None else loss_of(found, self.log.rank, f"{loss.name} then ended, {loss.detail}")


def loss_of(found: Divergence, seen_by: int, then: str = "") -> Loss:
    """What ends all ranks when ``found`` is."""
    return Loss(found.rank, "diverged", 0.0, f"{found}; {then}" if then else str(found), seen_by)
