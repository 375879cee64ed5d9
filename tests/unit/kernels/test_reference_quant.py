# SPDX-License-Identifier: Apache-2.0
"""FP8 with power-of-two scales against exact arithmetic, and the Hadamard transform against its matrix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_kernels.reference import quant

pytestmark = pytest.mark.unit


def smallest_power(raw: float) -> float:
    """By exact arithmetic: frexp gives ``raw = m * 2**e`` with ``0.5 <= m < 1``."""
    mantissa, exponent = math.frexp(raw)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_scale_is_the_smallest_power_of_two_that_is_not_below(raw: float) -> None:
    scale, inverse = quant.pow2_scale(torch.tensor([raw]))
    assert float(scale) == smallest_power(raw)
    assert float(scale) * float(inverse) == 1.0


@pytest.mark.parametrize("exponent", range(-22, 40))
def test_scale_at_exact_powers_of_two_and_their_neighbours(exponent: int) -> None:
    at = torch.tensor([2.0**exponent])
    below, above = torch.nextafter(at, torch.zeros(1)), torch.nextafter(at, torch.full((1,), math.inf))
    assert float(quant.pow2_scale(at)[0]) == 2.0**exponent
    assert float(quant.pow2_scale(below)[0]) == 2.0**exponent
    assert float(quant.pow2_scale(above)[0]) == 2.0 ** (exponent + 1)


def test_values_of_a_row_by_hand() -> None:
    # amax 448 * 2 exactly: scale 2. 3.3 / 2 = 1.65 lies between 1.625 and 1.75 and rounds down; 0.0078125 / 2 = 2**-8.
    values, scale = quant.quantise(torch.tensor([[896.0, 3.3, -0.0078125, 0.0]]))
    assert scale.tolist() == [[2.0]]
    assert values.float().tolist() == [[448.0, 1.625, -0.00390625, 0.0]]
    assert quant.dequantise(values, scale).tolist() == [[896.0, 3.25, -0.0078125, 0.0]]


def test_floors_of_amax_and_of_scale_differ() -> None:
    zeros = torch.zeros(1, 8)
    assert float(quant.quantise(zeros)[1]) == 2.0**-22  # 1e-4 / 448 = 2.23e-7
    assert float(quant.quantise(zeros, floor_on="scale")[1]) == 2.0**-13  # 1e-4
    assert not quant.quantise(zeros)[0].float().any()


def test_groups_have_scales_of_their_own() -> None:
    x = torch.cat((torch.full((2, 4), 448.0), torch.full((2, 4), 1.0)), dim=1)
    values, scale = quant.quantise(x, 4)
    assert scale.tolist() == [[1.0, 2.0**-8]] * 2
    assert torch.equal(quant.dequantise(values, scale), x)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), size=st.sampled_from([1e-6, 1.0, 3e4]))
def test_no_value_is_clamped_and_the_error_is_half_a_step(seed: int, size: float) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)) * size
    values, scale = quant.quantise(x)
    assert bool((x.abs() / scale <= quant.FP8_MAX).all())
    step = torch.maximum(x.abs(), scale * 2.0**-6) * 2.0**-4  # e4m3 has three fraction bits, and steps of 2**-9 below
    assert bool(((quant.dequantise(values, scale) - x).abs() <= step).all())


def test_quantising_is_of_each_token_alone() -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    values, scale = quant.quantise(x)
    for row in range(9):
        alone, its = quant.quantise(x[row : row + 1])
        assert torch.equal(alone.view(torch.uint8)[0], values.view(torch.uint8)[row])
        assert torch.equal(its[0], scale[row])


def test_unfit_groups_and_floors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"found groups of 5 of 8 values"):
        quant.quantise(torch.zeros(1, 8), 5)
    with pytest.raises(ValueError, match=r"floor_on='both'"):
        quant.quantise(torch.zeros(1, 8), floor_on="both")


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_hadamard_is_the_sylvester_matrix(size: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = torch.randn(3, 2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    assert torch.allclose(quant.hadamard(x), x @ matrix * size**-0.5, rtol=0, atol=1e-13)
    assert torch.allclose(quant.hadamard(quant.hadamard(x)), x, rtol=0, atol=1e-13)
    assert quant.hadamard(x.bfloat16()).dtype == torch.float32


def test_hadamard_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found a last dimension of 12; required a power of two"):
        quant.hadamard(torch.zeros(1, 12))
