# SPDX-License-Identifier: Apache-2.0
"""A small captured model of five layers with experts, and a drafter with experts and an embedding of its own.

Of no use but sensitive, as those of ``tests/steps.py``, whose attention it has; float64. Make schedules with
``vocab=VOCAB``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from pcp_passes.engine.bodies import Model, make_bodies, prepare
from pcp_passes.paged.experts import experts_op
from pcp_passes.passes import PassContext
from pcp_passes.speculative.contract import Drafter
from pcp_passes.speculative.mtp import MTP
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step import StepProgram
from tests.steps import HIDDEN, VOCAB, Layer, _head, _norm, _seeded

__all__ = ["EXPERTS", "LAYERS", "VOCAB", "mesh_program"]

LAYERS, EXPERTS, CHOSEN, INNER = 5, 6, 2, 4
"""Six experts: a share of four ranks is unequal, and the last rank has none."""


class Mixture(nn.Module):
    """Attention, then experts that are chosen by the hidden state."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.attention = Layer(name)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, _ = self.attention(x, positions)
        rows = _norm(x)
        weights, index = self.router(rows).softmax(-1).topk(CHOSEN)
        found: torch.Tensor = experts_op(rows, index, weights, self.gate_up, self.down, "silu")
        return x + found


class Target(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Mixture(f"target.{i}") for i in range(layers))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return _norm(x)


class Module(nn.Module):
    """The next-token module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.join = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layer = Mixture("drafter.0")

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> Any:
        x = self.join(torch.cat([_norm(self.embed(ids)), hidden], -1))
        return _norm(self.layer(x, positions))


@cache
def _captured(layers: int) -> Any:
    ids = torch.arange(7)
    return {"": prepare(_seeded(Target(layers), 1, torch.float64), (ids, ids))}


@cache
def _captured_module() -> Any:
    ids, hidden = torch.arange(7), torch.zeros(7, HIDDEN, dtype=torch.float64)
    return {"": prepare(_seeded(Module(), 3, torch.float64), (ids, ids, hidden))}


@cache
def mesh_program(pcp: int, steps: int, layers: int = LAYERS) -> StepProgram:
    """The program for ``pcp`` ranks with ``steps`` drafts; 0 has no drafter."""
    ctx, names, captured = PassContext(pcp), tuple(f"target.{i}" for i in range(layers)), _captured(layers)
    bodies = make_bodies(captured, ctx)
    target = Model("target", bodies, _head(), HIDDEN, VOCAB, names, torch.float64, captured=captured)
    kind: Drafter = NoDrafter()
    if steps:
        bodies, names = make_bodies(_captured_module(), ctx), ("drafter.0",)
        model = Model("drafter", bodies, _head(), HIDDEN, VOCAB, names, torch.float64, captured=_captured_module())
        kind = MTP(model, steps)
    return StepProgram(target, kind, pcp=pcp)
