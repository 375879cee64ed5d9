# SPDX-License-Identifier: Apache-2.0
"""Masks that show the selected keys alone, and attention under them. Nothing here changes a graph.

A selection becomes a mask by a scatter of one value into a tensor of another, and the mask is joined to the causal one
by whatever ops the model likes, as long as they act element by element: what moves rows or keys is not followed. So
two questions to the index algebra tell what they do: if every key were selected, is the mask causal? If none were, does
it hide every key? Then a row sees a key iff it is causal *and* selected, whichever keys are selected. A third one, of
the keys ``i - j <= n``, is put to the matcher of the attention, which so far saw a mask that any op may ignore.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir import predicates as p
from pcp_passes.ir.index.algebra import transfer
from pcp_passes.ir.index.ops import POINTWISE, Values, sizes
from pcp_passes.ir.index.values import IndexValue, Visible, shown
from pcp_passes.passes.tokens.match_attention import Attention
from pcp_passes.passes.tokens.match_bias import number_of

_WINDOW = 5
_THROUGH = ("aten::_to_copy", "aten::to", "aten::clamp_min", "aten::reshape", "aten::unsqueeze", "aten::squeeze")
_CAUSAL = Visible(right=0)
_IN_PLACE = frozenset(f"aten::{name}" for name in (
    *POINTWISE, "_to_copy", "to", "clone", "detach", "alias", "contiguous", "lift_fresh_copy", "lift_fresh", "view",
    "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "repeat", "slice", "tril", "triu",
))  # fmt: skip
"""Ops that leave each row and key where it was, if both sizes stay."""

Matcher = Any
"""``matcher(node, values) -> Attention | str | None``."""


@dataclass(frozen=True)
class Marked:
    """A scatter that marks the keys a selection holds.

    Attributes:
        scatter: ``[B, T, T]``.
        selection: the ``pcp::select_keys`` that made its index.
        every, near, none: closed forms of what follows it, if every key were selected, the nearest, or no key.
    """

    scatter: fx.Node
    selection: fx.Node
    every: Values
    near: Values
    none: Values


def marks(graph: fx.Graph, values: Values) -> Iterator[Marked | tuple[fx.Node, str]]:
    """Every scatter of a selection; one that cannot be read comes with the reason."""
    for node in graph.nodes:
        if rules.op_name(node) != "aten::scatter":
            continue
        selection = _selection(rules.named_argument(node, "index"))
        if selection is None:
            continue
        found = [_overlay(node, values, cond) for cond in (p.TRUE, _near(node), p.FALSE)]
        reason = next((one for one in found if isinstance(one, str)), None)
        if reason is not None:
            yield node, reason
            continue
        every, near, none = (ChainMap(one, values) for one in found)  # type: ignore[arg-type]
        yield Marked(node, selection, every, near, none)


def _selection(index: Any) -> fx.Node | None:
    while isinstance(index, fx.Node) and rules.op_name(index) in _THROUGH:
        index = index.args[0]
    return index if isinstance(index, fx.Node) and rules.op_name(index) == "pcp::select_keys" else None


def reads_later_keys(scatter: fx.Node, values: Values) -> tuple[fx.Node, str] | None:
    """What follows from a scatter of a selection and depends on keys after a row's own being in it, and why it may.

    A model's own selection holds some of these where a row sees fewer keys than it may select. Its masks hide them.
    ``None`` when nothing depends on them.
    """
    every, causal = (_overlay(scatter, values, cond) for cond in (p.TRUE, p.ge(_gap(scatter))))
    if isinstance(every, str) or isinstance(causal, str):
        return scatter, str(every)
    for node in every:
        leaves = any(user not in every for user in node.users)
        if leaves and not _alike(every[node], causal.get(node)):
            return node, "keys after a row's own have to be hidden from it, whether they are selected or not"
    return None


def _alike(one: IndexValue, other: IndexValue | None) -> bool:
    """Equal, or float masks that hide the same by whatever numbers."""
    return other is not None and (one == other or (shown(one) is not None and shown(one) == shown(other)))


def _gap(scatter: fx.Node) -> p.Lin:
    """Row minus key."""
    held = meta.tensor(scatter)
    assert held is not None
    return p.combine(p.index(held.dim() - 2), p.index(held.dim() - 1), -1)


def _near(scatter: fx.Node) -> p.Cond:
    return p.ge(p.combine(p.constant(_WINDOW), _gap(scatter), -1))


def _overlay(scatter: fx.Node, values: Values, cond: p.Cond) -> dict[fx.Node, IndexValue] | str:
    """Closed forms of a scatter and all that follows from it, if just the keys of ``cond`` were selected."""
    held = meta.tensor(scatter)
    base, dim = (rules.named_argument(scatter, name) for name in ("self", "dim"))
    index = meta.tensor(rules.named_argument(scatter, "index"))
    assert held is not None and index is not None
    selected = _value_of(rules.named_argument(scatter, "value"), values)
    other = _value_of(base, values)
    if held.dim() < 2 or dim not in (-1, held.dim() - 1) or selected is None or other is None or selected == other:
        return f"%{scatter.name} does not mark keys by one value in a tensor of another"
    rows = [*held.shape[:-1]], [*index.shape[:-1]]
    if len(rows[0]) != len(rows[1]) or not all(map(fakes.same_size, *rows)):
        return f"%{scatter.name} marks keys in {rows[1]} of {rows[0]} rows"
    if rules.named_argument(scatter, "reduce") is not None:
        return f"%{scatter.name} reduces what it marks with what was there"
    expr: p.Expr
    if held.dtype == torch.bool:
        expr = cond if selected else p.negate(cond)
    else:
        expr = p.choose(cond, p.constant(selected), p.constant(other))
    overlay = {scatter: IndexValue(sizes(held), expr)}
    merged = ChainMap(overlay, values)  # type: ignore[arg-type]
    waiting = list(scatter.users)
    while waiting:
        node = waiting.pop()
        if node in merged:
            continue
        value = transfer(node, merged) if _is_in_place(node, overlay) else None
        if value is not None:
            overlay[node] = value
            waiting += list(node.users)
    return overlay


def _is_in_place(node: fx.Node, overlay: dict[fx.Node, IndexValue]) -> bool:
    """Whether each row and key of a result follows from the same row and key of the operands."""
    held = meta.tensor(node)
    operands = [overlay[one].shape for one in node.all_input_nodes if one in overlay]
    return (
        held is not None and rules.op_name(node) in _IN_PLACE and {one[-2:] for one in operands} == {sizes(held)[-2:]}
    )


def _value_of(found: Any, values: Values) -> float | None:
    """A number or truth value, or the only element of a tensor that has one."""
    if isinstance(found, bool):
        return float(found)
    if isinstance(found, fx.Node) and found in values and values[found].expr in (p.TRUE, p.FALSE):
        return float(values[found].expr == p.TRUE)
    return number_of(found, values)


def match_selected(node: fx.Node, matcher: Matcher, marked: Marked) -> Attention | str | None:
    """Attention under a mask that comes from ``marked``; ``None`` when it does not, a string when it differs."""
    masks = _masks_of(node, marked)
    if not masks:
        return None
    every, near = (matcher(node, held) for held in (marked.every, marked.near))
    for one in (every, near):
        if not isinstance(one, Attention):
            return one or "it is no attention"
    if every.visible != _CAUSAL:
        return f"with every key selected a row sees {every.visible}; required the keys up to its own"
    if near.visible != Visible(_WINDOW, 0):
        return f"its mask %{marked.scatter.name} does not show the selected keys alone: near ones give {near.visible}"
    shows = [mask for mask in masks if not _hides_the_rest(mask, marked)]
    if shows:
        return f"its mask %{shows[0].name} does not show the selected keys alone: without any it is not closed"
    if every.softcap or every.slopes is not None:
        return "it has a soft cap or ALiBi, which sparse attention has not"
    queries = meta.tensor(every.q)
    if queries is None or queries.dim() != 4:
        return "its operands have no batch dimension"
    selected = meta.tensor(marked.selection)
    if selected is None or not fakes.same_size(selected.shape[0], queries.shape[0]):
        return "its batch is not that of the selection"
    if every.keys_last:
        return "its keys are kept with channels before tokens"
    return every  # type: ignore[no-any-return]


def _masks_of(node: fx.Node, marked: Marked) -> list[fx.Node]:
    """What follows from the scatter and is read by the attention, or by one of the ops between its products."""
    overlay, values = marked.every.maps  # type: ignore[attr-defined]
    masks: dict[fx.Node, None] = {}
    seen, waiting = {node}, [node]
    while waiting:
        for one in waiting.pop().all_input_nodes:
            held = meta.tensor(one)
            if one in overlay:
                masks[one] = None
            elif held is not None and _is_square(held) and one not in values and one not in seen:
                seen.add(one)
                waiting.append(one)
    return list(masks)


def _hides_the_rest(mask: fx.Node, marked: Marked) -> bool:
    """Whether a mask that shows the causal keys, if every key is selected, shows none of them if none is."""
    held = meta.tensor(mask)
    half = held is not None and held.dtype == torch.float16
    every, none = (shown(one[mask], half=half) if mask in one else None for one in (marked.every, marked.none))
    if every is None or none is None:
        return False
    rank = marked.every[mask].rank
    causal = p.ge(p.combine(p.index(rank - 2), p.index(rank - 1), -1))
    if every not in (p.TRUE, causal):  # then a true element hides
        if every not in (p.FALSE, p.negate(causal)):
            return False
        none = p.negate(none)
    return p.all_of((none, causal)) == p.FALSE


def _is_square(held: torch.Tensor) -> bool:
    return held.dim() >= 2 and isinstance(held.shape[-1], torch.SymInt) and isinstance(held.shape[-2], torch.SymInt)
