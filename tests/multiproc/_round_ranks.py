# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages as processes for ``test_round_state``: each case runs on groups of its own, one after the other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pcp_passes.distributed.stages.round_state import Round, RoundForm, StashedStep
from pcp_passes.distributed.stages.round_transport import GroupTransport, Mailbox, RoundTransport, Ticket
from pcp_passes.distributed.stages.rounds import RoundReceiver, RoundSender
from pcp_passes.errors import PcpError

K = 2
ROUNDS = 500
PATIENCE_S = 20.0
"""Much longer than any round takes; what waits for it fails the test."""
SHORT_S = 1.5
"""For the cases whose point is a round that does not come."""


class Stage:
    """One stage of one case: its transport, what it issued, and what became of each round."""

    def __init__(self, rank: int, world: int, form: RoundForm, timeout_s: float = PATIENCE_S) -> None:
        ranks = list(range(world))
        # Not shorter than a test's own patience: a group's timeout would tear its connections down first.
        limit = timedelta(seconds=4 * PATIENCE_S)
        self.cpu: Any = dist.new_group(ranks, backend="gloo", timeout=limit)
        self.device: Any = dist.new_group(ranks, backend="gloo", timeout=limit)
        self.form, self.timeout_s, self.last = form, timeout_s, rank == world - 1
        self.issued: list[list[int]] = []
        self.transport = GroupTransport(
            self.cpu, device_group=self.device, on_issue=lambda payload: self.issued.append(list(payload.shape))
        )
        self.sender = RoundSender(self.transport, form, timeout_s=timeout_s) if self.last else None
        self.receiver = None if self.last else RoundReceiver(self.transport, form, timeout_s=timeout_s)
        self.found: list[Any] = []

    def attempt(self, call: Callable[[], Any]) -> None:
        """Note what ``call`` gave, or its error and how long it took to come."""
        begin = time.monotonic()
        try:
            self.found.append(call())
        except PcpError as error:
            self.found.append([type(error).__name__, str(error), time.monotonic() - begin])

    def send(self, step: int, sampled: Any, drafts: Any, requests: int = 2) -> None:
        assert self.sender is not None
        sender, made = self.sender, torch.tensor(sampled)
        given = torch.tensor(drafts) if self.form.drafts == "tensor" and drafts is not None else drafts
        self.attempt(lambda: sender.send(step, requests, made, given))

    def stash(self, step: int, drafts: tuple[int, ...] = (K, K), rows: tuple[int, ...] = (0, 1)) -> None:
        assert self.receiver is not None
        lengths, none = tuple(1 + d for d in drafts), (-1,) * len(rows)
        self.receiver.stash(StashedStep(step, rows, (0,) * len(rows), lengths, drafts, none))

    def receive(self) -> None:
        assert self.receiver is not None
        receiver = self.receiver
        self.attempt(lambda: plain(receiver.receive()))

    def close(self) -> list[Any]:
        if self.sender is not None:
            self.attempt(lambda: self.sender.close(self.timeout_s))  # type: ignore[union-attr]
        return [self.found, self.issued]


def plain(found: Round) -> list[Any]:
    drafts = None if found.drafts is None else found.drafts.tolist()
    derived = found.derived
    return [
        found.stash.step,
        found.sampled.tolist(),
        drafts,
        derived.next_token.tolist(),
        derived.num_rejected.tolist(),
    ]


def wrong_rows(rank: int, world: int) -> list[Any]:
    """The sampled matrix of the first round has a row too few; the second round is right."""
    stage = Stage(rank, world, RoundForm(K))
    if stage.last:
        stage.send(1, [[5, -1, -1]], [[8, 9]])
        stage.send(2, [[5, -1, -1], [6, 7, -1]], [[8, 9], [10, 11]])
    else:
        for step in (1, 2):
            stage.stash(step)
            stage.receive()
    return stage.close()


def narrow(rank: int, world: int) -> list[Any]:
    """One column where K + 1 are shipped."""
    stage = Stage(rank, world, RoundForm(K))
    if stage.last:
        stage.send(1, [[5], [6]], [[8, 9], [10, 11]])
    else:
        stage.stash(1, (0, 0))
        stage.receive()
    return stage.close()


