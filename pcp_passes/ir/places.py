# SPDX-License-Identifier: Apache-2.0
"""Where a new node may stand."""

from __future__ import annotations

from torch import fx

_INPUTS = ("placeholder", "get_attr")


def behind(node: fx.Node) -> fx.Node:
    """The node to insert in front of, so that the new one stands right behind ``node``; behind an input, behind all."""
    after: fx.Node = node.next
    while node.op in _INPUTS and after.op in _INPUTS:
        after = after.next
    return after
