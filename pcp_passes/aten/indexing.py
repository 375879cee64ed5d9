# SPDX-License-Identifier: Apache-2.0
"""Ops that read or write at indices. An index tensor always holds *global* indices: what it reads is global as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pcp_passes.aten.decision import REPLICATE, Call, Decision, Local, Mixes, tensor_of, wrap
from pcp_passes.aten.pointwise import aligned
from pcp_passes.ir.placements import Placement, Shard


def embedding(call: Call) -> Decision:
    """``embedding(weight, indices)``: one row of the table per index."""
    indices = call.arg("indices")
    where = call.at(indices)
    if not isinstance(where, Shard):
        return Mixes("its table depends on tokens")
    return Local(where, call.needs({indices: where}))


def index_select(call: Call) -> Decision:
    """``index_select(x, dim, index)``."""
    x, index = call.operands
    at_x, at_index = call.at(x), call.at(index)
    dim = wrap(call.arg("dim"), tensor_of(x).dim())
    if isinstance(at_x, Shard) and at_x.dim != dim:
        return Local(at_x, call.needs({x: at_x}))
    if isinstance(at_index, Shard):
        return Local(Shard(dim, at_index.outer, at_index.inner), call.needs({index: at_index}))
    return Mixes("selects among the tokens")


def gather(call: Call) -> Decision:
    """``gather(x, dim, index)``: ``out[i, j] = x[i, index[i, j]]`` for ``dim`` 1, so ``i`` must agree."""
    x, index = call.operands[:2]
    if call.arg("dim") is None:
        return Mixes("reads the flattened tensor")
    return _beside(call, [x, index], [x])


def scatter(call: Call) -> Decision:
    """``scatter(x, dim, index, src or value)`` and its reductions along another dimension than the tokens'."""
    members = list(call.operands)
    return _beside(call, members, [])


def _beside(call: Call, members: list[fx.Node], whole_along_dim: list[fx.Node]) -> Decision:
    """Rows agree between all members and lie beside ``dim``; or along it in the index alone, for a gather."""
    rank = tensor_of(members[0]).dim()
    dim = wrap(call.arg("dim"), rank)
    where = next((w for m in members if isinstance(w := call.at(m), Shard) and w.dim != dim), None)
    if where is None:
        index = members[1]
        at = call.at(index)
        if whole_along_dim and isinstance(at, Shard):
            return Local(at, call.needs({index: at}))
        return Mixes("reads or writes along the tokens")
    wanted: dict[fx.Node, Placement] = {}
    for member in members:
        held = tensor_of(member)
        if held.dim() == 0:
            continue
        if held.dim() != rank or call.count(held.shape[where.dim]) != where.outer * where.inner:
            return Mixes("its operands have different numbers of rows")
        wanted[member] = where
    return Local(where, call.needs(wanted))


def index(call: Call) -> Decision:
    """``index(x, indices)``: integer tensors, broadcast against each other, in place of the dimensions they index."""
    x, indices = call.arg("self"), list(call.arg("indices"))
    given = [i for i, entry in enumerate(indices) if isinstance(entry, fx.Node)]
    members = tuple(indices[i] for i in given)
    if any(tensor_of(m).dtype in (torch.bool, torch.uint8) for m in members):
        return Mixes("selects by a mask: the number of rows depends on data")
    at_x = call.at(x)
    together = given == list(range(given[0], given[-1] + 1))
    spread = max(tensor_of(m).dim() for m in members)
    start = given[0] if together else 0
    if isinstance(at_x, Shard) and at_x.dim not in given:
        if any(isinstance(call.at(m), Shard) for m in members):
            return Mixes("both what is read and the index are rows of tokens")
        before = sum(1 for i in given if i < at_x.dim)
        dim = at_x.dim if at_x.dim < start else at_x.dim - before + spread
        return Local(Shard(dim, at_x.outer, at_x.inner), call.needs({x: at_x}))
    found = aligned(call, members, spread)
    if not isinstance(found, Local):
        return Mixes("reads tokens by an index")
    if x in members:
        return Mixes("reads a tensor at itself")
    out = found.out
    assert isinstance(out, Shard)
    return Local(Shard(start + out.dim, out.outer, out.inner), found.needs)


