# SPDX-License-Identifier: Apache-2.0
"""Small bodies to split, and the least runner that makes holds mean something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from pcp_passes.engine.bodies import capture
from pcp_passes.ir.printer import print_graph
from pcp_passes.paged import AttentionInputs, PagedCaches, kv_attend, kv_write, running
from pcp_passes.passes import PassContext
from pcp_passes.piecewise.pieces import Piece

HEADS, DIM = 2, 4
WIDTH = HEADS * DIM


class CopyingRunner:
    """Holds copy into one buffer per slot, as under CUDA graphs; pieces run as they are."""

    def __init__(self) -> None:
        self.buffers: dict[str, torch.Tensor] = {}

    def run_piece(self, piece: Piece, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = piece.gm(*args)
        return found

    def hold(self, value: torch.Tensor, slot: str, dim: int | None) -> torch.Tensor:
        known = self.buffers.get(slot)
        if known is None or known.shape != value.shape:
            self.buffers[slot] = value.clone()
        else:
            known.copy_(value)
        return self.buffers[slot]


class Body(nn.Module):
    """A body of one float64 input ``[N, 8]`` that ``function(module, x)`` computes; it has two weights ``[8, 8]``."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.first, self.second = (
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64), requires_grad=False)
            for _ in range(2)
        )

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.function(self, hidden)


def attend(q: torch.Tensor, layer: str, k: torch.Tensor | None = None) -> torch.Tensor:
    """``[N, 8]`` to ``[N, 8]``: writes ``k`` (by default ``q``) and attends."""
    heads = q.view(-1, HEADS, DIM)
    keys = heads if k is None else k.view(-1, HEADS, DIM)
    return kv_attend(heads, kv_write(keys, keys, f"target.{layer}"), f"target.{layer}").reshape(-1, WIDTH)


def body(function: Callable[[Any, torch.Tensor], Any], variant: str = "replicated", pcp: int = 2) -> fx.GraphModule:
    """A finished body of ``function``."""
    return capture(Body(function), (torch.zeros(7, WIDTH, dtype=torch.float64),), PassContext(pcp))[variant]


def run(gm: fx.GraphModule, rows: int = 5, seed: int = 3) -> Any:
    """A replicated body on one prompt of ``rows`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    inputs = AttentionInputs(
        slots=torch.arange(rows),
        slot_layout="replicated",
        block_tables=torch.arange(4, dtype=torch.int32)[None],
        query_start_loc=torch.tensor([0, rows]),
        seq_lens=torch.tensor([rows]),
        positions=torch.arange(rows),
    )
    with torch.no_grad(), running(PagedCaches(4, 4, torch.float64), inputs):
        return gm(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64))


def lines(gm: fx.GraphModule | fx.Graph) -> list[str]:
    """The text without parameters, placements and comments."""
    text = print_graph(gm, placements=False, comments=False)
    return [line for line in text.splitlines() if " = attribute " not in line]


def changed(gm: fx.GraphModule, change: Callable[[fx.GraphModule], None]) -> fx.GraphModule:
    """The module with a planted fault, ready to run."""
    change(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


# bodies: one way of each to be cut


def between(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return attend((hidden @ module.first).sin(), "0") @ module.second


def odd(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    flat = (hidden @ module.first).reshape(-1).sin()
    return attend(hidden, "0") + (flat * 2).view(-1, 8)


def odd_inside(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return attend((hidden @ module.first).reshape(-1).sin().view(-1, 8) * 2, "0")


def constant(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    once = attend(hidden.sin(), "0")
    scale = module.first.exp()
    return attend(once, "1") @ scale


def constant_beside_rows(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    scale = module.first.exp()
    return attend(attend(hidden @ scale, "0").sin(), "1") @ scale


def several_results(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    values, order = (hidden @ module.first).topk(4, -1)
    return attend(hidden, "0") + values.sum(-1, keepdim=True) + order.sum(-1, keepdim=True)


def alive_together(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    a, b = attend(hidden, "0"), attend(hidden * 2, "1", hidden)
    c = attend((a * 2 + b).sin(), "2")
    return attend(a.cos() * b + c, "3").sin()


def view_of_eager(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    found = attend(hidden @ module.first, "0").view(-1, 2, 4)
    again = attend(found[:, 0].repeat(1, 2), "1")
    return found.transpose(1, 2).reshape(-1, 8) + again


def sized(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    rows = (hidden @ module.first).shape[0]
    found = attend(hidden.view(rows, 8), "0")
    return found.view(rows * 2, 4).sin().view(rows, 8) + torch.ones(rows, 1, dtype=hidden.dtype)


def turned(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return (attend(hidden, "0") @ module.first).t()


def two(module: Any, hidden: torch.Tensor) -> Any:
    found = attend(hidden, "0")
    return found.sin(), hidden, found
