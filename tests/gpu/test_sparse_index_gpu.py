# SPDX-License-Identifier: Apache-2.0
"""The sparse-index kernels on a CUDA device: every shipped one against the references, plans, repeats, CUDA graphs.

The calls and comparisons are those of ``benchmarks/sparse_index_gpu.py``, which also measures; here each is a test.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pcp_kernels import catalog
from pcp_kernels.ops import topk as selecting

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
REPEATS = 20
TOPK = 2048
SCORERS = [name for name, spec in catalog.shipped().items() if spec.family == "logits"]


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    path = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    from sparse_index import checks, problems, run

    yield SimpleNamespace(checks=checks, problems=problems, run=run.Run(torch.device("cuda"), False))
    sys.path[:] = path


def shipped(name: str, run: Any) -> Any:
    """A shipped spec, if this card has the products it needs."""
    if name not in {spec.name for spec in run.specs()}:
        pytest.skip("this card has no fp8 products")
    return catalog.shipped()[name]


@pytest.mark.parametrize("name", catalog.shipped())
def test_equals_the_reference_and_repeats(parts: SimpleNamespace, name: str) -> None:
    spec = shipped(name, parts.run)
    case = parts.problems.ALL[spec.family](spec, parts.run.inputs())
    with parts.checks.launched() as names:
        first = case.run()
    assert name in names
    assert case.wrong(first) == ""
    assert all(parts.checks.same_bytes(first, case.run()) for _ in range(REPEATS - 1))


@pytest.mark.parametrize("name", SCORERS)
def test_every_plan_selects_the_same_keys(parts: SimpleNamespace, name: str) -> None:
    given = parts.problems.mixed(shipped(name, parts.run), parts.run.inputs(), TOPK)
    fused, tiled, split = (given.select(TOPK, kind) for kind in ("fused", "tiled", "split"))
    assert torch.equal(fused, tiled)
    assert torch.equal(fused, split)
    # Workspaces for one program, and for a few rows of logits.
    assert torch.equal(fused, given.select(TOPK, "fused", 1 << 20))
    assert torch.equal(fused, given.select(TOPK, "tiled", 10 << 20))


def test_a_captured_selection_follows_lengths_on_the_device(parts: SimpleNamespace) -> None:
    """Nothing on the device is read by the host: the same graph selects anew after ``ke`` and the queries change."""
    spec = shipped(next(name for name in SCORERS if "paged" in name), parts.run)
    given = parts.problems.mixed(spec, parts.run.inputs(), TOPK)
    cache, table = given.paged
    q, ke = given.q.clone(), given.ke.clone()

    def select() -> torch.Tensor:
        return selecting.index_topk_paged(
            q, given.w, cache, table, given.request, ke, TOPK, given.page, parts.problems.WORKSPACE
        )

    select()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = select()
    # As bytes: flip is not there for every FP8 dtype on every version.
    q.view(torch.uint8).copy_(given.q.view(torch.uint8).flip(0))
    ke.copy_(given.ke.roll(7))
    graph.replay()
    torch.cuda.synchronize()
    captured = out.clone()
    assert torch.equal(captured, select())
    assert not torch.equal(captured, given.select(TOPK, None)), "the inputs have changed"
