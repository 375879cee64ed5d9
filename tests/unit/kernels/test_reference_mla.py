# SPDX-License-Identifier: Apache-2.0
"""Absorbed sparse MLA against a softmax over the selected rows, and its edges."""

from __future__ import annotations

import math

import pytest
import torch

from pcp_kernels.reference import mla, pack
from pcp_passes.live_bytes import LiveBytes

pytestmark = pytest.mark.unit

LATENT, ROPE, SCALE = 16, 8, 0.3


Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(
    dtype: torch.dtype, tokens: int = 9, heads: int = 3, rows: int = 40, topk: int = 7, seed: int = 0
) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, LATENT + ROPE, generator=generator).to(dtype)
    latent = torch.randn(rows, LATENT, generator=generator).to(dtype)
    rope = torch.randn(rows, ROPE, generator=generator).to(dtype)
    slots = torch.stack([torch.randperm(rows, generator=generator)[:topk] for _ in range(tokens)]).int()
    slots[torch.rand(slots.shape, generator=generator) < 0.3] = -1
    slots[2] = -1
    return q, latent, rope, slots


def by_definition(
    q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros(*q.shape[:2], latent.shape[1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for t in range(q.shape[0]):
        held = [slot for slot in slots[t].tolist() if slot >= 0]
        if held:
            keys = torch.cat((latent[held], rope[held]), dim=1).double()
            scores = SCALE * q[t].double() @ keys.t()
            lse[t] = scores.logsumexp(-1)
            out[t] = scores.softmax(-1) @ latent[held].double()
    return out, lse


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_attention_by_definition(dtype: torch.dtype, near: float) -> None:
    q, latent, rope, slots = case(dtype)
    out, lse = mla.sparse_mla(q, latent, rope, slots, SCALE)
    wanted, wanted_lse = by_definition(q, latent, rope, slots)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(out.double(), wanted, rtol=near, atol=near)
    assert torch.allclose(lse.double(), wanted_lse, rtol=near, atol=near)
    assert not out[2].any()
    assert bool((lse[2] == -math.inf).all())


def test_garbage_in_rows_that_are_not_selected_reaches_nothing() -> None:
    q, latent, rope, slots = case(torch.float32)
    out, lse = mla.sparse_mla(q, latent, rope, slots.masked_fill(slots == 0, 1), SCALE)
    latent[0], rope[0] = math.nan, math.nan
    again, lse_again = mla.sparse_mla(q, latent, rope, slots.masked_fill(slots == 0, 1), SCALE)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def test_tiles_of_tokens_and_unused_columns_change_nothing() -> None:
    q, latent, rope, slots = case(torch.float64)
    out, lse = mla.sparse_mla(q, latent, rope, slots, SCALE)
    wide = torch.cat((slots, torch.full((9, 30), -1, dtype=torch.int32)), dim=1)
    with pytest.raises(ValueError, match=r"found a workspace of 1 bytes; .* takes (\d+)") as refused:
        mla.sparse_mla(q, latent, rope, wide, SCALE, workspace_bytes=1)
    least = int(str(refused.value).split("takes ")[1].split(".")[0])
    tiled = mla.sparse_mla(q, latent, rope, wide, SCALE, workspace_bytes=least)
    assert torch.allclose(tiled[0], out, rtol=1e-14, atol=1e-14)
    assert torch.allclose(tiled[1], lse, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("store", ["fp8", "bf16", "fp32", "fp64"])
def test_temporaries_stay_within_the_workspace(store: str) -> None:
    dtype = torch.float64 if store == "fp64" else torch.float32
    q, latent, rope, slots = case(dtype, tokens=40, topk=30)
    records = pack.latent_pack(latent, rope, store=store)
    sizes = {"latent_dim": LATENT, "rope_dim": ROPE}
    whole, _ = mla.sparse_mla_records(q, records, slots, SCALE, **sizes)
    for room in (40_000, 120_000):
        with LiveBytes() as counted:
            out, lse = mla.sparse_mla_records(q, records, slots, SCALE, workspace_bytes=room, **sizes)
        assert torch.allclose(out, whole, rtol=1e-5, atol=1e-6)
        assert room // 10 < counted.peak - out.nbytes - lse.nbytes <= room


@pytest.mark.parametrize("slots", [torch.full((9, 4), -1, dtype=torch.int32), torch.zeros(9, 0, dtype=torch.int32)])
def test_no_slots_at_all(slots: torch.Tensor) -> None:
    q, latent, rope, _ = case(torch.float32)
    out, lse = mla.sparse_mla(q, latent, rope, slots, SCALE)
    assert not out.any()
    assert bool((lse == -math.inf).all())


def test_no_tokens() -> None:
    q, latent, rope, slots = case(torch.float32)
    assert mla.sparse_mla(q[:0], latent, rope, slots[:0], SCALE)[0].shape == (0, 3, LATENT)


@pytest.mark.parametrize("store", ["fp8", "bf16"])
def test_records_are_attended_as_what_they_unpack_to(store: str) -> None:
    q, latent, rope, slots = case(torch.float32)
    records = pack.latent_pack(latent, rope, store=store)
    out, lse = mla.sparse_mla_records(q, records, slots, SCALE, latent_dim=LATENT, rope_dim=ROPE)
    plain = mla.sparse_mla(q, *pack.latent_unpack(records, LATENT, ROPE), slots, SCALE)
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])
    # Far from the unquantised, so the records were read.
    assert not torch.allclose(out, mla.sparse_mla(q, latent, rope, slots, SCALE)[0], atol=1e-5)


def test_unfit_arguments_are_refused() -> None:
    q, latent, rope, slots = case(torch.float32)
    with pytest.raises(ValueError, match=r"found queries \[9, 3, 24\] .* required \[T, H, L \+ R\]"):
        mla.sparse_mla(q, latent[:, 1:], rope, slots, SCALE)
    with pytest.raises(ValueError, match=r"found latents \[40, 16\] and rope keys \[39, 8\]"):
        mla.sparse_mla(q, latent, rope[1:], slots, SCALE)
    with pytest.raises(ValueError, match=r"required \[S, 36\] for latents of 16 and rope keys of 8"):
        mla.sparse_mla_records(q, torch.zeros(4, 37, dtype=torch.uint8), slots, SCALE, latent_dim=LATENT, rope_dim=ROPE)
