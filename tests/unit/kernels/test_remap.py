# SPDX-License-Identifier: Apache-2.0
"""Indices to slots and owners' rows, in the interpreter against the reference; the operators; spoilt kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcp_kernels import ops
from pcp_kernels.reference import owner as owner_reference
from pcp_kernels.reference import remap as reference
from tests.interpreted import Interpreted
from tests.kernel_calls import call, call_spoilt

pytestmark = pytest.mark.unit


def selection(rows: int, topk: int, keys: int, seed: int = 0) -> torch.Tensor:
    """i32 ``[rows, topk]`` of ascending indices below ``keys``, -1 tails of every length; part of a wider buffer."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.full((rows, topk + 16), -1, dtype=torch.int32)
    for row in range(rows):
        count = row * topk // max(rows - 1, 1)
        out[row, :count] = torch.randperm(keys, generator=generator)[:count].sort().values.int()
    return out[:, :topk]


def paged(rows: int, topk: int, page: int, requests: int = 3, seed: int = 1) -> tuple[Any, ...]:
    """Selections, a block table whose unused entries are -1, and the request of each row."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(500, generator=generator)[: requests * 9].view(requests, 9).int()
    table[:, 7:] = -1
    request = torch.randint(0, requests, (rows,), generator=generator).sort().values.int()
    indices = selection(rows, topk, max(7 * page, topk))
    return indices, table, request, page


@pytest.mark.parametrize("rows, topk, page", [(5, 16, 64), (4, 48, 16), (3, 2048, 128), (2, 112, 32), (0, 16, 64)])
def test_slots_and_counts_are_the_reference(interpreted: Interpreted, rows: int, topk: int, page: int) -> None:
    args = paged(rows, topk, page)
    found = interpreted(call, "index_remap", args)
    wanted = reference.index_remap(*args)
    assert [part.dtype for part in found] == [torch.int32, torch.int32]
    assert all(map(torch.equal, found, wanted))
    slots, count = ops.index_remap(*args)
    assert torch.equal(slots, found[0]) and torch.equal(count, (slots >= 0).sum(1).int())


def test_worked_example() -> None:
    table = torch.tensor([[7, 2], [4, 9]], dtype=torch.int32)
    indices = torch.tensor([[0, 17, 31] + [-1] * 13, [5, 16, 40] + [-1] * 13], dtype=torch.int32)
    slots, count = ops.index_remap(indices, table, torch.tensor([0, 1], dtype=torch.int32), 16)
    assert slots[:, :3].tolist() == [[112, 33, 47], [69, 144, -1]]
    assert count.tolist() == [3, 2]


def test_an_index_without_a_page_is_no_slot(interpreted: Interpreted) -> None:
    indices, table, request, page = paged(4, 48, 16)
    indices = indices.clone()
    indices[2, :3] = torch.tensor([7 * 16, 9 * 16, 1 << 30])  # an unused entry, past the table, far past it
    args = (indices, table, request, page)
    found = interpreted(call, "index_remap", args)
    assert found[0][2, :3].tolist() == [-1, -1, -1]
    assert all(map(torch.equal, found, reference.index_remap(*args)))


def test_a_row_of_no_request_has_no_slots(interpreted: Interpreted) -> None:
    indices, table, request, page = paged(4, 48, 16)
    request = torch.tensor([-1, 2, -1, -(2**31)], dtype=torch.int32)
    found = interpreted(call, "index_remap", (indices, table, request, page))
    assert all(map(torch.equal, found, reference.index_remap(indices, table, request, page)))
    assert found[1].tolist() == [0, int((indices[1] >= 0).sum()), 0, 0]


def unchecked(name: str, args: tuple[Any, ...]) -> Any:
    """As on a GPU, where nobody looks at the values before the kernel runs."""
    from pcp_kernels.ops import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Faults, "below", lambda *_: None)
        patch.setattr(reference, "require_requests", lambda *_: None)
        return call(name, args)


def test_kernels_do_not_follow_a_request_or_row_past_the_last(interpreted: Interpreted) -> None:
    indices, table, _, page = paged(3, 48, 16)
    far = torch.tensor([0, 3, 2**31 - 1], dtype=torch.int32)
    indices = indices[:1].clone().fill_(5).expand(3, 48).contiguous()
    slots, count = interpreted(unchecked, "index_remap", (indices, table, far, page))
    assert count.tolist() == [48, 0, 0]
    assert (slots[1:] == -1).all() and (slots[0] == int(table[0, 0]) * page + 5).all()
    owned = interpreted(unchecked, "select_owner_rows", (indices, torch.tensor([2, 3, 2**40]), 7))
    assert owned[:, 0].tolist() == [5, 7, 7]


@pytest.mark.parametrize("kept", ["reference", "interpreter"])
def test_a_request_or_row_past_the_last_is_refused_on_a_cpu(interpreted: Interpreted, kept: str) -> None:
    run = call if kept == "reference" else (lambda *args: interpreted(call, *args))
    request = torch.tensor([0, 0, 1, 9, 2], dtype=torch.int32)
    with pytest.raises((ValueError, AssertionError), match="row_request: found 9 in row 3; required below 3, the requ"):
        run("index_remap", (INDICES, TABLE, request, PAGE))
    empty = torch.full_like(INDICES, -1)
    assert run("index_remap", (empty, TABLE, request, PAGE))[1].tolist() == [0] * 5, "padding may name any"
    with pytest.raises((ValueError, AssertionError), match="rows: found 99; required below 5"):
        run("select_owner_rows", (INDICES, torch.tensor([0, -1, 99])))


def test_references_refuse_by_themselves() -> None:
    with pytest.raises(ValueError, match="row_request: found 9 in row 1"):
        reference.index_remap(INDICES[3:], TABLE, torch.tensor([0, 9]), PAGE)
    with pytest.raises(ValueError, match="found row 5; required below 5"):
        owner_reference.select_owner_rows(INDICES, torch.tensor([0, 5]))


@pytest.mark.parametrize(
    "edits",
    [
        {"index % 16, -1)": "index % 16, 0)"},
        {"block * 16": "block * 32"},
        {"index % 16, -1)": "index, -1)"},
        {"request * table_step": "0 * table_step"},
        {"tl.sum(found": "1 + tl.sum(found"},
        {" & (page < reach)": "", "found = found & (block >= 0)": "found = index >= 0"},
    ],
    ids=["0 for no slot", "page size", "no offset in the page", "request 0", "count", "unused page"],
)
def test_a_spoilt_remap_differs(interpreted: Interpreted, edits: dict[str, str]) -> None:
    indices, table, request, page = paged(5, 32, 16)
    indices = indices.clone()
    indices[4, 31] = 7 * 16
    args = (indices, table, request, page)
    found = interpreted(call_spoilt, edits, "index_remap", args)
    assert not all(map(torch.equal, found, reference.index_remap(*args)))


@pytest.mark.parametrize("fill", [0, -1])
def test_owner_rows_are_the_reference(interpreted: Interpreted, fill: int) -> None:
    args = (selection(6, 48, 300), torch.tensor([5, -1, 0, 3, -1]), fill)
    found = interpreted(call, "select_owner_rows", args)
    assert torch.equal(found, owner_reference.select_owner_rows(*args))
    assert torch.equal(found, ops.select_owner_rows(*args))


def test_a_sum_over_ranks_delivers_every_owner_s_row(interpreted: Interpreted) -> None:
    ranks = [selection(4, 32, 300, seed) for seed in range(3)]
    owners = [(0, 3), (2, 1), (2, 0), (1, 2)]  # rank and local row of each request's last token
    total = torch.zeros(4, 32, dtype=torch.int32)
    for rank, indices in enumerate(ranks):
        rows = torch.tensor([row if owner == rank else -1 for owner, row in owners])
        total += interpreted(call, "select_owner_rows", (indices, rows))
    assert torch.equal(total, torch.stack([ranks[owner][row] for owner, row in owners]))


@pytest.mark.parametrize(
    "edits",
    [{"tl.where(kept, index, fill)": "index"}, {"row * index_stride": "request * index_stride"}],
    ids=["no fill", "row of the request"],
)
def test_a_spoilt_owner_kernel_differs(interpreted: Interpreted, edits: dict[str, str]) -> None:
    args = (selection(6, 48, 300), torch.tensor([5, -1, 0, 3, -1]), -1)
    found = interpreted(call_spoilt, edits, "select_owner_rows", args)
    assert not torch.equal(found, owner_reference.select_owner_rows(*args))


INDICES, TABLE, REQUEST, PAGE = paged(5, 16, 16)
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.index_remap(INDICES.long(), TABLE, REQUEST, PAGE), "indices: found torch.int64"),
    (lambda: ops.index_remap(INDICES, TABLE[0], REQUEST, PAGE), r"block_table: found torch.int32 \[9\].*\[R, nb\]"),
    (lambda: ops.index_remap(INDICES, TABLE, REQUEST[:4], PAGE), r"row_request: found torch.int32 \[4\].*\[5\]"),
    (lambda: ops.index_remap(INDICES, TABLE, REQUEST, 0), "page: found 0; required at least 1"),
    (lambda: ops.index_remap(INDICES[0], TABLE.float(), REQUEST, PAGE), r"(?s)indices: .*block_table: "),
    (lambda: ops.select_owner_rows(INDICES, REQUEST), "rows: found torch.int32"),
    (lambda: ops.select_owner_rows(INDICES[0], REQUEST.long()), r"indices: found torch.int32 \[16\]"),
]


@pytest.mark.parametrize("make, message", REFUSALS)
def test_arguments_that_do_not_fit_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "args, message",
    [
        ((INDICES[:, :15], TABLE, REQUEST, 16), "topk: found 15; supported: multiples of 16"),
        ((INDICES, TABLE, REQUEST, 48), "page: found 48"),
    ],
)
def test_a_spec_without_a_kernel_is_refused_where_kernels_run(
    interpreted: Interpreted, args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        interpreted(call, "index_remap", args)


def checked() -> None:
    torch.library.opcheck(torch.ops.pcp_kernels.index_remap.default, (INDICES, TABLE, REQUEST, PAGE))
    torch.library.opcheck(torch.ops.pcp_kernels.select_owner_rows.default, (INDICES, REQUEST.long(), 0))


def test_schemas_and_shapes(interpreted: Interpreted) -> None:
    checked()
    interpreted(checked)
