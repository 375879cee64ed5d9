# SPDX-License-Identifier: Apache-2.0
"""The report of an inspected configuration: plain data, with the layers multiplied by how often they occur."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pcp_passes.inspection.indexers import Role
from pcp_passes.inspection.kernels import Selection
from pcp_passes.inspection.ledger import CATEGORIES, Category, Cost

OUTSIDE = "outside the layers"
"""Kind of everything that occurs once: embedding, positions, masks, head."""


@dataclass(frozen=True)
class KindLine:
    """One kind of layer. ``captured`` is the layer that stands for it; ``parameters`` are those of one layer."""

    label: str
    times: int
    captured: int
    parameters: int


@dataclass(frozen=True)
class PartLine:
    """What one module costs, in one layer.

    Attributes:
        kind, times: the kind of layer, and how often it occurs.
        module: path within the layer.
        whole: cost of all tokens on one rank.
        rank: cost of a rank, by category.
    """

    kind: str
    times: int
    module: str
    whole: Cost
    rank: dict[Category, Cost]


@dataclass(frozen=True)
class GatherLine:
    """Collectives of one module, in one layer. ``sent`` is what a rank contributes, in bytes; it keeps P times that."""

    kind: str
    times: int
    module: str
    op: str
    dtype: str
    count: int
    sent: int


@dataclass(frozen=True)
class AttentionLine:
    """One attention of one kind of layer.

    Attributes:
        sees: what a query sees, in words.
        cached: bytes a token leaves in the cache of one layer: what is gathered for this attention.
        kept: tokens that have to be kept: all, or those of the window.
        work: operations of each rank for the pairs it sees, in one layer.
        work_whole: of all tokens on one rank.
        all_rank, all_whole: the same over all keys, which is how :class:`Cost` counts.
    """

    kind: str
    times: int
    module: str
    sees: str
    cached: int
    kept: int
    work: tuple[int, ...]
    work_whole: int
    all_rank: int
    all_whole: int


@dataclass(frozen=True)
class IndexerLine:
    """Layers of one kind that attend to selected keys.

    Attributes:
        role: ``full`` where the layer selects them, ``shared`` where an earlier layer has.
        layers: their numbers in the model.
        heads, dim, topk, rope, store: of the indexer that selects.
        selection: how its keys are selected; ``None`` in a shared layer, where nothing is.
        gathered: bytes of a token's index key that ranks exchange, in one layer; 0 in a shared one.
        gathered_prompt: of all tokens.
        repeated: every rank makes the keys of all tokens itself, and none are gathered.
    """

    kind: str
    times: int
    layers: tuple[int, ...]
    module: str
    role: Role
    heads: int
    dim: int
    topk: int
    rope: str
    store: str
    selection: Selection | None
    gathered: int
    gathered_prompt: int
    repeated: bool


@dataclass(frozen=True)
class FallbackLine:
    """An op that runs whole on every rank, in one layer. ``cost`` is what each rank repeats."""

    kind: str
    times: int
    node: str
    op: str
    module: str
    source: str
    reason: str
    gathered: int
    cost: Cost


@dataclass(frozen=True)
class ChoiceLine:
    """What is gathered for what, as ``insert-reshards`` decided it for the captured layers.

    Attributes:
        kinds: the kinds of layers that it is about; several where one decision covers more than one layer.
        module: of the first value that is needed whole.
    """

    kinds: tuple[str, ...]
    module: str
    text: str


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights: all of them, on every rank: prefill context parallelism shards tokens, not weights.
        cache_per_token: of one more token in every layer whose attention keeps all tokens or is not full yet.
        cache: of the prompt, on every rank.
        live: of the largest set of activations needed at one time, run node by node; a compiler needs less.
        live_whole: the same for all tokens on one rank.
    """

    weights: int
    parameters: int
    cache_per_token: int
    cache: int
    live: int
    live_whole: int


