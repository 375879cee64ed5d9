# SPDX-License-Identifier: Apache-2.0
"""Operators that pack what a token leaves in the caches: its index record, its latent record, or both in one."""

from __future__ import annotations

import torch

from pcp_kernels.generate.pack import LATENT_ROWS
from pcp_kernels.generate.rows import ROWS
from pcp_kernels.ops.launch import FLOATS, Faults, angles, by_reference, fresh, launch, name_of
from pcp_kernels.reference import pack as reference
from pcp_kernels.reference.pack import ROPES, ROUNDINGS, STORES, combine_records, latent_unpack, latent_width
from pcp_kernels.specs import LatentPackSpec, PackSpec

__all__ = ["dsa_pack", "index_pack", "latent_pack", "latent_unpack", "latent_width"]


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
    """Index record of each token's projected key: LayerNorm, RoPE, Hadamard, rounding point, store.

    Args:
        k: ``[T, D]``, bf16, fp16, fp32 or fp64.
        ln_weight, ln_bias: ``[D]``; no LayerNorm without a weight.
        cos, sin: ``[T, R/2]``, looked up per row; dimensions ``[0:R]`` are rotated.
        rope: "interleaved", "half" or "none".
        rounding: what fp8 is quantised from: "bf16" or "fp32". Other stores round once.
        store: "fp8", "bf16", "fp16", "fp32"; "fp64" by the reference alone.

    Returns:
        u8 ``[T, D + 4]`` for fp8 (values, then the fp32 scale), else ``[T, D]`` of the store's dtype.

    Raises:
        ValueError: arguments other than these, or a spec without a kernel.
    """
    result: torch.Tensor = _index_pack(
        k, ln_weight, ln_bias, eps, cos, sin, rope=rope, hadamard=hadamard, rounding=rounding, store=store
    )
    return result


def latent_pack(latent: torch.Tensor, rope_key: torch.Tensor, *, store: str = "fp8") -> torch.Tensor:
    """Latent record of each token.

    Args:
        latent: ``[T, L]``, normalised; bf16, fp16, fp32 or fp64.
        rope_key: ``[T, R]``, rotated; the same dtype.
        store: "fp8", "bf16", "fp16", "fp32"; "fp64" by the reference alone.

    Returns:
        u8 ``[T, L + 4 * ceil(L / 128) + 2 * R]`` for fp8 (values, fp32 scales, bf16 rope; 656 bytes at 512 and 64),
        else ``[T, L + R]`` of the store's dtype.

    Raises:
        ValueError: arguments other than these, or a spec without a kernel.
    """
    result: torch.Tensor = _latent_pack(latent, rope_key, store=store)
    return result


