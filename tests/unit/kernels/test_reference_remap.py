# SPDX-License-Identifier: Apache-2.0
"""Key indices to slots, and the rows that one rank owns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_kernels.reference.owner import owner_rank, select_owner_rows
from pcp_kernels.reference.remap import index_remap
from pcp_passes.layout import Batch, build_layout

pytestmark = pytest.mark.unit


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 6), width=st.integers(1, 9), page=st.sampled_from([16, 64]), seed=st.integers(0, 99))
def test_slots_by_definition(rows: int, width: int, page: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 50, (3, 4), generator=generator, dtype=torch.int32)
    request = torch.randint(0, 3, (rows,), generator=generator, dtype=torch.int32)
    indices = torch.randint(-1, 4 * page, (rows, width), generator=generator, dtype=torch.int32)
    slots, count = index_remap(indices, table, request, page)
    assert slots.dtype == count.dtype == torch.int32
    for t in range(rows):
        held = [int(table[request[t], i // page]) * page + i % page if i >= 0 else -1 for i in indices[t].tolist()]
        assert slots[t].tolist() == held
        assert int(count[t]) == sum(slot >= 0 for slot in held)


def test_pages_that_are_not_there_give_no_slot() -> None:
    table = torch.tensor([[7, -1]], dtype=torch.int32)
    slots, count = index_remap(torch.tensor([[3, 16, 40, -1]], dtype=torch.int32), table, torch.tensor([0]), 16)
    assert slots.tolist() == [[115, -1, -1, -1]]
    assert count.tolist() == [1]


def test_slots_near_the_end_of_32_bits() -> None:
    table = torch.tensor([[2**25 - 1]], dtype=torch.int32)
    slots, _ = index_remap(torch.tensor([[63]], dtype=torch.int32), table, torch.tensor([0]), 64)
    assert slots.tolist() == [[2**31 - 1]]


def test_remap_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"found indices \[2\], .* required \[T, k\]"):
        index_remap(torch.zeros(2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2), 16)


@settings(max_examples=60, deadline=None)
@given(lens=st.lists(st.integers(1, 40), min_size=1, max_size=4), pcp=st.integers(1, 8))
def test_owner_is_the_rank_that_holds_the_last_token(lens: list[int], pcp: int) -> None:
    batch = Batch(lens, [0] * len(lens), lens)
    layout = build_layout(batch, pcp, kind="zigzag", compat="vllm")
    for request, length in enumerate(lens):
        last = int(batch.query_start_loc[request + 1]) - 1
        row = int(layout.restore_index[last])
        assert row // layout.padded_tokens == owner_rank(length, pcp)


def test_a_sum_over_ranks_of_owned_rows_delivers_every_request() -> None:
    topk = torch.tensor([[4, 9, -1], [0, -1, -1], [2, 3, 5]], dtype=torch.int32)
    owners = [1, 0, 1]
    total = sum(
        select_owner_rows(topk, torch.tensor([r if owner == rank else -1 for r, owner in enumerate(owners)]))
        for rank in range(2)
    )
    assert torch.equal(torch.as_tensor(total), topk)
    # The same from gathered rows, with no sum.
    assert torch.equal(select_owner_rows(topk, torch.tensor([2, -1, 0]), -1)[[0, 2]], topk[[2, 0]])
    assert select_owner_rows(topk, torch.tensor([-1]), -1).tolist() == [[-1] * 3]
    assert select_owner_rows(topk[:0], torch.tensor([-1, -1])).tolist() == [[0] * 3] * 2


def test_owner_refusals() -> None:
    with pytest.raises(ValueError, match=r"found 0 tokens on 2 ranks"):
        owner_rank(0, 2)
    with pytest.raises(ValueError, match=r"found selections \[3\] and rows \[1\]"):
        select_owner_rows(torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
