# SPDX-License-Identifier: Apache-2.0
"""The Triton slot expansion on a CUDA device, in a CUDA graph too."""

from __future__ import annotations

import pytest
import torch

from pcp_kernels import expand_slots, expand_slots_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("groups, tokens, rows, capacity", [(1, 1, 1, 1), (3, 700, 4096, 5000), (2, 64, 0, 33)])
def test_equals_the_reference(groups: int, tokens: int, rows: int, capacity: int) -> None:
    torch.manual_seed(0)
    slots = torch.randint(0, 1 << 40, (groups, tokens), device="cuda")
    index = torch.randint(0, tokens, (rows,), device="cuda")
    mask = torch.rand(rows, device="cuda") < 0.7
    got, want = (torch.full((groups, capacity), 7, device="cuda") for _ in range(2))
    expand_slots(slots, index, mask, got)
    expand_slots_reference(slots, index, mask, want)
    assert torch.equal(got, want)


def test_replays_from_a_captured_graph() -> None:
    slots = torch.arange(64, device="cuda")[None]
    index, mask = torch.arange(32, device="cuda"), torch.ones(32, dtype=torch.bool, device="cuda")
    out = torch.empty(1, 40, dtype=torch.int64, device="cuda")
    expand_slots(slots, index, mask, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expand_slots(slots, index, mask, out)
    index.copy_(torch.arange(32, 64, device="cuda"))
    graph.replay()
    assert out[0, :32].tolist() == list(range(32, 64))
    assert (out[0, 32:] == -1).all()
