# SPDX-License-Identifier: Apache-2.0
"""The total order: keys compare as scores do, and what is best does not depend on how candidates are presented."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_kernels.reference import order
from tests.comparator import selected_by_definition

pytestmark = pytest.mark.unit

RISING = [-math.inf, -3.4e38, -1.0, -1.4e-45, 0.0, 1.4e-45, 1.0, 3.4e38, math.inf]


@pytest.mark.parametrize(("dtype", "keys"), [(torch.float32, torch.int32), (torch.float64, torch.int64)])
def test_keys_compare_as_scores_do(dtype: torch.dtype, keys: torch.dtype) -> None:
    found = order.sortable_key(torch.tensor(RISING, dtype=dtype))
    assert found.dtype == keys
    assert found.tolist() == sorted(set(found.tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_are_one_key_and_nan_is_below_every_number(dtype: torch.dtype) -> None:
    low, minus, plus, nan, other = order.sortable_key(
        torch.tensor([-math.inf, -0.0, 0.0, math.nan, -math.nan], dtype=dtype)
    ).tolist()
    info = torch.iinfo(torch.int32 if dtype == torch.float32 else torch.int64)
    assert minus == plus == 0
    assert nan == other == info.min + 1 < low
    assert order.no_key(torch.int32 if dtype == torch.float32 else torch.int64) == info.min


def test_keys_of_the_module_docstring() -> None:
    found = order.sortable_key(torch.tensor([-math.inf, -1.0, 1.0, math.inf])).tolist()
    assert found == [-2139095041, -1065353217, 1065353216, 2139095040]
    assert all(str(key) in str(order.__doc__) for key in found)


def test_every_bit_pattern_of_one_exponent_keeps_its_order() -> None:
    bits = torch.arange(0x3F800000, 0x3F800000 + (1 << 16), dtype=torch.int32)
    scores = bits.view(torch.float32)
    assert bool((order.sortable_key(scores).diff() > 0).all())
    assert bool((order.sortable_key(-scores).diff() < 0).all())


def test_a_view_with_strides_has_the_keys_of_its_copy() -> None:
    scores = torch.randn(6, 8)[:, ::2]
    assert torch.equal(order.sortable_key(scores), order.sortable_key(scores.contiguous()))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"found scores of torch.bfloat16; required fp32 or fp64"):
        order.sortable_key(torch.zeros(2, dtype=torch.bfloat16))


SCORES = st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=24)


@settings(max_examples=60, deadline=None)
@given(scores=SCORES, topk=st.integers(1, 12), seed=st.integers(0, 99), double=st.booleans())
def test_merge_selects_by_definition_whatever_the_order_of_candidates(
    scores: list[float], topk: int, seed: int, double: bool
) -> None:
    row = torch.tensor([scores], dtype=torch.float64 if double else torch.float32)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(scores), generator=generator)
    # Non-candidates carry the best of keys and no index.
    keys = torch.cat((order.sortable_key(row[:, shuffled]), order.sortable_key(row.new_full((1, 3), math.inf))), dim=1)
    indices = torch.cat((shuffled.int()[None], torch.full((1, 3), -1, dtype=torch.int32)), dim=1)
    wanted = selected_by_definition(row, torch.tensor([len(scores)]), topk)
    assert torch.equal(order.merge(keys, indices, topk), wanted)


def test_ties_are_broken_by_index_only() -> None:
    keys = order.sortable_key(torch.zeros(1, 6))
    assert order.merge(keys, torch.tensor([[50, 3, 70000, 9, 2**31 - 2, 0]]), 3).tolist() == [[0, 3, 9]]


def test_an_empty_set_of_candidates_selects_nothing() -> None:
    empty = torch.zeros(2, 0, dtype=torch.int32)
    assert order.merge(empty, empty, 4).tolist() == [[-1] * 4] * 2
