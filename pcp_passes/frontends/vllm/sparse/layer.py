# SPDX-License-Identifier: Apache-2.0
"""vLLM's latent attention layer with the key selection as a value of the graph."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakIdKeyDictionary
from vllm.model_executor.layers.mla import MLAModules, MultiHeadLatentAttentionWrapper
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

from pcp_kernels.ops import index_pack, index_prep
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm.sparse import ops
from pcp_passes.frontends.vllm.sparse.backend import IndexBackend
from pcp_passes.frontends.vllm.sparse.rows import rotated
from pcp_passes.frontends.vllm.sparse.settings import index_store


class Selection:
    """The selection that the layers of one model hand on while one forward of it is traced or runs.

    The last layer clears it, so a captured graph neither returns nor keeps it.
    """

    _of_buffer: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()

    def __init__(self) -> None:
        self.indices: torch.Tensor | None = None
        self.last = ""

    @classmethod
    def of(cls, buffer: torch.Tensor) -> Selection:
        """The one of the layers that vLLM gave ``buffer``, which stands for the same connection there."""
        if buffer not in cls._of_buffer:
            cls._of_buffer[buffer] = cls()
        found: Selection = cls._of_buffer[buffer]
        return found


class IndexCache(DeepseekV32IndexerCache):  # type: ignore[misc]
    """The cache of index keys of one layer, in the store that was asked for."""

    def __init__(self, replaced: DeepseekV32IndexerCache, dim: int, store: str, dtype: torch.dtype) -> None:
        from vllm.config import get_current_vllm_config

        del get_current_vllm_config().compilation_config.static_forward_context[replaced.prefix]
        super().__init__(dim + 4 if store == "fp8" else dim, dtype, replaced.prefix, replaced.cache_config)
        self.store = store

    @property
    def page(self) -> int:
        """Tokens per block."""
        return int(self.kv_cache.shape[1])

    def index_pages(self) -> torch.Tensor:
        """[blocks, page, D], or bytes u8 [blocks, page * (D + 4)]: the values of a page, then its scales."""
        pages: torch.Tensor = self.kv_cache.view(len(self.kv_cache), -1) if self.store == "fp8" else self.kv_cache
        return pages

    def get_attn_backend(self) -> type[IndexBackend]:
        return IndexBackend


class SparseLatentAttention(MultiHeadLatentAttentionWrapper):  # type: ignore[misc]
    """Takes the place of every ``MultiHeadLatentAttentionWrapper``; without sparse attention it is one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.is_sparse:
            return
        modules = next(value for value in (*args, *kwargs.values()) if isinstance(value, MLAModules))
        if modules.topk_indices_buffer is None or self.q_lora_rank is None or self.g_proj is not None:
            raise ConfigError(f"{self.prefix}: sparse attention without a query latent, or with an output gate")
        self.selection = Selection.of(modules.topk_indices_buffer)
        self.selection.last = self.prefix
        if self.indexer is not None:
            self._own_index_cache()

    def _own_index_cache(self) -> None:
        from vllm.config import get_current_vllm_config

        indexer = self.indexer
        store, dtype = index_store(get_current_vllm_config())
        indexer.k_cache = IndexCache(indexer.k_cache, indexer.head_dim, store, dtype)
        del indexer.indexer_op  # vLLM's kernels, none of which run here

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden], of ``positions`` i64 [T] and ``hidden_states`` [T, hidden]."""
        if not self.is_sparse:
            return super().forward(positions, hidden_states, llama_4_scaling)  # type: ignore[no-any-return]
        query_latent, rows = self.fused_qkv_a_proj(hidden_states)[0].split(
            [self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim], dim=-1
        )
        query_latent = self.q_a_layernorm(query_latent)
        latent, rope = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        q = self.q_b_proj(query_latent)[0].view(-1, self.num_heads, self.qk_head_dim)
        nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_rope, rope = rotated(self.rotary_emb, positions, q_rope, rope.unsqueeze(1))
        q = torch.cat([nope, q_rope], dim=-1)
        if llama_4_scaling is not None:
            q = q * llama_4_scaling

        name = self.mla_attn.layer_name
        if self.indexer is not None and not self.skip_topk:
            index_q, key, weights = self._index_inputs(positions, hidden_states, query_latent)
            cache, topk = self.indexer.k_cache, self.indexer.topk_tokens
            written = ops.record_write(latent, rope, key, name, cache.prefix)
            self.selection.indices = ops.index_topk(index_q, weights, written, cache.prefix, topk)
        else:
            written = ops.latent_write(latent, rope, name)
        indices = self.selection.indices
        if indices is None:
            raise ConfigError(f"{self.prefix} shares a selection, and no layer before it makes one")
        if self.selection.last == self.prefix:
            self.selection.indices = None
        attended = ops.sparse_attend(q, indices, written, name, self.v_head_dim)
        return self.o_proj(attended)[0]  # type: ignore[no-any-return]

    def _index_inputs(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, query_latent: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, Hi, D], packed keys [T, W] and weights f32 [T, Hi], ready to be written and scored. Rotary
        dimensions come first; keys and weights come out of one product."""
        indexer = self.indexer
        rotary, dim, heads = indexer.rope_dim, indexer.head_dim, indexer.n_head
        q = indexer.wq_b(query_latent)[0].view(-1, heads, dim)
        k, weights = indexer.wk_weights_proj(hidden_states)[0].split([dim, heads], dim=-1)
        k = indexer.k_norm(k)
        q_rope, k_rope = rotated(self.indexer_rope_emb, positions, q[..., :rotary], k[:, :rotary].unsqueeze(1))
        q = torch.cat([q_rope.reshape(-1, heads, rotary), q[..., rotary:]], dim=-1)
        k = torch.cat([k_rope.reshape(-1, rotary), k[:, rotary:]], dim=-1)
        # Packed here, in front of the gather, so that a key of one rank travels as what every cache holds.
        cache, factor = indexer.k_cache, indexer.softmax_scale * indexer.n_head_scale
        if cache.store == "fp8":
            q, weights = index_prep(q, weights, store="fp8", factor=factor)
            return q, index_pack(k, store="fp8"), weights
        return q.to(cache.dtype), k.to(cache.dtype), weights.float() * factor
