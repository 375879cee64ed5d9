# SPDX-License-Identifier: Apache-2.0
"""normalize: one spelling for what says the same, and nothing that only keeps dead values alive."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from pcp_passes.aten.decision import argument, expression, multiple
from pcp_passes.aten.plan_inputs import plan_inputs
from pcp_passes.ir import meta
from pcp_passes.ir.places import behind
from pcp_passes.passes.base import PassContext, PassResult

_ATEN: Any = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)
_LIKE_OPERAND = {
    _ATEN.new_zeros.default: _ATEN.zeros.default,
    _ATEN.new_ones.default: _ATEN.ones.default,
    _ATEN.new_empty.default: _ATEN.empty.memory_format,
    _ATEN.new_full.default: _ATEN.full.default,
}
_DROPPED = (_ATEN._assert_tensor_metadata.default,)


@dataclass(frozen=True)
class Normalize:
    """Spell equal things equally, and drop assertions about metadata.

    Why: assertions keep dead chains alive; a ``view`` needs strides that a restored operand need not have; a
    ``new_zeros`` reads only the dtype of its operand, which would tie it to that operand's rows; and a size read from
    an activation would be the number of *local* rows.

    Before::

        %view : f32[sT, 64] = aten.view(%x, [-1, 64])
        %new_ones : b8[sT, sT] = aten.new_ones(%x, [%sym_size_int, %sym_size_int], dtype=b8, pin_memory=False)

    After::

        %view : f32[sT, 64] = aten.reshape(%x, [-1, 64])
        %new_ones : b8[sT, sT] = aten.ones([%sym_size_int_1, %sym_size_int_1], dtype=b8, device=cpu, pin_memory=False)
    """

    name: ClassVar[str] = "normalize"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return normalize(graph)


def normalize(graph: fx.Graph) -> PassResult:
    """Normalise every node; shapes and values stay as they are, strides of views may not."""
    count = 0
    for node in list(graph.nodes):
        if node.target in _DROPPED:
            graph.erase_node(node)
        elif node.target is _ATEN.dropout.default and not (argument(node, "p") and argument(node, "train")):
            node.replace_all_uses_with(node.args[0])  # fx takes it for impure and would keep it
            graph.erase_node(node)
        elif _takes_all(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _VIEWS:
            node.target = _ATEN.reshape.default
        elif node.target in _LIKE_OPERAND:
            _forget_operand(node)
        elif node.target is _ATEN.type_as.default:
            held = meta.tensor(node)
            node.target, node.args, node.kwargs = _ATEN._to_copy.default, node.args[:1], {"dtype": held.dtype}  # type: ignore[union-attr]
        else:
            continue
        count += 1
    count += _one_count(graph)
    count += _first_tokens(graph)
    graph.eliminate_dead_code()
    return PassResult(count, () if count else ("every node was normal",))


def _takes_all(node: fx.Node) -> bool:
    """Whether a slice is its operand: it would hide what it slices from whoever looks for that."""
    if node.target is not _ATEN.slice.Tensor or argument(node, "start") not in (0, None) or argument(node, "step") != 1:
        return False
    source, own = meta.tensor(node.args[0]), meta.tensor(node)
    return (
        source is not None
        and own is not None
        and list(map(expression, source.shape)) == list(map(expression, own.shape))
    )


def _forget_operand(node: fx.Node) -> None:
    held = meta.tensor(node)
    assert held is not None, f"%{node.name} creates no tensor"
    kept = {key: value for key, value in node.kwargs.items() if key in ("pin_memory", "layout")}
    node.target = _LIKE_OPERAND[node.target]
    node.args = node.args[1:]
    node.kwargs = {"dtype": held.dtype, "device": held.device, **kept}


def _one_count(graph: fx.Graph) -> int:
    """Sizes that are a multiple of the token count are computed from the plan, not read from an activation."""
    plan = plan_inputs(graph)
    source: fx.Node | None = None
    made: dict[int, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.target is not _ATEN.sym_size.int or node.args[0] is plan.restore:
            continue
        times = multiple(meta.value(node), plan.tokens)
        if times is None:
            continue
        if source is None:
            source = _behind(graph, _ATEN.sym_size.int, plan.restore, 0, meta.value(plan.restore).shape[0])
        if times not in made:
            made[times] = source if times == 1 else _behind(graph, operator.mul, source, times, meta.value(node))
        node.replace_all_uses_with(made[times])
        graph.erase_node(node)
        count += 1
    return count


def _first_tokens(graph: fx.Graph) -> int:
    """``x[:, :T]`` of a padded length has T rows, which a slice's size does not say: it could be shorter.

    That it is not becomes a guard of the graph's environment, for whoever runs the graph to evaluate.
    """
    plan = plan_inputs(graph)
    count = 0
    for node in graph.nodes:
        if node.target is not _ATEN.slice.Tensor or len(node.args) < 4:
            continue
        source, dim, start, end = node.args[:4]
        held = meta.tensor(source)
        told = isinstance(end, fx.Node) and multiple(meta.value(end), plan.tokens) == 1
        if held is None or not told or start not in (0, None) or argument(node, "step") != 1:
            continue
        dim = dim % held.dim()
        known = meta.tensor(node)
        if (
            known is None
            or multiple(known.shape[dim], plan.tokens) == 1
            or not bool(held.shape[dim] >= meta.value(end))
        ):
            continue
        node.target, node.args = _ATEN.narrow.default, (source, dim, 0, end)
        meta.set_value(node, held.narrow(dim, 0, meta.value(end)))
        count += 1
    return count


def _behind(graph: fx.Graph, target: Any, source: fx.Node, argument: int, value: object) -> fx.Node:
    with graph.inserting_before(behind(source)):
        node = graph.call_function(target, (source, argument))
    meta.set_aten_value(node, value)
    return node
