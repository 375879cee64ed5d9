# SPDX-License-Identifier: Apache-2.0
"""Reference attention over paged caches: the keys of a request are gathered, then attended by position.

Correct everywhere and fast enough for tests and small models on a CPU. It reads lengths on the host, once per call of
a body.
"""

from __future__ import annotations

from typing import Any

import torch

from pcp_passes.attention import attend
from pcp_passes.errors import ConfigError
from pcp_passes.paged.state import AttentionInputs

_GATHERED_ELEMENTS = 1 << 23
"""Elements of selected keys materialised at once."""


def over_blocks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    left: int = -1,
    right: int = 0,
    chunk: int = 0,
    **options: Any,
) -> torch.Tensor:
    """``[N, Hq, Dv]`` of queries ``[N, Hq, D]``; see :func:`pcp_passes.paged.kv_attend`.

    Raises:
        ConfigError: shapes that do not fit together.
    """
    _require_rows(q, inputs)
    if q.shape[2] != k_cache.shape[3]:
        raise ConfigError(f"queries are {list(q.shape)}, the key cache {list(k_cache.shape)}; required one head size")
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[3])
    size = k_cache.shape[1]
    for (_, start, stop, keys), slots in zip(inputs.segments, inputs.key_slots(size), strict=True):
        where = inputs.positions[start:stop]
        skip = _out_of_sight(where, left, chunk)
        if skip >= keys:
            continue
        seen = attend(
            q[start:stop].transpose(0, 1)[None],
            _heads_first(k_cache, slots[skip:], q.dtype),
            _heads_first(v_cache, slots[skip:], q.dtype),
            where - skip,
            scale=scale, left=left, right=right, chunk=chunk, **options,
        )  # fmt: skip
        out[start:stop] = seen[0].transpose(0, 1)
    return out


def absorbed(
    q: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    inputs: AttentionInputs,
    scale: float,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """``[N, H, L]`` of queries ``[N, H, L + R]`` over ``[latent | rope]``; see :func:`pcp_passes.paged.mla_attend`.

    Raises:
        ConfigError: shapes that do not fit together.
    """
    _require_rows(q, inputs)
    size, latent = latents.shape[1], latents.shape[3]
    if q.shape[2] != latent + ropes.shape[3] or (indices is not None and indices.shape[0] != q.shape[0]):
        raise ConfigError(
            f"absorbed queries are {list(q.shape)} with {'no' if indices is None else list(indices.shape)} indices; "
            f"required [N, H, {latent} + {ropes.shape[3]}] and one row of indices per row."
        )
    out = q.new_zeros(q.shape[0], q.shape[1], latent)
    for (_, start, stop, _), slots in zip(inputs.segments, inputs.key_slots(size), strict=True):
        keys = torch.cat([_rows(latents, slots, q.dtype), _rows(ropes, slots, q.dtype)], dim=1)
        if indices is None:
            seen = attend(
                q[start:stop].transpose(0, 1)[None], keys[None, None], keys[None, None, :, :latent],
                inputs.positions[start:stop], scale=scale,
            )[0].transpose(0, 1)  # fmt: skip
        else:
            seen = _over_selected(q[start:stop], keys, latent, scale, indices[start:stop])
        out[start:stop] = seen
    return out


def _over_selected(
    q: torch.Tensor, keys: torch.Tensor, latent: int, scale: float, indices: torch.Tensor
) -> torch.Tensor:
    """Each row over its own selection of ``keys`` ``[S, L + R]``, some rows at a time."""
    step = max(1, _GATHERED_ELEMENTS // max(1, indices.shape[1] * keys.shape[1]))
    parts = []
    for first in range(0, q.shape[0], step):
        chosen = indices[first : first + step].long()
        absent = chosen < 0
        selected = keys[chosen.clamp(min=0)]
        logits = torch.matmul(q[first : first + step], selected.transpose(1, 2)) * scale
        weights = torch.softmax(logits.masked_fill(absent[:, None], float("-inf")), dim=-1)
        # A row without any key is 0 / 0 here; its output is defined as 0.
        weights = weights.masked_fill(absent[:, None], 0.0)
        parts.append(torch.matmul(weights, selected[..., :latent]))
    return torch.cat(parts)


def _out_of_sight(positions: torch.Tensor, left: int, chunk: int) -> int:
    """Leading keys that no row of a sliding window sees: they need not be gathered.

    Chunks count from position 0, so nothing is cut there.
    """
    return 0 if left < 0 or chunk else max(int(positions.min()) - left, 0)


def _rows(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gathered rows of a cache with one head: ``[S, D]``."""
    return cache.flatten(0, 2).index_select(0, slots).to(dtype)


def _heads_first(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gathered rows as ``[1, H, S, D]``."""
    return cache.flatten(0, 1).index_select(0, slots).to(dtype).transpose(0, 1)[None]


def _require_rows(q: torch.Tensor, inputs: AttentionInputs) -> None:
    if q.dim() != 3 or q.shape[0] != inputs.rows:
        raise ConfigError(
            f"found queries {list(q.shape)} for attention inputs of {inputs.rows} rows; required [N, H, D] with a row "
            "per position. Give a body the inputs that were made for its rows."
        )
