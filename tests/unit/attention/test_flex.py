# SPDX-License-Identifier: Apache-2.0
"""The CUDA path by contract: its mask and scores on CPU, its blocks against PyTorch's, its choice on fake tensors."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from pcp_passes.attention import attend, attend_reference, flex
from pcp_passes.attention.blocks import attend_blocks
from pcp_passes.attention.op import _path
from pcp_passes.attention.tiles import intervals

LAYOUTS = {
    "zigzag": [*range(64, 192), *range(448, 576), 0, 0, 0],
    "whole blocks": list(range(256, 512)),
    "few": [5, 600, 0],
    "past the keys": [*range(100, 300), *range(690, 720)],
}
WINDOWS = {
    "causal": {},
    "window": {"left": 40},
    "wide window": {"left": 300, "right": 4},
    "encoder": {"right": -1},
    "chunks": {"chunk": 130},
    "sinks": {"sinks": torch.linspace(-1, 2, 4)},
    "alibi": {"slopes": torch.linspace(0.1, 0.4, 4)},
    "all": {"left": 200, "softcap": 1.5, "sinks": torch.ones(4), "slopes": torch.linspace(0.1, 0.4, 4)},
}
KEYS = 700


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's dense path: its CPU code takes neither dynamic shapes nor a log-sum-exp (torch 2.13)."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex.attend_masked)


def both(positions: list[int], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, len(positions), 16), torch.randn(2, 2, KEYS, 16), torch.randn(2, 2, KEYS, 24)
    at = torch.tensor(positions)
    full = {"scale": 0.5, "left": -1, "right": 0, "chunk": 0, "sinks": None, "slopes": None, "softcap": 0.0, **options}
    out = torch.full((2, 4, len(positions), 24), torch.nan)
    flex.attend_flex(q, k, v, at, out, **full)
    return out, attend_reference(q, k, v, at, **full)


@pytest.mark.usefixtures("dense")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("positions", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_values(positions: list[int], options: dict[str, Any]) -> None:
    found, expected = both(positions, options)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("dense")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("change", [{"left": 1}, {"right": 1}, {"chunk": 1}], ids=str)
def test_a_wrong_interval_is_seen(change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(at: torch.Tensor, keys: int, left: int, right: int, chunk: int) -> Any:
        return intervals(
            at, keys, left + change.get("left", 0), right + change.get("right", 0), chunk + change.get("chunk", 0)
        )

    monkeypatch.setattr(flex, "intervals", wrong)
    found, expected = both(LAYOUTS["zigzag"], {"left": 40, "chunk": 130})
    assert (found - expected).abs().max() > 1e-3


MASKS = ("causal", "window", "wide window", "encoder", "chunks")


@pytest.mark.parametrize("options", [WINDOWS[name] for name in MASKS], ids=MASKS)
@pytest.mark.parametrize("positions", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_blocks_are_those_of_pytorch(positions: list[int], options: dict[str, int]) -> None:
    at = torch.tensor(positions)
    low, high = intervals(at, KEYS, **{"left": -1, "right": 0, "chunk": 0, **options})

    def sees(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return (key >= low[row]) & (key < high[row])

    expected = create_block_mask(sees, None, None, len(positions), KEYS, device="cpu")
    blocks = flex.block_indices(low, high, KEYS)
    sizes = {"seq_lengths": (len(positions), KEYS), "compute_q_blocks": False, "mask_mod": sees}
    found = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=flex.BLOCK, **sizes)
    # A hull may hold a block that no row of it needs; it may never miss one, nor call a masked one full.
    assert (found.to_dense() >= expected.to_dense()).all()
    full = BlockMask.from_kv_blocks(*blocks[2:], BLOCK_SIZE=flex.BLOCK, **sizes).to_dense()
    assert expected.full_kv_num_blocks is not None and expected.full_kv_indices is not None
    theirs = BlockMask.from_kv_blocks(
        expected.full_kv_num_blocks, expected.full_kv_indices, BLOCK_SIZE=flex.BLOCK, **sizes
    ).to_dense()
    assert torch.equal(full, theirs)
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_one_capture_serves_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA up to the code generator: all options at once, whole graph, dynamic rows and keys."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = flex.compile_masked(backend)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    with torch.no_grad():
        for positions in (LAYOUTS["zigzag"], LAYOUTS["past the keys"], LAYOUTS["zigzag"][:200]):
            found, expected = both(positions, WINDOWS["all"])
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert len(graphs) == 1
    fused = [n for n in graphs[0].graph.nodes if n.target is torch.ops.higher_order.flex_attention]
    assert len(fused) == 1


def test_a_compiled_kernel_visits_the_blocks_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense path ignores the block lists; a compiled kernel does not, and misses what is dropped from them."""
    torch._dynamo.reset()
    compiled = torch.compile(flex.attend_masked, dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    positions = LAYOUTS["zigzag"]
    with torch.no_grad():
        found, expected = both(positions, WINDOWS["wide window"])
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        indices = flex.block_indices

        def dropped(low: torch.Tensor, high: torch.Tensor, keys: int) -> Any:
            count, *others = indices(low, high, keys)
            return (count - (count > 0).int(), *others)

        monkeypatch.setattr(flex, "block_indices", dropped)
        found, expected = both(positions, WINDOWS["wide window"])
    assert not torch.allclose(found, expected, rtol=0, atol=1e-3)


def test_blocks_of_a_window_are_few() -> None:
    low, high = intervals(torch.arange(8192), 8192, 127, 0, 0)
    partial, _, full, _ = flex.block_indices(low, high, 8192)
    assert int((partial + full).max()) == 2


@pytest.mark.parametrize(
    "device, dtype, size, value_size, fused",
    [
        ("cuda", torch.bfloat16, 128, 128, True),
        ("cuda", torch.float16, 192, 128, True),
        ("cuda", torch.float32, 64, 64, True),
        ("cuda", torch.float64, 64, 64, False),
        ("cuda", torch.bfloat16, 576, 512, False),
        ("cuda", torch.bfloat16, 8, 8, False),
        ("cpu", torch.bfloat16, 128, 128, False),
    ],
)
def test_the_path_is_chosen_by_device_dtype_and_sizes(device, dtype, size, value_size, fused) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 4, 6, size, dtype=dtype, device=device)
        v = torch.empty(1, 2, 10, value_size, dtype=dtype, device=device)
        assert _path(q, v) is (flex.attend_flex if fused else attend_blocks)
        out = attend(q, q.new_empty(1, 2, 10, size), v, torch.empty(6, dtype=torch.int64, device=device))
    assert out.device.type == device
    assert out.shape == (1, 4, 6, value_size)
