# SPDX-License-Identifier: Apache-2.0
"""Which experts of a layer a rank holds, in flattened EP order."""

from __future__ import annotations


def shard_range(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """``(first, count)`` of the experts of a rank: ``ceil(total / ranks)`` each, so the last ranks have fewer or none.

    5 experts on 4 ranks are 2, 2, 1 and 0.
    """
    each = -(-total // ranks)
    first = min(rank * each, total)
    return first, min(each, total - first)
