# SPDX-License-Identifier: Apache-2.0
"""A key-value store of the group's own, hosted by rank 0, for what must never hang: agreement and heartbeat.

Facts about ``torch.distributed.TCPStore`` (executed with torch 2.13.0, CPU) that shape this module:

- Its timeout bounds how long a *key* may be missing, not an operation: against a host process stopped with SIGSTOP,
  ``add``, ``get``, ``check``, ``wait(timeout)`` and even the constructor block until the host runs again. Hence
  :func:`bounded`.
- A client serialises its operations under one lock, so a blocked thread blocks every other user of that client. Hence
  one client per thread, :func:`new_connection`.
- Operations release the GIL; a vanished host raises ``DistNetworkError`` (a ``RuntimeError``) at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

from pcp_passes.distributed.watch.procstate import ProcessIdentity, this_process
from pcp_passes.errors import PeerLost, RankMismatch

if TYPE_CHECKING:  # torch.distributed re-exports them only where it was built in, which mypy does not follow
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
else:
    from torch.distributed import PrefixStore, Store, TCPStore

__all__ = ["PrefixStore", "Store", "TCPStore", "bounded", "first_line", "identity_of", "new_connection", "open_store"]

T = TypeVar("T")

_OPERATION = timedelta(seconds=10)
"""How long a read may wait for a key. Readers here only ask for keys that exist, so this is a backstop."""


def first_line(error: BaseException) -> str:
    """The message of ``error`` without the C++ stack that torch appends, or its type where there is no message."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _Call(threading.Thread, Generic[T]):
    """Runs one function on a daemon thread and keeps its outcome."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(name="pcp-store-call", daemon=True)
        self._function = function
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:  # handed to the waiting thread, which raises it
            self.error = error


def bounded(function: Callable[[], T], *, timeout_s: float, waiting_for: str) -> T:
    """Run ``function``, which talks to a store, and give up after ``timeout_s`` seconds even if its host is frozen.

    Raises whatever ``function`` raises, and :class:`PeerLost` naming ``waiting_for`` when time runs out. Afterwards the
    abandoned thread still holds the store's lock: do not use that client again.
    """
    call = _Call(function)
    call.start()
    call.join(timeout_s)
    if call.is_alive():
        raise PeerLost(
            f"no answer from {waiting_for} within {timeout_s:g} s: its process is frozen, or the network is down.\n"
            "  next  look at that process (state T in ps means stopped), then restart all ranks"
        )
    if call.error is not None:
        raise call.error
    return call.result  # type: ignore[return-value]  # T itself may be None


def _client(host: str, port: int, *, is_master: bool) -> TCPStore:
    return TCPStore(host, port, None, is_master, timeout=_OPERATION, wait_for_workers=False, multi_tenant=is_master)


def open_store(host: str, *, rank: int, world: int, bootstrap: Store, name: str, timeout_s: float = 60.0) -> TCPStore:
    """Open the group's own store: rank 0 serves it on a free port, the others connect.

    ``host`` is the address of rank 0's machine as this rank reaches it. ``bootstrap`` is any store all ``world`` ranks
    already share (the default process group's, in a ``PrefixStore``); only the port and the group size travel through
    it. ``name`` tells groups apart; every rank must open the same names equally often, and may open one name again (a
    count per rank in ``bootstrap`` keeps the openings apart).

    The server lives as long as rank 0 keeps the returned object. The object belongs to the calling thread; another
    thread takes its own with :func:`new_connection`.

    Raises :class:`PeerLost` when rank 0 does not publish within ``timeout_s`` seconds or cannot be reached, and
    :class:`RankMismatch` when it was started with another group size.
    """
    assert 0 <= rank < world, f"rank {rank} is not in a group of {world}"

    def rendezvous() -> TCPStore:
        prefix = f"pcp_passes/{name}/{bootstrap.add(f'pcp_passes/{name}/opened/{rank}', 1)}"
        if rank == 0:
            server = _client(host, 0, is_master=True)
            bootstrap.set(f"{prefix}/port", f"{server.port} {world}")
            return announced(server)
        bootstrap.wait([f"{prefix}/port"], timedelta(seconds=timeout_s))
        port, host_world = map(int, bootstrap.get(f"{prefix}/port").split())
        if host_world != world:
            raise RankMismatch(
                f"group {name!r}: rank {rank} was started with {world} ranks, rank 0 with {host_world}.\n"
                "  next  start every rank with the same parallel sizes"
            )
        return announced(_client(host, port, is_master=False))

    def announced(store: TCPStore) -> TCPStore:
        store.set(_identity_key(rank), this_process().encode())
        return store

    who = f"rank 0, which hosts the store of group {name!r}"
    try:
        return bounded(rendezvous, timeout_s=timeout_s + 5.0, waiting_for=who)
    except RuntimeError as error:  # what torch raises for a missing key, a refused and a broken connection
        raise PeerLost(
            f"rank {rank} could not reach {who}, at {host}, within {timeout_s:g} s: {first_line(error)}\n"
            "  next  see whether rank 0 started and whether its address is right, then restart all ranks"
        ) from error


def _identity_key(rank: int) -> str:
    return f"pcp_passes/identity/{rank}"


def identity_of(store: TCPStore, rank: int) -> ProcessIdentity | None:
    """The process that opened ``store`` as ``rank``, or None when it has not yet."""
    key = _identity_key(rank)
    return ProcessIdentity.decode(store.get(key).decode()) if store.check([key]) else None


def new_connection(store: TCPStore) -> TCPStore:
    """A further client of the server behind ``store``, for another thread. Raises ``RuntimeError`` when it is gone.

    Blocks for as long as the host is frozen; call it on a thread that may be blocked, or through :func:`bounded`.
    """
    return _client(store.host, store.port, is_master=False)
