# SPDX-License-Identifier: Apache-2.0
"""What a rewritten graph costs a rank, counted node by node and filed under the module that made the node."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from pcp_passes.aten.costs import bytes_of, flops_of, hint, is_product
from pcp_passes.aten.decision import REPLICATE, operands, tensor_of
from pcp_passes.collectives import is_collective
from pcp_passes.inspection.attention import Sight
from pcp_passes.inspection.indexers import ATTENDS, SELECT, Indexer, gathered_keys, read_indexer, selection_of
from pcp_passes.inspection.layers import LayerStack
from pcp_passes.ir import meta, rules
from pcp_passes.ir.placements import RankMajor
from pcp_passes.passes.pipeline import Event
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.lower_restores import LowerRestores
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements, effective

Category = Literal["sharded", "repeated", "fallback", "chosen", "replicated", "moving"]
CATEGORIES: tuple[Category, ...] = ("sharded", "repeated", "fallback", "chosen", "replicated", "moving")
"""Why a rank runs a node: on its own rows; whole because of a gather choice; whole because an op mixes tokens; for
chosen tokens alone, as the last one; whole because it has no token rows (positions, masks, weights); packing, ordering
and unpacking of what is gathered."""

_CHOOSES = ("aten::slice", "aten::select", "aten::index_select", "aten::index", "aten::narrow")

_ATTENTIONS = ("pcp::attend", "aten::scaled_dot_product_attention", *ATTENDS)

_BOUNDS = (("left", -1), ("right", 0), ("chunk", 0))
"""Options of ``pcp::attend``, with their defaults."""

Place = tuple[int | None, str]
"""Number of the captured layer (``None`` outside all layers), and the module path within it."""


@dataclass(frozen=True)
class Cost:
    """Floating-point operations.

    Attributes:
        products: of matrix products and attention, a multiply and an add being two; masks skip nothing.
        elements: of everything else, one for each element of the result.
    """

    products: int = 0
    elements: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.products + other.products, self.elements + other.elements)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.products * times, self.elements * times)


def cost_of(node: fx.Node) -> Cost:
    """Cost of one call, symbols at their hints."""
    operations = flops_of(node)
    return Cost(products=operations) if is_product(node) else Cost(elements=operations)


@dataclass(frozen=True)
class Gather:
    """One collective.

    Attributes:
        sent: bytes a rank contributes.
        rows: whether it is all M rows of a rank, and not a chosen few.
    """

    place: Place
    op: str
    dtype: str
    sent: int
    rows: bool


@dataclass(frozen=True)
class Attend:
    """One attention.

    Attributes:
        pair: cost of one pair of a query and a key, all heads together.
        keys: of each query, as its cost counts them: all, or those that are selected.
        rows: number of queries of a rank.
        local: whether they are the rank's rows; else every rank runs the same ones.
    """

    place: Place
    sight: Sight
    pair: int
    keys: int
    rows: int
    local: bool


@dataclass(frozen=True)
class Selecting:
    """A layer that selects keys, or attends to a selection of another layer (``full`` is false).

    Attributes:
        gathered: bytes of a token's index key that ranks exchange.
    """

    place: Place
    full: bool
    indexer: Indexer
    gathered: int = 0


@dataclass(frozen=True)
class Fallback:
    """An op that runs whole on every rank because it mixes tokens.

    Attributes:
        gathered: bytes of its operands that must be restored for it, all ranks together.
    """

    place: Place
    node: str
    op: str
    module: str
    source: str
    reason: str
    gathered: int
    cost: Cost


@dataclass
class Ledger:
    """Filled by the pipeline, as an observer of it, and by :meth:`close`.

    Attributes:
        stack: tells layers apart in module paths.
        whole: cost of all tokens on one rank, by place.
        ranks: cost of one rank of the rewritten graph, by place and category.
        places: where each node of the graph of all tokens is filed, by its name.
        live_whole, live: bytes of the largest set of values that are needed at one time, without inputs.
    """

    stack: LayerStack
    whole: dict[Place, Cost] = field(default_factory=lambda: defaultdict(Cost))
    ranks: dict[Place, dict[Category, Cost]] = field(default_factory=lambda: defaultdict(dict))
    gathers: list[Gather] = field(default_factory=list)
    attends: list[Attend] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    selects: list[Selecting] = field(default_factory=list)
    live_whole: int = 0
    live: int = 0
    places: dict[str, Place] = field(default_factory=dict)
    _placed: dict[str, Category] = field(default_factory=dict)
    _layer_of_input: dict[str, int] = field(default_factory=dict)

    def observe(self, event: Event) -> None:
        """The graph of all tokens is read when every value has its placement, the graph of a rank at the end."""
        if event.name == PropagatePlacements.name:
            self._read_placed(event.graph)
        if event.last:
            self._read_rank(event.graph)

    def name_inputs(self, sources: Mapping[str, str]) -> None:
        """Say which input of the graph is which parameter, as ``placeholder name -> dotted name``."""
        for name, source in sources.items():
            number = self.stack.number_in(source)
            if number is not None:
                self._layer_of_input[name] = number

    def place(self, node: fx.Node) -> Place:
        """Where a node is filed: by its module; one that names none, by the layer whose parameter it reads."""
        path = meta.module_path(node)
        number = self.stack.number_in(path)
        if number is not None:
            return number, self.stack.within(path)
        for source in node.all_input_nodes:
            if source.name in self._layer_of_input:
                return self._layer_of_input[source.name], ""
        return None, path

    def _read_placed(self, graph: fx.Graph) -> None:
        whole: dict[fx.Node, Category] = {}
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            place = self.places[node.name] = self.place(node)
            self.whole[place] += cost_of(node)
            if any(where != REPLICATE for where in meta.placements(node)):
                self._placed[node.name] = "sharded"
                continue
            reason = meta.info(node).reason
            self._placed[node.name] = whole[node] = _why_whole(node, reason, whole)
            if reason and whole[node] == "fallback":
                self.fallbacks.append(self._fallback(node, reason))
        self.live_whole = peak_live_bytes(graph)

    def _fallback(self, node: fx.Node, reason: str) -> Fallback:
        moved = {source for source in operands(node) if effective(source) != REPLICATE}
        return Fallback(
            self.place(node), node.name, rules.op_name(node), meta.module_path(node), meta.source_line(node), reason,
            sum(map(bytes_of, moved)), cost_of(node),
        )  # fmt: skip

    def _read_rank(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            place, category = self.place(node), self.category(node)
            held = self.ranks[place]
            held[category] = held.get(category, Cost()) + cost_of(node)
            if is_collective(node):
                self.gathers.append(self._gather(node, place))
            elif rules.op_name(node) in _ATTENTIONS:
                self.attends.append(self._attend(node, place, category == "sharded"))
            self._note_selection(node, place)
        self.live = peak_live_bytes(graph)

    def category(self, node: fx.Node) -> Category:
        """Why a rank runs a node of the rewritten graph."""
        known = meta.info(node)
        if known.created_by == LowerRestores.name:
            return "moving"
        if any(where != REPLICATE for where in meta.placements(node)):
            return "moving" if isinstance(known.placement, RankMajor) else "sharded"
        before = self._placed.get(node.name)
        if before is None:
            # The whole version of a value that is needed on rows as well; sizes and numbers cost nothing.
            return "repeated" if known.created_by == InsertReshards.name else "replicated"
        return "repeated" if before == "sharded" else before

    def _gather(self, node: fx.Node, place: Place) -> Gather:
        operand: Any = node.args[0]
        held = tensor_of(operand)
        dtype = str(held.dtype).removeprefix("torch.")
        return Gather(place, rules.op_name(node), dtype, bytes_of(operand), isinstance(held.shape[0], torch.SymInt))

    def _attend(self, node: fx.Node, place: Place, local: bool) -> Attend:
        q, k = (tensor_of(one).shape for one in operands(node)[:2])
        rows, keys = hint(q[-2]), hint(k[-2])
        name, options = rules.op_name(node), node.kwargs
        if name in ATTENDS:
            selection = selection_of(node)
            topk = read_indexer(selection).topk if selection is not None else keys
            keys, sight = min(keys, topk), Sight(right=0, topk=topk)
        elif name == "pcp::attend":
            left, right, chunk = (_integer(options.get(key, base)) for key, base in _BOUNDS)
            sight = Sight(left, right, chunk)
        else:
            sight = Sight(explicit=True)
        return Attend(place, sight, flops_of(node) // (rows * keys), keys, rows, local)

    def _note_selection(self, node: fx.Node, place: Place) -> None:
        name = rules.op_name(node)
        if name == SELECT:
            self.selects.append(Selecting(place, True, read_indexer(node), gathered_keys(node)))
            return
        selection = selection_of(node) if name in ATTENDS else None
        if selection is not None and self.place(selection)[0] != place[0]:
            self.selects.append(Selecting(place, False, read_indexer(selection)))


def _why_whole(node: fx.Node, reason: str | None, known: Mapping[fx.Node, Category]) -> Category:
    """Why a node is replicated, given why its operands are."""
    sources = {known[source] for source in node.all_input_nodes if source in known}
    few = not any(isinstance(size, torch.SymInt) for held in meta.tensors(node) for size in held.shape)
    if few and "fallback" not in sources and ("chosen" in sources or (reason and rules.op_name(node) in _CHOOSES)):
        return "chosen"
    return "fallback" if reason or sources & {"fallback", "chosen"} else "replicated"


def _integer(found: Any) -> int:
    assert isinstance(found, int), f"{found} is no constant"
    return found


def peak_live_bytes(graph: fx.Graph) -> int:
    """Bytes of the largest set of values that must exist at one time when the graph runs node by node.

    Inputs are left out. A view holds its base; ``reshape`` is taken for one. An upper bound for a compiler that fuses.
    """
    base: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _viewed(node)
        base[node] = base[source] if source is not None else node
        for operand in node.all_input_nodes:
            last[base[operand]] = node
    ends: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, end in last.items():
        ends[end].append(node)
    live = peak = 0
    for node in graph.nodes:
        made = base[node] is node and node.op == "call_function"
        live += bytes_of(node) if made else 0
        peak = max(peak, live)
        live -= sum(bytes_of(done) for done in ends[node] if done.op == "call_function")
        if made and node not in last:
            live -= bytes_of(node)
    return peak


def _viewed(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the node's value is."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return node.args[0]
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.returns:
        return None
    alias = target._schema.returns[0].alias_info
    return node.args[0] if alias is not None and not alias.is_write else None
