# SPDX-License-Identifier: Apache-2.0
"""Unmodified models of transformers over the paged ops: what their cache and attention calls become in a capture.

``Cache.update`` becomes ``pcp::kv_write``, ``Cache.update_indexer`` ``pcp::index_write``, the attention function
``pcp::kv_attend`` or, where the cache holds MLA's latent, ``pcp::mla_attend`` in the absorbed form. Masks are not made:
the ops see by position. Experts become one op (:mod:`~pcp_passes.frontends.transformers.experts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from pcp_passes import paged
from pcp_passes.errors import Refusal
from pcp_passes.frontends.transformers.attention import STEP_ARGUMENT, not_understood
from pcp_passes.frontends.transformers.experts import EXPERTS, register_experts
from pcp_passes.frontends.transformers.masks import PACKED, MaskPattern, window_of
from pcp_passes.frontends.transformers.switch import configs_of

PAGED = "pcp_paged"


class CapturedCache(Cache):  # type: ignore[misc]
    """What a model writes to while it is captured: one name per layer, ``"<prefix>.<layer_idx>"``.

    Args:
        prefix: ``"target"`` or ``"drafter"``.
        first: ``layer_idx`` that becomes number 0.
    """

    def __init__(self, prefix: str, first: int = 0) -> None:
        super().__init__(layers=[])
        self.prefix, self.first = prefix, first
        self.written: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        """By layer name: key states, value states, and the result of their write, of the capture that runs."""

    def name(self, layer_idx: int) -> str:
        """Cache name of a decoder layer."""
        return f"{self.prefix}.{layer_idx - self.first}"

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states ``[1, H, N, D]``; returned as they are, for a model that goes on to expand them in vain."""
        name = self.name(layer_idx)
        dep = paged.kv_write(_rows(key_states), _rows(value_states), name)
        self.written[name] = key_states, value_states, dep
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write index keys ``[1, N, D]``; the result stands for the keys of a whole sequence."""
        dep = paged.index_write(indexer_key_states[0], self.name(layer_idx))
        return paged.index_keys(indexer_key_states, dep)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: requests have lengths, the cache has none."""
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:
        """Lengths are not those of a dense cache; the mask states a pattern only."""
        return query_length, 0

    def call_arguments(self, positions: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments for a call of the model on ``[1, N]`` ids or ``[1, N, H]`` embeddings."""
        self.written.clear()
        return {"position_ids": positions[None], "past_key_values": self, "use_cache": True, STEP_ARGUMENT: self}


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskPattern | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of ``"pcp_paged"``.

    Args:
        query: ``[1, Hq, N, D]``; ``key`` and ``value`` are what the cache returned, or what MLA expanded it to.
        attention_mask: a pattern, or the one-element tensor that says "by position" to a sparse indexer.
        indices: i32 ``[1, N, k]``, positions that an MLA row may see.

    Returns:
        ``[1, N, Hq, Dv]`` and ``None`` for the weights.

    Raises:
        Refusal: an argument that could change the result and is not understood.
    """
    cache: Any = kwargs.pop(STEP_ARGUMENT, None)
    pattern = attention_mask if isinstance(attention_mask, MaskPattern) else MaskPattern(0, 0, 0)
    by_position = attention_mask is None or isinstance(attention_mask, MaskPattern) or attention_mask.numel() == 1
    unknown = not_understood(kwargs)
    if not isinstance(cache, CapturedCache) or not by_position or unknown or dropout:
        _refuse(module, unknown, "a mask tensor" if not by_position else "dropout, or a call without the paged cache")
    name = cache.name(module.layer_idx)
    keys, _, dep = cache.written[name]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    latent: Any = getattr(module, "kv_lora_rank", None)
    if latent is not None and hasattr(module, "kv_b_proj") and keys.shape[1] == 1 and keys.shape[-1] == latent:
        if softcap or s_aux is not None or pattern.left >= 0 or pattern.chunk:
            _refuse(module, [], "a window, sinks or a soft cap on latent attention")
        return _absorbed(module, query, dep, name, scale, indices), None
    if indices is not None:
        _refuse(module, ["indices"], "a selection of keys without a latent cache")
    out = paged.kv_attend(
        _rows(query), dep, name, scale=scale, left=pattern.left, right=pattern.right, chunk=pattern.chunk,
        sinks=None if s_aux is None else s_aux.reshape(-1), softcap=softcap or 0.0, value_size=value.shape[-1],
    )  # fmt: skip
    return out[None], None


def _absorbed(
    module: Any, query: torch.Tensor, dep: torch.Tensor, name: str, scale: float, indices: torch.Tensor | None
) -> torch.Tensor:
    """Latent attention without expanding a key: the halves of ``kv_b_proj`` go to the query and to the output."""
    heads = query.shape[1]
    weight = module.kv_b_proj.weight.view(heads, -1, module.kv_lora_rank)
    nope = module.qk_nope_head_dim
    q_nope, q_rope = query[0].split([nope, query.shape[-1] - nope], dim=-1)
    q = torch.cat([torch.matmul(q_nope, weight[:, :nope]), q_rope], dim=-1).transpose(0, 1)
    chosen = None if indices is None else indices[0]
    out = paged.mla_attend(q, dep, name, scale=scale, latent=module.kv_lora_rank, indices=chosen)
    return torch.matmul(out.transpose(0, 1), weight[:, nope:].transpose(1, 2)).transpose(0, 1)[None]


def _refuse(module: torch.nn.Module, unknown: list[str], found: str) -> None:
    raise Refusal(
        f"{type(module).__name__} asks for attention that the paged ops do not have",
        [
            ("found", ", ".join(unknown) or found),
            ("required", "causal, sliding or chunked attention, sinks, a soft cap; a selection of keys with MLA"),
            ("next", "serve this model with vLLM"),
        ],
    )


def paged_mask(
    batch_size: int,
    q_length: Any,
    kv_length: Any,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> MaskPattern | torch.Tensor:
    """The mask function of ``"pcp_paged"``: a pattern, never a tensor with a size of the sequence.

    A model that hands its mask to an indexer computes with it, so it gets one ``True``: the op sees by position.

    Raises:
        Refusal: anything but a plain pattern.
    """
    config = kwargs.get("config")
    if attention_mask is None and getattr(config, "index_topk", None) is not None:
        if mask_function is causal_mask_function and local_size is None:
            return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=kwargs.get("device", "cpu"))
    elif attention_mask is None:
        window = window_of(mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, config)
        if window is not None:
            return MaskPattern(q_length, kv_length, 0, *window)
    raise Refusal(
        "this model's mask is no plain pattern, and the paged ops see by position",
        [
            ("found", f"{getattr(mask_function, '__name__', mask_function)}, window {local_size}"),
            ("required", "causal, sliding or chunked"),
            ("next", "serve this model with vLLM"),
        ],
    )


@contextmanager
def paged_capture(model: torch.nn.Module) -> Iterator[None]:
    """Let ``model`` run over the paged ops for the length of a ``with`` block; its configuration comes back."""
    AttentionInterface.register(PAGED, paged_attention_forward)
    AttentionMaskInterface.register(PAGED, paged_mask)
    register_experts()
    configs = configs_of(model)
    before = [(config._attn_implementation_internal, config._experts_implementation_internal) for config in configs]
    excluded, PACKED.excluded = PACKED.excluded, True
    try:
        with PACKED.installed():
            for config in configs:
                config._attn_implementation_internal, config._experts_implementation_internal = PAGED, EXPERTS
            yield
    finally:
        PACKED.excluded = excluded
        for config, (attention, experts) in zip(configs, before, strict=True):
            config._attn_implementation_internal, config._experts_implementation_internal = attention, experts


def _rows(states: torch.Tensor) -> torch.Tensor:
    """``[1, H, N, D]`` as token rows ``[N, H, D]``."""
    return states[0].transpose(0, 1)
