# SPDX-License-Identifier: Apache-2.0
"""Records: an index key or a latent row of each token, normalised, rotated, rounded and quantised once.

A record is computed from its own token alone, so packing commutes with gathering records over ranks.
"""

from __future__ import annotations

from pcp_kernels.generate import rows
from pcp_kernels.generate.text import POINTERS, Meta, blocks, module
from pcp_kernels.specs import KernelSpec, LatentPackSpec, PackSpec

LATENT_ROWS = 4
"""Latents that a program works on."""
_SCALE_FLOOR = 0x39000000
"""Bits of 2^-13, the least power of two that is at least 1e-4, the floor on the scale of a latent."""


def generate(spec: KernelSpec, interpret: bool) -> str:
    """Text of the kernel that packs index keys; grid ``ceil(rows / 16)``."""
    assert isinstance(spec, PackSpec), spec
    fp8, turned = spec.store == "fp8", spec.rope != "none"
    through_bf16 = fp8 and spec.rounding == "bf16"
    signature = {"k_ptr": POINTERS[spec.source], "k_stride": "i64"}
    if spec.norm:
        signature |= {"weight_ptr": "*fp32", "bias_ptr": "*fp32", "eps": "fp32"}
    if turned:
        signature |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "angle_stride": "i64"}
    if fp8:
        signature |= {"code_ptr": "*u8", "scale_ptr": "*fp32", "out_words": "i64"}
    else:
        signature |= {"out_ptr": POINTERS[spec.store], "out_stride": "i64"}
    signature["rows"] = "i32"
    body = rows.define(
        signature,
        f"{rows.ROWS} rows of [rows, {spec.dim}] a program.",
        """
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, DIM)
        live = (row < rows)[:, None] & (column < DIM)[None, :]
        source = k_ptr + row[:, None] * k_stride
        x = tl.load(source + column[None, :], mask=live, other=0.0).to(tl.float32)
        """,
        _NORM if spec.norm else None,
        _partner(spec) if turned else None,
        rows.turn(spec.rope, spec.rope_dim, "row") if turned else None,
        "x = hadamard(x)" if spec.hadamard else None,
        "x = round_bf16(x)" if through_bf16 else None,
        _STORE_CODES if fp8 else rows.store("out_ptr + row[:, None] * out_stride", "x", spec.store),
    )
    return module(
        spec,
        numerics=f"""fp32 throughout; LayerNorm sums in the order of a row reduction; RoPE and LayerNorm without fused
            multiply-add; {"rounded to bf16, then to fp8" if through_bf16 else "rounded once, to the store"}.""",
        kernel=body,
        meta=Meta(signature, aligned=rows.strides(signature), fp_fusion=False),
        helpers=(rows.HADAMARD if spec.hadamard else None, *rows.rounders(spec.store, through_bf16=through_bf16)),
        constants={
            "ROWS": rows.ROWS, "DIM": spec.dim, **(rows.hadamard_constants(spec.dim) if spec.hadamard else {})
        },
        interpret=interpret,
    )  # fmt: skip


_NORM = """
    mean = tl.sum(x, axis=1) * (1.0 / DIM)
    centred = x - mean[:, None]
    variance = tl.sum(centred * centred, axis=1) * (1.0 / DIM)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    x = centred * inverse[:, None] * tl.load(weight_ptr + column)[None, :] + tl.load(bias_ptr + column)[None, :]
"""

_STORE_CODES = """
    bits = scale_bits(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4))
    code = e4m3_code(scaled(x, bits[:, None]))
    tl.store(code_ptr + row[:, None] * (out_words * 4) + column[None, :], code, mask=live)
    tl.store(scale_ptr + row * out_words, bits.to(tl.float32, bitcast=True), mask=row < rows)
"""


