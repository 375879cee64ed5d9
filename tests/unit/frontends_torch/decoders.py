# SPDX-License-Identifier: Apache-2.0
"""Small decoders in plain PyTorch, and what the tests of the front end do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from pcp_passes.frontends.torch.capture import DynamoGraph

VOCABULARY, HIDDEN, HEADS = 61, 32, 4


class Layer(nn.Module):
    """Pre-norm attention and MLP; attention is causal, with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.scale = 0.5

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(_turn(q, cos, sin), _turn(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1)) * self.scale
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Decoder(nn.Module):
    """Two layers and a head; ``position_ids`` default to 0, 1, ..."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(HIDDEN // HEADS // 2) / 4))

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, *, double: bool = False
    ) -> dict[str, torch.Tensor]:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        angles = position_ids[..., None] * self.frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return {"logits": self.head(x) * (2 if double else 1)}


def decoder(layers: int = 2) -> Decoder:
    """A decoder with the same weights every time."""
    torch.manual_seed(0)
    return Decoder(layers).eval().requires_grad_(False)


def tokens(count: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """i64[batch, count]."""
    return torch.randint(0, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def traced(
    function: Callable[..., Any],
    *args: Any,
    marked: Sequence[tuple[torch.Tensor, int]] = (),
    look: Callable[[fx.GraphModule, Sequence[Any]], Any] = lambda gm, inputs: DynamoGraph.read(gm),
    **options: Any,
) -> tuple[Any, list[Any]]:
    """What ``look`` makes of the Dynamo graph of one call, and the arguments that the graph was then given."""
    seen: list[Any] = []
    given: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(look(gm, inputs))

        def run(*arguments: Any) -> Any:
            given.extend(arguments)
            return gm.forward(*arguments)

        return run

    torch._dynamo.reset()
    for tensor, dim in marked:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    kwargs = options.pop("kwargs", {})
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True, **options)(*args, **kwargs)
    (found,) = seen
    return found, given
