# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which token: pure index arithmetic, all ranks at once, no communication.

A *layout* is a map from the tokens of the global batch (the scheduler's order, ``T`` tokens) to ``(rank, row)``.
Every rank pads to the same count ``M``, so the rank-local batches laid end to end make the *rank-major* array of
``P * M`` rows. Two index vectors connect the orders::

    rank_major = global[gather_index]          # pads read token 0 and are masked
    global     = rank_major[restore_index]     # points at rows whose write_mask is true, never at a pad

Worked example, P = 2, a prefill ``A B C D E F`` and a decode ``G``, decode="owner"::

    build_layout(Batch([6, 1], [0, 9], [6, 4]), 2, decode="owner")

    chunks of A..F    AB | CD | E | F          2P = 4 chunks whose sizes differ by at most one
    rank 0 / rank 1   [G AB F] / [CD E]        decodes first; then the low and the high chunk of the prefill
    rank-major        [G A B F | C D E _]      M = 4
    gather_index      [6 0 1 5   2 3 4 0]
    write_mask        [1 1 1 1   1 1 1 0]
    restore_index     [1 2 4 5 6 3 0]

Rank 1 holds chunks 1 and 2, which touch: they are one segment, so one attention row (vLLM's layout keeps two).
"""

from __future__ import annotations

from pcp_passes.layout.batch import Batch
from pcp_passes.layout.build import build_layout, dispatch_tokens
from pcp_passes.layout.result import Layout, RankRows
from pcp_passes.layout.sampling import SampledRows, sampled_rows

__all__ = ["Batch", "Layout", "RankRows", "SampledRows", "build_layout", "dispatch_tokens", "sampled_rows"]
