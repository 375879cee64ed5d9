# SPDX-License-Identifier: Apache-2.0
"""Targets for the embedded engine: a causal language model of transformers as two bodies and a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pcp_passes.engine.bodies import Model, make_bodies, prepare
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.transformers.paged import CapturedCache, paged_capture
from pcp_passes.passes import PassContext

_EXAMPLE_ROWS = 64


def load_target(model: Any, aux_layers: tuple[int, ...] = (), *, ctx: PassContext) -> Model:
    """Capture a causal language model.

    Args:
        model: a ``...ForCausalLM`` in eval mode, of a dense decoder or of one with MLA, experts, or DeepSeek's sparse
            attention. It is not changed, and shares its parameters with the result.
        aux_layers: decoder layers, from 0, whose outputs a drafter needs.
        ctx: axis and size of the bodies.

    Returns:
        bodies ``(ids i64[N], positions i64[N]) -> hidden [N, H]``, after the final norm; with ``aux_layers`` a tuple of
        it and one ``[N, H]`` for each. Cache layers are ``"target.0"``, ``"target.1"``, ...

    Raises:
        ConfigError: a model in training mode, or an auxiliary layer that it does not have.
        Refusal: a model whose attention or rows the paged ops cannot state.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if model.training:
        raise ConfigError(f"{type(model).__name__} is in training mode; call model.eval() first")
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    if any(not 0 <= layer < count for layer in aux_layers):
        raise ConfigError(f"aux_layers={aux_layers}; required layers from 0 to {count - 1}")
    if head is None or not hasattr(decoder, "layers"):
        raise Refusal(
            f"{type(model).__name__} is no causal language model with a list of decoder layers",
            [("next", "give a model of transformers whose class name ends in ForCausalLM")],
        )
    body = _Decoder(decoder, aux_layers)
    body.eval()
    ids = torch.zeros(example_rows(config), dtype=torch.int64, device=head.weight.device)
    with paged_capture(model):
        captured = {"": prepare(body, (ids, ids))}
    return Model(
        name="target",
        source=type(model).__name__,
        bodies=make_bodies(captured, ctx),
        head=head,
        hidden_size=config.hidden_size,
        vocab_size=head.weight.shape[0],
        layers=tuple(f"target.{layer}" for layer in range(count)),
        dtype=head.weight.dtype,
        aux_layers=tuple(aux_layers),
        captured=captured,
    )


def example_rows(config: Any) -> int:
    """A row count above every constant that the model compares it with."""
    return max(_EXAMPLE_ROWS, 1 + int(getattr(config, "index_topk", None) or 0))


class _Decoder(nn.Module):
    """The decoder of a model on stacked rows; a batch of one is all the model sees."""

    def __init__(self, decoder: nn.Module, aux_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.decoder = decoder
        self.aux_layers = aux_layers

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        layers: Any = self.decoder.layers
        held: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, result: Any) -> None:
                held[layer] = result if isinstance(result, torch.Tensor) else result[0]

            return hook

        hooks = [layers[layer].register_forward_hook(keep(layer)) for layer in self.aux_layers]
        try:
            result = self.decoder(input_ids=ids[None], **CapturedCache("target").call_arguments(positions))
        finally:
            for hook in hooks:
                hook.remove()
        hidden: torch.Tensor = result.last_hidden_state[0]
        return (hidden, *(held[layer][0] for layer in self.aux_layers)) if self.aux_layers else hidden
