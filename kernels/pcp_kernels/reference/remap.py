# SPDX-License-Identifier: Apache-2.0
"""From a request's key index to the physical slot of that key."""

from __future__ import annotations

import torch


def index_remap(
    indices: torch.Tensor, block_table: torch.Tensor, row_request: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots i32 ``[T, k]``, count i32 ``[T]``): ``slot = block_table[request, i // page] * page + i % page``.

    -1 stays -1; an index past the table, or of a page that the table does not have (negative), becomes -1, and so does
    every index of a row of no request (negative). ``count`` is the number of slots that are not -1; they come first
    when the indices are a selection, whose tail is -1.

    Args:
        indices: i32 ``[T, k]``.
        block_table: i32 ``[R, nb]``.
        row_request: i32 ``[T]``.

    Raises:
        ValueError: shapes that do not fit together, no keys to a page, or an index of a request past the table.
    """
    if indices.ndim != 2 or block_table.ndim != 2 or row_request.shape != indices.shape[:1] or page < 1:
        raise ValueError(
            f"index_remap: found indices {list(indices.shape)}, a block table {list(block_table.shape)}, requests "
            f"{list(row_request.shape)} and pages of {page}; required [T, k], [R, nb], [T] and at least 1."
        )
    require_requests(indices, row_request, block_table.shape[0])
    index = indices.to(torch.int64)
    column = index.div(page, rounding_mode="floor")
    known = (
        (index >= 0)
        & (column < block_table.shape[1])
        & (row_request >= 0)[:, None]
        & (row_request < block_table.shape[0])[:, None]
    )
    if not block_table.numel():
        return indices.new_full(indices.shape, -1), indices.new_zeros(indices.shape[:1])
    pages = block_table[
        row_request.to(torch.int64).clamp(0, block_table.shape[0] - 1)[:, None], column.masked_fill(~known, 0)
    ].to(torch.int64)
    known &= pages >= 0
    slots = (pages * page + index % page).masked_fill(~known, -1).to(torch.int32)
    return slots, known.sum(dim=1, dtype=torch.int32)


def require_requests(indices: torch.Tensor, row_request: torch.Tensor, requests: int) -> None:
    """Refuse indices of a request that the block table does not have; a row without an index may name any.

    Raises:
        ValueError: names the first such request.
    """
    if not row_request.numel() or int(row_request.max()) < requests:
        return
    wrong = (row_request >= requests) & (indices >= 0).any(dim=1)
    if bool(wrong.any()):
        found = int(row_request[wrong][0])
        raise ValueError(
            f"index_remap: row_request: found {found} in row {int(wrong.nonzero()[0])}; required below {requests}, the "
            "requests of the block table, or negative for a row without keys."
        )
