# SPDX-License-Identifier: Apache-2.0
"""Ops that compute each element of the result from the elements at its place: the rule, and broadcasting."""

from __future__ import annotations

import torch
from torch import fx

from pcp_passes.aten.decision import Call, Decision, Local, Mixes, tensor_of
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement, Shard


def pointwise(call: Call) -> Decision:
    """Broadcasting element-wise ops: the result is sharded where its operands are, counted from the last dimension."""
    out = meta.tensor(call.node)
    if out is None:
        return Mixes("an element-wise op with several results has no rule")
    return aligned(call, call.operands, out.dim())


def aligned(call: Call, members: tuple[fx.Node, ...], rank: int) -> Decision:
    """Broadcast ``members`` to ``rank`` dimensions; they decide the result, other operands are replicated.

    Where two members are sharded along different dimensions, the larger one decides and the other is restored.
    """
    wanted: dict[fx.Node, Placement] = {}
    sharded = [(m, where) for m in members if isinstance(where := call.at(m), Shard)]
    if not sharded:
        return Mixes("no operand is sharded")
    lead, where = max(sharded, key=lambda pair: _weight(pair[0]))
    back = where.dim - tensor_of(lead).dim()
    for member in members:
        if meta.tensor(member) is None:
            continue  # a symbolic scalar: its value is global everywhere
        needed = call.as_rows(member, back, where)
        if needed is None:
            return Mixes(f"%{member.name} has another number of rows than %{lead.name}, as far as is known")
        wanted[member] = needed
    return Local(Shard(rank + back, where.outer, where.inner), call.needs(wanted, one_role=True))


def _weight(node: fx.Node) -> tuple[int, int]:
    """Dimensions with many values first: restoring the other operand is then the cheaper choice."""
    held = tensor_of(node)
    fixed = 1
    for size in held.shape:
        fixed *= size if isinstance(size, int) else 1
    return sum(isinstance(size, torch.SymInt) for size in held.shape), fixed


def dropout(call: Call) -> Decision:
    """Dropout that does nothing. One that draws random numbers would draw others on each rank."""
    name = "train" if "train" in call.names else "training"
    if call.arg("p") == 0 or not call.arg(name):
        return pointwise(call)
    return Mixes("draws random numbers: ranks would draw different ones; call model.eval() first")
