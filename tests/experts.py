# SPDX-License-Identifier: Apache-2.0
"""One layer of experts on the ranks of a small mesh: bodies, rows that carry their owner, and side state per rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.bodies import Model, prepare
from pcp_passes.engine.expert_shards import shard_experts
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.peer_rows import PeerRows
from pcp_passes.paged import AttentionInputs, PagedCaches, running
from pcp_passes.paged.experts import experts_op
from pcp_passes.passes import PassContext
from pcp_passes.simulate import simulate

HIDDEN, INNER, TOPK = 6, 5, 2


class _Experts(nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up, False), nn.Parameter(down, False)


class Layer(nn.Module):
    """``pcp::experts`` of rows that come routed."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, act: str) -> None:
        super().__init__()
        self.experts, self.act = _Experts(gate_up, down), act

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        held = self.experts
        out: torch.Tensor = experts_op(hidden, index, weights, held.gate_up_proj, held.down_proj, self.act)
        return out


@cache
def layer(count: int, tagged: bool = False) -> Layer:
    """``count`` random experts; ``tagged``: expert ``e`` gives ``(e + 1)`` times the first column of a row."""
    if tagged:
        gate_up, down = torch.zeros(count, 2, HIDDEN), torch.zeros(count, HIDDEN, 1)
        gate_up[:, 0, 1], gate_up[:, 1, 0] = 1.0, 1.0
        down[:, 0, 0] = torch.arange(count) + 1.0
        return Layer(gate_up.double(), down.double(), "relu")
    generator = torch.Generator().manual_seed(count)
    shapes = (count, 2 * INNER, HIDDEN), (count, HIDDEN, INNER)
    gate_up, down = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return Layer(gate_up, down, "silu")


@cache
def model(count: int, tagged: bool = False) -> Model:
    """The layer as a captured target, its experts whole."""
    kinds = ((HIDDEN, torch.float64), (TOPK, torch.int64), (TOPK, torch.float32))
    example = tuple(torch.zeros(7, width, dtype=kind) for width, kind in kinds)
    captured = {"": prepare(layer(count, tagged), example)}
    made = Model("target", {}, nn.Identity(), HIDDEN, 2, (), torch.float64, captured=captured)
    return made.over(PassContext(1))


@dataclass
class World:
    """Rows of every rank of a mesh, in the order of its ``ep`` group.

    Args:
        mesh: without stages.
        rows: padded rows of a rank, per replica.
        padding: of them the padded ones on each rank but the first of a replica.
        replicated: all PCP ranks of a replica have the same rows.
    """

    mesh: Mesh
    rows: Sequence[int]
    experts: int = 4
    padding: int = 1
    replicated: bool = False
    tagged: bool = False
    inputs: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    caches: list[PagedCaches] = field(default_factory=list)
    calls: list[AttentionInputs] = field(default_factory=list)

    def __post_init__(self) -> None:
        pcp = self.mesh.pcp
        for rank in range(self.mesh.dp * pcp):
            replica, place = divmod(rank, pcp)
            count = self.rows[replica]
            generator = torch.Generator().manual_seed(replica * pcp + (0 if self.replicated else place))
            hidden = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
            if self.tagged:
                owner = replica * pcp + (0 if self.replicated else place)
                hidden[:, 0], hidden[:, 1] = 1000 * owner + torch.arange(count) + 1, 1.0
            index = torch.rand(count, self.experts, generator=generator).argsort(1)[:, :TOPK]
            weights = torch.tensor([0.5, 0.25])[torch.rand(count, TOPK, generator=generator).argsort(1)]
            self.inputs.append((hidden, index, weights))
            real = count if place == 0 and not self.replicated else count - self.padding
            empty = torch.zeros(1, 1, dtype=torch.int32)
            ends = torch.tensor([0, real])
            zeros = torch.zeros(count, dtype=torch.int64)
            self.calls.append(AttentionInputs(zeros, "replicated", empty, ends, ends[1:], zeros))
            held = PagedCaches(1, 1)
            held.experts = shard_experts(model(self.experts, self.tagged), rank, self.mesh.dp * pcp)
            held.peers = PeerRows(tuple(self.rows), (1,) * self.mesh.dp, replica)
            self.caches.append(held)

    @property
    def ranks(self) -> int:
        return len(self.inputs)

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {axis: self.mesh.groups(axis) for axis in ("dp", "pcp")}

    def body(self) -> fx.GraphModule:
        """Of its own: tests break it."""
        made = model(self.experts, self.tagged).over(PassContext(self.mesh.pcp), dp=self.mesh.dp)
        return made.bodies["replicated" if self.replicated else "sharded"]

    def enter(self, rank: int) -> AbstractContextManager[Any]:
        return running(self.caches[rank], self.calls[rank])

    def run(self, body: fx.GraphModule | None = None, logs: list[CollectiveLog] | None = None) -> list[torch.Tensor]:
        with torch.no_grad():
            return simulate(
                self.body() if body is None else body, self.inputs, rank_context=self.enter, groups=self.groups,
                logs=logs,
            )  # fmt: skip

    def alone(self, rank: int) -> torch.Tensor:
        """What all experts give for the rank's rows; 0 on padding."""
        one = layer(self.experts, self.tagged)
        hidden, index, weights = self.inputs[rank]
        held = one.experts
        whole: torch.Tensor = experts_op(hidden, index, weights, held.gate_up_proj, held.down_proj, one.act)
        return whole.masked_fill(self.calls[rank].padding[:, None], 0)

    def error(self, found: Sequence[torch.Tensor]) -> float:
        return max(float((mine - self.alone(rank)).abs().max()) for rank, mine in enumerate(found))
