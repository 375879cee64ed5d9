# SPDX-License-Identifier: Apache-2.0
"""Ops of token graphs with sparse attention: which keys a row attends to, and attention over those alone.

``pcp::select_keys`` scores all keys for the rows of this rank and keeps the best; ``pcp::sparse_attend`` is MLA over
the selected rows of latents, and ``pcp::sparse_attend_heads`` attention over selected keys that every head has of its
own. Nothing of size M x S outlives a call, and no temporary passes :data:`WORKSPACE_BYTES`.

*The selection* (contract of ``pcp_kernels.reference``): keys after a row's own position do not count; of equal scores
the smaller index wins; indices ascend, and -1 fills up rows that see fewer keys than ``topk``, which see all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from pcp_passes.errors import ConfigError
from pcp_passes.ir.library import define
from pcp_passes.sparse import backends
from pcp_passes.sparse.gathered import attend_gathered

SELECT_KEYS = "pcp::select_keys"
SPARSE_ATTEND = "pcp::sparse_attend"
SPARSE_ATTEND_HEADS = "pcp::sparse_attend_heads"

WORKSPACE_BYTES = backends.DEFAULT_WORKSPACE_BYTES
"""Bound on the temporaries of one call."""

LAYOUTS = ("local", "replicated", "rank_major")
"""How the keys lie: this rank's rows are all there are; all keys in global order; all keys, rank after rank."""


def _select_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    topk: int,
    layout: str,
    restore: torch.Tensor | None = None,
) -> torch.Tensor:
    """The keys that each row attends to.

    Args:
        q: ``[B, M, H, D]``, index queries of this rank's rows.
        k: ``[B, S, D]``, index keys, which all heads share.
        weights: ``[B, M, H]``; scores are ``sum_h weights[h] * relu(<q[h], k>)``, in f32 (f64 for f64 operands).
        positions: i64 ``[M]``, where the rows sit in the sequence.
        topk: keys of a row.
        layout: one of :data:`LAYOUTS`. It is stated and not guessed: sizes that contradict it are an error.
        restore: i64 ``[T]``, place of each token among rank-major rows; required but for ``"local"``.

    Returns:
        i32 ``[B, M, topk]``, keys by their position in the sequence.

    Raises:
        ConfigError: operands that do not fit together, or do not have the stated layout.
        ValueError: ``PCP_KERNELS`` names no implementation, or its kernels do not take such operands.
    """
    _check_selection(q, k, weights, positions, layout, restore)
    if layout == "rank_major":
        assert restore is not None
        k = k.index_select(1, restore)
    ke = (positions + 1).to(torch.int32)
    ks = torch.zeros_like(ke)
    out = q.new_empty(*q.shape[:2], topk, dtype=torch.int32)
    for batch in range(q.shape[0]):
        out[batch] = _topk_rows(q[batch], weights[batch], k[batch], ks, ke, topk)
    return out


def _topk_rows(
    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, topk: int
) -> torch.Tensor:
    """The generated kernels, or the reference: on a CPU unless ``PCP_KERNELS`` says otherwise, and in float64."""
    from pcp_kernels.ops.launch import by_reference

    if by_reference(q, k):  # which also takes queries and keys of different dtypes
        from pcp_kernels.reference.select import topk_rows

        return topk_rows(q, weights, k, None, ks, ke, topk, workspace_bytes=WORKSPACE_BYTES)
    from pcp_kernels.ops.topk import index_topk_rows

    rows = q.contiguous(), weights.contiguous(), k.contiguous()
    found: torch.Tensor = index_topk_rows(*rows, None, ks, ke, topk, WORKSPACE_BYTES)
    return found


def _select_keys_fake(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, topk: int, layout: str,
    restore: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], q.shape[1], topk, dtype=torch.int32)


def _check_selection(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    layout: str,
    restore: torch.Tensor | None,
) -> None:
    if q.dim() != 4 or k.dim() != 3:
        raise ConfigError(f"{SELECT_KEYS}: q is [B, M, H, D] and k [B, S, D]; found {list(q.shape)}, {list(k.shape)}.")
    batch, rows, heads, size = q.shape
    wrong = [
        f"{name} is {list(found)}, required {list(required)}"
        for name, found, required in (
            ("k", k.shape, (batch, k.shape[1], size)),
            ("weights", weights.shape, (batch, rows, heads)),
            ("positions", positions.shape, (rows,)),
        )
        if tuple(found) != tuple(required)
    ]
    wrong += _wrong_layout(rows, k.shape[1], layout, restore)
    if wrong:
        raise ConfigError(f"{SELECT_KEYS} of q {list(q.shape)}, layout {layout!r}: {'; '.join(wrong)}.")


def _wrong_layout(rows: int, keys: int, layout: str, restore: torch.Tensor | None) -> list[str]:
    """Equalities that must hold of the sizes; what is stated is never inferred from them."""
    if layout not in LAYOUTS:
        return [f"required one of the layouts {', '.join(LAYOUTS)}"]
    if (restore is None) != (layout == "local"):
        return ["restore is given" if restore is not None else "restore is missing"]
    if layout == "local":
        return [] if keys == rows else [f"there are {keys} keys and {rows} rows, required as many"]
    assert restore is not None
    tokens = restore.shape[0]
    if layout == "replicated":
        return [] if keys == tokens else [f"there are {keys} keys for {tokens} tokens, required as many"]
    ranks = keys // rows if rows else 0
    return [] if ranks * rows == keys >= tokens else [f"{keys} keys are not {rows} of each rank, for {tokens} tokens"]