@dataclass(frozen=True)
class ModelReport:
    """What sharding a model's prefill over ``pcp`` ranks means.

    Attributes:
        tokens: T, of one prompt.
        rows: M, rows of each rank, padding included; ``real_rows`` without, for each rank.
        full: every layer was captured, and is a kind of its own; else one of each kind was, and is multiplied.
        notes: what a reader of the figures has to know.
        seconds: time spent, by step.
    """

    model: str
    model_type: str
    dtype: str
    pcp: int
    layout: str
    outputs: str
    tokens: int
    rows: int
    real_rows: tuple[int, ...]
    full: bool
    kinds: tuple[KindLine, ...]
    parts: tuple[PartLine, ...]
    gathers: tuple[GatherLine, ...]
    attention: tuple[AttentionLine, ...]
    indexers: tuple[IndexerLine, ...]
    fallbacks: tuple[FallbackLine, ...]
    choices: tuple[ChoiceLine, ...]
    memory: Memory
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def whole(self) -> Cost:
        """Cost of the prompt on one rank without the rewrite's repetitions."""
        return sum((part.whole * part.times for part in self.parts), Cost())

    def by_category(self) -> dict[Category, Cost]:
        """Cost of one rank, by the reason it is there."""
        return {
            name: sum((part.rank.get(name, Cost()) * part.times for part in self.parts), Cost()) for name in CATEGORIES
        }

    @property
    def rank(self) -> Cost:
        """Cost of one rank; the same for all, where attention is counted over all keys."""
        return sum(self.by_category().values(), Cost())

    @property
    def collectives(self) -> int:
        """Collectives in one prefill."""
        return sum(line.count * line.times for line in self.gathers)

    @property
    def sent(self) -> int:
        """Bytes each rank contributes in one prefill."""
        return sum(line.sent * line.times for line in self.gathers)

    def layers_of(self, role: Role) -> int:
        """Layers that select keys, or that reuse a selection."""
        return sum(line.times for line in self.indexers if line.role == role)

    @property
    def index_keys(self) -> int:
        """Bytes of index keys of a token that ranks exchange, in all layers."""
        return sum(line.gathered * line.times for line in self.indexers)

    @property
    def bound(self) -> float:
        """Speed-up that matrix products allow: those of one rank alone over those of a rank, all keys counted."""
        return self.whole.products / self.rank.products if self.rank.products else 1.0

    def seen(self) -> tuple[int, tuple[int, ...]]:
        """Products with attention counted over the pairs that are seen: of one rank alone, and of each rank."""
        skipped = sum((line.all_whole - line.work_whole) * line.times for line in self.attention)
        ranks = [
            self.rank.products - sum((line.all_rank - line.work[r]) * line.times for line in self.attention)
            for r in range(self.pcp)
        ]
        return self.whole.products - skipped, tuple(ranks)

    @property
    def bound_seen(self) -> float:
        """Speed-up that matrix products allow when attention skips what its mask hides: the slowest rank decides."""
        whole, ranks = self.seen()
        return whole / max(ranks) if max(ranks) else 1.0

    @property
    def imbalance(self) -> float:
        """Attention of the busiest rank over the mean of all; 1 is even."""
        ranks = [sum(line.work[r] * line.times for line in self.attention) for r in range(self.pcp)]
        return max(ranks) * self.pcp / sum(ranks) if sum(ranks) else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data: the fields, and the totals under ``totals``."""
        whole, ranks = self.seen()
        totals = {
            "whole": asdict(self.whole),
            "rank": asdict(self.rank),
            "by_category": {name: asdict(cost) for name, cost in self.by_category().items()},
            "seen": {"whole": whole, "ranks": list(ranks)},
            "collectives": self.collectives,
            "sent": self.sent,
            "indexers": {role: self.layers_of(role) for role in ("full", "shared")},
            "index_keys": self.index_keys,
            "imbalance": self.imbalance,
            "bound": self.bound,
            "bound_seen": self.bound_seen,
        }
        return {**asdict(self), "totals": totals, "unit": "operations and bytes of one prefill"}
