# SPDX-License-Identifier: Apache-2.0
"""Selection of DeepSeek's lightning indexer over a paged cache of index keys: pcp_kernels on what a step holds."""

from __future__ import annotations

import torch

from pcp_kernels.ops import index_prep
from pcp_kernels.ops.launch import by_reference
from pcp_kernels.ops.topk import index_topk_paged
from pcp_kernels.reference.select import topk_paged
from pcp_passes.capture_mode import host_free
from pcp_passes.errors import ConfigError
from pcp_passes.paged.state import AttentionInputs


def best_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    inputs: AttentionInputs,
    topk: int,
    *,
    page: int,
    workspace_bytes: int,
) -> torch.Tensor:
    """i32 ``[N, topk]``; see :func:`pcp_passes.paged.index_topk`.

    Args:
        q: over records, FP8 too: prepared by ``pcp_kernels.index_prep``, with their scales in the weights.
        cache: ``[blocks, page, 1, D]``, or records ``u8[blocks, page * (D + 4)]``. Queries are rounded as its keys
            are; for records per row and head.
        workspace_bytes: bound on temporaries.

    Raises:
        ConfigError: shapes that do not fit together, or prepared queries for a cache of another dtype.
    """
    records = cache.dtype == torch.uint8
    width = cache.shape[1] // page - 4 if records else cache.shape[3]
    if q.shape[0] != inputs.rows or weights.shape != q.shape[:2] or q.shape[2] != width:
        raise ConfigError(
            f"found index queries {list(q.shape)}, weights {list(weights.shape)} and an index cache "
            f"{list(cache.shape)} for {inputs.rows} rows; required [N, Hi, {width}] and [N, Hi] of one row count."
        )
    prepared = q.dtype == torch.float8_e4m3fn
    if prepared and not records:
        raise ConfigError(
            f"found FP8 queries for index keys of {cache.dtype}; required FP8 records. Make the bodies for the caches' "
            "dtype."
        )
    if not inputs.seq_lens.shape[0] or not inputs.rows:
        return torch.full((inputs.rows, topk), -1, dtype=torch.int32, device=q.device)
    if not host_free(q):
        inputs.require_columns(page)
    if records and not prepared:
        q, weights = index_prep(q.contiguous(), weights.contiguous(), rope="none", store="fp8")
    elif not records:
        q, cache = q.to(cache.dtype), cache.flatten(2)
    where = inputs.tables, inputs.row_request, inputs.visible, topk, page
    if by_reference(q, cache):  # the op does the same after some 50 us of dispatch, which a decode step would notice
        return topk_paged(q, weights, cache, *where, workspace_bytes=workspace_bytes)
    found: torch.Tensor = index_topk_paged(q.contiguous(), weights.contiguous(), cache, *where, workspace_bytes)
    return found
