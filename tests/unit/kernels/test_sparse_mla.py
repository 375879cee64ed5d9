# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention in the interpreter against the reference and against dense attention; spoilt kernels.

The kernel and the reference sum in different orders, so outputs agree within a few units of fp32, or within one of the
dtype that they are stored in. Measured on outputs up to 3.6: off by 1.2e-6 in fp32, 6e-5 in fp16, 4e-3 in bf16, the
log-sum-exp by 2e-6; every spoilt kernel is off by more than 1 in one of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcp_kernels import ops
from pcp_kernels.reference import mla as reference
from pcp_kernels.reference.pack import latent_pack
from tests.interpreted import Interpreted
from tests.kernel_calls import call, call_spoilt

pytestmark = pytest.mark.unit

ATOL = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
RTOL = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SCALE = 0.2


def case(
    dtype: torch.dtype,
    tokens: int = 4,
    heads: int = 20,
    latent: int = 64,
    rope: int = 16,
    topk: int = 48,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Queries, latents and rope keys as columns of one cache, and slots: full, with a tail, all -1, -1 anywhere."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, latent + rope, generator=generator).to(dtype)
    rows = torch.randn(90, latent + rope, generator=generator).to(dtype)
    slots = torch.stack([torch.randperm(90, generator=generator)[:topk] for _ in range(tokens)]).int()
    slots[1:2, 5:] = -1
    slots[2:3] = -1
    slots[3:4, ::3] = -1
    return q, rows[:, :latent], rows[:, latent:], slots, SCALE


def close(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether outputs and log-sum-exps agree within the tolerances of this module."""
    dtype = wanted[0].dtype
    outputs = torch.allclose(found[0].float(), wanted[0].float(), rtol=RTOL[dtype], atol=ATOL[dtype])
    return found[0].dtype == dtype and outputs and torch.allclose(found[1], wanted[1], rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize(
    "args",
    [
        case(torch.float32),
        case(torch.bfloat16, heads=16, topk=32),
        case(torch.float16, heads=5),
        case(torch.float32, heads=2, latent=32, rope=8, topk=16),
        case(torch.float32, tokens=1, heads=1, latent=128, rope=0, topk=80),
        case(torch.bfloat16, tokens=2, heads=17, latent=512, rope=64, topk=32),
        tuple(x[:0] if n in (0, 3) else x for n, x in enumerate(case(torch.float32))),
    ],
    ids=["fp32", "bf16", "fp16", "small", "one head without rope", "full size", "no rows"],
)
def test_the_kernel_is_the_reference(interpreted: Interpreted, args: tuple[Any, ...]) -> None:
    found = interpreted(call, "sparse_mla", args)
    assert close(found, reference.sparse_mla(*args))


@pytest.mark.parametrize("latent, rope", [(64, 16), (256, 8), (32, 0)])
def test_fp8_records_are_read_as_they_were_packed(interpreted: Interpreted, latent: int, rope: int) -> None:
    q, values, keys, slots, scale = case(torch.bfloat16, latent=latent, rope=rope)
    size = torch.exp2(torch.randint(-6, 6, (90, 1), generator=torch.Generator().manual_seed(4)).float())
    records = latent_pack((values.float() * size).bfloat16(), keys)
    options = {"latent_dim": latent, "rope_dim": rope}
    found = interpreted(call, "sparse_mla_records", (q, records, slots, scale), options)
    wanted = reference.sparse_mla_records(q, records, slots, scale, **options)
    # Values up to 2^6 times those of the other tests.
    torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=1.6e-2, atol=1e-2)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)


def test_a_row_without_slots_is_zero_and_minus_infinity(interpreted: Interpreted) -> None:
    for compute in (lambda args: interpreted(call, "sparse_mla", args), lambda args: ops.sparse_mla(*args)):
        out, lse = compute(case(torch.float32))
        assert (out[2] == 0).all() and (lse[2] == float("-inf")).all()
        assert torch.isfinite(lse[[0, 1, 3]]).all()


def test_rows_that_no_slot_names_are_never_read(interpreted: Interpreted) -> None:
    q, latent, rope_key, slots, scale = case(torch.float32)
    slots = torch.where(slots == 0, 1, slots)
    clean = interpreted(call, "sparse_mla", (q, latent, rope_key, slots, scale))
    latent, rope_key = latent.clone(), rope_key.clone()
    latent[0], rope_key[0] = float("nan"), float("inf")
    spoilt = interpreted(call, "sparse_mla", (q, latent, rope_key, slots, scale))
    assert torch.equal(clean[0], spoilt[0]) and torch.equal(clean[1], spoilt[1])


def test_indices_through_a_block_table_are_dense_attention(interpreted: Interpreted) -> None:
    generator = torch.Generator().manual_seed(7)
    q, keys = torch.randn(3, 4, 48, generator=generator), torch.randn(40, 48, generator=generator)
    table = torch.tensor([[5, 0, 3]], dtype=torch.int32)
    cache = torch.zeros(6 * 16, 48)
    for key in range(40):
        cache[int(table[0, key // 16]) * 16 + key % 16] = keys[key]
    indices = torch.full((3, 48), -1, dtype=torch.int32)
    indices[:, :40] = torch.arange(40)
    slots, _ = ops.index_remap(indices, table, torch.zeros(3, dtype=torch.int32), 16)
    out, lse = interpreted(call, "sparse_mla", (q, cache[:, :32], cache[:, 32:], slots, SCALE))
    scores = (q.double() @ keys.double().T) * SCALE
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ keys[:, :32].double(), rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=4e-6)


SPOILT: dict[str, dict[str, str]] = {
    "-1 reads slot 0": {"seen = slot >= 0": "slot = tl.maximum(slot, 0)\n        seen = slot >= 0"},
    "no softmax scale": {"scores * softmax_scale": "scores"},
    "no rope part": {"scores += ": "turn + 0.0 * "},
    "sums are not rescaled": {"sums * fade[:, None]": "sums"},
    "total is not rescaled": {"total * fade": "total"},
    "rows without slots": {"tl.where(some, total, 1.0)": "total"},
    "heads of the first program": {"tl.program_id(1).to(tl.int64) * HEADS": "0"},
    "log of base 2": {"tl.log(whole)": "tl.log2(whole)"},
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_kernel_differs(interpreted: Interpreted, name: str) -> None:
    args = case(torch.float32)
    edits = dict(SPOILT[name])
    if name == "no rope part":
        edits = {"scores += tl.dot(q_rope": "scores += 0.0 * tl.dot(q_rope"}
    found = interpreted(call_spoilt, edits, "sparse_mla", args)
    wanted = reference.sparse_mla(*args)
    assert not close(found, wanted)


@pytest.mark.parametrize("edit", ["(KEYS, 2, 128)) * scale[:, :, None]", "+ group[None, :]"])
def test_spoilt_scales_of_records_differ(interpreted: Interpreted, edit: str) -> None:
    q, values, keys, slots, scale = case(torch.bfloat16, latent=256)
    values = values * torch.tensor([1.0, 8.0]).repeat_interleave(128).bfloat16()
    options = {"latent_dim": 256, "rope_dim": 16}
    args = (q, latent_pack(values, keys), slots, scale)
    new = edit.split(" * scale")[0] if "scale" in edit else "+ 0 * group[None, :]"
    found = interpreted(call_spoilt, {edit: new}, "sparse_mla_records", args, options)
    wanted = reference.sparse_mla_records(*args, **options)
    assert not torch.allclose(found[0].float(), wanted[0].float(), rtol=0.1, atol=0.1)


Q, LATENT, ROPE, SLOTS, _ = case(torch.float32)
RECORDS = torch.zeros(90, 64 + 4 + 32, dtype=torch.uint8)
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: ops.sparse_mla(Q[..., 1:], LATENT, ROPE, SLOTS, 1.0),
        r"q: found torch.float32 \[4, 20, 79\].*\[T, H, 80\]",
    ),
    (lambda: ops.sparse_mla(Q, LATENT.int(), ROPE, SLOTS, 1.0), "latent: found torch.int32.*required bfloat16 or"),
    (lambda: ops.sparse_mla(Q, LATENT, ROPE[1:], SLOTS, 1.0), r"rope_key: found .*\[89, 16\].*\[90, R\]"),
    (lambda: ops.sparse_mla(Q, LATENT, ROPE, SLOTS.long(), 1.0), "slots: found torch.int64"),
    (lambda: ops.sparse_mla(Q, LATENT, ROPE, SLOTS + 1000, 1.0), r"slots: found \d+; required below \d+, the rows of"),
    (lambda: ops.sparse_mla(Q, LATENT, ROPE, SLOTS, 1.0, workspace_bytes=-1), "workspace_bytes: found -1; required at"),
    (lambda: ops.sparse_mla(Q, LATENT, ROPE, SLOTS[:3], 1.0), r"slots: found .*\[3, 48\].*\[4, k\]"),
    (
        lambda: ops.sparse_mla_records(Q, RECORDS[:, 1:], SLOTS, 1.0, latent_dim=64, rope_dim=16),
        r"records: found torch.uint8 \[90, 99\].*required uint8 \[S, 100\], contiguous",
    ),
]


@pytest.mark.parametrize("make, message", REFUSALS)
def test_arguments_that_do_not_fit_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_has_no_kernel_is_refused_where_kernels_run(interpreted: Interpreted) -> None:
    args = (Q, RECORDS, SLOTS, 1.0)
    with pytest.raises(AssertionError, match=r"q: found torch\.float32; required bfloat16 over fp8 records"):
        interpreted(call, "sparse_mla_records", args, {"latent_dim": 64, "rope_dim": 16})
    with pytest.raises(AssertionError, match=r"latent: found torch\.float16 .*; required float32 \[S, L\]"):
        interpreted(call, "sparse_mla", (Q, LATENT.half(), ROPE, SLOTS, 1.0))
    with pytest.raises(AssertionError, match="latent: found 48; supported: 16, 32, 64"):
        interpreted(call, "sparse_mla", (Q[..., :64], LATENT[:, :48], ROPE, SLOTS, 1.0))


def checked() -> None:
    q, latent, rope_key, slots, scale = case(torch.bfloat16, heads=2, topk=16)
    torch.library.opcheck(torch.ops.pcp_kernels.sparse_mla.default, (q, latent, rope_key, slots, scale, 1 << 24))
    records = latent_pack(latent, rope_key)
    torch.library.opcheck(torch.ops.pcp_kernels.sparse_mla_records.default, (q, records, slots, scale, 64, 16, 1 << 24))


def test_schemas_and_shapes(interpreted: Interpreted) -> None:
    checked()
    interpreted(checked)
