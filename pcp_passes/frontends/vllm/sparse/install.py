# SPDX-License-Identifier: Apache-2.0
"""Where vLLM meets the back end of this package: its choice of a back end, and its layer class."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from pcp_passes.frontends.vllm import config as vllm_options
from pcp_passes.frontends.vllm import versions
from pcp_passes.frontends.vllm.sparse.settings import is_sparse

_BACKEND = "pcp_passes.frontends.vllm.sparse.backend.SparseMLABackend"
_LAYER = "MultiHeadLatentAttentionWrapper"


def offer_backend(module: ModuleType) -> None:
    """Wrap ``CpuPlatform.get_attn_backend_cls`` of ``vllm.platforms.cpu`` (idempotent): where a configuration that
    asks for this package wants sparse attention, it gets ours instead of vLLM's refusal."""
    platform = module.CpuPlatform
    original = platform.get_attn_backend_cls.__func__
    if hasattr(original, "__pcp_passes_original__"):
        return

    @functools.wraps(original)
    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        asked = config is not None and vllm_options.options_of(config.additional_config) is not None
        if attn_selector_config.use_sparse and asked:
            return _BACKEND
        return str(original(cls, selected_backend, attn_selector_config, num_heads))

    get_attn_backend_cls.__pcp_passes_original__ = original  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def replace_layer(vllm_config: Any) -> None:
    """In a worker of a sparse model on CPU: have vLLM build our latent attention layer (idempotent).

    Raises:
        ConfigError: a function of vLLM that is replaced or called has another signature here.
    """
    from vllm.platforms import current_platform

    if not is_sparse(vllm_config) or not current_platform.is_cpu():
        return
    import vllm
    from vllm.model_executor.custom_op import op_registry_oot

    versions.require_signatures(vllm.__version__, versions.SPARSE_SYMBOLS)
    if _LAYER in op_registry_oot:
        return
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    from pcp_passes.frontends.vllm.sparse.layer import SparseLatentAttention

    MultiHeadLatentAttentionWrapper.register_oot(SparseLatentAttention)
