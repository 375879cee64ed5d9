# SPDX-License-Identifier: Apache-2.0
"""The contract between a step program and what it calls: bodies with a head, and drafters.

A drafter adds its nodes to the *plain* program (one device, global order). It says nothing of ranks: the passes decide
what is sharded, restored or gathered. So a new kind (several MTP modules, EAGLE, n-grams) is one class with ``extend``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import fx, nn

if TYPE_CHECKING:
    from pcp_passes.step.builder import StepBuilder


class BodyModel(Protocol):
    """A captured model (:class:`pcp_passes.engine.bodies.Model`)."""

    @property
    def name(self) -> str:
        """For messages and reports."""
        ...

    @property
    def bodies(self) -> Mapping[str, fx.GraphModule]:
        """By variant: ``sharded``, ``replicated``, and others of the drafter's own."""
        ...

    @property
    def head(self) -> nn.Module:
        """``[L, H] -> [L, V]``."""
        ...

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and logits."""
        ...

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that hold a cache; no other model of the program has one of them."""
        ...


@dataclass(frozen=True)
class TargetValues:
    """What a drafter may read of the target's part of the program."""

    hidden: fx.Node
    """[T, H]."""
    aux: tuple[fx.Node, ...]
    """[T, H] each: outputs of chosen layers of the target."""
    inputs: fx.Node
    """The attention inputs of the target's call."""
    tables: fx.Node
    """i32[R, B]."""
    last: fx.Node
    """i64[R], last valid row of each request among the rows with logits."""
    last_rows: fx.Node
    """i64[R], last valid row of each request among the tokens."""
    last_positions: fx.Node
    """i64[R], its position."""
    num_sampled: fx.Node
    """i64[R]."""
    next_token: fx.Node
    """i64[R]."""


@dataclass(frozen=True)
class Drafted:
    """What a drafter adds."""

    drafts: fx.Node
    """i64[R, K]."""
    logits: fx.Node | None
    """[R, K, V] the drafts were sampled from, when the program keeps them."""


class Drafter(Protocol):
    """A kind of drafter."""

    @property
    def steps(self) -> int:
        """K, drafts per step."""
        ...

    @property
    def model(self) -> BodyModel | None:
        """The drafter's own bodies; ``None`` for a drafter without a model."""
        ...

    def extend(self, builder: StepBuilder, values: TargetValues) -> Drafted:
        """Add the drafter's nodes to the plain program."""
        ...