def dsa_pack(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
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
    """One record per token, for one collective: its latent record, then its index record (788 bytes at GLM's sizes).

    Arguments and errors are those of :func:`latent_pack` and :func:`index_pack`.
    """
    result: torch.Tensor = _dsa_pack(
        latent,
        rope_key,
        k,
        ln_weight,
        ln_bias,
        eps,
        cos,
        sin,
        rope=rope,
        hadamard=hadamard,
        rounding=rounding,
        store=store,
    )
    return result


def rope_faults(faults: Faults, rope: str, cos: torch.Tensor | None, sin: torch.Tensor | None, x: torch.Tensor) -> int:
    """Check the tables of angles against rows ``x``; how many dimensions are rotated."""
    faults.choice("rope", rope, ROPES)
    rotated = 0 if cos is None or cos.ndim != 2 else 2 * cos.shape[1]
    faults.expect(
        (cos is None) == (sin is None) == (rope == "none"),
        f"cos, sin: found {_kind(cos)} and {_kind(sin)} with rope={rope!r}; required both, and neither with 'none'",
    )
    for name, table in (("cos", cos), ("sin", sin)):
        faults.tensor(name, table, (x.shape[0] if x.ndim else 0, rotated // 2), FLOATS)
    faults.expect(
        cos is None or 0 < rotated <= x.shape[-1],
        f"cos: found angles for {rotated} dimensions; required 2 to {x.shape[-1] if x.ndim else 0}",
    )
    return rotated


def _kind(table: torch.Tensor | None) -> str:
    return "none" if table is None else f"{table.dtype} {list(table.shape)}"


def _index_faults(
    faults: Faults,
    k: torch.Tensor,
    ln_weight: torch.Tensor | None,
    ln_bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rope: str,
    rounding: str,
    store: str,
) -> int:
    faults.tensor("k", k, ("T", "D"), FLOATS)
    for name, vector in (("ln_weight", ln_weight), ("ln_bias", ln_bias)):
        faults.tensor(name, vector, k.shape[-1:], FLOATS, contiguous=True)
    faults.expect(
        ln_bias is None or ln_weight is not None, "ln_bias: found without ln_weight; required both or a weight"
    )
    faults.choice("rounding", rounding, ROUNDINGS)
    faults.choice("store", store, tuple(STORES))
    return rope_faults(faults, rope, cos, sin, k)


def _latent_faults(faults: Faults, latent: torch.Tensor, rope_key: torch.Tensor, store: str) -> None:
    faults.tensor("latent", latent, ("T", "L"), FLOATS)
    faults.tensor("rope_key", rope_key, (latent.shape[0] if latent.ndim else 0, "R"), (latent.dtype,))
    faults.choice("store", store, tuple(STORES))


def _pack_index_into(
    out: torch.Tensor,
    k: torch.Tensor,
    ln_weight: torch.Tensor | None,
    ln_bias: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    spec: PackSpec,
) -> None:
    """Fill ``out``, which may be columns of a wider record."""
    arguments = {"k_ptr": k, "k_stride": k.stride(0), "rows": k.shape[0], "eps": eps, **_targets(out, spec.dim)}
    if ln_weight is not None:
        weight = ln_weight.float()
        bias = torch.zeros_like(weight) if ln_bias is None else ln_bias.float()
        arguments |= {"weight_ptr": weight, "bias_ptr": bias}
    launch(spec, (-(-k.shape[0] // ROWS),), k, arguments | angles(cos, sin))


def _pack_latent_into(out: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor, spec: LatentPackSpec) -> None:
    arguments = {
        "latent_ptr": latent,
        "latent_stride": latent.stride(0),
        "key_ptr": rope_key,
        "key_stride": rope_key.stride(0),
        "rows": latent.shape[0],
        **_targets(out, spec.latent),
    }
    if out.dtype == torch.uint8:
        start = latent_width(spec.latent, 0, "fp8")
        arguments["rope_ptr"] = out[:, start:].view(torch.bfloat16)
    launch(spec, (-(-latent.shape[0] // LATENT_ROWS),), latent, arguments)


def _targets(out: torch.Tensor, values: int) -> dict[str, object]:
    """Where a packing kernel writes: codes and scales of one byte record, or values."""
    if out.dtype != torch.uint8:
        return {"out_ptr": out, "out_stride": out.stride(0)}
    return {"code_ptr": out, "scale_ptr": out[:, values:].view(torch.float32), "out_words": out.stride(0) // 4}


def _index_spec(
    k: torch.Tensor, norm: bool, rope: str, rope_dim: int, hadamard: bool, rounding: str, store: str
) -> PackSpec:
    return PackSpec(
        dim=k.shape[1], rope=rope, rope_dim=rope_dim, norm=norm, hadamard=hadamard, rounding=rounding, store=store,
        source=name_of(k.dtype),
    )  # fmt: skip


def _record(like: torch.Tensor, width: int, store: str) -> torch.Tensor:
    dtype = torch.uint8 if store == "fp8" else STORES[store]
    return torch.empty((like.shape[0], width), dtype=dtype, device=like.device)


def _index_width(dim: int, store: str) -> int:
    return dim + 4 if store == "fp8" else dim


@torch.library.custom_op("pcp_kernels::index_pack", mutates_args=())
def _index_pack(
    k: torch.Tensor,
    ln_weight: torch.Tensor | None,
    ln_bias: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    rope: str,
    hadamard: bool,
    rounding: str,
    store: str,
) -> torch.Tensor:
    faults = Faults("index_pack", k)
    rope_dim = _index_faults(faults, k, ln_weight, ln_bias, cos, sin, rope, rounding, store)
    faults.check()
    if by_reference(k):
        packed = reference.index_pack(
            k, ln_weight, ln_bias, eps, cos, sin, rope=rope, hadamard=hadamard, rounding=rounding, store=store
        )
        return fresh(packed, k)
    spec = _index_spec(k, ln_weight is not None, rope, rope_dim, hadamard, rounding, store)
    out = _record(k, _index_width(k.shape[1], store), store)
    _pack_index_into(out, k, ln_weight, ln_bias, eps, cos, sin, spec)
    return out


@_index_pack.register_fake
def _(
    k: torch.Tensor,
    ln_weight: torch.Tensor | None,
    ln_bias: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    rope: str,
    hadamard: bool,
    rounding: str,
    store: str,
) -> torch.Tensor:
    return _record(k, _index_width(k.shape[1], store), store)


@torch.library.custom_op("pcp_kernels::latent_pack", mutates_args=())
def _latent_pack(latent: torch.Tensor, rope_key: torch.Tensor, *, store: str) -> torch.Tensor:
    faults = Faults("latent_pack", latent)
    _latent_faults(faults, latent, rope_key, store)
    faults.check()
    if by_reference(latent):
        return reference.latent_pack(latent, rope_key, store=store)
    spec = LatentPackSpec(latent=latent.shape[1], rope_dim=rope_key.shape[1], store=store, source=name_of(latent.dtype))
    out = _record(latent, latent_width(latent.shape[1], rope_key.shape[1], store), store)
    _pack_latent_into(out, latent, rope_key, spec)
    return out


@_latent_pack.register_fake
def _(latent: torch.Tensor, rope_key: torch.Tensor, *, store: str) -> torch.Tensor:
    return _record(latent, latent_width(latent.shape[1], rope_key.shape[1], store), store)


@torch.library.custom_op("pcp_kernels::dsa_pack", mutates_args=())
def _dsa_pack(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    k: torch.Tensor,
    ln_weight: torch.Tensor | None,
    ln_bias: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    rope: str,
    hadamard: bool,
    rounding: str,
    store: str,
) -> torch.Tensor:
    faults = Faults("dsa_pack", latent)
    _latent_faults(faults, latent, rope_key, store)
    rope_dim = _index_faults(faults, k, ln_weight, ln_bias, cos, sin, rope, rounding, store)
    same = k.ndim > 0 < latent.ndim and k.shape[0] == latent.shape[0]
    faults.expect(same, f"k: found {list(k.shape)}; required as many rows as latent {list(latent.shape)}")
    faults.check()
    if by_reference(latent, k):
        return combine_records(
            reference.latent_pack(latent, rope_key, store=store),
            reference.index_pack(
                k, ln_weight, ln_bias, eps, cos, sin, rope=rope, hadamard=hadamard, rounding=rounding, store=store
            ),
        )
    width = latent_width(latent.shape[1], rope_key.shape[1], store)
    out = _record(latent, width + _index_width(k.shape[1], store), store)
    latent_spec = LatentPackSpec(
        latent=latent.shape[1], rope_dim=rope_key.shape[1], store=store, source=name_of(latent.dtype)
    )
    _pack_latent_into(out[:, :width], latent, rope_key, latent_spec)
    spec = _index_spec(k, ln_weight is not None, rope, rope_dim, hadamard, rounding, store)
    _pack_index_into(out[:, width:], k, ln_weight, ln_bias, eps, cos, sin, spec)
    return out


@_dsa_pack.register_fake
def _(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    k: torch.Tensor,
    ln_weight: torch.Tensor | None,
    ln_bias: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    rope: str,
    hadamard: bool,
    rounding: str,
    store: str,
) -> torch.Tensor:
    width = latent_width(latent.shape[1], rope_key.shape[1], store) + _index_width(k.shape[1], store)
    return _record(latent, width, store)
