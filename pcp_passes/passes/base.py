# SPDX-License-Identifier: Apache-2.0
"""What a pass is: a frozen dataclass with a name, a contract and a ``run``.

The class is thin; the work is a module-level function on ``fx.Graph`` that a test can call. A pass never sees the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from torch import fx

from pcp_passes.errors import ConfigError
from pcp_passes.ir import meta

Variant = Literal["sharded", "replicated"]
VARIANTS: tuple[Variant, ...] = ("sharded", "replicated")


@dataclass(frozen=True)
class PassContext:
    """What every pass may know.

    Attributes:
        pcp: size P of the prefill-context-parallel axis, at least 1.
        axis: name of that axis, as given to :func:`pcp_passes.collectives.bind_axis`.
        variant: which body of the capture is being made.
        shared_cache_layers: attention layers that read the cache of another layer and so never write one.

    Raises:
        ConfigError: ``pcp`` is below 1, or ``variant`` is unknown.
    """

    pcp: int
    axis: str = "pcp"
    variant: Variant = "sharded"
    shared_cache_layers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.pcp < 1:
            raise ConfigError(f"pcp is {self.pcp}; required at least 1 rank")
        if self.variant not in VARIANTS:
            raise ConfigError(f"variant is {self.variant!r}; required one of {', '.join(VARIANTS)}")


@dataclass(frozen=True)
class Note:
    """A remark of a pass about one node: what it did, or why it did nothing."""

    text: str
    node: str = ""
    module: str = ""

    def __str__(self) -> str:
        where = f"%{self.node}" if self.node else ""
        where += f" ({self.module})" if self.module else ""
        return f"{where}: {self.text}" if where else self.text


def note(text: str, node: fx.Node) -> Note:
    """A remark with the node's name and the layer or module it belongs to."""
    return Note(text, node.name, meta.info(node).layer or meta.module_path(node))


@dataclass(frozen=True)
class PassResult:
    """Outcome of one pass. ``rewrites == 0`` must come with at least one note that says why."""

    rewrites: int
    notes: tuple[str | Note, ...] = ()


@runtime_checkable
class Pass(Protocol):
    """The contract. ``requires``, ``establishes`` and ``breaks`` name invariants of :mod:`pcp_passes.ir.invariants`."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]]
    establishes: ClassVar[frozenset[str]]
    breaks: ClassVar[frozenset[str]]

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        """Rewrite ``graph`` in place."""
        ...
