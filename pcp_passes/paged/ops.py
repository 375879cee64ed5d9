# SPDX-License-Identifier: Apache-2.0
"""The paged ops of a body: cache writes, and attention of the rows over what the caches hold.

Each takes a layer name, a literal of the graph, and token rows; the rest is side state of the running call
(:mod:`pcp_passes.paged.state`). A write returns an empty tensor that the reads of its layer take as ``dep``: it orders
them and keeps the write alive.

``layout`` of a write says in which layout its rows arrive: ``"replicated"`` (the rows of this call) or
``"rank_major"`` (those of all ranks, rank after rank; set by the pass that gathers them). The op compares it with the
layout its slots were made in. Row counts never decide: a padded batch of one layout can have the size of the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.ir.library import define
from pcp_passes.paged import attend, index
from pcp_passes.paged.records import write_index
from pcp_passes.paged.rows import write_rows
from pcp_passes.paged.state import REPLICATED_SLOTS, AttentionInputs, PagedCaches, current, require_layout

KV_WRITE = "pcp::kv_write"
KV_ATTEND = "pcp::kv_attend"
MLA_ATTEND = "pcp::mla_attend"
INDEX_WRITE = "pcp::index_write"
INDEX_TOPK = "pcp::index_topk"
INDEX_KEYS = "pcp::index_keys"


def kv_write(k: torch.Tensor, v: torch.Tensor, layer: str, layout: str = REPLICATED_SLOTS) -> torch.Tensor:
    """Write key and value rows of a layer into their slots.

    Args:
        k, v: ``[N, Hkv, D]`` and ``[N, Hkv, Dv]``; for MLA the latent ``[N, 1, L]`` and the rope key ``[N, 1, R]``.
        layer: name of the layer's cache.
        layout: layout of the rows, see the module's text.

    Returns:
        an empty tensor, to hand to the reads as ``dep``.

    Raises:
        ConfigError: rows in another layout than the slots, or other shapes than slots and cache have.
    """
    result: torch.Tensor = kv_write_op(k, v, layer, layout)
    return result


def kv_attend(
    q: torch.Tensor,
    dep: torch.Tensor,
    layer: str,
    *,
    scale: float | None = None,
    left: int = -1,
    right: int = 0,
    chunk: int = 0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    softcap: float = 0.0,
    value_size: int = 0,
) -> torch.Tensor:
    """Attention of stacked query rows, each over the cached keys of its own request.

    Args:
        q: ``[N, Hq, D]``.
        dep: what :func:`kv_write` of this layer returned.
        layer: name of the layer's cache.
        scale, left, right, chunk, sinks, slopes, softcap: as :func:`pcp_passes.attention.attend` takes them. With
            ``right=-1`` a row sees every cached key of its request, later ones included.
        value_size: Dv; 0 means D.

    Returns:
        ``[N, Hq, Dv]``, dtype of ``q``; 0 on padding rows and where a row sees no key.

    Raises:
        ConfigError: shapes that do not fit together, or a request longer than its row of the block table.
    """
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    result: torch.Tensor = kv_attend_op(
        q, dep, layer, scale=factor, left=left, right=right, chunk=chunk, sinks=sinks, slopes=slopes,
        softcap=softcap, value_size=value_size,
    )  # fmt: skip
    return result


def mla_attend(
    q: torch.Tensor,
    dep: torch.Tensor,
    layer: str,
    *,
    scale: float,
    latent: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Absorbed MLA attention: all heads share one key ``[latent | rope]``, and the latent is the value.

    Args:
        q: ``[N, H, L + R]``: the no-rope query through the key half of ``kv_b_proj``, then the rope query.
        dep, layer: as in :func:`kv_attend`.
        scale: factor of the logits.
        latent: L.
        indices: i32 ``[N, k]``, positions each row may see, no position twice; -1 stands for none. ``None``: all up
            to its own position.

    Returns:
        ``[N, H, L]``, still latent; 0 on padding rows.
    """
    result: torch.Tensor = mla_attend_op(q, dep, layer, scale=scale, latent=latent, indices=indices)
    return result


def index_write(k: torch.Tensor, layer: str, layout: str = REPLICATED_SLOTS) -> torch.Tensor:
    """Write index keys ``[N, D]`` of a layer into their slots; otherwise as :func:`kv_write`."""
    result: torch.Tensor = index_write_op(k, layer, layout)
    return result


def index_topk(q: torch.Tensor, weights: torch.Tensor, dep: torch.Tensor, layer: str, topk: int) -> torch.Tensor:
    """Positions of the best cached index keys of each row: DeepSeek's lightning indexer, scores and selection.

    ``score[n, j] = sum_h weights[n, h] * relu(q[n, h] . k[j])`` over the keys up to the row's own position. Equal
    scores are taken in position order, so the selection does not depend on how rows are batched or split.

    Args:
        q: ``[N, Hi, D]``.
        weights: ``[N, Hi]``, scales folded in.
        dep, layer: as in :func:`kv_attend`, of :func:`index_write`.
        topk: k.

    Returns:
        i32 ``[N, k]``, positions in rising order, then -1 where a row has fewer keys and on padding rows.
    """
    result: torch.Tensor = index_topk_op(q, weights, dep, layer, topk)
    return result


