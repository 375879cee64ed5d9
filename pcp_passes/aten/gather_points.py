# SPDX-License-Identifier: Apache-2.0
"""Where to gather: the cheapest set of values from which everything that is needed whole can be had.

A value needed whole can be restored (its bytes travel), or computed on every rank from operands that are whole (its
operations are repeated). For MLA the keys and values of all heads are wide and come from a narrow latent: gathering
the latent and repeating one projection moves a fraction of the bytes. For grouped-query attention it is the other way
round.

One operation counts as ``1 / balance`` bytes. With two yes-no questions for each value ``u``, "is it whole?" (``a``)
and "is it computed whole?" (``c``), the costs are

* ``bytes(u)`` when ``a`` and not ``c`` (it is restored),
* ``operations(u) / balance`` when ``c``, and then ``a`` of each operand,

which is a minimum cut: an edge from ``a`` to ``c``, one from ``c`` to the sink, and unbounded ones from ``c`` to the
operands' ``a``. (The "project selection" form of max-flow min-cut; Kleinberg and Tardos, Algorithm Design, 7.11.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import networkx
from torch import fx

from pcp_passes.aten.costs import bytes_of, flops_of
from pcp_passes.aten.decision import operands
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Shard

BALANCE = {"cpu": 32.0, "cuda": 1000.0, "meta": 1000.0}
"""Operations in the time a byte takes to reach the other ranks: a CPU core over loopback; a data-centre GPU (about
400 TFLOP/s of bf16 achieved, over 400 GB/s of links)."""

_OVERHEAD = 0.01
"""Bytes that an operation's result counts for when it is computed again, so that equal cuts prefer the later one."""


@dataclass(frozen=True)
class Choice:
    """One decision: what is gathered for what.

    Attributes:
        wanted: values needed whole.
        gathered: values that are restored.
        recomputed: values computed whole from them.
    """

    wanted: tuple[fx.Node, ...]
    gathered: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]

    @property
    def moved(self) -> int:
        """Bytes of the gathered values, all ranks together."""
        return sum(map(bytes_of, self.gathered))

    @property
    def avoided(self) -> int:
        """Bytes that gathering the wanted values themselves would have moved."""
        return sum(map(bytes_of, self.wanted))

    @property
    def repeated(self) -> int:
        """Operations that every rank repeats for it."""
        return sum(map(flops_of, self.recomputed))

    def __str__(self) -> str:
        names = ", ".join(f"%{node.name}" for node in self.gathered) or "nothing"
        if not self.recomputed:
            return f"gathers {names}: {self.moved:,} bytes"
        wanted = ", ".join(f"%{node.name}" for node in self.wanted)
        return (
            f"gathers {names}: {self.moved:,} bytes instead of {self.avoided:,} for {wanted}, "
            f"and repeats {self.repeated:,} operations"
        )


def choose(wanted: Iterable[fx.Node], is_local: Callable[[fx.Node], bool], balance: float) -> list[Choice]:
    """Choose for all values needed whole; independent groups are decided apart.

    Args:
        wanted: values on rows that something needs whole, in graph order.
        is_local: whether a node's value is on rows; any other is whole already.
        balance: operations that one byte is worth.
    """
    groups: list[tuple[list[fx.Node], dict[fx.Node, None]]] = []
    for node in wanted:
        cone = _cone(node, is_local, balance)
        members = [node]
        for group in [g for g in groups if not g[1].keys().isdisjoint(cone)]:
            groups.remove(group)
            members = group[0] + members
            cone = group[1] | cone
        groups.append((members, cone))
    return [_cut(members, cone, is_local, balance) for members, cone in groups]


def _cone(node: fx.Node, is_local: Callable[[fx.Node], bool], balance: float) -> dict[fx.Node, None]:
    """What could be computed whole for ``node`` before that costs more than restoring it.

    A path is charged for the other operands on its way as well: at a residual addition it would need a hidden state,
    and so it ends there instead of running through all layers.
    """
    budget = float(bytes_of(node))
    spent: dict[fx.Node, float] = {node: _repeat(node, balance)}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if spent[current] > budget and can_restore(current):
            continue
        needed = {operand: _least(operand, balance) for operand in operands(current) if is_local(operand)}
        for operand in needed:
            others = sum(least for other, least in needed.items() if other is not operand)
            cost = spent[current] + others + _repeat(operand, balance)
            if cost < spent.get(operand, math.inf):
                spent[operand] = cost
                waiting.append(operand)
    return dict.fromkeys(spent)


def can_restore(node: fx.Node) -> bool:
    """Whether a value on rows can be put in global order: one tensor, and not tied to a sort of local rows."""
    held = meta.info(node)
    return meta.tensor(node) is not None and isinstance(held.rows or held.placement, Shard)


def _least(node: fx.Node, balance: float) -> float:
    """The least that having a value whole can cost."""
    return min(bytes_of(node), _repeat(node, balance)) if can_restore(node) else 0.0


def _repeat(node: fx.Node, balance: float) -> float:
    return math.inf if node.op == "placeholder" else flops_of(node) / balance + _OVERHEAD * bytes_of(node) + 1.0


def _cut(wanted: list[fx.Node], cone: Iterable[fx.Node], is_local: Callable[[fx.Node], bool], balance: float) -> Choice:
    flow = networkx.DiGraph()
    members = set(cone)
    for node in members:
        flow.add_edge(("a", node), ("c", node), **({"capacity": bytes_of(node)} if can_restore(node) else {}))
        repeat = _repeat(node, balance)
        flow.add_edge(("c", node), "sink", **({} if math.isinf(repeat) else {"capacity": repeat}))
        for operand in operands(node):
            if not is_local(operand):
                continue
            flow.add_edge(("c", node), ("a", operand))
            if operand not in members:
                known = {"capacity": bytes_of(operand)} if can_restore(operand) else {}
                flow.add_edge(("a", operand), "sink", **known)
    for node in wanted:
        flow.add_edge("source", ("a", node))
    _, (whole, _) = networkx.minimum_cut(flow, "source", "sink")
    available = {entry[1] for entry in whole if isinstance(entry, tuple) and entry[0] == "a"}
    computed = {entry[1] for entry in whole if isinstance(entry, tuple) and entry[0] == "c"}
    order = sorted(available, key=lambda n: n._sort_key)
    return Choice(tuple(wanted), tuple(n for n in order if n not in computed), tuple(n for n in order if n in computed))
