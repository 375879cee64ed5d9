# SPDX-License-Identifier: Apache-2.0
"""Scattering records into paged caches, in the interpreter against the reference; the operator; spoilt kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcp_kernels import ops, store
from pcp_kernels.reference import cache as reference
from pcp_kernels.reference.cache import scale_offset, value_offset
from pcp_kernels.specs import LatentScatterSpec, ScatterSpec
from tests.interpreted import Interpreted
from tests.kernel_calls import call, call_spoilt

pytestmark = pytest.mark.unit


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes; values of a dtype are small whole numbers, which every dtype holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


def slots_of(records: int, capacity: int, seed: int = 2) -> torch.Tensor:
    """Distinct slots in no order, every third one padding."""
    slots = torch.randperm(capacity, generator=torch.Generator().manual_seed(seed))[:records]
    slots[::3] = -1
    return slots


FP8_PAGES = [(128, 64, 3), (128, 16, 4), (64, 32, 3), (32, 128, 2)]
ROWS = [
    ((4, 16, 128), torch.bfloat16), ((2, 64, 64), torch.float16), ((2, 32, 32), torch.float32),
    ((2, 64, 656), torch.uint8), ((3, 16, 52), torch.uint8), ((2, 16, 576), torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("dim, page, pages", FP8_PAGES)
def test_fp8_pages_are_the_reference_to_the_byte(interpreted: Interpreted, dim: int, page: int, pages: int) -> None:
    records, capacity = 37, page * pages
    args = (
        filled((pages, page * (dim + 4)), torch.uint8, 0),
        filled((records, dim + 4), torch.uint8, 1),
        slots_of(records, capacity),
    )
    found = interpreted(call, "index_scatter", args)
    wanted = args[0].clone()
    reference.scatter(wanted, *args[1:])
    assert torch.equal(found, wanted)
    record, slot = args[1][1], int(args[2][1])
    flat = found.flatten()
    assert torch.equal(flat[value_offset(slot, page, dim) :][:dim], record[:dim])
    assert torch.equal(flat[scale_offset(slot, page, dim) :][:4], record[dim:])


@pytest.mark.parametrize("shape, dtype", ROWS, ids=str)
def test_rows_are_the_reference_to_the_byte(
    interpreted: Interpreted, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    args = (filled(shape, dtype, 0), filled((21, shape[2]), dtype, 1), slots_of(21, shape[0] * shape[1]))
    wanted = args[0].clone()
    reference.scatter(wanted, *args[1:])
    assert torch.equal(interpreted(call, "index_scatter", args), wanted)


@pytest.mark.parametrize("part", ["latent", "index"])
def test_both_parts_of_a_gathered_record_go_to_their_caches(interpreted: Interpreted, part: str) -> None:
    record = filled((9, 788), torch.uint8, 1)
    piece = record[:, :656] if part == "latent" else record[:, 656:]
    cache = torch.zeros((2, 16, 656) if part == "latent" else (2, 16 * 132), dtype=torch.uint8)
    args = (cache, piece, slots_of(9, 32))
    wanted = cache.clone()
    reference.scatter(wanted, *args[1:])
    assert torch.equal(interpreted(call, "index_scatter", args), wanted)
    ops.index_scatter(*args)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize("slots", [[-1] * 5, []], ids=["padding alone", "no record"])
def test_padding_writes_nothing(interpreted: Interpreted, slots: list[int]) -> None:
    cache = filled((2, 16 * 36), torch.uint8, 0)
    args = (cache, filled((len(slots), 36), torch.uint8, 1), torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(interpreted(call, "index_scatter", args), cache)


def test_a_slot_past_the_cache_is_never_written(interpreted: Interpreted) -> None:
    cache = filled((2, 16 * 36), torch.uint8, 0)
    args = (cache.clone(), filled((2, 36), torch.uint8, 1), torch.tensor([32, 1 << 40]))
    assert torch.equal(interpreted(call, "index_scatter", args), cache)
    with pytest.raises(ValueError, match="slots: found 1099511627776; required below 32"):
        ops.index_scatter(*args)


@pytest.mark.parametrize(
    "edits",
    [
        {"slot = tl.load": "slot = 0 * tl.load"},
        {"other=-1)": "other=-1)\n    slot = tl.maximum(slot, 0)"},
        {"tl.store(cache_ptr + start + 2048 + place, scale, mask=kept)": "pass"},
        {"place * 32": "place * 33", "start + 2048 + place": "start + place * 33 + 32"},
        {"page * 2112": "page * 2048"},
    ],
    ids=["all in slot 0", "padding into slot 0", "no scale", "scale beside its values", "pages without scales"],
)
def test_a_spoilt_kernel_differs(interpreted: Interpreted, edits: dict[str, str]) -> None:
    args = (filled((2, 64 * 132), torch.uint8, 0), filled((9, 132), torch.uint8, 1), slots_of(9, 128))
    wanted = args[0].clone()
    reference.scatter(wanted, *args[1:])
    assert not torch.equal(interpreted(call_spoilt, edits, "index_scatter", args), wanted)


@pytest.mark.parametrize("spec", [ScatterSpec(), ScatterSpec(store="bf16"), LatentScatterSpec()], ids=lambda s: s.name)
def test_offsets_are_64_bits_wide(spec: ScatterSpec) -> None:
    text = store.generate(spec)
    # A page of 8448 bytes passes 2**31 at 16 M tokens; slots come as i64 and everything is computed from them.
    assert '"slot_ptr": "*i64"' in text and "tl.program_id(0).to(tl.int64)" in text and "int32" not in text


CACHE = torch.zeros(2, 64 * 132, dtype=torch.uint8)
RECORD = torch.zeros(3, 132, dtype=torch.uint8)
SLOTS = torch.arange(3)
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.index_scatter(CACHE, RECORD, SLOTS.int()), "slots: found torch.int32"),
    (lambda: ops.index_scatter(CACHE, RECORD, SLOTS[:2]), r"slots: found torch.int64 \[2\].*\[3\]"),
    (lambda: ops.index_scatter(CACHE, RECORD[:, :131], SLOTS), "cache: found pages of 8448 bytes .*131"),
    (lambda: ops.index_scatter(CACHE, RECORD.float(), SLOTS), "required u8 records and pages of a whole number"),
    (lambda: ops.index_scatter(torch.zeros(2, 4, 32), torch.zeros(3, 64), SLOTS), r"cache: .*\[pages, page, 64\]"),
    (lambda: ops.index_scatter(torch.zeros(2, 4, 32), torch.zeros(3, 32).half(), SLOTS), "cache: found torch.float32"),
    (
        lambda: ops.index_scatter(torch.zeros(4, 2, 32).transpose(0, 1), torch.zeros(3, 32), SLOTS),
        "cache: .*, contiguous",
    ),
]


@pytest.mark.parametrize("make, message", REFUSALS)
def test_arguments_that_do_not_fit_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_no_kernel_copies_is_refused_where_kernels_run(interpreted: Interpreted) -> None:
    args = (torch.zeros(2, 16, 48), torch.zeros(3, 48), SLOTS)
    interpreted(call, "index_scatter", args)  # a latent of 32 and a rope part of 16
    with pytest.raises(AssertionError, match=r"found torch.float32 of width 50; required keys of 32, 64, 128"):
        interpreted(call, "index_scatter", (torch.zeros(2, 16, 50), torch.zeros(3, 50), SLOTS))
    odd = torch.zeros(3, 134, dtype=torch.uint8)[:, 2:]
    with pytest.raises(AssertionError, match="record: found rows of 134 bytes from byte 2; required whole words of 4"):
        interpreted(call, "index_scatter", (CACHE, odd, SLOTS))


def checked(args: tuple[Any, ...]) -> None:
    torch.library.opcheck(torch.ops.pcp_kernels.index_scatter.default, args)


def test_schema_and_mutation(interpreted: Interpreted) -> None:
    args = (CACHE, RECORD, SLOTS)
    checked(args)
    interpreted(checked, args)
