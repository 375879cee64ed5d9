# SPDX-License-Identifier: Apache-2.0
"""The two ends of the round state: the last pipeline stage sends a round per step, every other stage receives it.

What a round is, and what follows from it: :mod:`pcp_passes.distributed.stages.round_state`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady  # before Python 3.11 not the built-in one
from dataclasses import dataclass

import torch

from pcp_passes.distributed.stages.round_state import Derived, Round, RoundForm, StashedStep, derive
from pcp_passes.distributed.stages.round_transport import RoundTransport, Ticket
from pcp_passes.errors import PcpError, PeerLost, RankMismatch

_FAILED = -2
"""Fills both payloads of a round that the last stage could not make: receivers raise instead of waiting for it."""
_UNSET = -(1 << 62)
"""What a payload holds before it arrives: gloo fills a buffer that is larger than what was sent only in part."""


class RoundSender:
    """The last stage's end. ``send`` does not wait for receivers, until ``in_flight`` rounds are on their way.

    Args:
        transport: its source end.
        form: as the receivers have it.
        in_flight: rounds on their way before a send waits for the oldest.
        timeout_s: seconds to wait for it, then :class:`PeerLost`.
    """

    def __init__(
        self, transport: RoundTransport, form: RoundForm, *, in_flight: int = 64, timeout_s: float = 300.0
    ) -> None:
        assert transport.is_source, "the last stage sends"
        self.transport, self.form, self.in_flight, self.timeout_s = transport, form, in_flight, timeout_s
        self._sent: deque[list[Ticket] | Future[list[Ticket]]] = deque()
        self._copier: ThreadPoolExecutor | None = None

    def send(
        self, step: int, requests: int, sampled: torch.Tensor, drafts: torch.Tensor | list[list[int]] | None
    ) -> None:
        """Ship a round.

        Args:
            step: number of the step, for messages.
            requests: of the batch: the receivers size their buffers from it.
            sampled: i64 ``[R, n]``, ``n <= K + 1``; padded with -1.
            drafts: i64 ``[R, K]``; anything, where the form says that they are lists.

        Raises:
            RankMismatch: shapes that the receivers do not expect. They are sent a round that says so, and raise too.
            PeerLost: the receivers did not take the round of ``in_flight`` steps ago.
        """
        fault = self._fault(requests, sampled, drafts)
        if fault:
            self.fail(requests)
            raise RankMismatch(
                f"step {step}: {fault}. The other stages size their buffers from the batch, and were told that there "
                "is no round.\n  next  make the step program and the batch of the last stage agree"
            )
        sampled = torch.nn.functional.pad(sampled, (0, self.form.steps + 1 - sampled.shape[1]), value=-1)
        payloads = [sampled]
        if self.form.steps:
            given = isinstance(drafts, torch.Tensor) and self.form.drafts == "tensor"
            payloads.append(drafts if given else sampled.new_zeros(requests, self.form.steps))  # type: ignore[arg-type]
        if not _on_host(sampled):
            self._send_when_ready(payloads)
        else:
            # Cloned, for the step after may write the state that these are views of.
            self._sent.append(
                [self.transport.broadcast(x.clone(memory_format=torch.contiguous_format)) for x in payloads]
            )
        self._bound()

    def fail(self, requests: int) -> None:
        """Tell the receivers, instead of a round of ``requests`` requests, that there is none: each raises."""
        shapes = self.form.shapes(requests)
        self._settle_copies(self.timeout_s)
        self._sent.append([self.transport.broadcast(torch.full(one, _FAILED, dtype=torch.int64)) for one in shapes])

    def close(self, timeout_s: float = 30.0) -> None:
        """Wait for the rounds on their way. Raises PeerLost after ``timeout_s`` seconds."""
        while self._sent:
            self._wait_oldest(timeout_s)
        if self._copier is not None:
            self._copier.shutdown()

    def _fault(self, requests: int, sampled: torch.Tensor, drafts: torch.Tensor | list[list[int]] | None) -> str:
        steps, width = self.form.steps, sampled.shape[1] if sampled.dim() == 2 else -1
        if sampled.dtype != torch.int64 or not 1 <= width <= steps + 1 or sampled.shape[0] != requests:
            return (
                f"the sampled tokens are {sampled.dtype}{list(sampled.shape)} for a batch of {requests} requests; "
                f"required i64[{requests}, 1 to {steps + 1}]"
            )
        if steps == 0 or self.form.drafts == "list":
            return ""
        if not isinstance(drafts, torch.Tensor):
            return "the drafts are lists on the host, and this round was declared to bring them as a tensor"
        if drafts.dtype != torch.int64 or tuple(drafts.shape) != (requests, steps):
            return f"the drafts are {drafts.dtype}{list(drafts.shape)}; required i64[{requests}, {steps}]"
        return ""

    def _send_when_ready(self, payloads: list[torch.Tensor]) -> None:
        """The host goes on; one thread waits for the copies, and broadcasts in the order of the rounds."""
        copies, ready = _copy_out(payloads)
        broadcast = self.transport.later()

        def ship() -> list[Ticket]:
            ready()
            return [broadcast(copy) for copy in copies]

        self._copier = self._copier or ThreadPoolExecutor(1, thread_name_prefix="rounds")
        self._sent.append(self._copier.submit(ship))

    def _settle_copies(self, timeout_s: float) -> None:
        for held in self._sent:
            _issued(held, timeout_s)

    def _bound(self) -> None:
        while len(self._sent) > self.in_flight:
            self._wait_oldest(self.timeout_s)

    def _wait_oldest(self, timeout_s: float) -> None:
        held = self._sent.popleft()
        for ticket in _issued(held, timeout_s):
            ticket.wait(timeout_s)


@dataclass(eq=False)
class _Expected:
    step: int
    payloads: list[torch.Tensor]
    tickets: list[Ticket]
    stash: StashedStep | None = None


class RoundReceiver:
    """Another stage's end.

    Args:
        transport: a receiving end.
        form: as the sender has it.
        timeout_s: seconds that :meth:`receive` waits for a round.
    """

    def __init__(self, transport: RoundTransport, form: RoundForm, *, timeout_s: float = 300.0) -> None:
        assert not transport.is_source, "the last stage does not receive its own rounds"
        self.transport, self.form, self.timeout_s = transport, form, timeout_s
        self._expected: deque[_Expected] = deque()

    @property
    def pending(self) -> tuple[int, ...]:
        """Steps whose rounds were not received yet, oldest first."""
        return tuple(held.step for held in self._expected)

    def expect(self, step: int, requests: int) -> None:
        """The last stage will ship a round of ``requests`` requests for ``step``; steps are announced in order."""
        assert not self._expected or self._expected[-1].step < step, f"step {step} after {self._expected[-1].step}"
        payloads = [torch.full(shape, _UNSET, dtype=torch.int64) for shape in self.form.shapes(requests)]
        self._expected.append(_Expected(step, payloads, [self.transport.broadcast(x) for x in payloads]))

    def stash(self, step: StashedStep) -> None:
        """Keep what :meth:`receive` needs of a step that this stage executes; also announces it, if nobody did."""
        held = next((held for held in self._expected if held.step == step.step), None)
        if held is None:
            self.expect(step.step, len(step.rows))
            held = self._expected[-1]
        held.stash = step

    def receive(self) -> Round:
        """The oldest round that was not received yet; waits for it.

        Raises:
            PcpError: nothing is expected; or the step was never stashed: then both payloads were taken all the same,
                so the other stages do not wait, and the next round is the next step's.
            RankMismatch: a round that does not fit the stashed step, or that the last stage could not make.
            PeerLost: no round within ``timeout_s`` seconds.
        """
        if not self._expected:
            raise PcpError("no round is on its way; stash a step, or expect it, before receiving its round.")
        held = self._expected.popleft()
        for ticket in held.tickets:
            ticket.wait(self.timeout_s)
        if held.stash is None:
            raise PcpError(
                f"the round of step {held.step} arrived, and this stage stashed nothing of that step: its requests "
                "cannot be advanced.\n  next  look for an earlier error of this stage in that step"
            )
        sampled = held.payloads[0]
        _require_whole(held)
        stash = held.stash
        scheduled = torch.tensor(stash.drafts, dtype=torch.int64)
        next_prefill = torch.tensor(stash.next_prefill, dtype=torch.int64)
        derived = derive(sampled, scheduled, next_prefill)
        _require_fitting(stash, derived, scheduled, next_prefill)
        if self.form.drafts == "list" and self.form.steps:
            return Round(stash, sampled, None, derived)
        drafts = held.payloads[1] if self.form.steps else sampled.new_zeros(len(stash.rows), 0)
        return Round(stash, sampled, drafts, derived)


def _issued(held: list[Ticket] | Future[list[Ticket]], timeout_s: float) -> list[Ticket]:
    """The broadcasts of a round; of one whose copies are still being made, once they are."""
    if isinstance(held, list):
        return held
    try:
        return held.result(timeout_s)
    except NotReady as error:
        raise PeerLost(
            f"the device did not finish a step within {timeout_s:.0f} s, so its round was not sent.\n"
            "  next  look for a collective or a kernel of the last stage that hangs"
        ) from error


def _on_host(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def _copy_out(payloads: list[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], object]]:
    """Copies in pinned memory, and what waits until they are made."""
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in payloads]
    ready = torch.cuda.Event()
    ready.record()
    return copies, ready.synchronize


def _require_whole(held: _Expected) -> None:
    if all(bool((x == _FAILED).all()) for x in held.payloads if x.numel()) and held.payloads[0].numel():
        raise RankMismatch(
            f"the last stage could not make the round of step {held.step}.\n  next  look at the error of that stage"
        )
    missing = [int((x == _UNSET).sum()) for x in held.payloads]
    stashed = len(held.stash.rows) if held.stash is not None else held.payloads[0].shape[0]
    if any(missing) or stashed != held.payloads[0].shape[0]:
        raise RankMismatch(
            f"step {held.step}: this stage expects a round of {[list(x.shape) for x in held.payloads]} for its batch "
            f"of {stashed} requests, and {missing} values of it did not arrive: the last stage has another batch.\n"
            "  next  give all ranks the same requests in the same order"
        )


def _require_fitting(stash: StashedStep, derived: Derived, scheduled: torch.Tensor, next_prefill: torch.Tensor) -> None:
    """The round of another step would advance requests by tokens that they do not have."""
    prefilling = next_prefill >= 0
    wrong = torch.where(prefilling, derived.num_sampled > 0, (derived.num_sampled < 1) | (derived.num_rejected < 0))
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        expects = "none, in the middle of its prefill" if bool(prefilling[place]) else f"1 to {scheduled[place] + 1}"
        raise RankMismatch(
            f"step {stash.step}: the round has {derived.num_sampled[place]} tokens for request {place} of "
            f"{len(stash.rows)} (row {stash.rows[place]}), which gets {expects}: it is another step's, or another "
            "batch's.\n  next  give all ranks the same requests in the same order"
        )
