# SPDX-License-Identifier: Apache-2.0
"""Which configurations of sparse attention run, and what is settled for them before a worker starts."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm.sparse.rules import RULES

logger = logging.getLogger(__name__)

BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
_STORES = {"bf16": ("bf16", torch.bfloat16), "fp8": ("fp8", torch.uint8)}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NEEDED = ("index_n_heads", "index_head_dim", "q_lora_rank", "kv_lora_rank")


def is_sparse(vllm_config: Any) -> bool:
    """Whether the model selects keys by an indexer."""
    model = vllm_config.model_config
    return model is not None and hasattr(model.hf_text_config, "index_topk")


def index_store(vllm_config: Any) -> tuple[str, torch.dtype]:
    """Store of index keys and dtype of their cache. ``auto`` is the model's own dtype, in which no key is
    rounded; vLLM's is fp8."""
    dtype = vllm_config.model_config.dtype
    return _STORES.get(vllm_config.attention_config.indexer_kv_dtype, (_NAMES[dtype], dtype))


def splitting_ops(vllm_config: Any) -> tuple[str, ...]:
    """Where the piecewise split has to cut besides: the ops of a sparse model that take gathered rows, or read what
    they wrote."""
    return tuple(RULES) if is_sparse(vllm_config) else ()


def unsharded_sparse_attention(vllm_config: Any) -> str | None:
    """:func:`sparse_attention` where graphs run as they were captured: on CPU this package executes them all the
    same."""
    from vllm.platforms import current_platform

    if not is_sparse(vllm_config) or not current_platform.is_cpu():
        return None
    size = vllm_config.parallel_config.prefill_context_parallel_size
    if size > 1:
        return (
            f"mode='check' runs the graphs of {size} ranks as they are, and nothing gathers index keys in them; set "
            "prefill_context_parallel_size to 1, and pcp_passes.ranks to the number to check for."
        )
    return sparse_attention(vllm_config)


def sparse_attention(vllm_config: Any) -> str | None:
    """Why this model's sparse attention does not run, in one sentence; ``None`` when it does, or has none."""
    if not is_sparse(vllm_config):
        return None
    from vllm.platforms import current_platform

    model = vllm_config.model_config.hf_text_config
    name = f"sparse MLA (DeepSeek sparse attention, index_topk={model.index_topk})"
    if not current_platform.is_cpu():
        return f"{name} is supported on CPU only so far; use a dense-attention model."
    missing = [field for field in _NEEDED if not getattr(model, field, None)]
    if missing:
        return f"{name} needs {', '.join(missing)} in the model's configuration; use a checkpoint made for it."
    asked = vllm_config.attention_config.indexer_kv_dtype
    if asked not in ("auto", *_STORES):
        return f"{name} with indexer_kv_dtype={asked!r} is not supported; use one of {['auto', *_STORES]}."
    cache = vllm_config.cache_config.cache_dtype
    if cache != "auto":
        return f"{name} with kv_cache_dtype={cache!r} is not supported; set it to 'auto'."
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return f"{name} with decode context parallelism is not supported; set decode_context_parallel_size to 1."
    if vllm_config.kv_transfer_config is not None:
        return f"{name} with a KV connector is not supported; drop kv_transfer_config."
    return None


def settle(vllm_config: Any) -> None:
    """Turn off what would make a draft pass read another pass's selection: that is hidden state, which no graph shows
    and which PCP ranks hold for their own rows only."""
    from vllm.platforms import current_platform

    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if not is_sparse(vllm_config) or draft is None or not current_platform.is_cpu():
        return
    if getattr(draft.hf_config, "index_share_for_mtp_iteration", False):
        draft.hf_config.index_share_for_mtp_iteration = False
        logger.info("pcp_passes: index_share_for_mtp_iteration is off: every draft step selects its own keys")


def keep_graphs() -> None:
    """Have vLLM capture sparse models: by default it runs their classes without any graph, for its own CUDA graphs.

    Raises:
        ConfigError: the environment asks for that.
    """
    asked = os.environ.setdefault(BREAKABLE, "0")
    if asked == "1":
        raise ConfigError(f"{BREAKABLE}=1 runs models without a graph that could be rewritten; unset it.")
