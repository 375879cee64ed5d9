# SPDX-License-Identifier: Apache-2.0
"""What a token leaves in the caches: its index-key record and its latent record.

::

    index record   fp8   u8 [T, D+4]          D values | scale fp32                        132 B at D=128
                   else  [T, D]
    latent record  fp8   u8 [T, L+4*G+2*R]    L values | G scales fp32 | R rope bf16       656 B at L=512, R=64
                   else  [T, L+R]
    both           the latent record, then the index record                                788 B

Each record is made of its own token alone, so records may be gathered, and not the values they are made of.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pcp_kernels.reference.quant import dequantise, hadamard, quantise

LATENT_GROUP = 128
"""Latent values that share a scale."""

_TILE_BYTES = 4 << 20

STORES: dict[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
ROPES = ("interleaved", "half", "none")
ROUNDINGS = ("bf16", "fp32")


def check_choice(function: str, **choices: tuple[str, tuple[str, ...]]) -> None:
    """Raise ValueError, all faults named, unless each choice is one of its set."""
    faults = [
        f"{name}: found {found!r}; required one of {', '.join(known)}"
        for name, (found, known) in choices.items()
        if found not in known
    ]
    if faults:
        raise ValueError("\n  ".join([f"{function} cannot run:", *faults]))


def apply_rope(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, rope: str) -> torch.Tensor:
    """Rotate the first R values of the last dimension, in the dtype of ``x``; the rest passes.

    Pair ``(a, b)`` becomes ``(a*cos - b*sin, b*cos + a*sin)``. Pairs are ``(x[i], x[i + R/2])`` for "half" and
    ``(x[2i], x[2i + 1])`` for "interleaved".

    Args:
        x: ``[T, ..., D]``.
        cos, sin: ``[T, R/2]``, looked up per row; R <= D. Not read for "none".

    Raises:
        ValueError: another rope, or no cos and sin for one.
    """
    check_choice("apply_rope", rope=(rope, ROPES))
    if rope == "none":
        return x
    if cos is None or sin is None or 2 * cos.shape[-1] > x.shape[-1] or cos.shape != sin.shape:
        shapes = [None if table is None else list(table.shape) for table in (cos, sin)]
        raise ValueError(
            f"apply_rope: found cos {shapes[0]} and sin {shapes[1]} for {list(x.shape)}; required [T, R/2] each, "
            "R not above the last dimension. Give both, or rope='none'."
        )
    size = 2 * cos.shape[-1]
    rows = (cos.shape[0], *[1] * (x.ndim - 2), cos.shape[-1])
    cos, sin = cos.to(x.dtype).reshape(rows), sin.to(x.dtype).reshape(rows)
    rotated = x[..., :size]
    if rope == "half":
        a, b = rotated.chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((out, x[..., size:]), dim=-1)


def index_pack(
    k: torch.Tensor,
    ln_weight: torch.Tensor | None = None,
    ln_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    rope: str = "none",
    hadamard: bool = False,
    rounding: str = "bf16",
    store: str = "fp8",
) -> torch.Tensor:
    """Index-key records of ``k``: LayerNorm, RoPE and Hadamard in fp32 (fp64 of fp64), one rounding, the store.

    Args:
        k: ``[T, D]``, the projected key.
        ln_weight, ln_bias: ``[D]``; no LayerNorm without a weight.
        cos, sin: fp32 ``[T, R/2]``.
        rounding: what FP8 is quantised from: "bf16" (a bf16 tensor, as when the key itself is gathered) or "fp32".
            Quantising a bf16 copy moves about 3 % of the elements. The other stores round once, to the store.

    Returns:
        u8 ``[T, D+4]`` for "fp8", else ``[T, D]`` of the store's dtype.

    Raises:
        ValueError: a choice outside its set.
    """
    check_choice("index_pack", rope=(rope, ROPES), rounding=(rounding, ROUNDINGS), store=(store, tuple(STORES)))

    def make(rows: slice) -> tuple[torch.Tensor]:
        x = widened(k[rows])
        if ln_weight is not None:
            bias = None if ln_bias is None else ln_bias.to(x.dtype)
            x = F.layer_norm(x, (x.shape[-1],), ln_weight.to(x.dtype), bias, eps)
        x = rotate(x, rows_of(cos, rows), rows_of(sin, rows), rope, hadamard)
        if store != "fp8":
            return (x.to(STORES[store]),)
        values, scale = quantise(x.to(torch.bfloat16) if rounding == "bf16" else x)
        return (torch.cat((as_bytes(values), as_bytes(scale)), dim=-1),)

    return in_tiles(make, k)[0]


def rotate(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, rope: str, with_hadamard: bool
) -> torch.Tensor:
    """RoPE, then Hadamard if wanted, in the dtype of ``x`` (fp32 or fp64)."""
    x = apply_rope(x, cos, sin, rope)
    return hadamard(x) if with_hadamard else x


def index_unpack(record: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(keys ``[..., D]``, scale fp32 ``[...]`` or None) of index records; FP8 records are those of u8."""
    if record.dtype != torch.uint8:
        return record, None
    values = from_bytes(record[..., :dim], torch.float8_e4m3fn)
    return values, from_bytes(record[..., dim : dim + 4], torch.float32)[..., 0]


