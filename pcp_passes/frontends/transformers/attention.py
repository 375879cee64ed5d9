# SPDX-License-Identifier: Apache-2.0
"""The attention function of ``"pcp"``, in the form of transformers' ``AttentionInterface``.

A :class:`~pcp_passes.frontends.transformers.masks.MaskPattern` becomes one ``pcp::attend`` with positions, a step over
a paged cache one ``pcp::paged_attend``; key heads are not repeated. A mask tensor is honoured as it is, by ``sdpa`` or,
where the layer has sinks or caps its logits, by the explicit formula.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pcp_passes.attention import attend
from pcp_passes.errors import Refusal
from pcp_passes.frontends.transformers.masks import MaskPattern

STEP_ARGUMENT = "pcp_step"
"""Keyword under which a model's forward takes the step of a paged cache, and hands it on to its attention layers."""

_NO_EFFECT = frozenset(
    "position_ids cache_position position_embeddings token_type_ids mm_token_type_ids input_ids labels attention_mask"
    " cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k num_items_in_batch logits_to_keep".split()
)
"""Tensors that models hand through and that neither ``sdpa`` nor ``eager`` reads."""


def pcp_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskPattern | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer.

    Args:
        query, key, value: ``[B, Hq, T, D]``, ``[B, Hkv, S, D]``, ``[B, Hkv, S, Dv]``.
        attention_mask: a pattern; a tensor ``[B, 1, T, S]``, bool or additive; or ``None``, which means what it means
            to ``sdpa``: causal if the layer is and has more than one query row, else no mask.
        position_bias: additive, as ``sdpa`` takes it.
        softcap: c of ``c * tanh(logit / c)``.
        s_aux: ``[Hq]``, attention sinks.
        kwargs: ``pcp_step`` selects the paged cache. ``sliding_window`` is not read: the mask states the window.

    Returns:
        ``[B, T, Hq, Dv]`` and ``None`` for the weights.

    Raises:
        Refusal: an argument that could change the result and is not understood.
    """
    _require_understood(module, attention_mask, kwargs)
    step = kwargs.get(STEP_ARGUMENT)
    pattern = attention_mask
    if pattern is None and position_bias is None and dropout == 0.0:
        causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        pattern = MaskPattern(query.shape[2], key.shape[2], 0, -1, 0 if causal else -1)
    if step is not None:
        if not isinstance(pattern, MaskPattern) or position_bias is not None or dropout != 0.0:
            raise Refusal(
                "attention over a paged cache is stated by positions alone",
                [
                    ("found", "a mask tensor, a position bias or dropout"),
                    ("module", type(module).__name__),
                    ("next", "pass neither attention_mask nor images, and call model.eval()"),
                ],
            )
        return step.attend(query, key, value, pattern, scaling, softcap or 0.0, s_aux), None
    if not isinstance(pattern, MaskPattern) or position_bias is not None or dropout != 0.0:
        if isinstance(pattern, MaskPattern):
            pattern = pattern.dense(query.device)
        return _explicit(module, query, key, value, pattern, dropout, scaling, is_causal, position_bias, softcap, s_aux)
    _require_lengths(module, query, key, pattern)
    out = attend(
        query, key, value, pattern.positions(query.device),
        scale=scaling, left=pattern.left, right=pattern.right, chunk=pattern.chunk,
        sinks=None if s_aux is None else s_aux.reshape(-1), softcap=softcap or 0.0,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _explicit(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    position_bias: torch.Tensor | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    if not softcap and s_aux is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, position_bias=position_bias,
        )  # fmt: skip
        return out, None
    if position_bias is not None or dropout != 0.0 or mask is None:
        raise Refusal(
            "sinks and capped logits are computed for a mask, without a position bias and dropout",
            [("module", type(module).__name__), ("next", "call model.eval(), or leave the model its own attention")],
        )
    groups = query.shape[1] // key.shape[1]
    logits = torch.matmul(query, key.repeat_interleave(groups, dim=1).transpose(2, 3))
    logits = logits * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    least = torch.finfo(logits.dtype).min
    logits = torch.where(mask, logits, least) if mask.dtype == torch.bool else logits + mask
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], -1)
        logits = torch.cat([logits, sinks.to(logits.dtype)], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(value.dtype)[..., : key.shape[2]]
    return torch.matmul(weights, value.repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous(), None


def not_understood(kwargs: dict[str, Any]) -> list[str]:
    """Names of the tensors in ``kwargs`` that may change the result of attention in a way nobody here knows."""
    return [name for name, held in kwargs.items() if isinstance(held, torch.Tensor) and name not in _NO_EFFECT]


def _require_understood(module: torch.nn.Module, mask: object, kwargs: dict[str, Any]) -> None:
    """An attention layer hands its extras as keywords, and ignoring one may drop, say, a selection of keys."""
    unknown = not_understood(kwargs)
    if unknown or not (mask is None or isinstance(mask, (torch.Tensor, MaskPattern))):
        raise Refusal(
            'the "pcp" attention does not know what this layer asks for',
            [
                ("module", type(module).__name__),
                ("found", ", ".join(unknown) or f"a mask of type {type(mask).__name__}"),
                ("required", "only a mask, scaling, softcap, s_aux, position_bias"),
                ("next", "leave this model its own attention"),
            ],
        )


def _require_lengths(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, pattern: MaskPattern) -> None:
    """A layer that adds keys of its own, or drops queries, after the mask was stated would be masked wrongly."""
    if query.shape[2] != pattern.q_length or key.shape[2] != pattern.kv_length:
        raise Refusal(
            "the layer attends with other lengths than its mask was made for",
            [
                ("module", type(module).__name__),
                ("found", f"{query.shape[2]} queries, {key.shape[2]} keys"),
                ("required", f"{pattern.q_length} queries, {pattern.kv_length} keys"),
                ("next", "leave this model its own attention"),
            ],
        )
