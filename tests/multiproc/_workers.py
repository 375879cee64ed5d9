# SPDX-License-Identifier: Apache-2.0
"""Ranks as real processes for the tests of agreement and heartbeat: a launcher and what the processes run.

Processes come from a fork server that has torch imported, so a group of three starts in a fraction of a second. Each
rank is a process group of its own and ends itself after ``LIFETIME_S``; the launcher kills what is left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from pcp_passes.distributed import Heartbeat, Loss, open_store, require_agreement
from pcp_passes.distributed.store import TCPStore
from pcp_passes.errors import PcpError, PeerLost

LIFETIME_S = 150


class Group:
    """``world`` processes that run ``work(rank, world, folder, **options)``; leaving the context kills them."""

    def __init__(
        self, world: int, folder: Path, work: Callable[..., None], ranks: list[int] | None = None, **options: Any
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "pcp_passes.engine.ranks"])
        self.folder = folder
        self.processes: dict[int, ForkServerProcess] = {
            rank: context.Process(target=_enter, args=(rank, world, str(folder), work, options))
            for rank in (range(world) if ranks is None else ranks)
        }

    def __enter__(self) -> Group:
        for process in self.processes.values():
            process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self.processes.values():
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)  # also ends a stopped process
            process.join(10)
        if kind is not None:
            for rank in self.processes:
                print(f"--- stderr of rank {rank}\n{self.stderr(rank)}", file=sys.stderr)

    def signal(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def stderr(self, rank: int) -> str:
        path = self.folder / f"stderr.{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_marks(self, name: str, ranks: list[int], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while missing := [r for r in ranks if not (self.folder / f"{name}.{r}").exists()]:
            dead = {r: p.exitcode for r, p in self.processes.items() if r in missing and p.exitcode is not None}
            assert not dead, f"ranks ended before {name!r}: {dead}"
            assert time.monotonic() < deadline, f"no {name!r} from ranks {missing}"
            time.sleep(0.02)

    def exit_codes(self, ranks: list[int], timeout_s: float) -> dict[int, int | None]:
        """Exit codes of ``ranks``; None for those still alive after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        for rank in ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        return {rank: self.processes[rank].exitcode for rank in ranks}

    def results(self) -> dict[int, Any]:
        paths = {rank: self.folder / f"result.{rank}" for rank in self.processes}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def mark(folder: Path, name: str, rank: int, content: str = "") -> None:
    partial = folder / f".{name}.{rank}"
    partial.write_text(content)
    partial.rename(folder / f"{name}.{rank}")


