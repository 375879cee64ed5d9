# SPDX-License-Identifier: Apache-2.0
"""lower-indexer: the dense scoring of DeepSeek's sparse attention becomes one op over index keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.aten.plan_inputs import has_plan, plan_inputs
from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.index.algebra import Assumption, analyse
from pcp_passes.ir.index.ops import Values
from pcp_passes.ir.index.values import EVERY_KEY, HIDDEN, HIDDEN_HALF, Visible, both
from pcp_passes.ir.printer import print_node
from pcp_passes.passes.base import Note, PassContext, PassResult, note
from pcp_passes.passes.match_indexer import Indexer, Masking, Mismatch, canonical, match_indexer
from pcp_passes.passes.tokens.match_bias import read_bias, read_mask
from pcp_passes.passes.tokens.match_selected import reads_later_keys
from pcp_passes.passes.tokens.rewriting import Maker, Positions, refresh

_ATEN: Any = torch.ops.aten
_SCATTERS = ("aten::scatter",)
_CAUSAL = Visible(right=0)
_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class LowerIndexer:
    """Replace each indexer's scores, mask and top-k by ``pcp::select_keys``.

    Why: scored in ATen, an indexer makes a number for every pair of tokens and head, and a rank that holds every P-th
    part of the rows would still need its rows of a T x T mask. The op is told where its rows sit, scores them in
    pieces, and breaks ties by position, so neither the pieces nor the ranks change the selection. What is read is the
    idea and not a spelling (see :mod:`pcp_passes.passes.match_indexer`); the mask must be causal, as proved from the
    ops that built it. An indexer that differs stays as it is, with a note that says which node differs and how.

    The keys come whole and in global order to every rank, which the op is told (``'replicated'``) and checks against
    the plan's restore index; a graph without a plan has one rank's rows (``'local'``).

    Where the model reads the selection, it marks the selected keys in a mask, and hides later keys whether they are
    marked or not (which is proved too). ``clamp`` makes a number of the -1 that stands for no key: rows with a -1 see
    no more keys than they may select, and key 0 is one of those.

    Options: ``assume`` as for ``localize-attention``.

    Before::

        %scores = aten.relu(aten.mul.Tensor(aten.matmul(%q, %keys), 0.25))
        %sum = aten.squeeze.dim(aten.matmul(aten.unsqueeze(%weights, -2), %scores), -2)
        %topk = aten.topk(aten.masked_fill.Scalar(%sum, %hidden, -inf), %n)

    After::

        %mul = aten.mul.Tensor(%weights, 0.25)
        %select_keys : i32[1, sT, 8] = pcp.select_keys(%q, %k, %mul, %arange, 8, 'replicated', %pcp_restore)
        %clamp_min = aten.clamp_min(%select_keys, 0)
    """

    name: ClassVar[str] = "lower-indexer"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    assume: tuple[tuple[str, Assumption], ...] = ()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return lower_indexer(graph, dict(self.assume))


def lower_indexer(graph: fx.Graph, assume: dict[str, Assumption] | None = None) -> PassResult:
    """Rewrite each indexer whose mask is causal and whose selection only marks keys.

    Raises:
        ConfigError: ``assume`` names no input of the graph.
    """
    candidates = [node for node in graph.nodes if _selects_tokens(node)]
    if not candidates:
        return PassResult(0, ("the graph has no sparse indexer",))
    values = analyse(graph, assume)
    notes: list[Note | str] = []
    found: list[Indexer] = []
    for node in candidates:
        try:
            found.append(_match(node, values))
        except Mismatch as mismatch:
            notes.append(note(f"indexer stays dense: {mismatch.reason}, at {print_node(mismatch.node)}", mismatch.node))
    positions = Positions(graph, LowerIndexer.name)
    changed: set[fx.Node] = set()
    for one in found:
        made, index = _replace(graph, one, positions)
        changed.add(index)
        notes.append(note(f"selects {one.topk} keys by {one.sizes.get('h', 1)} heads", made))
    if found:
        refresh(graph, changed, LowerIndexer.name)
        graph.eliminate_dead_code()
    return PassResult(len(found), tuple(notes))


def _selects_tokens(node: fx.Node) -> bool:
    """Whether a top-k chooses among a number of things that grows with the tokens: a router chooses among experts."""
    held = meta.tensor(node.args[0]) if rules.op_name(node) == "aten::topk" else None
    return held is not None and held.dim() > 0 and fakes.has_token_symbol(held.shape[-1])


def _match(topk: fx.Node, values: Values) -> Indexer:
    found = match_indexer(topk)
    scores = meta.tensor(topk.args[0])
    assert scores is not None
    if not (fakes.is_plain_symbol(scores.shape[-1]) and fakes.same_size(scores.shape[-2], scores.shape[-1])):
        raise Mismatch(topk, f"it selects among {scores.shape[-1]} keys for {scores.shape[-2]} rows, not among tokens")
    if not found.masks:
        raise Mismatch(topk, "scores are masked before the selection: without a mask a row would see later keys")
    seen = EVERY_KEY
    for masking in found.masks:
        joined = both(seen, _visible(masking, values))
        if joined is None:
            raise Mismatch(masking.node, "its masks do not join")
        seen = joined
    if seen != _CAUSAL:
        raise Mismatch(found.masks[0].node, f"a row selects among the keys before it, and here it sees {seen}")
    for reader in found.selection.users:
        _require_marking(reader, found.selection, values)
    return found


def _visible(masking: Masking, values: Values) -> Visible:
    node = masking.node
    if masking.hides is None:
        bias = read_bias(masking.mask, values)
    elif masking.mask not in values:
        bias = str(read_bias(masking.mask, values))
    else:
        held = meta.tensor(node)
        limit = HIDDEN_HALF if held is not None and held.dtype == torch.float16 else HIDDEN
        if masking.low is None or not masking.low <= limit:  # of NaN neither holds
            raise Mismatch(node, f"hidden scores become {masking.low}, which a score may be")
        bias = read_mask(masking.mask, values, masking.hides)
    if isinstance(bias, str):
        raise Mismatch(node, bias)
    if bias.slopes is not None:
        raise Mismatch(node, "a mask hides keys, and here it also weighs them")
    return bias.visible


def _require_marking(reader: fx.Node, source: fx.Node, values: Values) -> None:
    """Indices are read as a set of keys up to a row's own: by a scatter of one value, through casts."""
    name = rules.op_name(reader)
    held = meta.tensor(reader)
    if name in ("aten::_to_copy", "aten::to") and held is not None and held.dtype in _INDEX_DTYPES:
        for further in reader.users:
            _require_marking(further, reader, values)
        return
    index = rules.named_argument(reader, "index") if name in _SCATTERS else None
    value = rules.named_argument(reader, "value") if name in _SCATTERS else None
    if index is not source or not isinstance(value, (int, float, bool)):
        raise Mismatch(reader, "a selection marks keys in a mask, by a scatter of one value")
    later = reads_later_keys(reader, values)
    if later is not None:
        raise Mismatch(*later)


