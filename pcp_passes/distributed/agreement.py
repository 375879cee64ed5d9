# SPDX-License-Identifier: Apache-2.0
"""Do all ranks of a group hold the same options, versions and graphs? Asked through a store, with a timeout.

Never through a collective: ranks that disagree may already issue different collectives, and that hangs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest

from pcp_passes.distributed.store import Store, bounded, first_line
from pcp_passes.errors import PeerLost, RankMismatch

logger = logging.getLogger(__name__)

ABSENT = "<absent>"
SCOPE = " | "
"""A fact called ``"stage 1 | weights"`` is compared among the ranks that post facts of ``stage 1``, not with others."""
_POLL_S = 0.02
_LINGER_S = 5.0
"""How long rank 0, which hosts the store, waits for the others to have read: it, and the store, may end right after."""
_SHOWN = 72
_CONTEXT = 2
_MAX_TEXTS = 6 << 20
"""Bytes of a rank's compressed texts in the store, whose server drops a client that sends more than 8 MiB at once."""


def require_agreement(
    store: Store,
    *,
    rank: int,
    world: int,
    topic: str,
    facts: Mapping[str, str],
    texts: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Return when all ``world`` ranks posted equal ``facts`` and ``texts`` under ``topic``; else raise on every rank.

    ``facts`` are short strings (an options digest, versions, a graph's fingerprint). ``texts`` may be long (a printed
    graph): their digests are compared, and only when these differ are the texts exchanged to show the first differing
    line. A key with a scope (:data:`SCOPE`) is compared among the ranks that have facts of that scope.

    A topic may be posted again, e.g. when a graph is compiled a second time: each rank's n-th post is compared with the
    n-th posts of the others. The count is kept per rank and topic in the store, so every rank must post a topic equally
    often.

    Raises :class:`RankMismatch` naming topic, keys and which ranks hold which value; :class:`PeerLost` naming the ranks
    that posted nothing within ``timeout_s`` seconds, or rank 0 when the store it hosts stops answering.
    """
    assert 0 <= rank < world, f"rank {rank} is not in a group of {world}"
    long_texts = dict(texts or {})
    mine = dict(facts) | {_digest_key(key): _digest(text) for key, text in long_texts.items()}
    posted: dict[int, dict[str, str]] = {}
    prefix = ""

    def exchange() -> list[int]:
        nonlocal prefix
        deadline = time.monotonic() + timeout_s
        prefix = f"pcp_passes/agree/{topic}/{store.add(f'pcp_passes/agree/{topic}/posted/{rank}', 1)}"
        store.set(f"{prefix}/facts/{rank}", json.dumps(mine))
        return _collect(
            store, prefix + "/facts", world, deadline, lambda who, raw: posted.__setitem__(who, json.loads(raw))
        )

    def linger() -> None:
        _linger(store, prefix, rank, len(posted))

    def explain() -> str:
        shown = _exchange_texts(store, prefix, rank, world, differing, long_texts)
        linger()
        return _mismatch_message(topic, differing, posted, shown)

    host = f"rank 0, which hosts the store, about {topic!r}"
    try:
        missing = bounded(exchange, timeout_s=timeout_s + 1.0, waiting_for=host)
        differing = _differing(posted)
        if differing and not missing:
            raise RankMismatch(bounded(explain, timeout_s=3 * _LINGER_S, waiting_for=host))
        bounded(linger, timeout_s=2 * _LINGER_S, waiting_for=host)
        if missing:
            raise PeerLost(_missing_message(topic, rank, missing, timeout_s))
    except RuntimeError as error:
        absent = [r for r in range(world) if r not in posted]
        also = f" Not yet posted: {_ranks(absent)}." if absent else ""
        raise PeerLost(
            f"rank {rank} lost the store of rank 0 while agreeing about {topic!r}: {first_line(error)}.{also}\n"
            "  next  look at the first error of these ranks, then restart all ranks"
        ) from error
    logger.debug("%d ranks agree on %s", world, topic)


def _digest(text: str) -> str:
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}, {text.count(chr(10)) + 1} lines"


def _digest_key(key: str) -> str:
    return f"text of {key}"


def _collect(store: Store, prefix: str, world: int, deadline: float, take: Callable[[int, bytes], None]) -> list[int]:
    """Hand each rank's value under ``prefix`` to ``take`` as it appears; return the ranks missing at ``deadline``.

    Polls ``check``: a ``wait`` that times out still has to settle its cancellation with the server.
    """
    missing = list(range(world))
    while True:
        for who in [r for r in missing if store.check([f"{prefix}/{r}"])]:
            take(who, store.get(f"{prefix}/{who}"))
            missing.remove(who)
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_POLL_S)


def _linger(store: Store, prefix: str, rank: int, readers: int) -> None:
    """Mark that this rank has read everything; the store's host waits for ``readers`` such marks before it goes on."""
    read = store.add(f"{prefix}/read", 1)
    deadline = time.monotonic() + _LINGER_S
    while rank == 0 and read < readers and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        read = store.add(f"{prefix}/read", 0)


def _differing(posted: Mapping[int, Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Key → value → ranks, for the keys whose values are not all equal."""
    keys = sorted(set().union(*posted.values()))
    scopes = {who: {_scope(key) for key in facts} for who, facts in posted.items()}
    by_key: dict[str, dict[str, list[int]]] = {}
    for key in keys:
        holders: dict[str, list[int]] = {}
        for who in sorted(posted):
            if (scope := _scope(key)) and scope not in scopes[who]:
                continue
            holders.setdefault(posted[who].get(key, ABSENT), []).append(who)
        if len(holders) > 1:
            by_key[key] = holders
    return by_key


def _scope(key: str) -> str:
    return key.removeprefix(_digest_key("")).partition(SCOPE)[0] if SCOPE in key else ""


def _exchange_texts(
    store: Store,
    prefix: str,
    rank: int,
    world: int,
    differing: Mapping[str, Mapping[str, list[int]]],
    texts: Mapping[str, str],
) -> dict[str, str]:
    """First differing lines of each differing text. Every rank comes here, because every rank saw the same posts."""
    keys = sorted({k for k in differing if k.startswith(_digest_key(""))})
    if not keys:
        return {}
    packed: dict[str, str] = {}
    for key in sorted(texts):
        text = base64.b85encode(zlib.compress(texts[key].encode())).decode("ascii")
        if _digest_key(key) in keys and len(text) + sum(map(len, packed.values())) < _MAX_TEXTS:
            packed[key] = text
    store.set(f"{prefix}/texts/{rank}", json.dumps(packed))
    got: dict[int, dict[str, str]] = {}
    _collect(
        store,
        prefix + "/texts",
        world,
        time.monotonic() + _LINGER_S,
        lambda who, raw: got.__setitem__(who, json.loads(raw)),
    )
    shown = {}
    for key in keys:
        # The two largest parties, so that one odd rank is compared with the many.
        first, second = sorted(differing[key].values(), key=lambda ranks: (-len(ranks), ranks))[:2]
        name = key.removeprefix(_digest_key(""))
        left, right = (got.get(ranks[0], {}).get(name) for ranks in (first, second))
        if left and right:
            shown[key] = _first_difference(_unpack(left), _unpack(right), first[0], second[0])
    return shown


def _unpack(packed: str) -> str:
    return zlib.decompress(base64.b85decode(packed)).decode()


def _first_difference(left: str, right: str, left_rank: int, right_rank: int) -> str:
    """The first differing line of two texts with the lines before it, as an indented block."""
    pairs = list(zip_longest(left.splitlines(), right.splitlines()))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return "    (they differ only in how lines end)"
    before = [f"      {i + 1:>4}  {_around(pairs[i][0], 0)}" for i in range(max(0, at - _CONTEXT), at)]
    a, b = pairs[at]
    column = next((i for i, (x, y) in enumerate(zip(a or "", b or "", strict=False)) if x != y), 0)
    lines = [
        f"    {sign} {at + 1:>4}  {'<end of text>' if line is None else _around(line, column)}   (rank {who})"
        for sign, line, who in (("-", a, left_rank), ("+", b, right_rank))
    ]
    return "\n".join([*before, *lines])


def _around(line: str, column: int) -> str:
    """At most ``_SHOWN`` characters of ``line`` that include ``column``."""
    start = max(0, column - _SHOWN // 2) if len(line) > _SHOWN else 0
    end = start + _SHOWN
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")


def _values(holders: Mapping[str, list[int]]) -> Iterable[str]:
    """``rank 2: 'value'`` per distinct value; long values are cut around the place where they first differ."""
    values = list(holders)
    shortest = min(map(len, values))
    column = next((i for i in range(shortest) if len({v[i] for v in values}) > 1), shortest)
    for value, ranks in holders.items():
        yield f"{_ranks(ranks)}: {value if value == ABSENT else repr(_around(value, column))}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _mismatch_message(
    topic: str,
    differing: Mapping[str, Mapping[str, list[int]]],
    posted: Mapping[int, Mapping[str, str]],
    shown: Mapping[str, str],
) -> str:
    compared = len(set().union(*posted.values()))
    lines = [f"{len(posted)} ranks disagree about {topic!r}: {len(differing)} of {compared} facts differ."]
    width = max(map(len, differing))
    for key, holders in differing.items():
        for i, text in enumerate(_values(holders)):
            lines.append(f"  {key if i == 0 else '':<{width}}  {text}")
        if key in shown:
            lines.append(shown[key])
    lines.append("  next  start every rank with the same options, package versions and model, then restart all ranks")
    return "\n".join(lines)


def _missing_message(topic: str, rank: int, missing: list[int], timeout_s: float) -> str:
    return (
        f"{_ranks(missing)} did not report about {topic!r} within {timeout_s:g} s of rank {rank}'s report: "
        "dead, frozen, or still busy before this point.\n"
        f"  next  look at the log of {_ranks(missing)}, then restart all ranks; raise the timeout if it was only slow"
    )
