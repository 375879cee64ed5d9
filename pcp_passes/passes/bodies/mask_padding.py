# SPDX-License-Identifier: Apache-2.0
"""mask-padding: define the padded rows of every attention output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from pcp_passes.ir import buffers, meta, rules
from pcp_passes.ir.invariants import PADDING_DEFINED, PLACED
from pcp_passes.passes.base import Note, PassContext, PassResult, note


@dataclass(frozen=True)
class MaskPadding:
    """Make every attention output zero where the op writes nothing.

    Why: all ranks pad to the same row count, and attention writes only its real rows. What an uninitialised buffer
    holds in the others (a NaN, say) would go through the norms and the router, and into the next layer's gather.

    Before::

        %empty = torch.empty((%s72, 2, 32), dtype=f32)
        %attend = toy.attention(%q, %k, %v, %empty, %layer, kv_cache_dummy_dep=%write)

    After::

        %empty = torch.zeros((%s72, 2, 32), dtype=f32)
        %attend = toy.attention(%q, %k, %v, %empty, %layer, kv_cache_dummy_dep=%write)
    """

    name: ClassVar[str] = "mask-padding"
    requires: ClassVar[frozenset[str]] = frozenset({PLACED})
    establishes: ClassVar[frozenset[str]] = frozenset({PADDING_DEFINED})
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return mask_padding(graph)


def mask_padding(graph: fx.Graph) -> PassResult:
    """Zero-fill each ``LocalQuery``'s output buffer: at its allocation when fresh, else by a fill before the op."""
    count = 0
    notes: list[Note | str] = []
    for attend in list(graph.nodes):
        rule = rules.rule_of(attend)
        if not isinstance(rule, rules.LocalQuery):
            continue
        if rule.writes_padding or rule.output is None:
            notes.append(note("the op defines its padded rows itself", attend))
            continue
        buffer = rules.argument(attend, rule.output)
        base = buffers.base_of(buffer)
        if buffers.is_zero_filled(base) or buffers.filled_before(buffer, attend):
            notes.append(note("the output buffer is zero-filled already", attend))
            continue
        if not _zero_allocation(base):
            notes.append(note(f"%{base.name} is no fresh allocation: filled before the op", attend))
            _insert_fill(graph, attend, buffer)
        count += 1
    if not count:
        notes.append("no attention in the graph leaves padded rows undefined")
    return PassResult(count, tuple(notes))


def _zero_allocation(base: fx.Node) -> bool:
    """Retarget a fresh allocation to its zero-filled twin. The value stays: same shape, strides and aliases."""
    twin = buffers.ZEROED.get(base.target)
    if twin is None or base.op not in ("call_function", "call_method"):
        return False
    if not _takes_memory_format(base) and base.kwargs.get("memory_format") not in (None, torch.contiguous_format):
        return False
    base.target = twin
    if not _takes_memory_format(base):
        base.kwargs = {key: held for key, held in base.kwargs.items() if key != "memory_format"}
    meta.set_changed_by(base, MaskPadding.name)
    return True


def _takes_memory_format(node: fx.Node) -> bool:
    return "like" in rules.op_name(node)


def _insert_fill(graph: fx.Graph, attend: fx.Node, buffer: fx.Node) -> None:
    with graph.inserting_before(attend):
        fill = graph.call_method("zero_", (buffer,))
    meta.adopt(fill, attend, MaskPadding.name, meta.placement(buffer), meta.info(attend).layer)
