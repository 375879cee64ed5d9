# SPDX-License-Identifier: Apache-2.0
"""lower-sparse-attention: dense attention under a mask of selected keys becomes attention over these keys alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.ir import meta, rules
from pcp_passes.ir.index.algebra import Assumption, analyse
from pcp_passes.ir.places import behind
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.tokens.localize_attention import MATCHERS
from pcp_passes.passes.tokens.match_attention import Attention
from pcp_passes.passes.tokens.match_eager import drops_nothing
from pcp_passes.passes.tokens.match_latent import Expanded, Latent, Shared, match_latent
from pcp_passes.passes.tokens.match_selected import Marked, marks, match_selected
from pcp_passes.passes.tokens.rewriting import Maker, refresh

_ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class LowerSparseAttention:
    """Replace attention under a mask of selected keys by attention over the selected keys.

    Why: a model marks the keys its indexer selected in a T x T mask and attends densely: every row pays for every key,
    and every rank needs the expanded keys of all tokens. What the ops between the selection and the softmax make of it
    is proved and not guessed (see :mod:`pcp_passes.passes.tokens.match_selected`).

    Where keys and values are one linear map of a latent, with rotary channels joined to the keys, they are never made:
    ``q . (W_k c) = (W_k^T q) . c``, so the map moves to the few queries and outputs, and ranks exchange latents. That
    is done whenever the latent with its rotary channels is no wider than the keys and values of all heads, which it is
    in every model that has one; else, or where the map is not found, the op takes the expanded keys and values
    (``pcp::sparse_attend_heads``), and a note says why.

    Options: ``assume`` as for ``localize-attention``.

    Before::

        %marked = aten.scatter.value(%ones, -1, %indices, False)
        %seen = aten.__and__.Tensor(%causal, aten.bitwise_not(aten.unsqueeze(%marked, 1)))
        %sdpa = aten.scaled_dot_product_attention(%q, %k, %v, %seen, scale=0.18)

    After::

        %absorbed = aten.cat([aten.matmul(aten.slice.Tensor(%q, 3, 0, 16), %w_k), aten.slice.Tensor(%q, 3, 16, 32)], 3)
        %sparse_attend = pcp.sparse_attend(%absorbed, %latent, %rope, %select_keys, scale=0.18)
        %out = aten.matmul(%sparse_attend, %w_v)
    """

    name: ClassVar[str] = "lower-sparse-attention"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    assume: tuple[tuple[str, Assumption], ...] = ()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return lower_sparse_attention(graph, dict(self.assume))


def lower_sparse_attention(graph: fx.Graph, assume: dict[str, Assumption] | None = None) -> PassResult:
    """Rewrite each attention whose mask shows the keys of a ``pcp::select_keys`` alone.

    Raises:
        ConfigError: ``assume`` names no input of the graph.
    """
    if not any(rules.op_name(node) == "pcp::select_keys" for node in graph.nodes):
        return PassResult(0, ("nothing in the graph selects keys",))
    values = analyse(graph, assume)
    notes: list[Note | str] = []
    found: list[tuple[Attention, Marked]] = []
    attentions = [node for node in graph.nodes if rules.op_name(node) in MATCHERS]
    for marked in marks(graph, values):
        if isinstance(marked, tuple):
            notes.append(note(f"a selection stays a mask: {marked[1]}", marked[0]))
            continue
        read = [(node, match_selected(node, MATCHERS[rules.op_name(node)], marked)) for node in attentions]
        found += [(one, marked) for _, one in read if isinstance(one, Attention)]
        notes += [note(f"attention stays dense: {one}", node) for node, one in read if isinstance(one, str)]
        if all(one is None for _, one in read):
            notes.append(note("a selection stays a mask: no attention is known that reads it", marked.scatter))
    replaced: set[fx.Node] = set()
    for attention, marked in found:
        queries = meta.tensor(attention.q)
        assert queries is not None
        latent = match_latent(attention.k, attention.v, int(queries.shape[1]))
        made = _replace(graph, attention, marked, latent)
        replaced.add(made)
        how = "over latents" if isinstance(latent, Latent) else f"over expanded keys: {latent}"
        notes.append(note(f"attends {how}", made))
    if replaced:
        refresh(graph, replaced, LowerSparseAttention.name)
        graph.eliminate_dead_code(lambda node: node.is_impure() and not drops_nothing(node))
    return PassResult(len(found), tuple(notes) or ("no selection marks keys in a mask",))


def _replace(graph: fx.Graph, attention: Attention, marked: Marked, latent: Latent | str) -> fx.Node:
    node = attention.node
    with graph.inserting_before(node):
        make = Maker(graph, node, LowerSparseAttention.name)
        options: dict[str, Any] = {"scale": attention.scale}
        if attention.sinks is not None:
            options["sinks"] = make(_ATEN.reshape.default, attention.sinks, [-1])
        if isinstance(latent, Latent):
            made = _absorbed(make, attention.q, latent, marked.selection, options)
        else:
            made = _expanded(make, attention, marked.selection, options)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made


def _expanded(make: Maker, attention: Attention, selection: fx.Node, options: dict[str, Any]) -> fx.Node:
    from pcp_passes.sparse.ops import sparse_attend_heads_op  # an op of its own: loaded when it is used

    return make(sparse_attend_heads_op, attention.q, attention.k, attention.v, selection, **options)


def _absorbed(make: Maker, q: fx.Node, latent: Latent, selection: fx.Node, options: dict[str, Any]) -> fx.Node:
    from pcp_passes.sparse.ops import sparse_attend_op  # an op of its own: loaded when it is used

    width = latent.values.width
    held = meta.tensor(latent.latent)
    assert held is not None
    rows = latent.latent if held.dim() == 3 else _early(make, _ATEN.squeeze.dim, latent.latent, 1)
    matrix = make(_ATEN.reshape.default, latent.weight, [-1, width, int(held.shape[-1])])  # [H, channels, L]
    inner: list[fx.Node] = []
    rotary: list[fx.Node] = []
    rope: fx.Node | None = None
    start = 0
    for piece in latent.keys:
        stop = start + piece.stop - piece.start
        part = make(_ATEN.slice.Tensor, q, 3, start, stop)
        if isinstance(piece, Expanded):
            inner.append(make(_ATEN.matmul.default, part, make(_ATEN.slice.Tensor, matrix, 1, piece.start, piece.stop)))
        else:
            rotary.append(part)
            rope = _rotary(make, piece)
        start = stop
    if rope is None:
        rope = make(_ATEN.slice.Tensor, rows, 2, 0, 0)
    absorbed = make(_ATEN.cat.default, [*inner, *rotary], 3) if rotary else inner[0]
    attended = make(sparse_attend_op, absorbed, rows, rope, selection, **options)
    back = make(_ATEN.slice.Tensor, matrix, 1, latent.values.start, latent.values.stop)
    return make(_ATEN.matmul.default, attended, make(_ATEN.transpose.int, back, 1, 2))


def _early(make: Maker, target: Any, source: fx.Node, *args: Any) -> fx.Node:
    """Right behind its operand: what ranks exchange is ready as early as the index keys, and travels with them."""
    with source.graph.inserting_before(behind(source)):
        return make(target, source, *args)


def _rotary(make: Maker, piece: Shared) -> fx.Node:
    rope = _early(make, _ATEN.squeeze.dim, piece.node, 2 if piece.heads_last else 1)
    held = meta.tensor(rope)
    assert held is not None
    whole = (piece.start, piece.stop) == (0, held.shape[-1])
    return rope if whole else make(_ATEN.slice.Tensor, rope, 2, piece.start, piece.stop)
