# SPDX-License-Identifier: Apache-2.0
"""The local form of a call whose operands are whole: what it needs so that its result is the wanted rows.

This is the table read backwards. It lets the taking of rows move up a chain of replicated ops, so that a rank computes
the rotary tables, masks and positions of its own rows only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pcp_passes.aten import table
from pcp_passes.aten.decision import REPLICATE, Call, Local, Rows, multiple, operands
from pcp_passes.aten.plan_inputs import PlanInputs
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement, Shard

_ATEN: Any = torch.ops.aten
_FILLED = (_ATEN.zeros.default, _ATEN.ones.default, _ATEN.empty.memory_format, _ATEN.full.default)


def local_form(node: fx.Node, wanted: Placement, plan: PlanInputs) -> Local | None:
    """How ``node`` gives the rows ``wanted`` when its operands are whole; ``None`` when only taking them does."""
    if not isinstance(wanted, Shard) or node.op != "call_function":
        return None
    if node.target in _FILLED:
        return _filled(node, wanted)
    members = operands(node)
    for position, placement in _hypotheses(members, plan):
        placed: list[Placement] = [REPLICATE] * len(members)
        for other, member in enumerate(members):
            if member is members[position]:
                placed[other] = placement
        found = table.decide(Call(node, members, tuple(placed), plan.tokens))
        if not isinstance(found, Local) or not all(isinstance(n, (Shard, type(REPLICATE))) for n in found.needs):
            continue
        outs = found.out if isinstance(found.out, tuple) else (found.out,)
        if all(out == wanted for out in outs):
            return found
    return None


def _hypotheses(members: tuple[fx.Node, ...], plan: PlanInputs) -> Iterator[tuple[int, Shard]]:
    """Each dimension of each operand that could be rows."""
    for position, member in enumerate(members):
        held = meta.tensor(member)
        if held is None or member in members[:position]:
            continue
        for dim, size in enumerate(held.shape):
            count = multiple(size, plan.tokens)
            if count is None:
                continue
            yield position, Shard(dim, 1, count)
            if count > 1:
                yield position, Shard(dim, count, 1)


def _filled(node: fx.Node, wanted: Shard) -> Local | None:
    """A tensor of one value has the same rows everywhere."""
    sizes = list(node.args[0])  # type: ignore[arg-type]
    if wanted.dim >= len(sizes):
        return None
    sizes[wanted.dim] = Rows(wanted.outer, wanted.inner)
    return Local(wanted, (REPLICATE,) * len(operands(node)), {0: sizes})


def counts_tokens(node: fx.Node, plan: PlanInputs) -> bool:
    """Whether a node is ``arange(T)`` in 64 bits: its rows are the plan's own."""
    held = meta.tensor(node)
    if held is None or held.dtype != torch.int64 or held.dim() != 1:
        return False
    if node.target is _ATEN.arange.default:
        return multiple(held.shape[0], plan.tokens) == 1
    if node.target is _ATEN.arange.start:
        return bool(node.args[0] == 0 and multiple(held.shape[0], plan.tokens) == 1)
    return False
