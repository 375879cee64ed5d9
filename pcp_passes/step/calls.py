# SPDX-License-Identifier: Apache-2.0
"""Modules that a step program calls: a body under the attention inputs and caches of one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pcp_passes.ir import meta
from pcp_passes.paged import running
from pcp_passes.segments import Segments, segments_of

Enter = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Nested:
    """A body call about to run: ``finish(gm(*inputs))``, where ``enter()`` is open around ``gm``."""

    gm: fx.GraphModule | None
    """``None`` where ``finish(())`` is all of the call, which then meets no other rank."""
    inputs: tuple[Any, ...]
    enter: Enter
    finish: Callable[[Any], Any]
    """From what ``gm`` returns to what the call gives."""

    @property
    def segments(self) -> Segments | None:
        """``gm`` between the points where ranks meet, for running many ranks in lockstep."""
        return None if self.gm is None else segments_of(self.gm)


class HeadCall(nn.Module):
    """A head: n rows of any kind to logits ``[n, V]`` of ``dtype``."""

    def __init__(self, head: nn.Module, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = head
        self.vocab_size = vocab_size
        self.dtype = dtype

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.head(hidden)


class BodyCall(nn.Module):
    """A body, called as ``(ids, positions, *rows, inputs, caches)``.

    Everything of the sequence is side state of the call: ``inputs`` (slots, block tables, lengths) and ``caches``. The
    step program hands both over explicitly, so it says which call runs under which; the ops of the body find them
    through :func:`pcp_passes.paged.running`.

    Args:
        body: a captured body; its outputs are ``[N, ...]``, one tensor or a tuple.
        variant: ``sharded``, ``replicated``, or another of the drafter's own.
        layers: cache layers that the body writes.
    """

    _is_impure = True  # it writes caches: never dead code

    def __init__(self, body: fx.GraphModule, variant: str, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.body = body
        self.variant = variant
        self.layers = layers
        results = next(iter(reversed(body.graph.nodes))).args[0]
        self._several = isinstance(results, (tuple, list))
        self.results: tuple[Any, ...] = tuple(results) if isinstance(results, (tuple, list)) else (results,)

    @property
    def sharded(self) -> bool:
        """Whether rows are rank-local and cache writes gather."""
        return self.variant == "sharded"

    def forward(self, *operands: Any) -> Any:
        call = self.nested(operands)
        if call.gm is None:
            return call.finish(())
        with call.enter():
            found = call.gm(*call.inputs)
        return call.finish(found)

    def unpacked(self, found: Any) -> Any:
        """A body that returns one tensor in a tuple gives the tensor."""
        return found[0] if self._several and len(self.results) == 1 else found

    def nested(self, operands: Sequence[Any]) -> Nested:
        """What runs: the body, or what the runner of the caches puts in its place."""
        *rows, inputs, caches = operands
        bound = None if caches.runner is None else caches.runner.bind(self, rows, inputs)
        if bound is None:
            return Nested(self.body, tuple(rows), lambda: running(caches, inputs), self.unpacked)
        return Nested(bound.gm, bound.operands, bound.enter, lambda found: self.packed(bound.finish(found)))

    def packed(self, results: tuple[Any, ...]) -> Any:
        """Results of a call as the step program takes them: one tensor, or a tuple of several."""
        return self.unpacked(results if self._several else results[0])

    def fake(self, rows: Any, like: torch.Tensor) -> Any:
        """What a call on ``rows`` rows gives, in the fake mode of ``like``."""
        made = tuple(self._fake(result, rows, like) for result in self.results)
        return made if len(made) > 1 else made[0]

    def _fake(self, result: fx.Node, rows: Any, like: torch.Tensor) -> torch.Tensor:
        held = meta.tensor(result)
        assert held is not None, f"output %{result.name} of the {self.variant} body has no example value"
        first = rows if isinstance(held.shape[0], torch.SymInt) else held.shape[0]
        return like.new_empty((first, *(int(size) for size in held.shape[1:])), dtype=held.dtype)
