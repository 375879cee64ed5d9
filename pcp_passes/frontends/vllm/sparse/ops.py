# SPDX-License-Identifier: Apache-2.0
"""The four ops of a sparse layer in vLLM's graphs.

Each takes a layer name and token rows. Caches, slots and :class:`.backend.StepRows` are found in vLLM's forward context
under that name. Without them (a profile run) writes do nothing and reads give empty selections and zeros.

``layout`` of a write says in which layout its rows arrive; ``gather-cache-writes`` sets it to ``"rank_major"``. The op
compares it with the layout that the batch manager made the slots in, and the number of rows with the number of slots.
Sizes never decide: a padded batch of one layout can have the size of the other.
"""

from __future__ import annotations

from typing import Any

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.frontends.vllm.sparse import rules
from pcp_passes.ir.library import define
from pcp_passes.ir.placements import RANK_MAJOR
from pcp_passes.paged.state import REPLICATED_SLOTS


def _layer_of(name: str) -> tuple[Any, torch.Tensor | None, Any]:
    """Layer, slots and step rows; ``None`` in a forward without metadata (profile, dummy).

    Raises:
        ConfigError: a forward that has them for others, where this layer would write or read nothing; or one of
            several micro-batches.
    """
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    layer, slots, steps = context.no_compile_layers[name], context.slot_mapping, context.attn_metadata
    if not steps:
        return layer, None, None
    if not (isinstance(slots, dict) and isinstance(steps, dict) and name in slots and name in steps):
        held = [len(given) if isinstance(given, dict) else type(given).__name__ for given in (slots, steps)]
        raise ConfigError(
            f"{name}: found slots of {held[0]} layers and attention metadata of {held[1]}, this layer's not among them;"
            " required both of every layer with a cache, for one batch. Drop micro-batching, if it is on."
        )
    return layer, slots[name], steps[name]


def _slot_layout() -> str:
    """The layout of the running forward's slots, as the batch manager planned them."""
    runtime = runtimes.current()
    if runtime is None or runtime.pcp == 1:
        return REPLICATED_SLOTS
    return RANK_MAJOR if runtime.variants.get(runtime.role) == "sharded" else REPLICATED_SLOTS


def _write(op: str, layer: str, layout: str, rows: torch.Tensor) -> None:
    """Scatter ``rows`` [N, W] into the cache of ``layer``; slot -1 is skipped."""
    from pcp_kernels.reference import cache

    module, slots, _ = _layer_of(layer)
    if slots is None or module.kv_cache.numel() == 0:
        return
    pages = module.index_pages() if hasattr(module, "index_pages") else module.kv_cache
    planned = _slot_layout()
    if layout != planned or rows.shape[0] != slots.shape[0]:
        raise ConfigError(
            f"{op} of {layer}: found {rows.shape[0]} {layout} rows and {slots.shape[0]} {planned} slots; required one "
            "slot per row in one layout. The batch manager and the compiled body disagree about this step."
        )
    cache.scatter(pages, rows, slots)


def _latent_write(latent: torch.Tensor, rope: torch.Tensor, layer: str, layout: str = REPLICATED_SLOTS) -> torch.Tensor:
    held = _layer_of(layer)[0].kv_cache.dtype
    _write(rules.LATENT_WRITE, layer, layout, torch.cat([latent, rope.flatten(1)], dim=1).to(held))
    return latent.new_empty(0)


def _latent_write_fake(
    latent: torch.Tensor, rope: torch.Tensor, layer: str, layout: str = REPLICATED_SLOTS
) -> torch.Tensor:
    return latent.new_empty(0)


def _record_write(
    latent: torch.Tensor,
    rope: torch.Tensor,
    key: torch.Tensor,
    layer: str,
    index_layer: str,
    layout: str = REPLICATED_SLOTS,
) -> torch.Tensor:
    _write(rules.RECORD_WRITE, index_layer, layout, key)
    return _latent_write(latent, rope, layer, layout)