def _partner(spec: PackSpec) -> str:
    return blocks(
        f"""
        partner = {rows.partner(spec.rope, spec.rope_dim)}
        turned = live & (column < {spec.rope_dim})[None, :]
        other = tl.load(source + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        """,
        """
        weight = tl.load(weight_ptr + partner, mask=column < ROPE, other=0.0)
        bias = tl.load(bias_ptr + partner, mask=column < ROPE, other=0.0)
        other = (other - mean[:, None]) * inverse[:, None] * weight[None, :] + bias[None, :]
        """.replace("ROPE", str(spec.rope_dim))
        if spec.norm
        else None,
    )


def generate_latent(spec: KernelSpec, interpret: bool) -> str:
    """Text of the kernel that packs latents and their rope parts; grid ``ceil(rows / 4)``."""
    assert isinstance(spec, LatentPackSpec), spec
    fp8, rope = spec.store == "fp8", spec.rope_dim > 0
    signature = {"latent_ptr": POINTERS[spec.source], "latent_stride": "i64"}
    if rope:
        signature |= {"key_ptr": POINTERS[spec.source], "key_stride": "i64"}
    if fp8:
        signature |= {"code_ptr": "*u8", "scale_ptr": "*fp32"}
        signature |= {"rope_ptr": "*bf16"} if rope else {}
        signature["out_words"] = "i64"
    else:
        signature |= {"out_ptr": POINTERS[spec.store], "out_stride": "i64"}
    signature["rows"] = "i32"
    kept = "bf16" if fp8 else spec.store
    body = rows.define(
        signature,
        f"{LATENT_ROWS} rows of [rows, {spec.latent}] and [rows, {spec.rope_dim}] a program.",
        """
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, LATENT)
        live = (row < rows)[:, None] & (column < LATENT)[None, :]
        source = latent_ptr + row[:, None] * latent_stride
        x = tl.load(source + column[None, :], mask=live, other=0.0).to(tl.float32)
        """,
        _LATENT_CODES if fp8 else rows.store("out_ptr + row[:, None] * out_stride", "x", kept),
        f"""
        part = tl.arange(0, {spec.rope_dim})
        live = (row < rows)[:, None] & (part < {spec.rope_dim})[None, :]
        key = tl.load(key_ptr + row[:, None] * key_stride + part[None, :], mask=live, other=0.0).to(tl.float32)
        tl.store({_rope_target(fp8)} + part[None, :], {rows.cast("key", kept)}, mask=live)
        """
        if rope
        else None,
    )
    group = min(spec.latent, 128)
    return module(
        spec,
        numerics="fp32 throughout; one power-of-two scale a group; every value is rounded once.",
        kernel=body,
        meta=Meta(
            signature,
            aligned=rows.strides(signature),
            fp_fusion=False,
        ),
        helpers=rows.rounders(spec.store, through_bf16=kept == "bf16" and rope),
        constants={"ROWS": LATENT_ROWS, "LATENT": spec.latent}
        | ({"GROUPS": spec.latent // group, "GROUP": group} if fp8 else {}),
        interpret=interpret,
    )


_LATENT_CODES = f"""
    x = tl.reshape(x, (ROWS, GROUPS, GROUP))
    bits = tl.maximum(scale_bits(tl.max(tl.abs(x), axis=2)), {_SCALE_FLOOR:#x})
    code = tl.reshape(e4m3_code(scaled(x, bits[:, :, None])), (ROWS, LATENT))
    tl.store(code_ptr + row[:, None] * (out_words * 4) + column[None, :], code, mask=live)
    group = tl.arange(0, GROUPS)
    scale = bits.to(tl.float32, bitcast=True)
    held = (row < rows)[:, None] & (group < GROUPS)[None, :]
    tl.store(scale_ptr + row[:, None] * out_words + group[None, :], scale, mask=held)
"""


def _rope_target(fp8: bool) -> str:
    return "rope_ptr + row[:, None] * (out_words * 2)" if fp8 else "out_ptr + row[:, None] * out_stride + LATENT"