def _enter(rank: int, world: int, folder: str, work: Callable[..., None], options: Mapping[str, Any]) -> None:
    os.setpgid(0, 0)
    signal.alarm(LIFETIME_S)
    error_log = os.open(f"{folder}/stderr.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(error_log, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    work(rank, world, Path(folder), **options)


# What the ranks run.


def connect(rank: int, world: int, folder: Path) -> TCPStore:
    """A gloo group whose connections are all made, and the group's own store on rank 0."""
    bootstrap = dist.FileStore(str(folder / "rendezvous"), world)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", bootstrap), rank=rank, world_size=world)
    store = open_store("127.0.0.1", rank=rank, world=world, bootstrap=dist.PrefixStore("pcp", bootstrap), name="pcp")
    dist.all_reduce(torch.ones(1))
    return store


def agree(
    rank: int,
    world: int,
    folder: Path,
    rounds: list[dict[str, Any]],
    posting: list[int],
    timeout_s: float,
) -> None:
    """Posts one round after the other; ``facts`` and ``texts`` of a round are lists by rank."""
    bootstrap = dist.FileStore(str(folder / "rendezvous"), world)
    store = open_store("127.0.0.1", rank=rank, world=world, bootstrap=bootstrap, name="pcp")
    mark(folder, "ready", rank)
    while not all((folder / f"ready.{r}").exists() for r in range(world)):
        time.sleep(0.02)
    outcomes = []
    for round_ in rounds if rank in posting else ():
        begin = time.monotonic()
        try:
            require_agreement(
                store,
                rank=rank,
                world=world,
                topic=round_["topic"],
                facts=round_["facts"][rank],
                texts=round_["texts"][rank],
                timeout_s=timeout_s,
            )
            outcomes.append(["agreed", "", time.monotonic() - begin])
        except PcpError as error:
            outcomes.append([type(error).__name__, str(error), time.monotonic() - begin])
    mark(folder, "result", rank, json.dumps(outcomes))
    if rank not in posting:
        time.sleep(LIFETIME_S)


def _beating(rank: int, world: int, folder: Path, heartbeat: Mapping[str, Any] | None) -> Heartbeat | None:
    store = connect(rank, world, folder)
    if heartbeat is None:
        _KEPT.append(store)
        return None
    beat = Heartbeat(store, rank=rank, world=world, reason_file=folder / f"reason.{rank}", **heartbeat)
    beat.start()
    return beat


_KEPT: list[TCPStore] = []


def collective(rank: int, world: int, folder: Path, heartbeat: Mapping[str, Any] | None, absent: int) -> None:
    """Everyone but ``absent`` enters an all-reduce and is blocked there."""
    _beating(rank, world, folder, heartbeat)
    dist.barrier()
    mark(folder, "ready", rank)
    if rank == absent:
        time.sleep(LIFETIME_S)
    dist.all_reduce(torch.ones(1))


def compiling(rank: int, world: int, folder: Path, heartbeat: Mapping[str, Any], seconds: float, backend: str) -> None:
    """Rank 1 compiles for ``seconds`` while the others wait for it in an all-reduce."""
    beat = _beating(rank, world, folder, heartbeat)
    assert beat is not None
    begin = time.monotonic()
    if rank == 1:
        compiled = torch.compile(lambda x: torch.nn.functional.silu(x) * x + 1, backend=backend)
        compiled(torch.ones(8, 8))
        total = 0
        while time.monotonic() - begin < seconds:
            total += sum(i * i for i in range(10_000))  # pure Python: holds the GIL except for its switch interval
    dist.all_reduce(torch.ones(1))
    waited = time.monotonic() - begin
    beat.stop()
    mark(folder, "result", rank, json.dumps({"waited": waited, "reason": beat.reason()}))


def departing(rank: int, world: int, folder: Path, heartbeat: Mapping[str, Any], after_s: list[float]) -> None:
    """Each rank says goodbye and ends its process after its own number of seconds."""
    beat = _beating(rank, world, folder, heartbeat)
    assert beat is not None
    dist.barrier()
    time.sleep(after_s[rank])
    begin = time.monotonic()
    beat.stop()
    mark(folder, "result", rank, json.dumps({"stop_s": time.monotonic() - begin, "reason": beat.reason()}))


def raising(rank: int, world: int, folder: Path, heartbeat: Mapping[str, Any], culprit: int) -> None:
    """``culprit`` ends with an exception, without saying goodbye, while the others wait for it outside of gloo."""
    _beating(rank, world, folder, heartbeat)
    dist.barrier()
    mark(folder, "ready", rank)
    if rank == culprit:
        raise RuntimeError("an error of this rank's own")
    time.sleep(LIFETIME_S)


def waiting(rank: int, world: int, folder: Path, heartbeat: Mapping[str, Any], forgiving: bool) -> None:
    """All ranks idle until the file ``go`` appears. ``forgiving=False`` takes the allowance for own suspension away."""
    beat = _beating(rank, world, folder, heartbeat)
    assert beat is not None
    if not forgiving:
        beat._late_s = float("inf")
    dist.barrier()
    mark(folder, "ready", rank)
    while not (folder / "go").exists():
        time.sleep(0.05)
    beat.stop()
    mark(folder, "result", rank, json.dumps(beat.reason()))


def partly_beating(rank: int, world: int, folder: Path, heartbeat: Mapping[str, Any], mute: int) -> None:
    """Everyone but ``mute`` starts a heartbeat."""
    _beating(rank, world, folder, None if rank == mute else heartbeat)
    time.sleep(LIFETIME_S)


def raising_peer_lost(rank: int, world: int, folder: Path, heartbeat: Mapping[str, Any]) -> None:
    """Rank 0 catches what gloo raises and asks its heartbeat why, with an ``on_lost`` that leaves the process alone."""
    lost: list[Loss] = []
    beat = Heartbeat(connect(rank, world, folder), rank=rank, world=world, on_lost=lost.append, **heartbeat)
    beat.start()
    dist.barrier()
    mark(folder, "ready", rank)
    if rank == 1:
        time.sleep(LIFETIME_S)
    told = ""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        try:
            beat.raise_if_lost(wait_s=10.0)
        except PeerLost as error:
            told = f"{type(error).__name__}: {error}"
    beat.stop()
    mark(folder, "result", rank, json.dumps(told if len(lost) == 1 else f"on_lost was called {len(lost)} times"))


def agree_when_told(rank: int, world: int, folder: Path, facts: Mapping[str, str], timeout_s: float) -> None:
    """Rank 0 only hosts the store; the others post once the file ``go`` appears."""
    bootstrap = dist.FileStore(str(folder / "rendezvous"), world)
    store = open_store("127.0.0.1", rank=rank, world=world, bootstrap=bootstrap, name="pcp")
    mark(folder, "ready", rank)
    while rank == 0 or not (folder / "go").exists():
        time.sleep(0.02)
    try:
        require_agreement(store, rank=rank, world=world, topic="start", facts=facts, timeout_s=timeout_s)
        outcome = ["agreed", ""]
    except PcpError as error:
        outcome = [type(error).__name__, str(error)]
    mark(folder, "result", rank, json.dumps(outcome))


def open_with_own_world(rank: int, world: int, folder: Path, worlds: list[int]) -> None:
    """Opens the store with a group size of each rank's own."""
    bootstrap = dist.FileStore(str(folder / "rendezvous"), world)
    told = ""
    try:
        store = open_store("127.0.0.1", rank=rank, world=worlds[rank], bootstrap=bootstrap, name="pcp", timeout_s=2.0)
        _KEPT.append(store)
    except PcpError as error:
        told = f"{type(error).__name__}: {error}"
    mark(folder, "result", rank, json.dumps(told))
    if rank == 0:
        time.sleep(LIFETIME_S)
