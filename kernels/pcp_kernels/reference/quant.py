# SPDX-License-Identifier: Apache-2.0
"""FP8 (e4m3fn) with power-of-two scales, and the orthonormal Hadamard transform that conditions it.

The scale of a group is the smallest power of two that is not below ``max(amax, floor) / 448``, found in integers::

    e       = (bits(max(amax, floor) / 448) + 0x7FFFFF) & 0x7F800000     bits of the scale
    inverse = 0x7F000000 - e                                             bits of 1 / scale
    value   = clamp(x * inverse, -448, 448)                              rounded to e4m3fn, to even

The division is IEEE fp32. Logarithms would be off by one at exact powers of two on some devices; this is not. Values
that are not finite have no meaning in FP8 and none is defined for them.
"""

from __future__ import annotations

import torch

FP8_MAX = 448.0
SCALE_FLOOR = 1e-4
"""Smallest amax (index keys and queries) or smallest scale before rounding (latents)."""


def pow2_scale(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, 1 / scale), fp32: the smallest powers of two that are at least ``raw``, normal positive fp32."""
    bits = (raw.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return bits.view(torch.float32), (0x7F000000 - bits).view(torch.float32)


def quantise(
    x: torch.Tensor, group: int | None = None, *, floor: float = SCALE_FLOOR, floor_on: str = "amax"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values e4m3fn ``[..., D]``, scale fp32 ``[..., D / group]``); one group when ``group`` is None.

    Args:
        x: ``[..., D]`` of any floating dtype; rounded to fp32 first.
        floor_on: "amax": of the largest magnitude, before the division by 448; "scale": of the quotient.

    Raises:
        ValueError: a group that does not divide D, or another ``floor_on``.
    """
    width = x.shape[-1] if group is None else group
    if width < 1 or x.shape[-1] % width or floor_on not in ("amax", "scale"):
        raise ValueError(
            f"quantise: found groups of {width} of {x.shape[-1]} values and floor_on={floor_on!r}; "
            "required a group that divides them, and 'amax' or 'scale'."
        )
    groups: torch.Tensor = x.to(torch.float32).unflatten(-1, (-1, width))
    amax = groups.abs().amax(-1)
    raw = amax.clamp(min=floor) / FP8_MAX if floor_on == "amax" else (amax / FP8_MAX).clamp(min=floor)
    scale, inverse = pow2_scale(raw)
    values = (groups * inverse[..., None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.flatten(-2), scale


def dequantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 ``[..., D]`` of values ``[..., D]`` and scales ``[..., D / group]``: exact."""
    groups: torch.Tensor = values.to(torch.float32).unflatten(-1, (scale.shape[-1], -1))
    out: torch.Tensor = groups.mul_(scale[..., None]).flatten(-2)
    return out


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """``x @ H / sqrt(D)`` over the last dimension, H the Sylvester matrix; fp32, or fp64 of fp64; not rounded further.

    Raises:
        ValueError: D is not a power of two.
    """
    size = x.shape[-1]
    if size < 1 or size & (size - 1):
        raise ValueError(f"hadamard: found a last dimension of {size}; required a power of two.")
    out = x if x.dtype == torch.float64 else x.to(torch.float32)
    half = 1
    while half < size:
        # Butterflies, never a matrix product: its bits would depend on the number of rows.
        low, high = out.unflatten(-1, (-1, 2, half)).unbind(-2)
        out = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    scaled: torch.Tensor = out * float(size) ** -0.5
    return scaled
