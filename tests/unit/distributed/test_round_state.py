# SPDX-License-Identifier: Apache-2.0
"""Round state within one process: what follows from a sampled matrix, and the two ends over a mailbox."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcp_passes.distributed.stages import rounds
from pcp_passes.distributed.stages.round_state import RoundForm, StashedStep, derive
from pcp_passes.distributed.stages.round_transport import Mailbox
from pcp_passes.distributed.stages.rounds import RoundReceiver, RoundSender
from pcp_passes.errors import ConfigError, PcpError, PeerLost, RankMismatch
from pcp_passes.step import ops


def ends(steps: int, receivers: int = 1, **options: Any) -> tuple[RoundSender, list[RoundReceiver]]:
    box, form = Mailbox(receivers), RoundForm(steps, **options)
    return RoundSender(box.source, form), [RoundReceiver(end, form) for end in box.receivers]


def step(number: int, drafts: tuple[int, ...], next_prefill: tuple[int, ...] = (), **given: Any) -> StashedStep:
    count = len(drafts)
    lengths = tuple(1 + d for d in drafts)
    rows = given.get("rows", tuple(range(count)))
    return StashedStep(
        number, rows, given.get("generations", (0,) * count), given.get("lengths", lengths), drafts,
        next_prefill or (-1,) * count,
    )  # fmt: skip


def test_what_follows_equals_what_the_last_stage_says() -> None:
    """Every count of drafts and of accepted ones, with and without a prefill that goes on; token 0 is a token."""
    cases = [(d, a, p) for d in range(4) for a in range(d + 1) for p in (-1, 0, 9) if p < 0 or d == 0]
    scheduled, accepted, next_prefill = (torch.tensor(column) for column in zip(*cases, strict=True))
    place = torch.arange(4)
    tokens = torch.arange(len(cases) * 4).view(-1, 4) % 7
    verified = torch.where(place <= accepted[:, None], tokens, -1)
    cu_logits = torch.cat((torch.zeros(1, dtype=torch.int64), (scheduled + 1).cumsum(0)))
    sampled, num_sampled, num_rejected, next_token = ops.outcome(verified, accepted, cu_logits, next_prefill)

    found = derive(sampled, scheduled, next_prefill)
    for mine, theirs in ((found.num_sampled, num_sampled), (found.num_rejected, num_rejected)):
        assert torch.equal(mine, theirs)
    assert torch.equal(found.next_token, next_token)
    assert torch.equal(found.accepted, accepted)
    counted = (verified > 0).sum(1)
    assert not torch.equal(counted, num_sampled), "the cases hold token 0, which is valid"


def test_the_example_of_the_module() -> None:
    sampled = torch.tensor([[7, 9, -1], [4, -1, -1], [-1, -1, -1]])
    found = derive(sampled, torch.tensor([2, 1, 0]), torch.tensor([-1, -1, 5]))
    assert found.accepted.tolist() == [1, 0, 0]
    assert found.num_rejected.tolist() == [1, 1, 0]
    assert found.next_token.tolist() == [9, 4, 5]


def test_several_rounds_in_flight_reach_every_stage_in_order() -> None:
    sender, receivers = ends(2, receivers=3)
    for number in range(5):
        for receiver in receivers:
            receiver.stash(step(number, (2, 0), (-1, 6), lengths=(3, 8)))
        state = torch.tensor([[number, 3, -1], [-1, -1, -1]])
        sender.send(number, 2, state, torch.tensor([[1, 2], [0, number]]))
        state.fill_(99)  # the payload is a copy
    for receiver in receivers:
        assert receiver.pending == (0, 1, 2, 3, 4)
        for number in range(5):
            found = receiver.receive()
            assert found.stash.step == number
            assert found.sampled.tolist() == [[number, 3, -1], [-1, -1, -1]]
            assert found.drafts is not None
            assert found.drafts.tolist() == [[1, 2], [0, number]]
            assert found.derived.next_token.tolist() == [3, 6]
            assert found.advance.tolist() == [2, 8], "one draft of the first request was rejected"
        assert not receiver.pending


def test_reused_rows_are_told_apart() -> None:
    sender, (receiver,) = ends(0)
    receiver.stash(step(1, (0, 0), rows=(3, 1), generations=(5, 2)))
    sender.send(1, 2, torch.tensor([[7], [8]]), None)
    found = receiver.receive()
    now = [0, 2, 0, 5]
    assert found.current(now).tolist() == [True, True]
    now[3] += 1
    assert found.current(now).tolist() == [False, True]


def test_without_a_drafter_there_is_one_payload() -> None:
    assert RoundForm(0).shapes(7) == ((7, 1),)
    assert RoundForm(3).shapes(7) == ((7, 4), (7, 3))
    sender, (receiver,) = ends(0)
    receiver.stash(step(1, (0,)))
    sender.send(1, 1, torch.tensor([[7]]), torch.zeros(1, 0, dtype=torch.int64))
    found = receiver.receive()
    assert found.drafts is not None
    assert found.drafts.shape == (1, 0)


def test_listed_drafts_are_never_read() -> None:
    sender, (receiver,) = ends(2, drafts="list")
    receiver.stash(step(1, (0,)))
    sender.send(1, 1, torch.tensor([[7]]), [[5, 6]])
    assert receiver.receive().drafts is None


@pytest.mark.parametrize(
    ("requests", "sampled", "drafts", "says"),
    [
        (2, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), r"\[1, 3\] for a batch of 2"),
        (1, torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), r"required i64\[1, 1 to 3\]"),
        (1, torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64), "int32"),
        (1, torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), r"required i64\[1, 2\]"),
        (1, torch.zeros(1, 3, dtype=torch.int64), [[1, 2]], "lists on the host"),
        (1, torch.zeros(1, 3, dtype=torch.int64), None, "lists on the host"),
    ],
)
def test_what_receivers_do_not_expect_is_an_error_on_both_sides(
    requests: int, sampled: torch.Tensor, drafts: Any, says: str
) -> None:
    sender, (receiver,) = ends(2)
    receiver.stash(step(1, (2,) * requests))
    receiver.stash(step(2, (0,)))
    with pytest.raises(RankMismatch, match=says):
        sender.send(1, requests, sampled, drafts)
    sender.send(2, 1, torch.tensor([[4]]), torch.tensor([[5, 6]]))
    with pytest.raises(RankMismatch, match="could not make the round of step 1"):
        receiver.receive()
    assert receiver.receive().sampled.tolist() == [[4, -1, -1]]


def test_a_step_that_was_not_stashed_raises_after_both_payloads() -> None:
    sender, (receiver,) = ends(1)
    receiver.expect(1, 2)
    receiver.stash(step(2, (1,)))
    sender.send(1, 2, torch.tensor([[4], [5]]), torch.tensor([[6], [7]]))
    sender.send(2, 1, torch.tensor([[8, 9]]), torch.tensor([[3]]))
    with pytest.raises(PcpError, match="round of step 1 arrived, and this stage stashed nothing"):
        receiver.receive()
    assert receiver.receive().sampled.tolist() == [[8, 9]]


def test_a_round_of_another_step_does_not_pass() -> None:
    wrong = [
        (step(1, (1,)), [[4, 5, 6]], "3 tokens for request 0 of 1 .row 0., which gets 1 to 2"),
        (step(1, (1,)), [[-1, 5, 6]], "0 tokens"),
        (step(1, (0,), (8,)), [[4, -1, -1]], "gets none, in the middle of its prefill"),
    ]
    for stash, sampled, says in wrong:
        sender, (receiver,) = ends(2)
        receiver.stash(stash)
        sender.send(1, 1, torch.tensor(sampled), torch.tensor([[0, 0]]))
        with pytest.raises(RankMismatch, match=says):
            receiver.receive()


@pytest.mark.parametrize(("sent", "arrives"), [(1, False), (2, True), (3, True)])
def test_a_smaller_batch_of_the_last_stage_is_noticed(sent: int, arrives: bool) -> None:
    """A larger one ends the process in gloo; the mailbox cuts it, so what arrives is whole."""
    sender, (receiver,) = ends(0)
    receiver.stash(step(1, (0, 0)))
    sender.send(1, sent, torch.tensor([[7]] * sent), None)
    if arrives:
        assert receiver.receive().sampled.tolist() == [[7], [7]]
        return
    with pytest.raises(RankMismatch, match=r"expects a round of \[\[2, 1\]\] .* \[1\] values of it did not arrive"):
        receiver.receive()


def test_a_stash_of_other_requests_than_were_announced_is_noticed() -> None:
    sender, (receiver,) = ends(0)
    receiver.expect(1, 2)
    receiver.stash(step(1, (0,)))
    sender.send(1, 2, torch.tensor([[7], [8]]), None)
    with pytest.raises(RankMismatch, match="batch of 1 requests"):
        receiver.receive()


def test_waiting_for_what_nobody_sends_is_an_error() -> None:
    _, (receiver,) = ends(0)
    with pytest.raises(PcpError, match="no round is on its way"):
        receiver.receive()
    receiver.stash(step(1, (0,)))
    with pytest.raises(PcpError, match="run the last stage of a step before"):
        receiver.receive()


def test_forms_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=-1"):
        RoundForm(-1)
    with pytest.raises(ConfigError, match="drafts='tensors'"):
        RoundForm(1, "tensors")  # type: ignore[arg-type]


class Slow:
    """A transport whose receivers take nothing until they are told to."""

    is_source = True

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.waits = 0

    def broadcast(self, payload: torch.Tensor) -> Slow:
        self.sent.append(payload)
        return self

    def later(self) -> Callable[[torch.Tensor], Slow]:
        return self.broadcast

    def wait(self, timeout_s: float) -> None:
        self.waits += 1
        if self.waits > 2:
            raise PeerLost("took nothing")


def test_a_sender_waits_only_when_too_many_rounds_are_in_flight() -> None:
    slow = Slow()
    sender = RoundSender(slow, RoundForm(0), in_flight=3)
    for number in range(5):
        sender.send(number, 1, torch.tensor([[number]]), None)
        assert slow.waits == max(0, number - 2), "the fourth round waits for the first"
    with pytest.raises(PeerLost):
        sender.send(5, 1, torch.tensor([[5]]), None)
    assert len(slow.sent) == 6


def test_rounds_of_a_device_are_sent_in_order_when_their_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with an event that a thread of the test sets."""
    made = threading.Event()
    monkeypatch.setattr(rounds, "_on_host", lambda x: False)
    monkeypatch.setattr(rounds, "_copy_out", lambda payloads: ([x.clone() for x in payloads], lambda: made.wait(30)))
    sender, (receiver,) = ends(1)
    for number in range(3):
        receiver.stash(step(number, (1,)))
        sender.send(number, 1, torch.tensor([[number, 1]]), torch.tensor([[number]]))
    with pytest.raises(PcpError, match="waits for a round"):
        RoundReceiver.receive(_peek(receiver))
    with pytest.raises(PeerLost, match="did not finish a step within 0 s"):
        sender._settle_copies(0.01)
    made.set()
    sender.fail(1)
    receiver.stash(step(3, (1,)))
    sender.close()
    assert [receiver.receive().sampled.tolist() for _ in range(3)] == [[[0, 1]], [[1, 1]], [[2, 1]]]
    with pytest.raises(RankMismatch, match="could not make the round of step 3"):
        receiver.receive()


def _peek(receiver: RoundReceiver) -> RoundReceiver:
    """A receiver with the same box that expects the same round: looks, and takes nothing from the first."""
    other = RoundReceiver(receiver.transport, receiver.form)
    other.stash(step(0, (1,)))
    return other
