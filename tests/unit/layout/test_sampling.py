# SPDX-License-Identifier: Apache-2.0
"""Gathering only the sampled rows gives what restoring everything and then picking gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_passes.errors import LayoutError
from pcp_passes.layout import Batch, Layout, SampledRows, build_layout, sampled_rows
from tests.unit.layout.oracle import DECODES, KINDS, make_batch

pytestmark = pytest.mark.unit


def check_sampled(layout: Layout, wanted: list[int], picked: SampledRows) -> None:
    hidden = np.random.default_rng(0).normal(size=(layout.num_tokens, 3))
    # Only canonical rows are right; copies, pads and everything else would poison the result.
    rank_major = np.where(layout.write_mask[:, None], hidden[layout.gather_index], np.nan)
    local = rank_major.reshape(layout.pcp, layout.padded_tokens, 3)
    gathered = np.concatenate([local[rank][picked.rows[rank]] for rank in range(layout.pcp)])
    assert gathered.shape[0] == layout.pcp * picked.padded_rows
    assert np.array_equal(gathered[picked.restore], hidden[wanted])
    assert picked.counts.sum() == len(wanted) and picked.counts.max() <= picked.padded_rows


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_drawn(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any))
    flags = data.draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens)))
    layout = build_layout(
        make_batch(lens, None, flags),
        data.draw(st.integers(1, 8)),
        kind=data.draw(st.sampled_from(KINDS)),
        decode=data.draw(st.sampled_from(DECODES)),
    )
    wanted = data.draw(st.lists(st.integers(0, sum(lens) - 1), max_size=30))
    picked = sampled_rows(layout, wanted)
    check_sampled(layout, wanted, picked)
    assert picked.padded_rows == picked.counts.max(), "no more rows than the largest rank needs"
    check_sampled(layout, wanted, sampled_rows(layout, wanted, padded_rows=picked.padded_rows + 2))


def test_last_tokens_move_far_fewer_rows_than_all() -> None:
    batch = make_batch([500, 700, 300])
    layout = build_layout(batch, 4)
    picked = sampled_rows(layout, batch.query_start_loc[1:] - 1)
    assert picked.padded_rows == 3  # rank 0 holds the last chunk of every prefill
    assert layout.padded_tokens == 375


def test_documented_example() -> None:
    layout = build_layout(Batch([6, 1], [0, 9], [6, 4]), 2, decode="owner")
    picked = sampled_rows(layout, [5, 6])
    assert picked.rows.tolist() == [[3, 0], [0, 0]]
    assert picked.counts.tolist() == [2, 0] and picked.restore.tolist() == [0, 1]


def test_nothing_sampled() -> None:
    picked = sampled_rows(build_layout(make_batch([0, 0]), 2), [])
    assert picked.rows.shape == (2, 0) and picked.restore.shape == (0,)


@pytest.mark.parametrize("wanted", [[7], [-1], [[0]]])
def test_refused(wanted: list[int]) -> None:
    with pytest.raises(LayoutError, match="indices into the 7 tokens"):
        sampled_rows(build_layout(make_batch([7]), 2), wanted)


def test_padding_below_the_largest_rank_is_refused() -> None:
    with pytest.raises(LayoutError, match="padded_rows = 1 is below the 2 sampled rows"):
        sampled_rows(build_layout(make_batch([7]), 2), [0, 1], padded_rows=1)


@pytest.mark.parametrize("field", ["rows", "restore"])
def test_sabotage(field: str) -> None:
    layout = build_layout(make_batch([9, 5, 6]), 2)
    wanted = [8, 3, 19, 0]
    picked = sampled_rows(layout, wanted)
    check_sampled(layout, wanted, picked)
    broken = dataclasses.replace(picked, **{field: np.roll(getattr(picked, field), 1, axis=-1)})
    with pytest.raises(AssertionError):
        check_sampled(layout, wanted, broken)
