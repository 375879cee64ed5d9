# SPDX-License-Identifier: Apache-2.0
"""Records in the caches: what is read back, what rows see, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pcp_kernels.reference import cache as pages
from pcp_kernels.reference import pack
from pcp_passes.errors import ConfigError
from pcp_passes.paged import (
    AttentionInputs,
    PagedCaches,
    SparseOptions,
    index_topk,
    index_write,
    mla_attend,
    record_write,
    running,
)
from pcp_passes.paged import pack_record as make_record
from tests.unit.paged.test_ops import LENGTHS, NEW, SIZE, World

LATENT, ROPE, KEY, HEADS, TOPK = 160, 16, 32, 2, 5


def world(dtype: torch.dtype) -> World:
    made = World()
    made.caches = PagedCaches(made.caches.num_blocks, SIZE, dtype)
    return made


def parts(made: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = sum(LENGTHS)
    return made.random(rows, 1, LATENT), made.random(rows, 1, ROPE), made.random(rows, KEY)


def test_fp8_caches_hold_the_records_of_the_kernels() -> None:
    """Two scales for 160 values; a page of index values before its scales."""
    made = world(torch.float8_e4m3fn)
    latent, rope, key = parts(made)
    with running(made.caches, made.write):
        record_write(make_record(latent, rope, key, "fp8"), "l", latent=LATENT, rope=ROPE, index=KEY)
    assert made.caches.tensors["l.latent"].shape == (made.caches.num_blocks, SIZE, 1, LATENT + 8 + 2 * ROPE)
    assert made.caches.tensors["l.index"].shape == (made.caches.num_blocks, SIZE * (KEY + 4))
    held = made.caches.by_slot("l.latent")[made.write.slots].flatten(1)
    assert torch.equal(held, pack.latent_pack(latent[:, 0], rope[:, 0]))
    wanted = pack.index_pack(key, rounding="fp32", store="fp8")
    assert torch.equal(made.caches.by_slot("l.index")[made.write.slots], wanted)
    values, scale = pages.gather(made.caches.tensors["l.index"], made.write.slots, KEY)
    assert scale is not None and torch.equal(values.view(torch.uint8), wanted[:, :KEY])
    assert (values.float() * scale[:, None] - key).abs().max() < 0.2 and made.caches.bytes_per_block == SIZE * (
        200 + 36
    )


def test_reading_records_is_reading_what_they_hold() -> None:
    """Selection and attention over FP8 caches, against the same over float64 caches of the unpacked records."""
    made, plain = world(torch.float8_e4m3fn), world(torch.float64)
    latent, rope, key = parts(made)
    record = pack.latent_pack(latent[:, 0], rope[:, 0])
    unpacked = pack.latent_unpack(record, LATENT, ROPE, dtype=torch.float64)
    rows = len(made.read.positions)
    q, index_q, weights = (
        made.random(rows, HEADS, LATENT + ROPE),
        made.random(rows, HEADS, KEY),
        made.random(rows, HEADS),
    )
    chosen = torch.arange(TOPK, dtype=torch.int32).expand(rows, -1).clone()
    chosen[made.read.positions < TOPK] = -1
    found = []
    for one, stored in ((made, make_record(latent, rope, key, "fp8")), (plain, torch.cat([*unpacked, key], dim=1))):
        with running(one.caches, one.write):
            dep = record_write(stored, "l", latent=LATENT, rope=ROPE, index=KEY)
        with running(one.caches, one.read):
            dense, sparse = (mla_attend(q, dep, "l", scale=0.1, latent=LATENT, indices=i) for i in (None, chosen))
            found.append((dense, sparse, index_topk(index_q, weights, dep, "l", TOPK)))
    for mine, other in zip(found[0][:2], found[1][:2], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    same = (found[0][2] == found[1][2]).float().mean()
    assert 0.7 < same < 1, "the indexer's keys and queries are rounded, and little else"
    assert (found[0][2][sum(NEW) :] == -1).all() and not found[0][1][sum(NEW) :].any()


def test_what_rows_see_is_made_on_the_device() -> None:
    made = World(padding=3)
    rows = torch.repeat_interleave(torch.arange(len(NEW)), torch.tensor(NEW))
    assert made.read.row_request[: sum(NEW)].tolist() == rows.tolist() and made.read.row_request.dtype == torch.int32
    seen = made.read.visible
    assert (
        seen.dtype == torch.int32
        and seen.tolist() == [p + 1 for p in made.read.positions[: sum(NEW)].tolist()] + [0] * 3
    )
    assert made.read.visible is seen, "once per call"


@pytest.mark.parametrize(
    "starts, lengths, positions, requests, visible",
    [
        ([0, 0, 3, 3], [5, 9, 0], [6, 7, 8, 0], [1, 1, 1, 2], [7, 8, 9, 0]),  # requests without rows, padding
        ([0, 2], [0], [0, 1], [0, 0], [0, 0]),  # a dummy call: rows, but no keys
        ([0], [], [0, 0], [0, 0], [0, 0]),  # padding alone
    ],
)
def test_edges_of_what_rows_see(starts: Any, lengths: Any, positions: Any, requests: Any, visible: Any) -> None:
    count = len(lengths)
    inputs = AttentionInputs(
        torch.full((len(positions),), -1), "replicated", torch.zeros(count, 3, dtype=torch.int64),
        torch.tensor(starts), torch.tensor(lengths, dtype=torch.int64), torch.tensor(positions),
    )  # fmt: skip
    assert inputs.row_request.tolist() == requests and inputs.visible.tolist() == visible
    caches = PagedCaches(3, 4, torch.float64)
    caches.tensors["l.index"], caches.tensors["l.latent"] = torch.ones(3, 4, 1, 8), torch.ones(3, 4, 1, 6)
    dep, q = torch.zeros(0), torch.ones(len(positions), 2, 8)
    with running(caches, inputs):
        chosen = index_topk(q, q[..., 0], dep, "l", 16)
        out = mla_attend(q[..., :6], dep, "l", scale=1.0, latent=4, indices=chosen * 0)
    assert chosen.shape == (len(positions), 16) and out.shape == (len(positions), 2, 4)
    unseen = torch.tensor(visible) == 0
    assert (chosen[unseen] == -1).all() and not out[unseen].any()
    assert out[~unseen].all()


def test_what_does_not_fit() -> None:
    made = world(torch.float64)
    latent, rope, key = parts(made)
    with pytest.raises(ConfigError, match=r"found store 'int8' .* required one of native, bf16, fp8"):
        make_record(latent, rope, key, "int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"parts of \[56, 55, 56\] rows"):
        make_record(latent, rope[1:], key, "native")
    record = make_record(latent, rope, key, "fp8")
    with running(made.caches, made.write):
        with pytest.raises(ConfigError, match=r"uint8 records .* caches of torch.float64; .* FP8 caches only"):
            record_write(record, "l", latent=LATENT, rope=ROPE, index=KEY)
        with pytest.raises(ConfigError, match="required width 176 at L=160, R=16, D=0"):
            record_write(make_record(latent, rope, key, "native"), "l", latent=LATENT, rope=ROPE)
        with pytest.raises(ConfigError, match="rank_major rows and 56 replicated slots"):
            record_write(record, "l", latent=LATENT, rope=ROPE, index=KEY, layout="rank_major")
        dep = record_write(make_record(latent, rope, None, "native"), "l", latent=LATENT, rope=ROPE)
    q = made.random(len(made.read.positions), HEADS, LATENT + ROPE)
    with running(made.caches, made.read):
        with pytest.raises(ConfigError, match=r"queries are 160 \+ 15 wide"):
            mla_attend(q[..., :-1], dep, "l", scale=1.0, latent=LATENT)
        with pytest.raises(ConfigError, match="required a row each"):
            mla_attend(q, dep, "l", scale=1.0, latent=LATENT, indices=torch.zeros(3, 4, dtype=torch.int32))
    with pytest.raises(ConfigError, match="at least 64 MiB"):
        SparseOptions(workspace_bytes=1 << 20)


def test_index_keys_alone_are_records_too() -> None:
    """A layer whose two writes stay apart."""
    made = world(torch.float8_e4m3fn)
    key = made.random(sum(LENGTHS), KEY)
    with running(made.caches, made.write):
        index_write(key, "l")
    held = made.caches.by_slot("l.index")[made.write.slots]
    assert torch.equal(held, pack.index_pack(key, rounding="fp32", store="fp8"))


@pytest.mark.parametrize("store", ["native", "bf16", "fp8"])
@pytest.mark.parametrize("shared", [False, True])
def test_packing_is_an_op_that_compilers_can_trust(store: str, shared: bool) -> None:
    latent, rope, key = torch.randn(3, 1, LATENT), torch.randn(3, 1, ROPE), torch.randn(3, KEY)
    torch.library.opcheck(torch.ops.pcp.pack_record.default, (latent, rope, None if shared else key, store))
