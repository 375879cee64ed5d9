# SPDX-License-Identifier: Apache-2.0
"""Static buffers: one address for all buckets, pads on every fill, attention inputs that say when they are stale."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pcp_passes.errors import GraphError
from pcp_passes.paged import AttentionInputs
from pcp_passes.paged.state import current, running
from pcp_passes.piecewise.static import AttentionSet, Buffer, SlotType, StaticInputs


class Copies(TorchDispatchMode):
    """Counts copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(None, 3), (2, None, 3), (1, None), (None,)])
def test_every_bucket_is_contiguous_at_one_address(shape: tuple[int | None, ...]) -> None:
    buffer = Buffer("x", shape, torch.float32, 8)
    for rows in (8, 3, 1):
        value = torch.randn([rows if size is None else size for size in shape])
        found = buffer.fill(value, rows)
        assert torch.equal(found, value) and found.is_contiguous() and found.data_ptr() == buffer.flat.data_ptr()


@pytest.mark.parametrize("shape", [(None, 3), (2, None, 3)])
def test_rows_behind_the_value_are_padded_every_time(shape: tuple[int | None, ...]) -> None:
    buffer = Buffer("x", shape, torch.float32, 8, pad=-1)
    seen: list[tuple[str, int]] = []
    for rows in (8, 5, 2):
        value = torch.randn([rows if size is None else size for size in shape])
        found = buffer.fill(value, 8, lambda name, tail, pad: seen.append((name, tail.shape[shape.index(None)])))
        dim = shape.index(None)
        assert torch.equal(found.narrow(dim, 0, rows), value) and (found.narrow(dim, rows, 8 - rows) == -1).all()
    assert seen == [("x", 3), ("x", 6)], "a full bucket has no tail"


def test_a_value_that_lies_there_already_is_not_copied() -> None:
    buffer = Buffer("x", (None, 3), torch.float32, 8)
    value = buffer.fill(torch.ones(5, 3), 8)[:5]
    with Copies() as copies:
        found = buffer.fill(value, 8)
    assert not copies.count and torch.equal(found[:5], torch.ones(5, 3)) and found[5:].eq(0).all()
    with Copies() as copies:
        moved = buffer.fill(buffer.view(8)[1:5], 8)
    assert copies.count and torch.equal(moved[:4], torch.ones(4, 3)) and moved[4:].eq(0).all()


def test_a_value_of_another_type_or_size_is_refused() -> None:
    buffer = Buffer("x", (None, 3), torch.float32, 8)
    for wrong in (torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 4), torch.ones(6, 3)):
        with pytest.raises(GraphError, match=r"x takes torch.float32\[5, 3\], found"):
            buffer.fill(wrong, 5)
    with pytest.raises(GraphError, match="allocated for 8 rows and is asked for 9"):
        buffer.view(9)


def test_a_value_without_rows_fills_its_buffer() -> None:
    buffer = Buffer("x", (2, 3), torch.float32, 8)
    assert torch.equal(buffer.fill(torch.ones(2, 3), 4), torch.ones(2, 3)) and buffer.bytes == 24


def inputs(lengths: list[int], columns: int = 3) -> AttentionInputs:
    """A replicated call whose requests have that many new rows and as many keys."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows, requests = int(starts[-1]), len(lengths)
    return AttentionInputs(
        slots=torch.arange(rows) + 4, slot_layout="replicated", block_tables=torch.ones(requests, columns).int(),
        query_start_loc=starts, seq_lens=torch.tensor(lengths) + 1, positions=torch.arange(rows) + 7,
    )  # fmt: skip


def test_attention_inputs_on_a_bucket() -> None:
    held = AttentionSet(rows=16, requests=4, columns=3)
    held.fill(inputs([4, 4, 4, 4]), "before", 16, 4)
    addresses = [buffer.flat.data_ptr() for buffer in held.buffers()]
    found = held.fill(inputs([2, 1]), "call", 8, 4)
    assert found.slots.tolist() == [4, 5, 6, -1, -1, -1, -1, -1]
    assert found.positions.tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert found.query_start_loc.tolist() == [0, 2, 3, 3, 3] and found.seq_lens.tolist() == [3, 2, 0, 0]
    assert found.block_tables.tolist() == [[1] * 3] * 2 + [[0] * 3] * 2
    assert found.visible.tolist() == [3, 3, 2, 0, 0, 0, 0, 0], "padding rows see no key"
    assert found.segments == ((0, 0, 2, 3), (1, 2, 3, 2))
    assert [buffer.flat.data_ptr() for buffer in held.buffers()] == addresses


def test_a_stale_set_is_refused_by_name() -> None:
    held = AttentionSet(rows=8, requests=2, columns=3)
    first = held.fill(inputs([2]), "draft step 1", 4, 1)
    with running(None, first):  # type: ignore[arg-type]
        current("kv_attend")
        held.fill(inputs([1]), "draft step 2", 4, 1)
        with pytest.raises(
            GraphError, match="kv_attend runs under the attention inputs of draft step 1, but draft step 2"
        ):
            current("kv_attend")


def test_sets_that_are_too_small_and_rank_major_slots_are_refused() -> None:
    held = AttentionSet(rows=8, requests=2, columns=3)
    with pytest.raises(GraphError, match="call has 3 attention rows, its bucket 2"):
        held.fill(inputs([1, 1, 1]), "call", 8, 2)
    with pytest.raises(GraphError, match=r"block_tables takes torch.int32\[1, 3\], found torch.int32\[1, 5\]"):
        held.fill(inputs([1], columns=5), "call", 8, 1)
    sharded = AttentionInputs(
        torch.zeros(4, dtype=torch.int64), "rank_major", torch.zeros(1, 3).int(), torch.tensor([0, 2]),
        torch.tensor([2]), torch.arange(2),
    )  # fmt: skip
    with pytest.raises(GraphError, match="rank-major slots"):
        held.fill(sharded, "call", 8, 1)


def test_slots_that_share_have_one_buffer() -> None:
    result = SlotType("target", "result", (None, 2), torch.float32)
    hidden, ids = (
        SlotType("drafter", "hidden", (None, 2), torch.float32),
        SlotType("drafter", "ids", (None,), torch.int64),
    )
    made = StaticInputs(8, 2, 3, "cpu", iter([hidden, ids, result, hidden]), {hidden: result})
    assert made.slots[hidden] is made.slots[result] is not made.slots[ids]
    apart = StaticInputs(8, 2, 3, "cpu", iter([hidden, ids, result]), {})
    assert apart.slots[hidden] is not apart.slots[result] and apart.bytes - made.bytes == 8 * 2 * 4
