# SPDX-License-Identifier: Apache-2.0
"""The indexer's queries: rotated, stored, and their scales folded into the head weights."""

from __future__ import annotations

import torch

from pcp_kernels.reference.pack import ROPES, ROUNDINGS, STORES, check_choice, in_tiles, rotate, rows_of, widened
from pcp_kernels.reference.quant import quantise


def index_prep(
    q: torch.Tensor,
    w: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    rope: str = "none",
    hadamard: bool = False,
    store: str = "fp8",
    factor: float = 1.0,
    rounding: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries ``[T, H, D]`` of the store's dtype, weights fp32 ``[T, H]``); fp64 weights when all is fp64.

    RoPE and Hadamard in fp32, then one rounding to the store. FP8 has one power-of-two scale ``s`` per token and head;
    the weight becomes ``(w * factor) * s``, which is exact in ``s``, and relu commutes with it because it is positive.

    Args:
        q: ``[T, H, D]``.
        w: ``[T, H]``.
        cos, sin: fp32 ``[T, R/2]``.
        factor: ``H**-0.5 * D**-0.5`` in the published models. Common to all keys, so no selection can show it missing.
        rounding: what FP8 is quantised from, "bf16" or "fp32"; None: "bf16" of bf16 queries, as the published code
            does, else "fp32".

    Raises:
        ValueError: a choice outside its set.
    """
    rounding = rounding or ("bf16" if q.dtype == torch.bfloat16 else "fp32")
    check_choice("index_prep", rope=(rope, ROPES), rounding=(rounding, ROUNDINGS), store=(store, tuple(STORES)))
    weights = w.to(torch.float64 if q.dtype == torch.float64 and store == "fp64" else torch.float32) * factor

    def make(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        x = rotate(widened(q[rows]), rows_of(cos, rows), rows_of(sin, rows), rope, hadamard)
        if store != "fp8":
            return x.to(STORES[store]), weights[rows]
        values, scale = quantise(x.to(torch.bfloat16) if rounding == "bf16" else x)
        return values, weights[rows] * scale[..., 0]

    queries, folded = in_tiles(make, q)
    return queries, folded
