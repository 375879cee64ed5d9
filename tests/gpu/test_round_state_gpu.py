# SPDX-License-Identifier: Apache-2.0
"""Rounds that a CUDA device makes: sent once their copies arrived, and the host does not wait for them."""

from __future__ import annotations

import time

import pytest
import torch

from pcp_passes.distributed.stages.round_state import RoundForm, StashedStep
from pcp_passes.distributed.stages.round_transport import Mailbox
from pcp_passes.distributed.stages.rounds import RoundReceiver, RoundSender

pytestmark = pytest.mark.gpu


def test_the_host_runs_ahead_of_the_rounds() -> None:
    box, form = Mailbox(1), RoundForm(1)
    sender, receiver = RoundSender(box.source, form), RoundReceiver(box.receivers[0], form)
    sampled = torch.tensor([[0, 1], [5, -1]], device="cuda")
    drafts = torch.tensor([[3], [4]], device="cuda")
    sender.send(0, 2, sampled, drafts)  # pinned memory and the thread are made
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of the device
    begin = time.monotonic()
    for step in range(1, 4):
        sampled[0, 0] += 1
        sender.send(step, 2, sampled, drafts)
    assert time.monotonic() - begin < 0.3
    sender.close()
    for step in range(4):
        receiver.stash(StashedStep(step, (0, 1), (0, 0), (2, 2), (1, 1), (-1, -1)))
        found = receiver.receive()
        assert found.sampled.tolist() == [[step, 1], [5, -1]]
        assert found.drafts is not None
        assert found.drafts.tolist() == [[3], [4]]
