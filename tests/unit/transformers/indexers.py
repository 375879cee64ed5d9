# SPDX-License-Identifier: Apache-2.0
"""What the indexers of transformers' tiny sparse models see, score and select, layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.transformers import tiny

HEADS, DIM, ROPE_DIM, TOPK, LENGTH = 4, 32, 16, 12, 112
CONFIG: dict[str, Any] = {
    "index_n_heads": HEADS,
    "index_head_dim": DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "head_dim": ROPE_DIM,
    "index_topk": TOPK,
    "num_hidden_layers": 3,
}
ROPE = {"glm_moe_dsa": "interleaved", "deepseek_v32": "half"}
"""How each model's indexer pairs the rotated dimensions: what a kernel has to be told."""


@dataclass(frozen=True)
class Seen:
    """One call of one layer's indexer, on one sequence of S tokens."""

    layer: int
    q: torch.Tensor
    """f32[S, H, D] before RoPE."""
    k: torch.Tensor
    """f32[S, D] before LayerNorm and RoPE."""
    weights: torch.Tensor
    """f32[S, H], unscaled."""
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    norm_eps: float
    cos: torch.Tensor
    """f32[S, R / 2] of these positions."""
    sin: torch.Tensor
    scores: torch.Tensor
    """f32[S, S], -inf above the diagonal."""
    indices: torch.Tensor
    """i32[S, topk] as transformers returns them: unordered, future keys where there are too few."""

    @property
    def selected(self) -> list[set[int]]:
        """Per row, the keys that are selected and visible."""
        return [{j for j in row if j <= i} for i, row in enumerate(self.indices.tolist())]


class _TopKInput(TorchDispatchMode):
    """Keeps what ``topk`` is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default:
            self.seen.append(args[0].clone())
        return func(*args, **(kwargs or {}))


@functools.cache
def watch(model_type: str) -> tuple[Seen, ...]:
    """Each indexer of a tiny model, as it runs on one random sequence. Shared layers have none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**tiny._COMMON, **tiny.SPARSE[model_type], **_layers(model_type)})
    model = tiny.randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    seen: list[Seen] = []
    for number, layer in enumerate(model.model.layers):
        indexer = getattr(layer.self_attn, "indexer", None)
        if indexer is not None:
            indexer.forward = _watched(indexer, indexer.forward, number, seen)
    with torch.no_grad():
        model(tiny.tokens(LENGTH), use_cache=False)
    return tuple(seen)


def _layers(model_type: str) -> dict[str, Any]:
    return CONFIG | {"mlp_layer_types": ["dense", "sparse", "sparse"]}


def _watched(indexer: Any, forward: Callable[..., Any], layer: int, seen: list[Seen]) -> Callable[..., Any]:
    def run(hidden: torch.Tensor, q_resid: torch.Tensor, position: Any, *rest: Any, **named: Any) -> torch.Tensor:
        with _TopKInput() as counted:
            indices: torch.Tensor = forward(hidden, q_resid, position, *rest, **named)
        (scores,) = counted.seen
        cos, sin = (angle[0, :, : ROPE_DIM // 2].float() for angle in position)  # cat(angles, angles)
        seen.append(
            Seen(
                layer, indexer.wq_b(q_resid)[0].view(-1, HEADS, DIM), indexer.wk(hidden)[0],
                indexer.weights_proj(hidden)[0].float(), indexer.k_norm.weight.detach(), indexer.k_norm.bias.detach(),
                indexer.k_norm.eps, cos, sin, scores[0], indices[0],
            )
        )  # fmt: skip
        return indices

    return run
