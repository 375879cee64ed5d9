# SPDX-License-Identifier: Apache-2.0
"""Real processes over gloo: the decorator on a small decoder, against the simulator and the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pcp_passes
from tests.multiproc import _torch_frontend as ranks
from tests.unit.frontends_torch.decoders import decoder, tokens

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(280)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The thread count of the ranks: CPU kernels may differ with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.start(2, tmp_path_factory.mktemp("torch"), "run")


@pytest.fixture(scope="module")
def simulated() -> Any:
    return pcp_passes.simulated(decoder(ranks.LAYERS), 2, tokens={"input_ids": 1})


@pytest.mark.parametrize("inner", ranks.INNERS)
def test_one_compilation_serves_all_lengths(found: list[dict[str, Any]], inner: str) -> None:
    assert [rank[inner]["compilations"] for rank in found] == [1, 1]


@pytest.mark.parametrize("index", range(len(ranks.LENGTHS)))
def test_eager_equals_the_simulator_bit_for_bit(found: list[dict[str, Any]], simulated: Any, index: int) -> None:
    wanted = simulated(tokens(ranks.LENGTHS[index]))["logits"]
    for rank in found:
        assert torch.equal(rank["eager"]["logits"][index], wanted)
    assert not torch.equal(simulated(tokens(ranks.LENGTHS[index], seed=1))["logits"], wanted)


@pytest.mark.parametrize("index", range(len(ranks.LENGTHS)))
@pytest.mark.parametrize("inner", ranks.INNERS)
def test_every_rank_returns_what_the_model_does(found: list[dict[str, Any]], inner: str, index: int) -> None:
    wanted = decoder(ranks.LAYERS)(tokens(ranks.LENGTHS[index]))["logits"]
    for rank in found:
        torch.testing.assert_close(rank[inner]["logits"][index], wanted, rtol=1e-5, atol=2e-5)
    assert (wanted.roll(1, 1) - found[0][inner]["logits"][index]).abs().max() > 1e-2, "the comparison can fail"


def test_ranks_issue_the_collectives_the_simulator_lists(found: list[dict[str, Any]], simulated: Any) -> None:
    shapes = []
    for count in ranks.LENGTHS:
        simulated(tokens(count))
        shapes += [entry.shape for entry in simulated.sharded.backend.make_executor().logs[0].entries]
    for inner in ranks.INNERS:
        assert [rank[inner]["shapes"] for rank in found] == [shapes] * 2


def test_local_rows_and_last_row(found: list[dict[str, Any]]) -> None:
    wanted = decoder(ranks.LAYERS)(tokens(33))["logits"]
    for rank in found:
        rows = rank["local"]["rows"]
        torch.testing.assert_close(rank["local"]["logits"], wanted.index_select(1, rows), rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(rank["last"]["logits"], wanted[:, -1:], rtol=1e-5, atol=2e-5)
    assert sorted({int(row) for rank in found for row in rank["local"]["rows"]}) == list(range(33))


def test_groups_side_by_side(tmp_path: Path) -> None:
    for rank, logits in enumerate(ranks.start(4, tmp_path, "subgroups")):
        half = rank // 2
        wanted = decoder(ranks.LAYERS)(tokens(20 + half, seed=half))["logits"]
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=2e-5)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str, float]]]:
    return ranks.start(2, tmp_path_factory.mktemp("disagree"), "disagree")


@pytest.mark.parametrize(
    "how, kind, said",
    [
        ("options", "RankMismatch", "options  rank 0"),
        ("model", "RankMismatch", "text of graph"),
        ("tokens", "RankMismatch", "tokens  rank 0: '12'"),
        ("absent", "PeerLost", "rank 1 did not report about 'graph' within 5 s"),
    ],
)
def test_ranks_that_differ_are_told_before_any_collective(told: list[Any], how: str, kind: str, said: str) -> None:
    first, second = (rank[how] for rank in told)
    assert first[0] == kind and said in first[1], first
    assert first[2] < 60
    if how != "absent":
        assert second[0] == kind
