# SPDX-License-Identifier: Apache-2.0
"""Ops that work along some dimensions (sums, norms, softmax, sorts, scans): local when those are not the tokens'."""

from __future__ import annotations

from typing import Any

from torch import fx

from pcp_passes.aten.decision import REPLICATE, Call, Decision, Local, Mixes, tensor_of, wrap
from pcp_passes.aten.pointwise import pointwise
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement, Shard


def along(call: Call) -> Decision:
    """Along ``dim`` (or ``dims``), reduced or kept; every result of an op with several has the same rows."""
    source = call.operands[0]
    where = call.at(source)
    if "other" in call.names:
        return pointwise(call)  # max(a, b) and min(a, b)
    if not isinstance(where, Shard):
        return Mixes("what it works along is not the sharded operand")
    rank = tensor_of(source).dim()
    dims = _dims(call, rank)
    if where.dim in dims:
        return Mixes(f"works along dimension {where.dim}, which holds the tokens")
    results = meta.value(call.node)
    first = results[0] if isinstance(results, (tuple, list)) else results
    lost = 0 if first.dim() == rank else sum(1 for d in dims if d < where.dim)
    out: Placement = Shard(where.dim - lost, where.outer, where.inner)
    several = isinstance(results, (tuple, list))
    return Local((out,) * len(results) if several else out, call.needs({source: where}))


def _dims(call: Call, rank: int) -> set[int]:
    name = next((n for n in ("dim", "dims") if n in call.names), None)
    asked: Any = call.arg(name) if name else None
    if asked is None or asked == []:
        return set(range(rank))
    return {wrap(d, rank) for d in ([asked] if isinstance(asked, int) else asked)}


def over_last(call: Call) -> Decision:
    """``layer_norm`` and ``rms_norm``: over the trailing ``normalized_shape``; weights are replicated."""
    return _trailing(call, len(call.arg("normalized_shape")))


def _trailing(call: Call, count: int) -> Decision:
    source = call.operands[0]
    where = call.at(source)
    if not isinstance(where, Shard) or any(call.at(weight) != REPLICATE for weight in call.operands[1:]):
        return Mixes("its weights depend on tokens")
    if where.dim >= tensor_of(source).dim() - count:
        return Mixes("normalises over tokens")
    results = meta.value(call.node)
    out: Any = (where,) * len(results) if isinstance(results, (tuple, list)) else where
    return Local(out, call.needs({source: where}))


def batch_first(call: Call) -> Decision:
    """Convolutions and group norms: local when the tokens are the batch (the first dimension)."""
    source = call.operands[0]
    where = call.at(source)
    if not isinstance(where, Shard):
        return Mixes("its weights depend on tokens")
    batched = {"conv1d": 3, "conv2d": 4, "conv3d": 5}.get(_base(call.node))
    if where.dim or (batched is not None and tensor_of(source).dim() != batched):
        return Mixes("combines neighbouring tokens" if "conv" in _base(call.node) else "normalises over tokens")
    return Local(Shard(0, where.outer, where.inner), call.needs({source: where}))


def _base(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def whole(call: Call) -> Decision:
    """Reductions over everything."""
    return Mixes("reduces over all tokens")
