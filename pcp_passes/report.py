# SPDX-License-Identifier: Apache-2.0
"""What a rewrite did to a body, per attention layer and in total, read from the rewritten graph.

Bytes are given per rank-local token row, since the row count M is known only at run time: a step with M rows a rank
sends ``M * sent`` bytes from each rank and leaves ``M * gathered`` on each, where ``gathered = P * sent``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from pcp_passes.ir import buffers, meta, rules
from pcp_passes.ir.invariants import gather_of
from pcp_passes.ir.markers import marker_rows
from pcp_passes.ir.placements import RankMajor, Replicate, Shard
from pcp_passes.ir.printer import dtype_text
from pcp_passes.passes.base import PassContext

_WHY = {
    "sharded": "row-local under continuous batching: each rank runs its own rows",
    "gathered": "cache rows: every rank attends over the whole prefix",
    "replicated": "no token dimension: weights, tables, scalars",
}


@dataclass(frozen=True)
class CollectiveReport:
    """One collective of one layer. ``row_elements`` and the byte counts are per rank-local row."""

    op: str
    axis: str
    dtype: str
    parts: int
    row_elements: int
    sent: int
    gathered: int


@dataclass(frozen=True)
class LayerReport:
    """One attention layer."""

    layer: str
    module: str
    cache_write: str | None
    attention: str | None
    collectives: tuple[CollectiveReport, ...]
    padding: str

    @property
    def sent(self) -> int:
        """Bytes each rank sends per rank-local row."""
        return sum(c.sent for c in self.collectives)

    @property
    def gathered(self) -> int:
        """Bytes each rank holds after the gathers, per rank-local row."""
        return sum(c.gathered for c in self.collectives)


@dataclass(frozen=True)
class RewriteReport:
    """The whole body.

    Attributes:
        pcp, axis: size and name of the axis.
        layers: one entry per attention layer, in graph order.
        nodes: how many nodes with a tensor value are ``sharded``, ``gathered``, ``replicated``.
        sharded_ops, gathered_ops: op name to number of nodes, most frequent first.
    """

    pcp: int
    axis: str
    layers: tuple[LayerReport, ...]
    nodes: dict[str, int]
    sharded_ops: dict[str, int]
    gathered_ops: dict[str, int]

    @property
    def collectives(self) -> int:
        """Collectives in one step."""
        return sum(len(layer.collectives) for layer in self.layers)

    @property
    def sent(self) -> int:
        """Bytes each rank sends in one step, per rank-local row."""
        return sum(layer.sent for layer in self.layers)

    @property
    def gathered(self) -> int:
        """Bytes each rank receives and keeps in one step, per rank-local row."""
        return sum(layer.gathered for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Plain data: what the dataclasses hold, the totals, and why each class of value is where it is."""
        plain = asdict(self)
        for entry, layer in zip(plain["layers"], self.layers, strict=True):
            entry |= {"sent": layer.sent, "gathered": layer.gathered}
        totals = {"collectives": self.collectives, "sent": self.sent, "gathered": self.gathered}
        return {**plain, "layers": list(plain["layers"]), "totals": totals, "why": dict(_WHY), "unit": "bytes per row"}

    def lines(self) -> Iterator[str]:
        """The report as text, one line at a time."""
        yield f"{self.axis} over {self.pcp} ranks: {self.collectives} collectives a step, {self.gathered} bytes a row"
        for kind, count in self.nodes.items():
            yield f"  {kind:<11}{count:>6} values  {_WHY[kind]}"
        for layer in self.layers:
            yield f"  {layer.layer}: {layer.cache_write or 'no cache write'} > {layer.attention or 'no attention'}"
            for c in layer.collectives:
                kept = f"{c.sent} B sent, {c.gathered} B kept"
                yield f"    {c.op} of {c.parts} parts, {c.row_elements} x {c.dtype} a row: {kept}"
            yield f"    padded rows: {layer.padding}"


def build_report(gm: fx.GraphModule | fx.Graph, ctx: PassContext) -> RewriteReport:
    """Read a rewritten body (lowered or still with markers). O(nodes)."""
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    writes: dict[str, fx.Node] = {}
    attends: dict[str, fx.Node] = {}
    kinds: Counter[str] = Counter(dict.fromkeys(_WHY, 0))
    ops: dict[str, Counter[str]] = {"sharded": Counter(), "gathered": Counter(), "replicated": Counter()}
    for node in graph.nodes:
        rule = rules.rule_of(node)
        layer = meta.info(node).layer or rules.layer_of(node) or node.name
        if isinstance(rule, rules.CacheWrite):
            writes[layer] = node
        if isinstance(rule, rules.LocalQuery):
            attends[layer] = node
        kind = _kind(node)
        if kind:
            kinds[kind] += 1
            ops[kind][rules.op_name(node) or node.op] += 1
    layers = tuple(_layer(name, writes.get(name), attends.get(name), ctx) for name in {**writes, **attends})
    return RewriteReport(
        ctx.pcp, ctx.axis, layers, dict(kinds), dict(ops["sharded"].most_common()), dict(ops["gathered"].most_common())
    )


def _kind(node: fx.Node) -> str | None:
    where = meta.placement(node)
    if isinstance(where, Shard):
        return "sharded"
    if isinstance(where, RankMajor):
        return "gathered"
    return "replicated" if isinstance(where, Replicate) else None


def _layer(name: str, write: fx.Node | None, attend: fx.Node | None, ctx: PassContext) -> LayerReport:
    served = attend or write
    assert served is not None
    return LayerReport(
        layer=name,
        module=meta.module_path(served),
        cache_write=rules.op_name(write) if write else None,
        attention=rules.op_name(attend) if attend else None,
        collectives=tuple(_collectives(write, ctx)) if write else (),
        padding=_padding(attend),
    )


def _collectives(write: fx.Node, ctx: PassContext) -> Iterator[CollectiveReport]:
    rule = rules.rule_of(write)
    assert isinstance(rule, rules.CacheWrite)
    operands = [argument for p in rule.rows if isinstance(argument := rules.argument(write, p), fx.Node)]
    parts = Counter(source for operand in operands if (source := gather_of(operand)) is not None)
    for source, count in parts.items():
        rows = [tensor for row in marker_rows(source) for tensor in meta.tensors(row)]
        elements = sum(math.prod(tensor.shape[1:]) for tensor in rows)
        sent = elements * rows[0].dtype.itemsize
        yield CollectiveReport(
            op=rules.op_name(source), axis=ctx.axis, dtype=dtype_text(rows[0].dtype), parts=count,
            row_elements=elements, sent=sent, gathered=ctx.pcp * sent,
        )  # fmt: skip


def _padding(attend: fx.Node | None) -> str:
    rule = rules.rule_of(attend) if attend is not None else None
    if attend is None or not isinstance(rule, rules.LocalQuery):
        return "no attention"
    if rule.writes_padding or rule.output is None:
        return "defined by the op"
    buffer = rules.argument(attend, rule.output)
    if buffers.is_zero_filled(buffers.base_of(buffer)):
        return "zero: the output buffer is allocated zero-filled"
    return "zero: filled before the op" if buffers.filled_before(buffer, attend) else "undefined"
