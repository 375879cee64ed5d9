# SPDX-License-Identifier: Apache-2.0
"""The caches of sparse layers on CPU, and what their ops need to know of a step."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)

from pcp_passes.frontends.vllm.sparse.rows import StepRows, step_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class StepRowsBuilder(AttentionMetadataBuilder[Any]):  # type: ignore[misc]
    """Builds :class:`StepRows` on the device of the step, now: vLLM advances the lengths it is given in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepRows:
        common = common_attn_metadata
        return step_rows(common.query_start_loc, common.seq_lens, common.num_actual_tokens, common.block_table_tensor)


class _Paged(AttentionBackend):  # type: ignore[misc]
    """A cache of one row per token, addressed by slots and block tables."""

    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES

    @staticmethod
    def get_builder_cls() -> type[StepRowsBuilder]:
        return StepRowsBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_pcp(cls) -> bool:
        return True


class IndexBackend(_Paged):
    """Index keys."""

    @staticmethod
    def get_name() -> str:
        return "PCP_CPU_INDEX"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("index keys are read by pcp::vllm_index_topk, not by an attention implementation")


class SparseMLABackend(_Paged):
    """Latents and rope keys, of which each query row sees those that were selected for it."""

    @staticmethod
    def get_name() -> str:
        return "PCP_CPU_SPARSE_MLA"

    @staticmethod
    def get_impl_cls() -> type[SparseMLAImpl]:
        return SparseMLAImpl


class SparseMLAImpl(MLAAttentionImpl[Any]):  # type: ignore[misc]
    """What vLLM's attention layer asks of its implementation. The layer of :mod:`.layer` calls the ops itself, because
    the selection is an operand of theirs, for which vLLM's interface has no place."""

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill = False
    supports_pcp = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *_: Any, **given: Any) -> None:
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, float(scale), num_kv_heads
        self.kv_cache_dtype = given.get("kv_cache_dtype", "auto")

    def record_logical_topk_ready(self) -> None:
        """Nothing waits: the selection is an operand of whoever reads it."""

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "sparse attention on CPU runs in pcp::vllm_sparse_attend; this model class calls vLLM's attention layer "
            "itself instead of its latent attention layer. Use a class of vllm.model_executor.models.deepseek_v2."
        )