class Forgetful:
    """Sabotage: the second payload of a step is not taken, of the next step neither: gloo would end the process."""

    is_source = False

    def __init__(self, transport: RoundTransport) -> None:
        self.transport, self.calls = transport, 0

    def broadcast(self, payload: torch.Tensor) -> Ticket:
        self.calls += 1
        return Mailbox(0).source.broadcast(payload) if self.calls % 2 == 0 else self.transport.broadcast(payload)

    def later(self) -> Callable[[torch.Tensor], Ticket]:
        return self.broadcast


def unstashed(rank: int, world: int, forgetful: bool = False) -> list[Any]:
    """The first step is known to both and stashed by none; the second is a step like others."""
    stage = Stage(rank, world, RoundForm(K), SHORT_S if forgetful else PATIENCE_S)
    if stage.last:
        stage.send(1, [[5, -1, -1], [6, 7, -1]], [[8, 9], [10, 11]])
        stage.send(2, [[15, 12, -1], [16, -1, -1]], [[18, 19], [20, 21]])
        return stage.close()
    assert stage.receiver is not None
    if forgetful:
        stage.receiver.transport = Forgetful(stage.transport)
    stage.receiver.expect(1, 2)
    stage.receive()
    stage.stash(2)
    stage.receive()
    return stage.close()


def listed(rank: int, world: int) -> list[Any]:
    """Drafts as lists on the host."""
    stage = Stage(rank, world, RoundForm(K, "list"))
    if stage.last:
        stage.send(1, [[5, -1, -1], [6, 7, -1]], [[8], []])
        stage.send(2, [[5, -1, -1], [6, 7, -1]], None)
    else:
        for step in (1, 2):
            stage.stash(step)
            arrived = stage.receiver._expected[0].payloads  # type: ignore[union-attr]
            stage.receive()
            stage.found.append(arrived[1].tolist())
    return stage.close()


def undeclared(rank: int, world: int) -> list[Any]:
    """Lists where a tensor was declared."""
    stage = Stage(rank, world, RoundForm(K))
    if stage.last:
        assert stage.sender is not None
        stage.attempt(lambda: stage.sender.send(1, 2, torch.tensor([[5], [6]]), [[8], [9]]))  # type: ignore[union-attr]
    else:
        stage.stash(1, (0, 0))
        stage.receive()
    return stage.close()


def without_drafter(rank: int, world: int) -> list[Any]:
    """K = 0: one payload of one column."""
    stage = Stage(rank, world, RoundForm(0))
    for step in (1, 2, 3):
        if stage.last:
            stage.send(step, [[step], [step + 10]], torch.zeros(2, 0, dtype=torch.int64).tolist())
        else:
            stage.stash(step, (0, 0))
    while stage.receiver is not None and stage.receiver.pending:
        stage.receive()
    return stage.close()


def fewer(rank: int, world: int) -> list[Any]:
    """The last stage has a batch of one request where the others have one of two."""
    stage = Stage(rank, world, RoundForm(0), SHORT_S)
    if stage.last:
        stage.send(1, [[5]], None, requests=1)
    else:
        stage.stash(1, (0, 0))
        stage.receive()
    return stage.close()


def silent(rank: int, world: int) -> list[Any]:
    """The last stage sends nothing for longer than a receiver waits."""
    stage = Stage(rank, world, RoundForm(K), SHORT_S)
    if not stage.last:
        stage.stash(1)
        stage.receive()
    return stage.found