def _sparse_attend(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Absorbed MLA attention over selected rows.

    Args:
        q: ``[B, H, M, L + R]``, the query in the latent's channels, then its rotary part.
        latent: ``[B, S, L]``, keys and values of all heads; rope: ``[B, S, R]``, further channels of the keys.
        indices: i32 ``[B, M, K]``, rows of a query; -1 is none.
        scale: factor of the logits.
        sinks: ``[H]``, one extra logit a head in the softmax denominator.

    Returns:
        ``[B, H, M, L]`` laid out as ``[B, M, H, L]``; 0 where a row has no index.

    Raises:
        ConfigError: operands that do not fit together.
    """
    _check_attention(SPARSE_ATTEND, q, indices, latent.shape[-1] + rope.shape[-1], (latent, rope))
    out = _attend_fake(q, latent)
    for batch in range(q.shape[0]):
        rows = torch.cat([latent[batch], rope[batch]], dim=-1)
        queries = q[batch].transpose(0, 1)
        if sinks is None:
            held = backends.sparse_mla(
                queries, rows, indices[batch], scale, latent=latent.shape[2], rope=rope.shape[2],
                workspace_bytes=WORKSPACE_BYTES,
            )  # fmt: skip
        else:
            held = attend_gathered(
                queries, rows[:, None], latent[batch][:, None], indices[batch], scale, sinks, WORKSPACE_BYTES
            )
        out[batch] = held.transpose(0, 1)
    return out


def _sparse_attend_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over selected keys.

    Args:
        q: ``[B, H, M, D]``; k: ``[B, Hkv, S, D]``; v: ``[B, Hkv, S, Dv]``, H a multiple of Hkv.
        indices, scale, sinks: as for ``sparse_attend``.

    Returns:
        ``[B, H, M, Dv]`` laid out as ``[B, M, H, Dv]``; 0 where a row has no index.

    Raises:
        ConfigError: operands that do not fit together.
    """
    _check_attention(SPARSE_ATTEND_HEADS, q, indices, k.shape[-1], (k, v))
    out = _attend_fake(q, v)
    for batch in range(q.shape[0]):
        queries, keys, values = (one[batch].transpose(0, 1) for one in (q, k, v))
        held = attend_gathered(queries, keys, values, indices[batch], scale, sinks, WORKSPACE_BYTES)
        out[batch] = held.transpose(0, 1)
    return out


def _check_attention(
    op: str, q: torch.Tensor, indices: torch.Tensor, width: int, members: Sequence[torch.Tensor]
) -> None:
    wrong = []
    if q.dim() != 4 or q.shape[-1] != width:
        wrong.append(f"q is {list(q.shape)}, required [B, H, M, {width}]")
    elif indices.shape[:-1] != (q.shape[0], q.shape[2]) or indices.dtype != torch.int32:
        wrong.append(
            f"indices is {indices.dtype} {list(indices.shape)}, required int32 {[q.shape[0], q.shape[2], 'K']}"
        )
    if any(one.shape[:-1] != members[0].shape[:-1] or one.shape[0] != q.shape[0] for one in members):
        wrong.append(f"keys and values are {[list(one.shape) for one in members]}, required as many rows of each")
    if wrong:
        raise ConfigError(f"{op}: {'; '.join(wrong)}.")


def _attend_fake(q: torch.Tensor, values: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    """Rows before heads in memory, as models view it right after."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], values.shape[-1]).transpose(1, 2)


def _heads_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    return _attend_fake(q, v)


select_keys_op: Any = define(
    "select_keys(Tensor q, Tensor k, Tensor weights, Tensor positions, int topk, str layout, Tensor? restore=None)"
    " -> Tensor",
    _select_keys,
    _select_keys_fake,
)
sparse_attend_op: Any = define(
    "sparse_attend(Tensor q, Tensor latent, Tensor rope, Tensor indices, *, float scale, Tensor? sinks=None) -> Tensor",
    _sparse_attend,
    _attend_fake,
    tags=(torch.Tag.needs_exact_strides,),
)
sparse_attend_heads_op: Any = define(
    "sparse_attend_heads(Tensor q, Tensor k, Tensor v, Tensor indices, *, float scale, Tensor? sinks=None) -> Tensor",
    _sparse_attend_heads,
    _heads_fake,
    tags=(torch.Tag.needs_exact_strides,),
)


@register_flop_formula(select_keys_op.overloadpacket)
def select_keys_flops(q: Sequence[int], k: Sequence[int], *args: Any, out_shape: Any = None, **options: Any) -> int:
    """Scores of all pairs of a row and a key, and their sum over heads."""
    batch, rows, heads, size = q
    return 2 * batch * rows * k[1] * heads * (size + 1)


@register_flop_formula(sparse_attend_op.overloadpacket)
def sparse_attend_flops(
    q: Sequence[int], latent: Sequence[int], rope: Sequence[int], indices: Sequence[int], *args: Any,
    out_shape: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Both products over the selected rows."""
    batch, heads, rows, size = q
    return 2 * batch * heads * rows * min(indices[2], latent[1]) * (size + latent[2])


@register_flop_formula(sparse_attend_heads_op.overloadpacket)
def sparse_attend_heads_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], indices: Sequence[int], *args: Any,
    out_shape: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Both products over the selected keys."""
    batch, heads, rows, size = q
    return 2 * batch * heads * rows * min(indices[2], k[2]) * (size + v[3])