def _record_write_fake(
    latent: torch.Tensor,
    rope: torch.Tensor,
    key: torch.Tensor,
    layer: str,
    index_layer: str,
    layout: str = REPLICATED_SLOTS,
) -> torch.Tensor:
    return latent.new_empty(0)


def _index_topk(q: torch.Tensor, weights: torch.Tensor, dep: torch.Tensor, layer: str, topk: int) -> torch.Tensor:
    from pcp_kernels.reference import select

    module, _, step = _layer_of(layer)
    if step is None or module.kv_cache.numel() == 0:
        return q.new_full((q.shape[0], topk), -1, dtype=torch.int32)
    row_request, visible = step.padded(q.shape[0])
    return select.topk_paged(
        q, weights, module.index_pages(), step.block_table, row_request, visible, topk, module.page
    )


def _index_topk_fake(q: torch.Tensor, weights: torch.Tensor, dep: torch.Tensor, layer: str, topk: int) -> torch.Tensor:
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


def _sparse_attend(
    q: torch.Tensor, indices: torch.Tensor, dep: torch.Tensor, layer: str, value_size: int
) -> torch.Tensor:
    from pcp_kernels.reference import mla, remap

    module, _, step = _layer_of(layer)
    if step is None or module.kv_cache.numel() == 0:
        return q.new_zeros(q.shape[0], q.shape[1] * value_size)
    row_request, _ = step.padded(q.shape[0])
    page = module.kv_cache.shape[1]
    slots, _ = remap.index_remap(indices, step.block_table, row_request, page)
    nope, rope = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    absorbed = torch.bmm(nope.transpose(0, 1), module.W_UK_T).transpose(0, 1)
    latents, ropes = module.kv_cache.view(-1, module.kv_cache.shape[-1]).split(
        [module.kv_lora_rank, module.qk_rope_head_dim], dim=-1
    )
    latent, _ = mla.sparse_mla(torch.cat([absorbed, rope], dim=-1), latents, ropes, slots, module.scale)
    return torch.bmm(latent.transpose(0, 1), module.W_UV).transpose(0, 1).flatten(1)


def _sparse_attend_fake(
    q: torch.Tensor, indices: torch.Tensor, dep: torch.Tensor, layer: str, value_size: int
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * value_size)


def _schema(name: str, arguments: str) -> str:
    return f"{name.partition('::')[2]}({arguments}) -> Tensor"


latent_write: Any = define(
    _schema(rules.LATENT_WRITE, f'Tensor latent, Tensor rope, str layer, str layout="{REPLICATED_SLOTS}"'),
    _latent_write,
    _latent_write_fake,
)
"""Write latents ``[N, L]`` and rope keys ``[N, 1, R]`` into their slots; returns what the reads take as ``dep``."""
record_write: Any = define(
    _schema(
        rules.RECORD_WRITE,
        f'Tensor latent, Tensor rope, Tensor key, str layer, str index_layer, str layout="{REPLICATED_SLOTS}"',
    ),
    _record_write,
    _record_write_fake,
)
"""The same, and packed index keys ``[N, W]`` into the slots of ``index_layer``: all that a token leaves in the caches
of one layer, so that it can travel as one record."""
index_topk: Any = define(
    _schema(rules.INDEX_TOPK, "Tensor q, Tensor weights, Tensor dep, str layer, int topk"),
    _index_topk,
    _index_topk_fake,
)
"""i32 ``[T, topk]``: the best index keys of each row, for prepared ``q`` ``[T, Hi, D]`` and f32 ``weights``
``[T, Hi]``, by the contract of ``pcp_kernels.reference``: positions within the request in rising order, then -1."""
sparse_attend: Any = define(
    _schema(rules.SPARSE_ATTEND, "Tensor q, Tensor indices, Tensor dep, str layer, int value_size"),
    _sparse_attend,
    _sparse_attend_fake,
)
"""``[T, H * V]``: attention of ``q`` ``[T, H, N + R]`` over the latents that ``indices`` i32 ``[T, k]`` name; 0 on rows
without any."""
rules.register()
