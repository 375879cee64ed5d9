# SPDX-License-Identifier: Apache-2.0
"""Query preparation: the fold of the scales is exact, and the result does not depend on how tokens are tiled."""

from __future__ import annotations

import pytest
import torch

from pcp_kernels.reference import pack, prep, quant

pytestmark = pytest.mark.unit


def inputs(
    tokens: int = 6, heads: int = 4, dim: int = 32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, heads, dim, generator=generator)
    theta = torch.randn(tokens, dim // 4, generator=generator)
    return q, torch.randn(tokens, heads, generator=generator), theta.cos(), theta.sin()


@pytest.mark.parametrize("rope", pack.ROPES)
@pytest.mark.parametrize("hadamard", [False, True])
def test_fp8_queries_and_weights_by_the_formula(rope: str, hadamard: bool) -> None:
    q, w, cos, sin = inputs()
    found, weights = prep.index_prep(q, w, cos, sin, rope=rope, hadamard=hadamard, factor=0.125)
    x = pack.apply_rope(q, cos, sin, rope)
    values, scale = quant.quantise(quant.hadamard(x) if hadamard else x)
    assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(weights, w * 0.125 * scale[..., 0])
    assert weights.dtype == torch.float32


def test_the_fold_of_the_scale_is_exact() -> None:
    q, w, _, _ = inputs()
    _, weights = prep.index_prep(q * 1000, w)
    ratio = weights / w
    assert torch.equal(torch.exp2(torch.log2(ratio).round()), ratio)


@pytest.mark.parametrize("store", ["bf16", "fp16", "fp32"])
def test_other_stores_have_no_scale(store: str) -> None:
    q, w, cos, sin = inputs()
    found, weights = prep.index_prep(q, w, cos, sin, rope="half", store=store, factor=0.5)
    assert torch.equal(found, pack.apply_rope(q, cos, sin, "half").to(pack.STORES[store]))
    assert torch.equal(weights, w * 0.5)


def test_double_precision_is_kept() -> None:
    q, w, cos, sin = (part.double() for part in inputs())
    found, weights = prep.index_prep(q, w, cos, sin, rope="half", store="fp64")
    assert found.dtype == weights.dtype == torch.float64
    assert torch.equal(found, pack.apply_rope(q, cos, sin, "half"))


def test_bf16_queries_are_quantised_from_bf16_unless_told() -> None:
    q, w, cos, sin = inputs(tokens=200)
    q = q.bfloat16()
    default, _ = prep.index_prep(q, w, cos, sin, rope="half")
    stated, _ = prep.index_prep(q, w, cos, sin, rope="half", rounding="bf16")
    direct, _ = prep.index_prep(q, w, cos, sin, rope="half", rounding="fp32")
    assert torch.equal(default.view(torch.uint8), stated.view(torch.uint8))
    assert not torch.equal(default.view(torch.uint8), direct.view(torch.uint8))


def test_tiles_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, w, cos, sin = inputs(tokens=11)
    whole = prep.index_prep(q, w, cos, sin, rope="interleaved", hadamard=True)
    records = pack.index_pack(q[:, 0], w[0].repeat(8), None, 1e-6, cos, sin, rope="half")
    latents = pack.latent_pack(q[:, 0], q[:, 1])
    monkeypatch.setattr(pack, "_TILE_BYTES", 32 * 4 * 32 * 3)  # three tokens of queries at a time
    tiled = prep.index_prep(q, w, cos, sin, rope="interleaved", hadamard=True)
    assert torch.equal(tiled[0].view(torch.uint8), whole[0].view(torch.uint8))
    assert torch.equal(tiled[1], whole[1])
    monkeypatch.setattr(pack, "_TILE_BYTES", 32 * 32 * 4)
    assert torch.equal(pack.index_pack(q[:, 0], w[0].repeat(8), None, 1e-6, cos, sin, rope="half"), records)
    assert torch.equal(pack.latent_pack(q[:, 0], q[:, 1]), latents)


def test_no_tokens_give_no_tokens() -> None:
    found, weights = prep.index_prep(torch.zeros(0, 4, 32), torch.zeros(0, 4))
    assert found.shape == (0, 4, 32)
    assert weights.shape == (0, 4)


def test_refusals_name_the_sets() -> None:
    q, w, _, _ = inputs()
    with pytest.raises(ValueError, match=r"rounding: found 'fp8'; required one of bf16, fp32"):
        prep.index_prep(q, w, rounding="fp8")
    with pytest.raises(ValueError, match=r"store: found 'int8'; required one of fp8, bf16, fp16, fp32"):
        prep.index_prep(q, w, store="int8")