def _replace(graph: fx.Graph, one: Indexer, positions: Positions) -> tuple[fx.Node, fx.Node]:
    """The selection, and the indices that take the place of the model's."""
    from pcp_passes.sparse.ops import select_keys_op  # an op of its own: loaded when it is used

    selection = one.selection
    held = meta.tensor(selection)
    assert held is not None
    where = positions.of(selection, held.dim() - 2, selection)
    with graph.inserting_before(selection):
        make = Maker(graph, selection, LowerIndexer.name)
        q = canonical(make, one.q, "bthd", one.sizes)
        k = canonical(make, one.k, "bsd", one.sizes)
        weights = canonical(make, one.weights, "bth", one.sizes)
        if one.scale != 1.0:
            weights = make(_ATEN.mul.Tensor, weights, one.scale)
        layout: tuple[Any, ...] = ("replicated", plan_inputs(graph).restore) if has_plan(graph) else ("local",)
        chosen = make(select_keys_op, q, k, weights, where, one.topk, *layout)
        index = make(_ATEN.clamp_min.default, chosen, 0)
        if held.dim() != 3:
            index = make(_ATEN.reshape.default, index, [*[1] * (held.dim() - 2), -1, one.topk])
        index = make(_ATEN._to_copy.default, index, dtype=held.dtype)
    selection.replace_all_uses_with(index)
    return chosen, index
