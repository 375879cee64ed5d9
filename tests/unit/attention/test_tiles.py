# SPDX-License-Identifier: Apache-2.0
"""The parts of every tile cover the interval of each row exactly once, and nothing else."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_passes.attention import tiles
from pcp_passes.attention.tiles import EDGE, NARROW, ROWS, Part, Sight, Tile, intervals, plan


def visits(found: Iterable[Tile], rows: int, keys: int) -> torch.Tensor:
    """i64 ``[rows, keys]``: how many parts show a key to a row, read off the meaning of each kind of part."""
    count = torch.zeros(rows, keys, dtype=torch.int64)
    for tile in found:
        for part in tile.parts:
            shape = (tile.stop - tile.start, part.stop - part.start)
            if part.sight is Sight.FULL:
                seen = torch.ones(shape, dtype=torch.bool)
            elif part.sight is Sight.CAUSAL:
                seen = torch.ones(shape, dtype=torch.bool).tril()
            else:
                seen = tile.seen(part)
            count[tile.start : tile.stop, part.start : part.stop] += seen
    return count


def by_definition(positions: torch.Tensor, keys: int, left: int, right: int, chunk: int) -> torch.Tensor:
    rows = []
    for p in positions.tolist():
        rows.append(
            [
                (left < 0 or p - j <= left)
                and (right < 0 or j - p <= right)
                and (not chunk or j // chunk == p // chunk)
                for j in range(keys)
            ]
        )
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), keys)


def covers(positions: list[int], keys: int, left: int, right: int, chunk: int, rows: int = 0) -> bool:
    at = torch.tensor(positions, dtype=torch.int64)
    found = plan(at, keys, left, right, chunk, rows)
    return torch.equal(visits(found, len(positions), keys), by_definition(at, keys, left, right, chunk))


POSITIONS = {
    "zigzag with padding": [*range(10), *range(70, 80), 0, 0, 0],
    "zigzag without padding": [*range(20, 40), *range(40, 60)],
    "all": list(range(80)),
    "interleave": list(range(1, 80, 4)),
    "one row": [17],
    "first row": [0],
    "all padding": [0] * 5,
    "descending": list(range(79, -1, -1)),
    "scattered": [3, 70, 4, 5, 5, 6, 79, 0, 1, 2, 40],
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_named_layouts_are_covered(positions: list[int]) -> None:
    for left in (-1, 0, 3, 500):
        for right in (-1, 0, 2, 500):
            for chunk in (0, 1, 7, 16):
                assert covers(positions, 80, left, right, chunk), (left, right, chunk)
                assert covers(positions, 80, left, right, chunk, rows=ROWS), (left, right, chunk)


def test_every_short_list_of_positions_is_covered() -> None:
    """All lists of 3 positions over 5 keys."""
    for index in range(5**3):
        positions = [index % 5, index // 5 % 5, index // 25]
        for left, right, chunk in ((-1, 0, 0), (1, 0, 0), (-1, -1, 2), (0, 1, 3)):
            assert covers(positions, 5, left, right, chunk), (positions, left, right, chunk)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1400), st.integers(1, 300), st.integers(0, 6)), min_size=1, max_size=4),
    st.sampled_from([-1, 0, 1, 40, 300, 5000]),
    st.sampled_from([-1, 0, 1, 40, 300, 5000]),
    st.sampled_from([0, 0, 1, 33, 400]),
    st.sampled_from([0, ROWS]),
)
def test_progressions_of_any_step_are_covered(pieces, left, right, chunk, rows) -> None:
    keys = 1500
    positions = [start + i * step for start, count, step in pieces for i in range(count) if start + i * step < keys]
    at = torch.tensor(positions)
    found = plan(at, keys, left, right, chunk, rows)
    low, high = intervals(at, keys, left, right, chunk)
    key = torch.arange(keys)
    expected = (key >= low[:, None]) & (key < high[:, None])
    assert torch.equal(visits(found, len(positions), keys), expected.long())
    for tile in found:
        masked = sum(part.stop - part.start for part in tile.parts if part.sight is Sight.MASKED)
        assert masked <= 2 * EDGE + NARROW
        if masked or rows:
            assert tile.stop - tile.start <= ROWS
        for part in tile.parts:
            assert torch.equal(tile.blind(part), ~tile.seen(part).any(-1))
            assert tile.seen(part).any(0).all(), "a key that no row of the tile sees"


def test_intervals_worked_example() -> None:
    low, high = intervals(torch.tensor([0, 5]), 8, left=2, right=0, chunk=4)
    assert (low.tolist(), high.tolist()) == ([0, 4], [1, 6])


def test_a_position_past_the_keys_gets_no_tile() -> None:
    found = plan(torch.tensor([3, 9, 4]), 5, 1, 0, 0, 0)
    assert [(tile.start, tile.stop) for tile in found] == [(0, 1), (2, 3)]


def test_zigzag_is_two_prefixes_two_diagonals_and_the_padding() -> None:
    at = torch.tensor([*range(4, 8), *range(24, 28), 0, 0])
    parts = [(tile.start, tile.stop, *((p.start, p.stop, p.sight.name) for p in tile.parts))
             for tile in plan(at, 32, -1, 0, 0, 0)]  # fmt: skip
    assert parts == [
        (0, 4, (0, 4, "FULL"), (4, 8, "CAUSAL")),
        (4, 8, (0, 24, "FULL"), (24, 28, "CAUSAL")),
        (8, 10, (0, 1, "FULL")),
    ]


def test_a_wide_window_has_an_interior_without_masks() -> None:
    (tile,) = plan(torch.arange(1000, 1100), 2000, 599, 0, 0, 0)
    assert [(p.start, p.stop, p.sight.name) for p in tile.parts] == [
        (500, 1001, "FULL"),
        (401, 500, "MASKED"),
        (1001, 1100, "MASKED"),
    ]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda p: Part(p.start, p.stop - 1, p.sight), id="a key short"),
        pytest.param(lambda p: Part(p.start + 1, p.stop + 1, p.sight), id="off by one"),
        pytest.param(lambda p: Part(p.start, p.stop, Sight.FULL), id="no mask"),
    ],
)
def test_a_wrong_part_is_seen(edit, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tiles._parts
    monkeypatch.setattr(tiles, "_parts", lambda *args: (*parts(*args)[:-1], edit(parts(*args)[-1])))
    tiles._plan.cache_clear()
    try:
        assert not covers(list(range(20, 40)), 80, 9, 0, 0)
    finally:
        tiles._plan.cache_clear()


def test_the_layers_of_a_step_share_one_plan() -> None:
    at = torch.arange(10)
    assert plan(at, 10, -1, 0, 0, 0) is plan(at.clone(), 10, -1, 0, 0, 0)
    assert plan(at, 10, -1, 0, 0, 0) is not plan(at.flip(0), 10, -1, 0, 0, 0)
