# SPDX-License-Identifier: Apache-2.0
"""Which rank holds the selection of a request's last token, and taking such rows.

Draft steps that share the first step's selection need one row per request. Under context parallelism it is on the rank
that owns the last token: that rank contributes its row and the others zeros, and a sum over the ranks delivers it. The
-1 tail survives the sum, since the others add nothing to it.
"""

from __future__ import annotations

import torch


def owner_rank(query_len: int, pcp: int) -> int:
    """The rank that holds the last of ``query_len`` tokens cut in ``2 * pcp`` chunks of ``ceil(query_len / 2 / pcp)``.

    With 7 tokens on 2 ranks, chunks AB CD EF G: the last is chunk 3, which rank 0 holds. Layouts that cut otherwise
    know their own owner.

    Raises:
        ValueError: no tokens or no ranks.
    """
    if query_len < 1 or pcp < 1:
        raise ValueError(f"owner_rank: found {query_len} tokens on {pcp} ranks; required at least one of each.")
    chunk = -(-query_len // (2 * pcp))
    last = -(-query_len // chunk) - 1
    return last if last < pcp else 2 * pcp - 1 - last


def select_owner_rows(indices: torch.Tensor, rows: torch.Tensor, fill: int = 0) -> torch.Tensor:
    """i32 ``[R, k]``: row ``rows[r]`` of ``indices`` i32 ``[M, k]``, or ``fill`` where ``rows[r]`` is negative.

    With this rank's selections, its rows of the last tokens it owns (-1 for the others) and 0, the sum over the ranks
    is every request's row. With gathered selections, rank-major rows and -1, no sum is needed.

    Raises:
        ValueError: shapes that do not fit together, or a row past the last.
    """
    if indices.ndim != 2 or rows.ndim != 1:
        raise ValueError(
            f"select_owner_rows: found selections {list(indices.shape)} and rows {list(rows.shape)}; required [M, k] "
            "and [R]."
        )
    if rows.numel() and int(rows.max()) >= indices.shape[0]:
        raise ValueError(f"select_owner_rows: found row {int(rows.max())}; required below {indices.shape[0]}.")
    if indices.shape[0] == 0:
        return indices.new_full((rows.shape[0], indices.shape[1]), fill)
    taken = indices.index_select(0, rows.clamp(min=0).to(torch.int64))
    return taken.masked_fill(rows[:, None] < 0, fill)
