# SPDX-License-Identifier: Apache-2.0
"""The random streams: known answers, independence of the batch, and statistics that a weaker mixing fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_passes.speculative import ACCEPT, DRAFT, RESIDUAL, SAMPLE, streams, uniforms

PURPOSES = (SAMPLE, DRAFT, ACCEPT, RESIDUAL)
WORDS = st.integers(-(2**63), 2**63 - 1)


def oracle(seed: int, position: int, purpose: int, column: int) -> float:
    """The definition in unbounded integers."""
    mask, step = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    stream = mix(seed & mask)
    for part in (position, purpose):
        stream = mix((stream + part * step) & mask)
    return ((mix((stream + (column + 1) * step) & mask) >> 12) + 0.5) / 2**52


def test_the_first_stream_is_the_published_sequence_of_splitmix64() -> None:
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
    zero = torch.zeros(1, dtype=torch.int64)
    expected = torch.tensor([((word >> 12) + 0.5) / 2**52 for word in published], dtype=torch.float64)
    assert torch.equal(uniforms(zero, zero, SAMPLE, 4)[0], expected)


@given(st.lists(st.tuples(WORDS, st.integers(0, 2**40)), min_size=1, max_size=9), st.sampled_from(PURPOSES))
@settings(deadline=None, max_examples=60)
def test_values_are_those_of_the_definition(rows: list[tuple[int, int]], purpose: int) -> None:
    seeds, positions = (torch.tensor(part, dtype=torch.int64) for part in zip(*rows, strict=True))
    found = uniforms(seeds, positions, purpose, 5)
    expected = [[oracle(seed, position, purpose, column) for column in range(5)] for seed, position in rows]
    assert found.tolist() == expected


def test_a_row_does_not_depend_on_its_batch_nor_on_the_columns_asked_for() -> None:
    seeds, positions = torch.arange(40) * 7, torch.arange(40) % 5
    purposes = torch.arange(40) % 4
    together = uniforms(seeds, positions, purposes, 17)
    for row in (0, 1, 13, 39):
        alone = uniforms(seeds[row : row + 1], positions[row : row + 1], int(purposes[row]), 6)
        assert torch.equal(alone[0], together[row, :6])


def test_the_ends_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    for word, value in ((0, 2.0**-53), (-1, 1 - 2.0**-53)):
        monkeypatch.setattr(streams, "_mix", lambda x, word=word: torch.full_like(x, word))
        assert uniforms(zero, zero, SAMPLE, 1).item() == value


def along(axis: str) -> np.ndarray:
    """2**16 numbers next to each other along one input, the others fixed at a small value, as real use has them."""
    count = 1 << 16
    fixed, counting = torch.full((count,), 3), torch.arange(count)
    if axis == "columns":
        return uniforms(fixed[:1], fixed[:1], DRAFT, count)[0].numpy()
    if axis == "purposes":
        rows = count // 4
        drawn = [uniforms(counting[:rows], fixed[:rows], purpose, 1) for purpose in PURPOSES]
        return torch.cat(drawn, 1).flatten().numpy()
    if axis == "diagonal":
        return uniforms(counting % 256, counting // 256, SAMPLE, 1)[:, 0].numpy()
    seeds, positions = (counting, fixed) if axis == "seeds" else (fixed, counting)
    return uniforms(seeds, positions, SAMPLE, 1)[:, 0].numpy()


def faults(numbers: np.ndarray) -> list[str]:
    """Statistics beyond five standard deviations: bins, pairs of neighbours, correlation, repeats."""

    def excess(bins: np.ndarray, cells: int) -> float:
        expected = len(bins) / cells
        chi = float(((np.bincount(bins, minlength=cells) - expected) ** 2 / expected).sum())
        return abs(chi - (cells - 1)) / np.sqrt(2 * (cells - 1))

    found = {"bins": excess((numbers * 256).astype(int), 256)}
    low = np.modf(numbers * 2**20)[0]
    found["low bits"] = excess((low * 256).astype(int), 256)
    for lag in (1, 2, 3, 4, 256):
        first, second = numbers[:-lag], numbers[lag:]
        found[f"pairs at {lag}"] = excess((first * 16).astype(int) * 16 + (second * 16).astype(int), 256)
        found[f"correlation at {lag}"] = abs(float(np.corrcoef(first, second)[0, 1])) * np.sqrt(len(first))
    found["repeats"] = 100.0 * (len(numbers) - len(np.unique(numbers)))
    return [f"{name}: {value:.1f}" for name, value in found.items() if not value < 5]


AXES = ("columns", "positions", "seeds", "purposes", "diagonal")


@pytest.mark.parametrize("axis", AXES)
def test_numbers_look_independent_along(axis: str) -> None:
    assert faults(along(axis)) == []


def test_streams_of_neighbours_do_not_overlap() -> None:
    keys = itertools.product(range(8), range(8), PURPOSES)
    drawn = [
        uniforms(torch.tensor([seed]), torch.tensor([position]), purpose, 512)[0] for seed, position, purpose in keys
    ]
    numbers = torch.cat(drawn)
    assert len(numbers.unique()) == len(numbers)


def _identity(word: torch.Tensor) -> torch.Tensor:
    return word


def _one_multiply(word: torch.Tensor) -> torch.Tensor:
    return word * streams._MULTIPLIERS[0]


@pytest.mark.parametrize("weaker", [_identity, _one_multiply])
@pytest.mark.parametrize("axis", AXES)
def test_a_weaker_mixing_is_seen(
    axis: str, weaker: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_mix", weaker)
    assert faults(along(axis)) != []
