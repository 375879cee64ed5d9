# SPDX-License-Identifier: Apache-2.0
"""Step programs through CUDA graphs: the same steps, memory that is shared, and a capture that allocates nothing."""

from __future__ import annotations

import pytest
import torch

from pcp_passes.errors import GraphError
from pcp_passes.piecewise.cuda import CudaReplayer, unowned
from pcp_passes.piecewise.replayer import GraphKey, GraphMode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_an_unowned_tensor_reads_the_same_memory(dtype: torch.dtype) -> None:
    owner = torch.zeros(6, 8, device="cuda").to(dtype)
    found = unowned(owner[1:, ::2])
    assert (found.dtype, found.shape, found.stride()) == (dtype, (5, 4), (8, 2))
    assert found.data_ptr() == owner[1:].data_ptr() and found.device == owner.device
    owner.view(torch.uint8)[1:].fill_(1)
    assert torch.equal(found.contiguous().view(torch.uint8), owner[1:, ::2].contiguous().view(torch.uint8))


def test_replays_follow_the_static_input_and_smaller_buckets_reuse_the_pool() -> None:
    replayer = CudaReplayer(None, torch.device("cuda"))
    weight = torch.randn(1024, 1024, device="cuda")
    static = torch.zeros(1024, 1024, device="cuda")
    keys = [GraphKey("target", "sharded", GraphMode.PIECEWISE, rows, piece=0) for rows in (1024, 512, 64)]
    for key in keys:
        replayer.run(key, lambda x: (torch.relu(x @ weight),), (static[: key.rows],))
    taken = replayer.captured_bytes
    for key in keys:
        static[: key.rows].normal_()
        (found,) = replayer.run(key, lambda x: (torch.relu(x @ weight),), (static[: key.rows],))
        torch.testing.assert_close(found, torch.relu(static[: key.rows] @ weight))
    assert replayer.captured_bytes == taken <= 1.5 * static.nbytes + (32 << 20), "three buckets in the memory of one"


def test_a_whole_piece_chain_replays_in_order() -> None:
    """Results of one piece are read by a later one of the same call, after others have been captured in between."""
    replayer = CudaReplayer(None, torch.device("cuda"))
    x = torch.zeros(256, 256, device="cuda")

    def call() -> torch.Tensor:
        kept = made = x
        for piece in range(4):
            key = GraphKey("target", "sharded", GraphMode.PIECEWISE, 256, piece=piece)
            (made,) = replayer.run(key, lambda a, b: ((a + 1) * 2 + b,), (made, kept))
            kept = made if piece == 0 else kept
        return made.clone()

    def expected() -> torch.Tensor:
        kept = made = x
        for piece in range(4):
            made = (made + 1) * 2 + kept
            kept = made if piece == 0 else kept
        return made

    for value in (0.0, 1.0, -3.0):
        x.fill_(value)
        assert torch.equal(call(), expected())


def test_an_input_that_moved_is_refused() -> None:
    replayer = CudaReplayer(None, torch.device("cuda"))
    x = torch.ones(8, device="cuda")
    key = GraphKey("target", "sharded", GraphMode.PIECEWISE, 8, piece=0)
    replayer.run(key, lambda x: (x + 1,), (x,), ("target ids",))
    with pytest.raises(GraphError, match="target ids moved"):
        replayer.run(key, lambda x: (x + 1,), (x.clone(),), ("target ids",))


def test_captures_go_on_after_every_graph_was_dropped() -> None:
    """In a pool of their own: the allocator takes back none that all graphs have left."""
    replayer = CudaReplayer(1, torch.device("cuda"))
    x = torch.ones(1 << 20, device="cuda")
    for rows in (4, 2):
        key = GraphKey("target", "sharded", GraphMode.PIECEWISE, rows, piece=0)
        replayer.begin_call(key.call)
        (found,) = replayer.run(key, lambda x: (x + 1,), (x,))
        replayer.end_call(key.call)
        assert found[0].item() == 2 and key.call in replayer.uncaptured and not replayer.keys