def index_put(call: Call) -> Decision:
    """``index_put(x, indices, values)`` with replicated indices beside the tokens, and a value without rows."""
    x, indices, values = call.arg("self"), list(call.arg("indices")), call.arg("values")
    at_x = call.at(x)
    given = {i: entry for i, entry in enumerate(indices) if isinstance(entry, fx.Node)}
    if not isinstance(at_x, Shard) or at_x.dim in given or any(call.at(m) != REPLICATE for m in given.values()):
        return Mixes("writes tokens by an index")
    if any(tensor_of(m).dtype in (torch.bool, torch.uint8) for m in given.values()):
        return Mixes("writes by a mask")
    if tensor_of(values).numel() != 1 or call.at(values) != REPLICATE:
        return Mixes("writes values whose rows have no rule")
    return Local(at_x, call.needs({x: at_x}))


def cat(call: Call) -> Decision:
    """``cat(tensors, dim)`` along another dimension than the tokens'."""
    members = call.operands
    rank = tensor_of(call.node).dim()
    if any(tensor_of(m).dim() != rank for m in members):
        return Mixes("concatenates tensors of different ranks")
    return _joined(call, wrap(call.arg("dim"), rank), 0)


def stack(call: Call) -> Decision:
    """``stack(tensors, dim)``: all members have the same rows."""
    rank = tensor_of(call.node).dim()
    return _joined(call, wrap(call.arg("dim"), rank), 1)


def _joined(call: Call, dim: int, added: int) -> Decision:
    where = next((w for m in call.operands if isinstance(w := call.at(m), Shard)), None)
    if where is None:
        return Mixes("no operand is sharded")
    if not added and where.dim == dim:
        return Mixes("concatenates along the tokens")
    for member in call.operands:
        held = tensor_of(member)
        if held.dim() <= where.dim or call.count(held.shape[where.dim]) != where.outer * where.inner:
            return Mixes("its members have different numbers of rows")
    out = Shard(where.dim + (added and dim <= where.dim), where.outer, where.inner)
    return Local(out, (where,) * len(call.operands))


def slice_scatter(call: Call) -> Decision:
    """``slice_scatter`` and ``select_scatter`` into another dimension than the tokens'."""
    x, src = call.operands[:2]
    rank = tensor_of(x).dim()
    dim = wrap(call.arg("dim"), rank)
    lost = "select" in str(call.node.target)
    at_x, at_src = call.at(x), call.at(src)
    where = at_x if isinstance(at_x, Shard) else None
    if where is None and isinstance(at_src, Shard):
        where = Shard(at_src.dim + (lost and dim <= at_src.dim), at_src.outer, at_src.inner)
    if where is None or where.dim == dim:
        return Mixes("writes some of the tokens")
    inside = Shard(where.dim - (lost and dim < where.dim), where.outer, where.inner)
    held = tensor_of(src)
    if held.dim() <= inside.dim or call.count(held.shape[inside.dim]) != where.outer * where.inner:
        return Mixes("writes another number of rows")
    return Local(where, call.needs({x: where, src: inside}))


def pad(call: Call) -> Decision:
    """``constant_pad_nd`` and ``pad`` that leave the tokens' dimension alone."""
    x = call.operands[0]
    where = call.at(x)
    if not isinstance(where, Shard):
        return Mixes("no operand is sharded")
    widths: list[Any] = list(call.arg("pad"))
    back = tensor_of(x).dim() - 1 - where.dim
    here = widths[2 * back : 2 * back + 2]
    if any(not isinstance(w, int) or w for w in here):
        return Mixes("pads the tokens")
    return Local(where, call.needs({x: where}))


def one_hot(call: Call) -> Decision:
    """``one_hot(x, classes)`` adds a last dimension."""
    x = call.operands[0]
    where = call.at(x)
    if call.arg("num_classes") == -1 or not isinstance(where, Shard):
        return Mixes("has as many classes as the largest value")
    return Local(where, call.needs({x: where}))
