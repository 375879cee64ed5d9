# SPDX-License-Identifier: Apache-2.0
"""Where an output buffer comes from: views are followed back to the node that allocated it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pcp_passes.ir.rules import mutated_arguments, op_name

aten = torch.ops.aten

ZEROED: dict[Any, Any] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
    "new_empty": "new_zeros",
}
"""Allocation to its zero-filled twin; the twins take the same arguments, ``memory_format`` apart."""

_ZERO_FILLED = frozenset(ZEROED.values())
_VIEWS = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze view_as reshape_as transpose permute t expand as_strided narrow"
    " select chunk split split_with_sizes getitem slice".split()
)
_FILLS = frozenset({"method::zero_", "aten::zero_", "torch::zero_"})


def base_of(buffer: fx.Node) -> fx.Node:
    """The node whose storage ``buffer`` is a view of, as far as views in the graph tell (``buffer`` itself if none)."""
    seen = buffer
    while _is_view(seen):
        seen = seen.all_input_nodes[0]
    return seen


def is_zero_filled(base: fx.Node) -> bool:
    """Whether ``base`` allocates zeros."""
    return base.op in ("call_function", "call_method") and base.target in _ZERO_FILLED


def filled_before(buffer: fx.Node, use: fx.Node) -> bool:
    """Whether a fill of exactly ``buffer`` stands in front of ``use``, with nothing writing it in between."""
    node = use.prev
    while node.op != "root" and node is not buffer:
        if buffer in mutated_arguments(node):
            return op_name(node) in _FILLS
        node = node.prev
    return False


def _is_view(node: fx.Node) -> bool:
    return op_name(node).partition("::")[2] in _VIEWS and bool(node.all_input_nodes)
