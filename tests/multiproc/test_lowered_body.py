# SPDX-License-Identifier: Apache-2.0
"""Two real processes over gloo run what the simulator says they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from pcp_passes.passes import PassContext, build_variants
from tests import toy, toy_runs
from tests.multiproc import _bodies

pytestmark = pytest.mark.multiproc
PCP = 2


@pytest.fixture(scope="module", params=["dense", "latent"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The kind of decoder, and what each of two processes saved."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    torch.multiprocessing.spawn(_bodies.run, args=(PCP, str(folder), request.param), nprocs=PCP)
    return request.param, [torch.load(folder / f"rank{rank}.pt") for rank in range(PCP)]


@pytest.fixture(autouse=True)
def one_thread():
    """The simulator runs with the thread count of the ranks: CPU kernels may differ with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def simulated(kind: str, index: int) -> tuple[toy.World, toy_runs.Sharded]:
    world = toy.World(_bodies.WORLDS[index], PCP)
    body = build_variants(toy_runs.captured(kind)[1].gm, PassContext(PCP))["sharded"]
    return world, toy_runs.sharded(body, world, kind)


@pytest.mark.parametrize("index", range(len(_bodies.WORLDS)))
def test_the_eager_body_equals_the_simulator_bit_for_bit(ranks, index: int) -> None:
    kind, saved = ranks
    _, wanted = simulated(kind, index)
    found = torch.cat([rank["eager"][index]["hidden"] for rank in saved])
    assert torch.equal(found, wanted.hidden)
    for rank in range(PCP):
        for layer, cache in wanted.steps[rank].caches.items():
            assert torch.equal(saved[rank]["eager"][index]["caches"][layer], cache)


@pytest.mark.parametrize("index", range(len(_bodies.WORLDS)))
def test_the_inductor_body_equals_the_simulator(ranks, index: int) -> None:
    kind, saved = ranks
    world, wanted = simulated(kind, index)
    found = torch.cat([rank["inductor"][index]["hidden"] for rank in saved])
    torch.testing.assert_close(found, wanted.hidden, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[world.restore], toy_runs.unsharded(world, kind), rtol=0, atol=1e-5)
    other = torch.cat([rank["inductor"][index]["hidden"] for rank in reversed(saved)])
    assert (other - wanted.hidden).abs().max() > 1e-2, "ranks exchanged: the comparison can fail"


@pytest.mark.parametrize("name", ["eager", "inductor"])
def test_ranks_issue_the_collectives_the_simulator_lists(ranks, name: str) -> None:
    kind, saved = ranks
    for index in range(len(_bodies.WORLDS)):
        _, wanted = simulated(kind, index)
        shapes = [entry.shape for entry in wanted.logs[0].entries]
        assert [rank[name][index]["shapes"] for rank in saved] == [shapes] * PCP


@pytest.mark.parametrize("dtype", _bodies.DTYPES, ids=str)
def test_every_cache_dtype_travels(ranks, dtype: torch.dtype) -> None:
    _, saved = ranks
    rows = torch.cat([torch.arange(6).view(2, 3) + 10 * rank for rank in range(PCP)])
    for rank in saved:
        assert torch.equal(rank["dtypes"][dtype], rows.to(dtype).to(torch.float64))
