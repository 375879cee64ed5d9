# SPDX-License-Identifier: Apache-2.0
"""Records and caches: the chain against its formula, the bytes where they are said to be, round trips, refusals."""

from __future__ import annotations

import struct

import pytest
import torch
import torch.nn.functional as F

from pcp_kernels.reference import cache, pack, quant

pytestmark = pytest.mark.unit


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(rows: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    theta = torch.arange(1, rows + 1)[:, None] * 0.3 ** torch.arange(half)
    return theta.cos(), theta.sin()


@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_rope_rotates_the_stated_pairs_as_complex_numbers(rope: str) -> None:
    x = rand(5, 3, 16, dtype=torch.float64)
    cos, sin = angles(5, 4)
    found = pack.apply_rope(x, cos, sin, rope)
    for pair in range(4):
        a, b = (pair, pair + 4) if rope == "half" else (2 * pair, 2 * pair + 1)
        turned = torch.complex(x[..., a], x[..., b]) * torch.complex(cos.double(), sin.double())[:, None, pair]
        assert torch.allclose(found[..., a], turned.real, rtol=0, atol=1e-12)
        assert torch.allclose(found[..., b], turned.imag, rtol=0, atol=1e-12)
    assert torch.equal(found[..., 8:], x[..., 8:])


def test_the_two_ropes_pair_the_same_values_after_a_permutation() -> None:
    x, (cos, sin) = rand(4, 8), angles(4, 4)
    spread = [0, 2, 4, 6, 1, 3, 5, 7]
    half = pack.apply_rope(x[:, spread], cos, sin, "half")
    assert torch.equal(half, pack.apply_rope(x, cos, sin, "interleaved")[:, spread])
    assert not torch.allclose(pack.apply_rope(x, cos, sin, "half"), pack.apply_rope(x, cos, sin, "interleaved"))


def test_index_record_of_the_whole_chain() -> None:
    k, weight, bias = rand(6, 32, dtype=torch.bfloat16), rand(32, seed=1), rand(32, seed=2)
    cos, sin = angles(6, 8)
    record = pack.index_pack(k, weight, bias, 1e-6, cos, sin, rope="half", hadamard=True)
    x = k.double()
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-6).sqrt() * weight + bias
    x = quant.hadamard(pack.apply_rope(x, cos, sin, "half"))
    values, scale = pack.index_unpack(record, 32)
    assert record.shape == (6, 36)
    assert record.dtype == torch.uint8
    assert scale is not None
    assert torch.equal(scale, quant.quantise(x.bfloat16())[1][:, 0])
    # fp32 against fp64 before one rounding to bf16 and one to e4m3: a value may land one step away, few do.
    expected = quant.quantise(x.bfloat16())[0]
    moved = values.view(torch.uint8) != expected.view(torch.uint8)
    assert float(moved.float().mean()) < 0.01


@pytest.mark.parametrize("store", ["bf16", "fp16", "fp32"])
def test_other_stores_round_once_whatever_the_rounding(store: str) -> None:
    k, weight = rand(6, 32), rand(32, seed=1)
    for rounding in pack.ROUNDINGS:
        record = pack.index_pack(k, weight, store=store, rounding=rounding)
        assert record.dtype == pack.STORES[store]
        assert torch.equal(record, F.layer_norm(k, (32,), weight, None, 1e-6).to(record.dtype))


def test_double_precision_is_kept() -> None:
    k = rand(3, 16, dtype=torch.float64)
    cos, sin = angles(3, 4)
    found = pack.index_pack(k, cos=cos, sin=sin, rope="interleaved", store="fp64")
    assert torch.equal(found, pack.apply_rope(k, cos, sin, "interleaved"))


def test_rounding_point_moves_three_percent_of_the_values() -> None:
    k = rand(400, 128)
    through_bf16, direct = (pack.index_pack(k, rounding=rounding)[:, :128] for rounding in ("bf16", "fp32"))
    share = float((through_bf16 != direct).float().mean())
    assert 0.02 < share < 0.045
    assert torch.equal(pack.index_pack(k.bfloat16(), rounding="bf16"), pack.index_pack(k.bfloat16(), rounding="fp32"))