def latent_groups(latent_dim: int) -> tuple[int, int]:
    """(groups, values per group) of a latent: 128 values share a scale, or all when there are fewer."""
    width = min(latent_dim, LATENT_GROUP)
    return -(-latent_dim // width), width


def latent_width(latent_dim: int, rope_dim: int, store: str) -> int:
    """Last dimension of a latent record: bytes for "fp8", values otherwise."""
    return latent_dim + 4 * latent_groups(latent_dim)[0] + 2 * rope_dim if store == "fp8" else latent_dim + rope_dim


def latent_pack(latent: torch.Tensor, rope_key: torch.Tensor, *, store: str = "fp8") -> torch.Tensor:
    """Latent records of ``latent [T, L]`` and ``rope_key [T, R]``, both as they would be cached.

    The floor of 1e-4 is on the scale here, not on the largest magnitude.

    Raises:
        ValueError: a store outside its set.
    """
    check_choice("latent_pack", store=(store, tuple(STORES)))
    if store != "fp8":
        return torch.cat((latent, rope_key), dim=-1).to(STORES[store])
    groups, width = latent_groups(latent.shape[-1])

    def make(rows: slice) -> tuple[torch.Tensor]:
        padded = F.pad(latent[rows], (0, groups * width - latent.shape[-1]))
        values, scale = quantise(padded, width, floor_on="scale")
        parts = (values[..., : latent.shape[-1]], scale, rope_key[rows].to(torch.bfloat16))
        return (torch.cat([as_bytes(part) for part in parts], dim=-1),)

    return in_tiles(make, latent)[0]


def latent_unpack(
    record: torch.Tensor, latent_dim: int, rope_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """(latent ``[..., L]``, rope key ``[..., R]``) of latent records, in ``dtype``; FP8 records are those of u8."""
    if record.dtype != torch.uint8:
        return record[..., :latent_dim].to(dtype), record[..., latent_dim : latent_dim + rope_dim].to(dtype)
    groups, width = latent_groups(latent_dim)
    end = latent_dim + 4 * groups
    values = from_bytes(record[..., :latent_dim], torch.float8_e4m3fn)
    scale = from_bytes(record[..., latent_dim:end], torch.float32)
    rope_key = from_bytes(record[..., end : end + 2 * rope_dim], torch.bfloat16)
    padded = F.pad(values.to(torch.float32), (0, groups * width - latent_dim))
    return dequantise(padded, scale)[..., :latent_dim].to(dtype), rope_key.to(dtype)


def combine_records(latent_record: torch.Tensor, index_record: torch.Tensor) -> torch.Tensor:
    """One record per token, for one collective: the latent record ``[T, A]``, then the index record ``[T, B]``.

    Raises:
        ValueError: records of two dtypes.
    """
    if latent_record.dtype != index_record.dtype:
        raise ValueError(
            f"combine_records: found a latent record of {latent_record.dtype} and an index record of "
            f"{index_record.dtype}; required one dtype, so pack both for the same store."
        )
    return torch.cat((latent_record, index_record), dim=-1)


def split_record(record: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(latent record, index record), views; ``width`` is the latent record's, see :func:`latent_width`."""
    return record[..., :width], record[..., width:]


def in_tiles(make: Callable[[slice], tuple[torch.Tensor, ...]], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What ``make`` gives for all rows of ``like [T, ...]``, some rows at a time: temporaries stay near 4 MiB."""
    rows = like.shape[0]
    # About eight fp32 copies of a row are alive at once.
    step = max(1, _TILE_BYTES // (32 * max(1, like[:1].numel())))
    if rows <= step:
        return make(slice(0, rows))
    first = make(slice(0, step))
    outs = tuple(part.new_empty((rows, *part.shape[1:])) for part in first)
    for out, part in zip(outs, first, strict=True):
        out[:step] = part
    for start in range(step, rows, step):
        for out, part in zip(outs, make(slice(start, start + step)), strict=True):
            out[start : start + step] = part
    return outs


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """u8 ``[..., n * itemsize]`` of ``[..., n]``."""
    if x.numel() == 0:  # whose strides may be anything, which a view does not take
        return x.new_zeros((*x.shape[:-1], x.shape[-1] * x.dtype.itemsize), dtype=torch.uint8)
    return x.contiguous().view(torch.uint8)


def from_bytes(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[..., n]`` of u8 ``[..., n * itemsize]``."""
    if raw.numel() == 0:
        return raw.new_zeros((*raw.shape[:-1], raw.shape[-1] // dtype.itemsize), dtype=dtype)
    return raw.contiguous().view(dtype)


def widened(x: torch.Tensor) -> torch.Tensor:
    """fp32, and fp64 as it is."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def rows_of(table: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Rows of a table that may be absent."""
    return None if table is None else table[rows]
