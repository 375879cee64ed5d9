# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with PCP=2: fifty requests at once, requests that hang up, and a worker that freezes or dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from pcp_passes.frontends.vllm.session import Request
from tests.models import build, prompt
from tests.vllm.cases import served
from tests.vllm.engines import FULL, reference, result_of
from tests.vllm.server import Answer, Server, abandon, ask, serve, strike
from tests.vllm.test_equality import TOLERANCE

SILENCE_S = 8.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"silence_s": SILENCE_S}
    with serve(str(build("tiny_gqa")), tmp_path_factory.mktemp("serve"), pcp=2, options=options) as running:
        yield running


def wanted() -> list[Answer]:
    outputs = result_of(reference("tiny_gqa")).outputs[-1]
    return [Answer(output.tokens, output.logprobs) for output in outputs if output is not None]


def check(found: list[Answer], expected: list[Answer]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) <= TOLERANCE


def test_fifty_concurrent_requests_answer_as_one_rank_does(server: Server) -> None:
    check(ask(server, served()), wanted())


def test_survives_requests_that_hang_up(server: Server) -> None:
    abandon(server, [Request(prompt(20 + n, seed=70 + n), 150) for n in range(12)])
    check(ask(server, served()[:10]), wanted()[:10])


def test_frozen_worker_ends_the_others_with_the_reason(server: Server) -> None:
    """Last: it takes the server down."""
    strike(server, server.workers()[1], signal.SIGSTOP)
    assert "pcp rank 1 is lost: frozen" in server.log.read_text(errors="replace"), server.tail()


if FULL:  # a second server

    def test_killed_worker_ends_the_others_with_the_reason(tmp_path_factory: pytest.TempPathFactory) -> None:
        """vLLM's executor sees a killed child at once, often before the heartbeat does; both name the worker."""
        options = {"silence_s": SILENCE_S}
        with serve(str(build("tiny_gqa")), tmp_path_factory.mktemp("serve"), pcp=2, options=options) as server:
            strike(server, server.workers()[0], signal.SIGKILL)
            log = server.log.read_text(errors="replace")
            named = ("VllmWorker-0 died unexpectedly", "pcp rank 0 is lost: killed")
            assert any(text in log for text in named), server.tail()
