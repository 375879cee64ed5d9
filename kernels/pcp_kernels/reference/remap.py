# SPDX-License-Identifier: Apache-2.0
"""From a request's key index to the physical slot of that key."""

from __future__ import annotations

import torch


def index_remap(
    indices: torch.Tensor, block_table: torch.Tensor, row_request: torch.Tensor, page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots i32 ``[T, k]``, count i32 ``[T]``): ``slot = block_table[request, i // page] * page + i % page``.

    -1 stays -1, and so does an index past the table or of a page that the table does not have (negative). ``count`` is
    the number of slots that are not -1; they come first when the indices are a selection, whose tail is -1.

    Args:
        indices: i32 ``[T, k]``.
        block_table: i32 ``[R, nb]``.
        row_request: i32 ``[T]``.

    Raises:
        ValueError: shapes that do not fit together, or no keys to a page.
    """
    if indices.ndim != 2 or block_table.ndim != 2 or row_request.shape != indices.shape[:1] or page < 1:
        raise ValueError(
            f"index_remap: found indices {list(indices.shape)}, a block table {list(block_table.shape)}, requests "
            f"{list(row_request.shape)} and pages of {page}; required [T, k], [R, nb], [T] and at least 1."
        )
    index = indices.to(torch.int64)
    column = index.div(page, rounding_mode="floor")
    known = (index >= 0) & (column < block_table.shape[1])
    pages = block_table[row_request.to(torch.int64)[:, None], column.masked_fill(~known, 0)].to(torch.int64)
    known &= pages >= 0
    slots = (pages * page + index % page).masked_fill(~known, -1).to(torch.int32)
    return slots, known.sum(dim=1, dtype=torch.int32)
