# SPDX-License-Identifier: Apache-2.0
"""localize-attention: explicit masks become positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.ir import meta, rules
from pcp_passes.ir.index.algebra import Assumption, analyse
from pcp_passes.ir.index.ops import Values
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.tokens.match_attention import Attention, match_sdpa
from pcp_passes.passes.tokens.match_eager import drops_nothing, match_softmax
from pcp_passes.passes.tokens.rewriting import Maker, Positions, refresh

_ATEN: Any = torch.ops.aten
MATCHERS: dict[str, Callable[[fx.Node, Values], Attention | str | None]] = {
    "aten::scaled_dot_product_attention": match_sdpa,
    "aten::softmax": match_softmax,
    "aten::_softmax": match_softmax,
    "aten::_safe_softmax": match_softmax,
}


@dataclass(frozen=True)
class LocalizeAttention:
    """Replace attention under an explicit T x T mask by attention of rows at given positions.

    Why: a rank that holds every P-th part of the queries would still read its rows of a T x T mask, and kernels cannot
    skip what a mask hides; ``pcp::attend`` is told where its rows sit and visits only the keys they see. The mask is
    read, not guessed: what a query sees must follow from the ops that built the mask, for every T (see
    :mod:`pcp_passes.ir.index.algebra`). Attention under any other mask stays as it is, with a note that says which
    node is not known. The rewritten graph computes what it computed: ``positions`` is ``arange(T)``.

    Options: ``assume`` states what token inputs hold, as ``(placeholder, assumption)`` pairs that the caller checks at
    run time.

    Before::

        %le : b8[sT, sT] = aten.le.Tensor(%j, %i)
        %sdpa = aten.scaled_dot_product_attention.default(%q, %k, %v, %le)

    After::

        %arange : i64[sT] = aten.arange.default(%n)
        %attend = pcp.attend.default(%q, %k, %v, %arange, scale=0.25, left=-1, right=0, chunk=0)
    """

    name: ClassVar[str] = "localize-attention"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    assume: tuple[tuple[str, Assumption], ...] = ()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return localize_attention(graph, dict(self.assume))


def localize_attention(graph: fx.Graph, assume: dict[str, Assumption] | None = None) -> PassResult:
    """Rewrite each attention whose mask is known by position, then drop the masks that nothing reads any more.

    Raises:
        ConfigError: ``assume`` names no input of the graph.
    """
    values = analyse(graph, assume)
    notes: list[Note | str] = []
    found: list[Attention] = []
    for node in graph.nodes:
        match = MATCHERS.get(rules.op_name(node))
        attention = match(node, values) if match is not None else None
        if isinstance(attention, str):
            notes.append(note(f"attention stays explicit: {attention}", node))
        elif attention is not None:
            found.append(attention)
    positions = Positions(graph, LocalizeAttention.name)
    replaced = {_replace(graph, attention, positions) for attention in found}
    if replaced:
        refresh(graph, replaced, LocalizeAttention.name)
        # A dropout that does nothing counts as random, and would keep the T x T weights alive.
        graph.eliminate_dead_code(lambda node: node.is_impure() and not drops_nothing(node))
    kinds = Counter(str(attention.visible) for attention in found)
    notes += [f"told by positions: {count} with {seen}" for seen, count in kinds.items()]
    return PassResult(len(found), tuple(notes) or ("no attention in the graph",))


def _replace(graph: fx.Graph, attention: Attention, positions: Positions) -> fx.Node:
    from pcp_passes.attention import attend_op  # an op of its own: loaded when it is used

    node, seen = attention.node, attention.visible
    where = positions.of(attention.q, -2, node)
    with graph.inserting_before(node):
        make = Maker(graph, node, LocalizeAttention.name)
        q, k, v = attention.q, attention.k, attention.v
        if attention.keys_last:
            k = make(_ATEN.transpose.int, k, -2, -1)
        flat = _rank(q) == 3
        if flat:
            q, k, v = (make(_ATEN.unsqueeze.default, one, 0) for one in (q, k, v))
        options: dict[str, Any] = {"left": seen.left, "right": seen.right, "chunk": seen.chunk}
        if attention.sinks is not None:
            options["sinks"] = _vector(make, attention.sinks)
        if attention.slopes is not None:
            slopes = _vector(make, attention.slopes)
            options["slopes"] = slopes if attention.slope_factor == 1 else make(
                _ATEN.mul.Tensor, slopes, attention.slope_factor
            )  # fmt: skip
        if attention.softcap:
            options["softcap"] = attention.softcap
        made = make(attend_op, q, k, v, where, scale=attention.scale, **options)
        if flat:
            made = make(_ATEN.squeeze.dim, made, 0)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made


def _vector(make: Maker, node: fx.Node) -> fx.Node:
    """One element per head, as ``[H]``."""
    return node if _rank(node) == 1 else make(_ATEN.reshape.default, node, [-1])


def _rank(node: fx.Node) -> int:
    held = meta.tensor(node)
    assert held is not None
    return held.dim()
