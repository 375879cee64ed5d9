# SPDX-License-Identifier: Apache-2.0
"""Two replicas in lockstep behind ``vllm serve``: DP2 x PCP2 with experts over all four ranks, two drafts a step.

One server with the trained model answers all tests; one rank without drafts answers beside it. The last test takes
the server down.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pcp_passes.frontends.vllm.session import Output
from pcp_passes.mesh.peer_rows import flattened_sizes
from tests.vllm.replicas import (
    DRAFTS,
    PCP,
    bits_per_byte,
    difference,
    hundred,
    lockstep,
    long,
    one_rank,
    reports,
    trained,
)
from tests.vllm.server import Server, ask, strike, tell_workers

#: Clean runs differ by 6e-6; the fault below by more than 0.1.
TOLERANCE = 1e-4
#: Four workers start on two cores, where a thread may not be scheduled for seconds.
SILENCE_S = 14.0
#: Where no step may read the device: a captured body itself, and this project's packages.
OURS = ("graph: ", "pcp_passes/", "pcp_kernels/")

#: Four workers, and another engine beside them while they start, on two cores.
pytestmark = pytest.mark.timeout(600)
Both = tuple[Server, list[list[Output | None]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """The server, and one rank's answers to the hundred prompts and the long ones."""
    trained()  # threads must not be the first to import transformers
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        wanted = pool.submit(one_rank)
        server = stack.enter_context(lockstep(tmp_path_factory.mktemp("lockstep"), SILENCE_S))
        yield server, wanted.result()


def test_sizes_are_spread_as_vllm_does() -> None:
    """Of every expert-parallel rank in the order (dp, pcp, tp); a replica's count is repeated over its PCP ranks."""
    from vllm.forward_context import _compute_sp_num_tokens

    for tokens, pcp, tp in itertools.product(((5, 2), (1, 8, 3)), (1, 2, 3), (1, 2)):
        ours = flattened_sizes(tokens, pcp, tp, sequence_parallel=True)
        assert list(ours) == _compute_sp_num_tokens(torch.tensor(tokens), tp, pcp, use_ep=True)
    assert flattened_sizes((5, 2), 2, 2, sequence_parallel=True) == (3, 3, 3, 3, 1, 1, 1, 1)


def _watched(server: Server, folder: Path, requests: Any, replicas: list[int]) -> tuple[Any, list[dict[str, Any]]]:
    tell_workers(server, "watch")
    answers = ask(server, requests, replicas)
    return answers, reports(server, folder)


def test_a_hundred_prompts_as_one_rank(both: Both) -> None:
    server, (wanted, _) = both
    found = ask(server, hundred(), [i % 2 for i in range(100)])
    tokens, largest = difference(found, wanted)
    assert tokens
    assert largest <= TOLERANCE
    assert abs(bits_per_byte(found) - bits_per_byte(wanted)) <= 1e-5
    assert bits_per_byte(found) < 3  # an untrained model needs eight


@pytest.mark.parametrize("busy", [0, 1])
def test_beside_an_idle_replica(both: Both, busy: int, tmp_path: Path) -> None:
    """The idle one runs dummy steps, one row a rank, in all of the other's collectives; and owns nothing of them."""
    server, (wanted, _) = both
    found, ranks = _watched(server, tmp_path, hundred()[:6], [busy] * 6)
    assert difference(found, wanted[:6])[0]
    dummies = [rank["dummies"] for rank in ranks]
    idle = 1 - busy
    assert dummies[idle * PCP : idle * PCP + PCP] == [dummies[idle * PCP]] * PCP
    assert dummies[idle * PCP] >= 3
    assert all(rank["ran"]["target/sharded"] for rank in ranks)


def test_row_counts_of_unequal_loads(both: Both, tmp_path: Path) -> None:
    """Every rank saw the same list in every dispatch: (dp, pcp) flattened, a replica's count once per PCP rank."""
    server, (wanted, _) = both
    found, ranks = _watched(server, tmp_path, hundred()[:9], [0] * 8 + [1])
    assert difference(found, wanted[:9])[0]
    # The replicas are not told to count at the same dummy step, in which nobody has more rows than one request.
    first, *others = ([sizes for sizes in rank["sizes"] if max(sizes) > 1 + DRAFTS] for rank in ranks)
    assert len(first) > 10
    assert others == [first] * 3
    assert all(a == b and c == d for a, b, c, d in first)
    assert any(a != c for a, _, c, _ in first)


def test_near_the_maximum_length(both: Both) -> None:
    server, (_, wanted) = both
    for replicas in ([0, 0, 0, 1], [1, 1, 1, 0], [0, 1, 0, 1]):
        tokens, largest = difference(ask(server, long(), replicas), wanted)
        assert tokens
        assert largest <= TOLERANCE


def _reads(server: Server, folder: Path, *planted: bool) -> list[dict[str, int]]:
    """Where the host read during steps of both replicas, by rank; target and drafter, dummies among them."""
    tell_workers(server, "watch", True, *planted)
    ask(server, hundred()[20:24], [0, 0, 0, 1])
    return [rank["reads"] for rank in reports(server, folder)]


def test_no_host_read_of_ours_or_in_a_captured_body(
    both: Both, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """What vLLM reads is listed, in the properties of the test's report."""
    listed = _reads(both[0], tmp_path)
    record_property("reads on the host", json.dumps(listed[0]))
    for reads in listed:
        assert any(where.startswith("vllm/") for where in reads), "it sees vLLM's own: sampled tokens become an answer"
        ours = {where: count for where, count in reads.items() if where.startswith(OURS)}
        assert not ours, f"{ours}; others: {reads}"


def test_a_planted_host_read_is_seen(both: Both, tmp_path: Path) -> None:
    for reads in _reads(both[0], tmp_path, True):
        ours = [where for where in reads if where.startswith(OURS)]
        assert ours and all(where.startswith("pcp_passes/planted.py: ") for where in ours)


def test_a_combine_without_the_others_is_seen(both: Both) -> None:
    server, (wanted, _) = both
    tell_workers(server, "keep_own_part")
    tokens, largest = difference(ask(server, hundred()[30:34], [0, 1, 0, 1]), wanted[30:34])
    assert not tokens or largest > 1000 * TOLERANCE
    tell_workers(server, "undo")
    tokens, largest = difference(ask(server, hundred()[40:44], [0, 1, 0, 1]), wanted[40:44])
    assert tokens and largest <= TOLERANCE


def test_a_frozen_worker_ends_both_replicas_with_the_reason(both: Both) -> None:
    """Last: it takes the server down. Nothing of vLLM notices a frozen worker, least of all in the other replica."""
    server, _ = both
    strike(server, server.workers()[-1], signal.SIGSTOP)
    assert "rank 3 (dp1 pp0 pcp1) is lost: frozen" in server.log.read_text(errors="replace"), server.tail()
