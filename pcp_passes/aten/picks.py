# SPDX-License-Identifier: Apache-2.0
"""Taking a fixed number of tokens (the last one, say): only those rows need to travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pcp_passes.aten.decision import argument, tensor_of, wrap
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement, Shard

_ATEN: Any = torch.ops.aten
SLICE, SELECT = _ATEN.slice.Tensor, _ATEN.select.int


@dataclass(frozen=True)
class Pick:
    """``x[..., start:end:step, ...]`` along tokens, a constant number of them; ``one`` drops the dimension."""

    dim: int
    start: Any
    end: Any
    step: int
    one: bool


def pick_of(node: fx.Node, where: Placement) -> Pick | None:
    """The pick a call is, when its operand is sharded as ``where``; ``None`` for anything else."""
    if node.target not in (SLICE, SELECT) or not isinstance(where, Shard) or where.outer * where.inner != 1:
        return None
    source = node.args[0]
    held = meta.tensor(source)
    if held is None or wrap(argument(node, "dim"), held.dim()) != where.dim:
        return None
    if node.target is SELECT:
        index = argument(node, "index")
        return Pick(where.dim, index, None if index == -1 else index + 1, 1, True) if isinstance(index, int) else None
    if not isinstance(tensor_of(node).shape[where.dim], int):
        return None
    return Pick(where.dim, argument(node, "start"), argument(node, "end"), argument(node, "step"), False)