def tokens(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the last stage sampled and drafted in a step: a function of the step."""
    sampled = torch.tensor([[step, step + 1, -1], [3 * step, -1, -1]])
    return sampled, torch.tensor([[step + 7, step + 8], [step + 9, step]])


def interleaved(rank: int, world: int, dropped: int = -1) -> list[Any]:
    """Hidden states go down the stages on the device group, rounds come back, several of both in flight.

    ``dropped``: sabotage, the round of this step is not sent; the last is sent twice, so nobody waits for it.
    """
    stage = Stage(rank, world, RoundForm(K))
    wrong: list[int] = []
    works: list[Any] = []
    for step in range(ROUNDS):
        wire = torch.full((4, 8), float(step * world + rank))
        if rank > 0:
            came = torch.empty(4, 8)
            dist.irecv(came, group=stage.device, group_src=rank - 1).wait()  # type: ignore[union-attr]
            if not torch.equal(came, torch.full((4, 8), float(step * world + rank - 1))):
                wrong.append(-step)
        if not stage.last:
            works.append((wire, dist.isend(wire, group=stage.device, group_dst=rank + 1)))
            stage.stash(step)
        elif step != dropped:
            stage.sender.send(step, 2, *tokens(step))  # type: ignore[union-attr]
        # Each stage looks at rounds at its own pace: up to nine in flight.
        keep = (rank * 3 + step) % 10 if step < ROUNDS - 1 else 0
        while stage.receiver is not None and len(stage.receiver.pending) > keep:
            oldest = stage.receiver.pending[0]
            if oldest > step - world and step < ROUNDS - 1:
                break  # not sampled yet: the last stage is behind
            found = stage.receiver.receive()
            expected = tokens(oldest)
            assert found.drafts is not None
            if found.stash.step != oldest or not all(map(torch.equal, (found.sampled, found.drafts), expected)):
                wrong.append(oldest)
    if stage.last and dropped >= 0:
        stage.sender.send(ROUNDS, 2, *tokens(ROUNDS - 1))  # type: ignore[union-attr]
    for _, work in works:
        work.wait()
    stage.close()
    return [wrong[:5], len(stage.issued)]


class LateReceiver(RoundReceiver):
    """Sabotage: it joins a step's broadcasts when it needs the round, not when it knows of it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.noted: list[StashedStep] = []

    def stash(self, step: StashedStep) -> None:
        self.noted.append(step)

    def receive(self) -> Round:
        super().stash(self.noted.pop(0))
        return super().receive()


def busy(rank: int, world: int, slow: int, receiver: type[RoundReceiver] = RoundReceiver) -> list[Any]:
    """Stage ``slow`` looks at no round before all other stages have theirs; with ``LateReceiver`` they wait for it."""
    stage = Stage(rank, world, RoundForm(K), PATIENCE_S if receiver is RoundReceiver else SHORT_S)
    if not stage.last:
        stage.receiver = receiver(stage.transport, stage.form, timeout_s=stage.receiver.timeout_s)  # type: ignore[union-attr]
    for step in range(4):
        if stage.last:
            stage.sender.send(step, 2, *tokens(step))  # type: ignore[union-attr]
        else:
            stage.stash(step)
    if rank == slow:
        dist.recv(torch.empty(1), group=stage.device, group_src=world - 1)
        for other in range(world - 1):
            if other != slow:
                dist.recv(torch.empty(1), group=stage.device, group_src=other)
    if not stage.last:
        for _ in range(4):
            stage.receive()
            if isinstance(stage.found[-1][0], str):
                break
    if rank != slow:
        dist.send(torch.ones(1), group=stage.device, group_dst=slow)
    if receiver is RoundReceiver:
        stage.close()
    return stage.found


def refused(rank: int, world: int) -> list[Any]:
    """Groups that a round must not travel on."""
    stage = Stage(rank, world, RoundForm(K))
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers a back end that is not gloo

    fake: Any = dist.new_group(list(range(world)), backend="fake")
    stage.attempt(lambda: GroupTransport(fake))
    stage.attempt(lambda: GroupTransport(stage.device, device_group=stage.device))
    return stage.found


TWO: dict[str, Callable[[int, int], list[Any]]] = {
    "wrong_rows": wrong_rows,
    "narrow": narrow,
    "unstashed": unstashed,
    "listed": listed,
    "undeclared": undeclared,
    "without_drafter": without_drafter,
    "interleaved": interleaved,
    "dropped": lambda rank, world: interleaved(rank, world, dropped=250),
    "refused": refused,
    "silent": silent,
    "fewer": fewer,
    "forgetful": lambda rank, world: unstashed(rank, world, forgetful=True),
}
FIVE: dict[str, Callable[[int, int], list[Any]]] = {
    "interleaved": interleaved,
    "busy": lambda rank, world: busy(rank, world, 1),
    "late": lambda rank, world: busy(rank, world, 1, LateReceiver),
}


def run(rank: int, world: int, folder: Path, names: list[str]) -> None:
    """Cases one after the other; writes what each gave as soon as it is over."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)
    cases = TWO if world == 2 else FIVE
    results: dict[str, Any] = {}
    for name in names:
        begin = time.monotonic()
        results[name] = cases[name](rank, world)
        results[name + ".seconds"] = time.monotonic() - begin
        partial = folder / f".result.{rank}"
        partial.write_text(json.dumps(results))
        partial.rename(folder / f"result.{rank}")
    dist.barrier()  # whoever leaves first closes connections that others still wait on