def test_latent_record_has_its_bytes_where_they_are_said_to_be() -> None:
    latent, rope_key = rand(2, 512), rand(2, 64, seed=1)
    latent[1, 128:256] = 0
    record = pack.latent_pack(latent, rope_key)
    assert record.shape == (2, 656)
    assert pack.latent_width(512, 64, "fp8") == 656
    raw = bytes(record[1].tolist())
    scales = struct.unpack("<4f", raw[512:528])
    assert scales[1] == 2.0**-13
    values = torch.tensor(list(raw[:512]), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert float(values[300]) * scales[2] == pytest.approx(float(latent[1, 300]), rel=2.0**-4)
    rope_bits = torch.tensor(struct.unpack("<64h", raw[528:]), dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(rope_bits, rope_key[1].bfloat16())


@pytest.mark.parametrize(("latent_dim", "groups"), [(512, 4), (128, 1), (32, 1), (192, 2)])
def test_latent_round_trip(latent_dim: int, groups: int) -> None:
    latent, rope_key = rand(5, latent_dim), rand(5, 8, seed=1).bfloat16()
    record = pack.latent_pack(latent, rope_key)
    assert record.shape[1] == latent_dim + 4 * groups + 16 == pack.latent_width(latent_dim, 8, "fp8")
    found, rope_found = pack.latent_unpack(record, latent_dim, 8)
    assert torch.equal(rope_found, rope_key.float())
    # Half a step of e4m3 (three fraction bits), or of its smallest steps where the group's scale is large.
    assert bool(((found - latent).abs() <= latent.abs() * 2.0**-4 + 2.0**-14).all())
    again = pack.latent_pack(found, rope_found)
    assert torch.equal(pack.latent_unpack(again, latent_dim, 8)[0], found)


def test_other_latent_stores_are_the_values_themselves() -> None:
    latent, rope_key = rand(3, 32), rand(3, 8, seed=1)
    record = pack.latent_pack(latent, rope_key, store="fp32")
    assert torch.equal(record, torch.cat((latent, rope_key), 1))
    assert record.shape[1] == pack.latent_width(32, 8, "fp32")
    found = pack.latent_unpack(record, 32, 8)
    assert torch.equal(found[0], latent)
    assert torch.equal(found[1], rope_key)


def test_combined_record_at_published_sizes() -> None:
    latent, index = pack.latent_pack(rand(3, 512), rand(3, 64)), pack.index_pack(rand(3, 128))
    record = pack.combine_records(latent, index)
    assert record.shape == (3, 788)
    found = pack.split_record(record, 656)
    assert torch.equal(found[0], latent)
    assert torch.equal(found[1], index)
    with pytest.raises(ValueError, match=r"pack both for the same store"):
        pack.combine_records(latent, index.float())


@pytest.mark.parametrize("page", [16, 64])
def test_page_layout_is_values_then_scales(page: int) -> None:
    dim, pages = 128, 3
    held = torch.zeros(pages, page * (dim + 4), dtype=torch.uint8)
    record = pack.index_pack(rand(5, dim))
    slots = torch.tensor([page + 1, 0, -1, 2 * page + page - 1, 7])
    cache.scatter(held, record, slots)
    flat = held.flatten()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        value, scale = cache.value_offset(slot, page, dim), cache.scale_offset(slot, page, dim)
        assert torch.equal(flat[value : value + dim], record[row, :dim])
        assert torch.equal(flat[scale : scale + 4], record[row, dim:])
    # All else is untouched: the skipped record has gone nowhere.
    assert int((flat != 0).sum()) == int((record[slots >= 0] != 0).sum())
    keys, scales = cache.gather(held, slots.clamp(min=0), dim)
    wanted = pack.index_unpack(record, dim)
    assert torch.equal(keys[[0, 1, 3, 4]].view(torch.uint8), wanted[0][[0, 1, 3, 4]].view(torch.uint8))
    assert scales is not None
    assert wanted[1] is not None
    assert torch.equal(scales[[0, 1, 3, 4]], wanted[1][[0, 1, 3, 4]])


def test_rows_cache_skips_padding_and_reads_back() -> None:
    held = torch.full((2, 4, 6), 9.0)
    record = rand(3, 6)
    cache.scatter(held, record, torch.tensor([5, -1, 0]))
    keys, scale = cache.gather(held, torch.tensor([5, 0, 1]), 6)
    assert scale is None
    assert torch.equal(keys, torch.stack((record[0], record[2], torch.full((6,), 9.0))))
    whole, _ = cache.gather_pages(held, torch.tensor([1]), 6)
    assert torch.equal(whole[0], held[1])


def test_pages_are_gathered_in_the_order_asked() -> None:
    held = torch.zeros(4, 16 * 36, dtype=torch.uint8)
    record = pack.index_pack(rand(64, 32))
    cache.scatter(held, record, torch.arange(64))
    keys, scale = cache.gather_pages(held, torch.tensor([2, 0]), 32)
    at = torch.cat((torch.arange(32, 48), torch.arange(16)))
    wanted = pack.index_unpack(record[at], 32)
    assert scale is not None
    assert wanted[1] is not None
    assert torch.equal(keys.flatten(0, 1).contiguous().view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(scale.flatten(), wanted[1])


@pytest.mark.parametrize("store", ["fp8", "bf16"])
def test_no_tokens_leave_no_records(store: str) -> None:
    none = torch.zeros(0, 10)
    index, latent = pack.index_pack(none, store=store), pack.latent_pack(none, none[:, :4], store=store)
    assert index.shape == (0, 14 if store == "fp8" else 10)
    assert latent.shape == (0, pack.latent_width(10, 4, store))
    assert [part.shape for part in pack.latent_unpack(latent, 10, 4)] == [(0, 10), (0, 4)]
    keys, scale = pack.index_unpack(index, 10)
    assert keys.shape == (0, 10)
    assert (scale is None) == (store != "fp8")
    held = (
        torch.zeros(1, 16 * index.shape[1], dtype=index.dtype) if store == "fp8" else torch.zeros(1, 16, 10).bfloat16()
    )
    cache.scatter(held, index, torch.zeros(0, dtype=torch.int64))
    assert not held.any()


def test_refusals_name_what_is_required() -> None:
    k = rand(2, 8)
    with pytest.raises(ValueError, match=r"rope: found 'neox'.*\n.*store: found 'fp4'; required one of fp8, bf16"):
        pack.index_pack(k, rope="neox", store="fp4")
    with pytest.raises(ValueError, match=r"found cos None"):
        pack.index_pack(k, rope="half")
    with pytest.raises(ValueError, match=r"R not above the last dimension"):
        pack.apply_rope(k, torch.zeros(2, 5), torch.zeros(2, 5), "half")
    with pytest.raises(ValueError, match=r"required \[pages, page, 8\]"):
        cache.scatter(torch.zeros(2, 4, 7), k, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"found a cache of torch.float64 for records of torch.float32"):
        cache.scatter(torch.zeros(2, 4, 8, dtype=torch.float64), k, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"slots torch.int32"):
        cache.scatter(torch.zeros(2, 4, 8), k, torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"found an index cache torch.uint8 \[2, 100\] for keys of 8"):
        cache.page_size(torch.zeros(2, 100, dtype=torch.uint8), 8)
