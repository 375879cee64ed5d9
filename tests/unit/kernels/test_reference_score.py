# SPDX-License-Identifier: Apache-2.0
"""Scores against exact rational arithmetic, their independence of tiles, and what not-a-numbers become."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from pcp_kernels.reference import quant, score

pytestmark = pytest.mark.unit


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(q: torch.Tensor, w: torch.Tensor, k: torch.Tensor, scale: list[float]) -> list[list[Fraction]]:
    return [
        [
            Fraction(scale[j])
            * sum(
                Fraction(w[i, h].item())
                * max(Fraction(0), sum(Fraction(a) * Fraction(b) for a, b in zip(row, key, strict=True)))
                for h, row in enumerate(q[i].tolist())
            )
            for j, key in enumerate(k.tolist())
        ]
        for i in range(q.shape[0])
    ]


def test_a_score_is_the_exact_value_rounded_once() -> None:
    q, w, k, scale = rand(3, 4, 16), rand(3, 4, seed=1), rand(7, 16, seed=2), torch.rand(7) + 0.5
    found = score.score(q, w, k, scale)
    wanted = torch.tensor([[float(value) for value in row] for row in exact(q, w, k, scale.tolist())])
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


def test_fp8_queries_and_keys_are_read_as_they_are() -> None:
    (q, s_q), (k, s_k) = quant.quantise(rand(3, 4, 32)), quant.quantise(rand(9, 32, seed=1))
    w = rand(3, 4, seed=2)
    found = score.score(q, w * s_q[..., 0], k, s_k[:, 0])
    assert torch.equal(found, score.score(quant.dequantise(q, s_q), w, quant.dequantise(k, s_k)))


def test_double_queries_keep_double_scores() -> None:
    q, w, k = rand(3, 4, 16).double(), rand(3, 4, seed=1).double(), rand(7, 16, seed=2).double()
    wanted = torch.einsum("th,thn->tn", w, torch.einsum("thd,nd->thn", q, k).relu())
    found = score.score(q, w, k)
    assert found.dtype == torch.float64
    assert torch.allclose(found, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dim", [32, 128])
def test_no_bit_depends_on_the_shape_of_the_product(dim: int) -> None:
    q, w, k = rand(40, 8, dim), rand(40, 8, seed=1), rand(700, dim, seed=2)
    whole = score.score(q, w, k)
    for rows in (slice(0, 1), slice(7, 9), slice(3, 40)):
        for keys in (slice(0, 1), slice(5, 8), slice(11, 27), slice(0, 699)):
            assert torch.equal(score.score(q[rows], w[rows], k[keys]), whole[rows, keys])


def test_nan_of_a_product_counts_as_zero_and_of_a_weight_or_scale_stays() -> None:
    q, w, k = rand(4, 2, 8), rand(4, 2, seed=1), rand(5, 8, seed=2)
    clean = score.score(q, w, k)
    k[2, 3] = math.nan
    found = score.score(q, w, k)
    assert not found[:, 2].any()
    keep = [0, 1, 3, 4]
    assert torch.equal(found[:, keep], clean[:, keep])
    w[1, 0] = math.nan
    scale = torch.ones(5)
    scale[4] = math.nan
    found = score.score(q, w, k, scale)
    assert found.isnan().nonzero().tolist() == [[0, 4], *[[1, j] for j in range(5)], [2, 4], [3, 4]]


def test_an_infinite_product_stays_infinite_beside_a_nan() -> None:
    q, w = torch.ones(1, 1, 2), torch.ones(1, 1)
    k = torch.tensor([[math.inf, 0.0], [math.inf, -math.inf], [1.0, 1.0]])
    assert score.score(q, w, k).tolist() == [[math.inf, 0.0, 2.0]]
