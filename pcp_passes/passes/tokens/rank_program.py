# SPDX-License-Identifier: Apache-2.0
"""Which versions of each value a rank needs: its rows, the whole, or both. Analysis only; nothing is changed."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pcp_passes.aten import table
from pcp_passes.aten.decision import REPLICATE, Local, operands
from pcp_passes.aten.experts import LocalIota
from pcp_passes.aten.gather_points import Choice, choose
from pcp_passes.aten.local_forms import counts_tokens, local_form
from pcp_passes.aten.picks import Pick, pick_of
from pcp_passes.aten.plan_inputs import PlanInputs
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement
from pcp_passes.passes.tokens.propagate_placements import call_of, effective


@dataclass
class RankProgram:
    """The versions of every value.

    Attributes:
        plan: the graph's plan inputs.
        local: nodes that run on rows, with what they need.
        choices: what is gathered for what.
        need_rows: per node, the placements in which its rows are wanted.
        need_whole: nodes whose whole value is wanted.
        moved: replicated nodes that run on rows because only rows of them are wanted, with what they need.
        whole_outputs: whether outputs of token rows are restored.
    """

    plan: PlanInputs
    whole_outputs: bool
    local: dict[fx.Node, Local] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    need_rows: dict[fx.Node, dict[Placement, None]] = field(default_factory=lambda: defaultdict(dict))
    need_whole: set[fx.Node] = field(default_factory=set)
    moved: dict[fx.Node, Local] = field(default_factory=dict)
    computed_whole: set[fx.Node] = field(default_factory=set)

    @classmethod
    def of(cls, graph: fx.Graph, plan: PlanInputs, balance: float, whole_outputs: bool) -> RankProgram:
        """Analyse a placed graph."""
        program = cls(plan, whole_outputs)
        # One look at each node: choices and requirements below only read these decisions.
        for node in graph.nodes:
            found = program._decide(node)
            if found is not None:
                program.local[node] = found
        wanted = list(dict.fromkeys(program._wanted_whole(graph)))
        program.choices = choose(wanted, program.is_local, balance)
        program.computed_whole = {node for choice in program.choices for node in choice.recomputed}
        for node in reversed(graph.nodes):
            program._require(node)
        return program

    def is_local(self, node: fx.Node) -> bool:
        """Whether the node's value is on rows, as placed."""
        return node in self.local or node is self.plan.rows

    def needs(self, node: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
        """Operands of a node as placed, in order, each with the placement it must have."""
        if node.op == "output":
            for operand in operands(node):
                yield operand, REPLICATE if self.whole_outputs else effective(operand)
        elif node in self.local:
            yield from zip(operands(node), self.local[node].needs, strict=True)
        elif self.pick(node) is not None:
            yield from ((operand, effective(operand)) for operand in operands(node))
        else:
            for operand in operands(node):
                yield operand, REPLICATE

    def pick(self, node: fx.Node) -> Pick | None:
        """How a replicated node takes a fixed number of tokens from a value on rows, if that is what it does."""
        if node.op != "call_function" or node in self.local or len(operands(node)) != 1:
            return None
        source = operands(node)[0]
        return pick_of(node, effective(source)) if self.is_local(source) else None

    def _decide(self, node: fx.Node) -> Local | None:
        if node.op != "call_function" or meta.info(node).reason:
            return None
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            held = meta.info(node).placement
            return Local(held, (effective(source),)) if source in self.local and held is not None else None
        call = call_of(node, self.plan)
        if all(where == REPLICATE for where in call.placed):
            return None
        found = table.decide(call)
        assert isinstance(found, Local), f"%{node.name} was placed on rows, but {found}"
        return found

    def _wanted_whole(self, graph: fx.Graph) -> Iterator[fx.Node]:
        for node in graph.nodes:
            for operand, need in self.needs(node):
                if self.is_local(operand) and not isinstance(need, LocalIota) and need != effective(operand):
                    yield operand

    def _require(self, node: fx.Node) -> None:
        """Turn what is wanted of a node into what is wanted of its operands; consumers have been seen before."""
        if node.op == "output":
            self._ask(self.needs(node))
        elif node in self.local:
            self._require_local(node)
        elif node.op == "call_function":
            self._require_whole(node)

    def _require_local(self, node: fx.Node) -> None:
        if node in self.need_whole:
            if node in self.computed_whole:
                self._ask((operand, REPLICATE) for operand in operands(node))
            else:
                self.need_rows[node][effective(node)] = None
        if self.need_rows[node]:
            self._ask(self.needs(node))

    def _require_whole(self, node: fx.Node) -> None:
        rows = list(self.need_rows[node])
        several = meta.tensor(node) is None
        if rows and (several or (len(rows) == 1 and node not in self.need_whole)):
            found = self._move(node, rows[0])
            if found is not None:
                self.moved[node] = found
                self._ask(zip(operands(node), found.needs, strict=True))
                rows = []
        if rows:
            self.need_whole.add(node)
        if node in self.need_whole:
            self._ask(self.needs(node))

    def _move(self, node: fx.Node, wanted: Placement) -> Local | None:
        if counts_tokens(node, self.plan):
            return None  # the plan has these rows
        if node.target is operator.getitem:
            source: Any = node.args[0]
            alone = set(self.need_rows[source]) <= {wanted}
            found = alone and local_form(source, wanted, self.plan) is not None
            return Local(wanted, (wanted,)) if found else None
        return local_form(node, wanted, self.plan)

    def _ask(self, wants: Any) -> None:
        for operand, need in wants:
            if isinstance(need, LocalIota):
                continue
            if need == REPLICATE:
                self.need_whole.add(operand)
                continue
            self.need_rows[operand][need] = None
            if operand in self.local and need != effective(operand):
                self.need_whole.add(operand)
