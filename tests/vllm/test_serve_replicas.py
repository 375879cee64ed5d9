# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with a dense model on DP2 x PCP2: two engines that know nothing of each other behind one address."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import build
from tests.vllm.cases import served
from tests.vllm.replicas import DEVELOPMENT, EXTENSION, PCP, REPLICAS, reports
from tests.vllm.server import Server, ask, rows_run, serve, strike, tell_workers
from tests.vllm.test_serve import check, wanted

#: Four workers on two cores.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, options = tmp_path_factory.mktemp("replicas"), {"silence_s": 14.0}
    model = str(build("tiny_gqa"))
    with serve(model, folder, pcp=PCP, replicas=REPLICAS, options=options, more=EXTENSION, env=DEVELOPMENT) as running:
        yield running


@pytest.mark.parametrize("replica", [0, 1])
def test_each_replica_answers_as_one_rank_does_and_alone(server: Server, replica: int, tmp_path: Path) -> None:
    """The other one runs nothing meanwhile, not even a dummy step, and ``/metrics`` knows which."""
    before = rows_run(server)
    tell_workers(server, "watch")
    check(ask(server, served()[:25], [replica] * 25), wanted()[:25])
    ranks = reports(server, tmp_path)
    counted = [after > earlier for earlier, after in zip(before, rows_run(server), strict=True)]
    worked = [bool(rank["ran"]) for rank in ranks]
    assert worked == [index // PCP == replica for index in range(REPLICAS * PCP)]
    assert counted == worked
    assert not any(rank["dummies"] or rank["sizes"] for rank in ranks)


def test_fifty_requests_pinned_in_turn(server: Server) -> None:
    check(ask(server, served(), [i % 2 for i in range(50)]), wanted())


def test_a_killed_worker_of_one_replica_ends_the_server(server: Server) -> None:
    """Last. The engines are independent, and the server that they share ends with the first that is lost."""
    strike(server, server.workers()[0], signal.SIGKILL)
    log = server.log.read_text(errors="replace")
    assert any(text in log for text in ("VllmWorker-0 died unexpectedly", "rank 0 is lost: killed")), server.tail()
