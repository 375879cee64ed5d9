# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: local in the rows of the queries, with all keys; see :mod:`pcp_passes.sparse.ops`."""

from __future__ import annotations

from pcp_passes.aten.decision import Call, Decision, Local, Mixes
from pcp_passes.ir.placements import Shard


def select_keys(call: Call) -> Decision:
    """``pcp::select_keys(q, k, weights, positions, ..., restore)``: rows of ``q`` at their positions, with all keys."""
    q, k, weights, positions = call.operands[:4]
    if call.at(q) != Shard(1) or q in (k, weights):
        return Mixes("its queries are not sharded by rows")
    return Local(Shard(1), call.needs({q: Shard(1), weights: Shard(1), positions: Shard(0)}))


def sparse_attend(call: Call) -> Decision:
    """``pcp::sparse_attend`` and ``pcp::sparse_attend_heads``: rows of ``q`` with their indices, and all keys."""
    q, k, v, indices = call.operands[:4]
    if call.at(q) != Shard(2) or q in (k, v):
        return Mixes("its queries are not sharded by rows")
    return Local(Shard(2), call.needs({q: Shard(2), indices: Shard(1)}))
