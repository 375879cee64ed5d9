# SPDX-License-Identifier: Apache-2.0
"""Masks that show the selected keys alone, and attention under them. Nothing here changes a graph.

A selection becomes a mask by a scatter of one value into a tensor of another, and the mask is joined to the causal one
by whatever ops the model likes. They act element by element, so two questions to the index algebra tell what they do:
if every key were selected, is the mask causal? If the keys ``i - j <= n`` were, does a row see these of its causal keys
and no other? Then a row sees a key iff it is causal *and* selected, whichever keys are selected.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import meta, rules
from pcp_passes.ir import predicates as p
from pcp_passes.ir.index.algebra import transfer
from pcp_passes.ir.index.ops import Values, sizes
from pcp_passes.ir.index.values import IndexValue, Visible, shown
from pcp_passes.passes.tokens.match_attention import Attention
from pcp_passes.passes.tokens.match_bias import number_of

_WINDOW = 5
_THROUGH = ("aten::_to_copy", "aten::to", "aten::clamp_min", "aten::reshape", "aten::unsqueeze", "aten::squeeze")
_CAUSAL = Visible(right=0)

Matcher = Any
"""``matcher(node, values) -> Attention | str | None``."""


@dataclass(frozen=True)
class Marked:
    """A scatter that marks the keys a selection holds.

    Attributes:
        scatter: ``[B, T, T]``.
        selection: the ``pcp::select_keys`` that made its index.
        every, near: closed forms of what follows it, if every key were selected, and if the nearest were.
    """

    scatter: fx.Node
    selection: fx.Node
    every: Values
    near: Values


def marks(graph: fx.Graph, values: Values) -> Iterator[Marked | tuple[fx.Node, str]]:
    """Every scatter of a selection; one that cannot be read comes with the reason."""
    for node in graph.nodes:
        if rules.op_name(node) != "aten::scatter":
            continue
        selection = _selection(rules.named_argument(node, "index"))
        if selection is None:
            continue
        found = [_overlay(node, values, cond) for cond in (p.TRUE, _near(node))]
        reason = next((one for one in found if isinstance(one, str)), None)
        if reason is not None:
            yield node, reason
            continue
        every, near = (ChainMap(one, values) for one in found)  # type: ignore[arg-type]
        yield Marked(node, selection, every, near)


def _selection(index: Any) -> fx.Node | None:
    while isinstance(index, fx.Node) and rules.op_name(index) in _THROUGH:
        index = index.args[0]
    return index if isinstance(index, fx.Node) and rules.op_name(index) == "pcp::select_keys" else None


def reads_later_keys(scatter: fx.Node, values: Values) -> fx.Node | None:
    """What follows from a scatter of a selection and depends on keys after a row's own being in it; else ``None``.

    A model's own selection holds some of these where a row sees fewer keys than it may select. Its masks hide them.
    """
    overlays = [_overlay(scatter, values, cond) for cond in (p.TRUE, p.ge(_gap(scatter)))]
    every, causal = (one if not isinstance(one, str) else {} for one in overlays)
    for node in every:
        leaves = any(user not in every and user.op != "output" for user in node.users)
        if leaves and not _alike(every[node], causal.get(node)):
            return node
    return None if every else scatter


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
    assert held is not None
    selected = _value_of(rules.named_argument(scatter, "value"), values)
    other = _value_of(base, values)
    if held.dim() < 2 or dim not in (-1, held.dim() - 1) or selected is None or other is None or selected == other:
        return f"%{scatter.name} does not mark keys by one value in a tensor of another"
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
        value = transfer(node, merged) if node.op == "call_function" else None
        if value is not None:
            overlay[node] = value
            waiting += list(node.users)
    return overlay


def _value_of(found: Any, values: Values) -> float | None:
    """A number or truth value, or the only element of a tensor that has one."""
    if isinstance(found, bool):
        return float(found)
    if isinstance(found, fx.Node) and found in values and values[found].expr in (p.TRUE, p.FALSE):
        return float(values[found].expr == p.TRUE)
    return number_of(found, values)


def match_selected(node: fx.Node, matcher: Matcher, marked: Marked) -> Attention | str | None:
    """Attention under a mask that comes from ``marked``; ``None`` when it does not, a string when it differs."""
    if not _reads(node, marked):
        return None
    every, near = (matcher(node, held) for held in (marked.every, marked.near))
    for one in (every, near):
        if not isinstance(one, Attention):
            return one or "it is no attention"
    if every.visible != _CAUSAL:
        return f"with every key selected a row sees {every.visible}; required the keys up to its own"
    if near.visible != Visible(_WINDOW, 0):
        return f"its mask %{marked.scatter.name} does not show the selected keys alone: near ones give {near.visible}"
    if every.softcap or every.slopes is not None:
        return "it has a soft cap or ALiBi, which sparse attention has not"
    queries = meta.tensor(every.q)
    if queries is None or queries.dim() != 4:
        return "its operands have no batch dimension"
    if every.keys_last:
        return "its keys are kept with channels before tokens"
    return every  # type: ignore[no-any-return]


def _reads(node: fx.Node, marked: Marked) -> bool:
    """Whether the mask, or one of the ops between products, follows from the scatter."""
    overlay = marked.every.maps[0]  # type: ignore[attr-defined]
    seen = [node]
    for _ in range(24):
        if not seen:
            return False
        at = seen.pop(0)
        for one in at.all_input_nodes:
            if one in overlay:
                return True
            held, own = meta.tensor(one), meta.tensor(node)
            if held is not None and own is not None and _is_square(held):
                seen.append(one)
    return False


def _is_square(held: torch.Tensor) -> bool:
    return held.dim() >= 2 and isinstance(held.shape[-1], torch.SymInt) and isinstance(held.shape[-2], torch.SymInt)
