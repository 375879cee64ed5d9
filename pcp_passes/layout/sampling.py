# SPDX-License-Identifier: Apache-2.0
"""Which rank-local rows hold the tokens that are sampled, so that only those rows are gathered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pcp_passes.errors import LayoutError
from pcp_passes.layout.batch import LongArray
from pcp_passes.layout.result import Layout


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Rows to pick on each rank, padded to the same count ``K`` so that the collective has equal operands.

    ``gathered = all_gather(hidden[rows[rank]])`` has ``P * K`` rows and ``sampled = gathered[restore]``.
    """

    rows: LongArray
    """i64[P, K], rank-local rows; pads hold 0 and are never restored."""
    counts: LongArray
    """i64[P], real entries of each rank."""
    restore: LongArray
    """i64[S], row of the gathered array that holds each sampled token, in the order asked."""

    @property
    def padded_rows(self) -> int:
        """K."""
        return int(self.rows.shape[1])


def sampled_rows(layout: Layout, sampled_global_indices: ArrayLike, *, padded_rows: int | None = None) -> SampledRows:
    """Locate global tokens ``sampled_global_indices`` i64[S] (any order, repeats allowed) in ``layout``.

    A replicated token is taken from rank 0, its canonical copy. ``padded_rows`` raises ``K``, for a static shape.

    Example, P = 2, rank-major ``[G A B F | C D E _]`` and tokens F and G sampled: both are on rank 0, so
    ``rows = [[3, 0], [0, 0]]``, ``counts = [2, 0]`` and ``restore = [0, 1]``.

    Raises LayoutError for a token outside the batch and for ``padded_rows`` below the largest rank.
    """
    wanted = np.asarray(sampled_global_indices, dtype=np.int64)
    outside = (wanted < 0) | (wanted >= layout.num_tokens)
    if wanted.ndim != 1 or outside.any():
        raise LayoutError(
            f"Sampled tokens are a vector of indices into the {layout.num_tokens} tokens of the global batch; "
            f"found shape {list(wanted.shape)} with {np.unique(wanted[outside]).tolist()} outside."
        )
    rank, row = np.divmod(layout.restore_index[wanted], max(1, layout.padded_tokens))
    counts = np.bincount(rank, minlength=layout.pcp)
    largest = int(counts.max())
    padded = largest if padded_rows is None else padded_rows
    if padded < largest:
        raise LayoutError(
            f"padded_rows = {padded} is below the {largest} sampled rows of the largest rank; use at least {largest}."
        )
    order = np.argsort(rank, kind="stable")
    by_rank = rank[order]
    slot = np.arange(len(wanted)) - (np.add.accumulate(counts) - counts)[by_rank]
    rows = np.zeros((layout.pcp, padded), dtype=np.int64)
    rows[by_rank, slot] = row[order]
    restore = np.empty(len(wanted), dtype=np.int64)
    restore[order] = by_rank * padded + slot
    return SampledRows(rows, counts, restore)
