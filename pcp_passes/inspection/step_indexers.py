# SPDX-License-Identifier: Apache-2.0
"""Indexers of a step program: which layers of target and drafter select keys, and what a token leaves in the caches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from pcp_passes.aten.decision import tensor_of
from pcp_passes.inspection.indexers import Role, Rope, read_indexer, row_bytes
from pcp_passes.inspection.kernels import Selection, select_on_card
from pcp_passes.inspection.layers import LayerKind
from pcp_passes.ir import rules
from pcp_passes.paged.ops import INDEX_TOPK, INDEX_WRITE, KV_WRITE, MLA_ATTEND
from pcp_passes.paged.records import RECORD_WRITE, index_bytes, latent_bytes
from pcp_passes.step.placement import body_of
from pcp_passes.step.report import StepReport

PAGE = 64
"""Keys of a page of the cache whose kernels are named; the shipped ones read such pages."""


@dataclass(frozen=True)
class StepIndexer:
    """Layers of one kind, of target or drafter, that attend to selected keys.

    Attributes:
        model: ``target`` or ``drafter``.
        layer: the cache of the layer that was captured: ``target.0``.
        kind: of the target's layers, in the words of the configuration; empty for the drafter.
        layers: their numbers in the model, the drafter's behind the target's.
        role: ``full`` where the layer selects keys, ``shared`` where an earlier layer has.
        heads, dim, topk, rope, store: of the indexer that selects.
        record: bytes that a token leaves in the caches of one layer; ``index_key`` is the part that is index key.
        record_fp8, index_key_fp8: the same with FP8 caches (``cache_dtype="fp8"``).
        selections: plan and kernels, by call; empty in a shared layer.
    """

    model: str
    layer: str
    kind: str
    layers: tuple[int, ...]
    role: Role
    heads: int
    dim: int
    topk: int
    rope: Rope
    store: str
    record: int
    index_key: int
    record_fp8: int
    index_key_fp8: int
    selections: dict[str, Selection]

    @property
    def times(self) -> int:
        """How many layers of the model these are."""
        return len(self.layers)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "times": self.times}


def step_indexers(
    program: fx.GraphModule, step: StepReport, kinds: Sequence[LayerKind], count: int
) -> tuple[StepIndexer, ...]:
    """Read the bodies that a step program calls.

    Args:
        program: the sharded program.
        step: its report, which has a line for each call.
        kinds: of the target's layers, one for each that was captured; empty where all were.
        count: layers of the target.
    """
    found: dict[str, StepIndexer] = {}
    keys = -(-(step.sizes.tokens + step.drafts) // PAGE) * PAGE
    calls = [node for node in program.graph.nodes if body_of(node)]
    for node, line in zip(calls, step.calls, strict=True):
        body = body_of(node)
        assert body is not None
        for one in _layers_of(body.body.graph):
            known = found.get(one.layer) or _describe(one, kinds, count)
            if one.role == "full":
                known.selections[line.body] = select_on_card(
                    line.rows, keys, topk=known.topk, heads=known.heads, dim=known.dim, store=known.store,
                    layout="paged", page=PAGE,
                )  # fmt: skip
            found[one.layer] = known
    return tuple(found.values())


@dataclass(frozen=True)
class _Layer:
    layer: str
    role: Role
    selection: fx.Node
    writes: tuple[fx.Node, ...]


def _layers_of(graph: fx.Graph) -> Iterator[_Layer]:
    """Layers of a body whose attention reads a selection, in order."""
    writes: dict[str | None, list[fx.Node]] = {}
    for node in graph.nodes:
        name = rules.op_name(node) if node.op == "call_function" else ""
        if name in (KV_WRITE, INDEX_WRITE, RECORD_WRITE):
            writes.setdefault(rules.layer_of(node), []).append(node)
        if name != MLA_ATTEND:
            continue
        selection = _selection_of(rules.named_argument(node, "indices"))
        layer = rules.layer_of(node)
        if selection is not None and layer is not None:
            role: Role = "full" if rules.layer_of(selection) == layer else "shared"
            yield _Layer(layer, role, selection, tuple(writes[layer]))


def _selection_of(found: Any) -> fx.Node | None:
    """The ``pcp::index_topk`` whose indices an attention reads."""
    while isinstance(found, fx.Node) and rules.op_name(found) != INDEX_TOPK:
        found = next(iter(found.all_input_nodes), None)
    return found if isinstance(found, fx.Node) else None


def _describe(one: _Layer, kinds: Sequence[LayerKind], count: int) -> StepIndexer:
    read = read_indexer(one.selection)
    model, _, place = one.layer.rpartition(".")
    number = int(place)
    kind = ""
    layers: tuple[int, ...] = (count + number if model == "drafter" else number,)
    if kinds and model == "target":
        kind, layers = kinds[number].label, kinds[number].layers
    return StepIndexer(
        model, one.layer, kind, layers, one.role, read.heads, read.dim, read.topk, read.rope, read.store,
        **_bytes(one.writes), selections={},
    )  # fmt: skip


def _bytes(writes: Sequence[fx.Node]) -> dict[str, int]:
    """What a token leaves, as written and as it would be in FP8 records."""
    record = key = latent = rope = index = 0
    for write in writes:
        name = rules.op_name(write)
        rows = [tensor_of(write.args[at]) for at in range(2 if name == KV_WRITE else 1)]
        record += sum(map(row_bytes, rows))
        width = math.prod(size for size in rows[0].shape[1:] if isinstance(size, int))
        if name == RECORD_WRITE:
            latent, rope, index = (int(rules.named_argument(write, part)) for part in ("latent", "rope", "index"))
            key += index_bytes(index) if rows[0].element_size() == 1 else index * rows[0].element_size()
        elif name == INDEX_WRITE:
            index, key = width, row_bytes(rows[0])
        else:
            latent, rope = width, math.prod(size for size in rows[1].shape[1:] if isinstance(size, int))
    fp8 = index_bytes(index)
    return {
        "record": record, "index_key": key, "record_fp8": latent_bytes(latent, rope) + fp8, "index_key_fp8": fp8,
    }  # fmt: skip
