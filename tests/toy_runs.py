# SPDX-License-Identifier: Apache-2.0
"""Running the toy decoders: captures kept for the session, the unsharded reference, and P simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from pcp_passes.collectives import CollectiveLog
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes import Pass, PassContext, PassResult, copy_graph_module
from pcp_passes.simulate import simulate
from tests import toy

KINDS: dict[str, Any] = {"dense": toy.DenseLayer, "latent": toy.LatentLayer}


@cache
def captured(
    kind: str = "dense", layers: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[toy.Decoder, toy.Capture]:
    """A decoder and its graph. The graph is shared between tests: copy it before a rewrite."""
    model = toy.decoder(KINDS[kind], layers, dtype)
    return model, toy.capture(model)


def structure(graph: fx.GraphModule | fx.Graph) -> str:
    """Text that is equal for graphs that compute the same with the same ops in the same order."""
    return print_graph(graph, numbered=True, placements=False, comments=False)


def traced(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    """A copy of the graph of a short function: the *Before* or *Expected* of a test."""
    return copy_graph_module(toy.trace(function, *args)[0])


def apply(steps: Sequence[Pass], gm: fx.GraphModule, ctx: PassContext) -> tuple[fx.GraphModule, list[PassResult]]:
    """Run passes on a copy of ``gm``, without a pipeline around them."""
    copy = copy_graph_module(gm)
    results = [step.run(copy.graph, ctx) for step in steps]
    copy.recompile()
    return copy, results


def unsharded(world: toy.World, kind: str = "dense", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Hidden states of all tokens in global order, from the captured graph on one rank."""
    model, capture = captured(kind, dtype=dtype)
    with toy.running(world.unsharded(model, dtype)):
        return capture.gm(*capture.bind(world.ids, world.positions))[0]


@dataclass
class Sharded:
    """What P simulated ranks gave."""

    hidden: torch.Tensor
    """``[P * M, 32]`` in rank-major order."""
    restored: torch.Tensor
    """Hidden states of all tokens in global order."""
    steps: list[toy.Step]
    logs: list[CollectiveLog]

    @property
    def padded(self) -> torch.Tensor:
        """Hidden states of the padded rows."""
        return self.hidden[self._is_padding]

    _is_padding: torch.Tensor


def sharded(
    gm: fx.GraphModule, world: toy.World, kind: str = "dense", dtype: torch.dtype = torch.float32,
    change: Callable[[list[toy.Step]], None] = lambda steps: None,
) -> Sharded:  # fmt: skip
    """Run a rewritten body on all ranks; ``change`` may break the steps first."""
    model, capture = captured(kind, dtype=dtype)
    steps = [world.rank_step(rank, model, dtype) for rank in range(world.pcp)]
    change(steps)
    inputs = [capture.bind(*world.rank_tokens(rank)) for rank in range(world.pcp)]
    logs: list[CollectiveLog] = []
    outputs = simulate(gm, inputs, rank_context=lambda rank: toy.running(steps[rank]), logs=logs)
    hidden = torch.cat([output[0] for output in outputs])
    padding = torch.tensor([row < 0 for rows in world.rank_rows for row in rows])
    return Sharded(hidden, hidden[world.restore], steps, logs, padding)


MIXED = (toy.Request(5, 7), toy.Request(0, 1), toy.Request(9, 9), toy.Request(3, 2))
"""A ragged batch: chunked prefills with context, a fresh short prompt, a verification-like pair."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Clean runs differ from the unsharded graph by 3e-15 and 2e-6; every sabotage in the suite by more than 1e-2."""