def index_keys(k: torch.Tensor, dep: torch.Tensor) -> torch.Tensor:
    """Stands, while a model is captured, for the index keys of a whole sequence; ``[.., N, D]`` as ``k``.

    A model's own dense scoring reads it; ``lower-sparse-index`` replaces both. It cannot run.
    """
    result: torch.Tensor = index_keys_op(k, dep)
    return result


def _write(name: str, rows: torch.Tensor, caches: PagedCaches, inputs: AttentionInputs) -> None:
    # Which rows are kept is the same in all layers, so it is found once a call.
    write_rows(rows, caches.written(name, rows), inputs.slots, name, lambda: inputs.kept)


def _kv_write(k: torch.Tensor, v: torch.Tensor, layer: str, layout: str = REPLICATED_SLOTS) -> torch.Tensor:
    caches, inputs = current(KV_WRITE)
    require_layout(KV_WRITE, layer, layout, k, inputs)
    _write(f"{layer}.k", k, caches, inputs)
    _write(f"{layer}.v", v, caches, inputs)
    return k.new_empty(0)


def _kv_write_fake(k: torch.Tensor, v: torch.Tensor, layer: str, layout: str = REPLICATED_SLOTS) -> torch.Tensor:
    return k.new_empty(0)


def _index_write(k: torch.Tensor, layer: str, layout: str = REPLICATED_SLOTS) -> torch.Tensor:
    caches, inputs = current(INDEX_WRITE)
    require_layout(INDEX_WRITE, layer, layout, k, inputs)
    write_index(k, f"{layer}.index", caches, inputs.slots, lambda: inputs.kept)
    return k.new_empty(0)


def _index_write_fake(k: torch.Tensor, layer: str, layout: str = REPLICATED_SLOTS) -> torch.Tensor:
    return k.new_empty(0)


def _kv_attend(
    q: torch.Tensor, dep: torch.Tensor, layer: str, *, scale: float, value_size: int = 0, **options: Any
) -> torch.Tensor:
    caches, inputs = current(KV_ATTEND)
    keys, values = caches.read(f"{layer}.k"), caches.read(f"{layer}.v")
    return attend.over_blocks(q, keys, values, inputs, scale=scale, **options)


def _kv_attend_fake(
    q: torch.Tensor, dep: torch.Tensor, layer: str, *, scale: float, value_size: int = 0, **options: Any
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], value_size or q.shape[2])


def _mla_attend(
    q: torch.Tensor,
    dep: torch.Tensor,
    layer: str,
    *,
    scale: float,
    latent: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    caches, inputs = current(MLA_ATTEND)
    return attend.absorbed(q, caches, layer, inputs, scale, latent, indices)


def _mla_attend_fake(
    q: torch.Tensor,
    dep: torch.Tensor,
    layer: str,
    *,
    scale: float,
    latent: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], latent)


def _index_topk(q: torch.Tensor, weights: torch.Tensor, dep: torch.Tensor, layer: str, topk: int) -> torch.Tensor:
    caches, inputs = current(INDEX_TOPK)
    return index.best_keys(
        q, weights, caches.read(f"{layer}.index"), inputs, topk,
        page=caches.block_size, workspace_bytes=caches.sparse.workspace_bytes,
    )  # fmt: skip


def _index_topk_fake(q: torch.Tensor, weights: torch.Tensor, dep: torch.Tensor, layer: str, topk: int) -> torch.Tensor:
    return q.new_empty(q.shape[0], topk, dtype=torch.int32)


def _index_keys(k: torch.Tensor, dep: torch.Tensor) -> torch.Tensor:
    raise ConfigError(
        f"{INDEX_KEYS} stands for the index keys of a sequence while a model is captured, and cannot run. Give the "
        "captured graph to the pass lower-sparse-index first."
    )


def _index_keys_fake(k: torch.Tensor, dep: torch.Tensor) -> torch.Tensor:
    return k.clone()


kv_write_op: Any = define(
    'kv_write(Tensor k, Tensor v, str layer, str layout="replicated") -> Tensor', _kv_write, _kv_write_fake
)
index_write_op: Any = define(
    'index_write(Tensor k, str layer, str layout="replicated") -> Tensor', _index_write, _index_write_fake
)
kv_attend_op: Any = define(
    "kv_attend(Tensor q, Tensor dep, str layer, *, float scale, int left=-1, int right=0, int chunk=0, "
    "Tensor? sinks=None, Tensor? slopes=None, float softcap=0.0, int value_size=0) -> Tensor",
    _kv_attend,
    _kv_attend_fake,
)
mla_attend_op: Any = define(
    "mla_attend(Tensor q, Tensor dep, str layer, *, float scale, int latent, Tensor? indices=None) -> Tensor",
    _mla_attend,
    _mla_attend_fake,
)
index_topk_op: Any = define(
    "index_topk(Tensor q, Tensor weights, Tensor dep, str layer, int topk) -> Tensor", _index_topk, _index_topk_fake
)
index_keys_op: Any = define("index_keys(Tensor k, Tensor dep) -> Tensor", _index_keys, _index_keys_fake)
