# SPDX-License-Identifier: Apache-2.0
"""Index queries: RoPE, Hadamard, one rounding to the store; the scales of fp8 are folded into the head weights."""

from __future__ import annotations

from pcp_kernels.generate import rows
from pcp_kernels.generate.text import POINTERS, Meta, module
from pcp_kernels.specs import KernelSpec, PrepSpec


def generate(spec: KernelSpec, interpret: bool) -> str:
    """Text of the kernel that prepares queries; grid ``ceil(pairs / 16)`` for ``pairs`` of token and head."""
    assert isinstance(spec, PrepSpec), spec
    fp8, turned = spec.store == "fp8", spec.rope != "none"
    # Published code keeps rotated queries in the model's dtype before it quantises them.
    through_bf16 = fp8 and spec.source == "bf16"
    signature = {"q_ptr": POINTERS[spec.source], "q_stride": "i64", "q_head_stride": "i64"}
    signature |= {"w_ptr": "*fp32", "w_step": "i64", "factor": "fp32"}
    if turned:
        signature |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "angle_stride": "i64"}
    signature |= {"code_ptr": "*u8"} if fp8 else {"out_ptr": POINTERS[spec.store]}
    signature |= {"weight_ptr": "*fp32", "pairs": "i64"}
    body = rows.define(
        signature,
        f"{rows.ROWS} (token, head) pairs of [tokens, {spec.heads}, {spec.dim}] a program.",
        """
        pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        token = pair // HEADS
        head = pair % HEADS
        column = tl.arange(0, DIM)
        live = (pair < pairs)[:, None] & (column < DIM)[None, :]
        source = q_ptr + (token * q_stride + head * q_head_stride)[:, None]
        x = tl.load(source + column[None, :], mask=live, other=0.0).to(tl.float32)
        """,
        f"""
        turned = live & (column < {spec.rope_dim})[None, :]
        other = tl.load(source + ({rows.partner(spec.rope, spec.rope_dim)})[None, :], mask=turned, other=0.0)
        other = other.to(tl.float32)
        """
        if turned
        else None,
        rows.turn(spec.rope, spec.rope_dim, "token") if turned else None,
        "x = hadamard(x)" if spec.hadamard else None,
        "x = round_bf16(x)" if through_bf16 else None,
        """
        weight = tl.load(w_ptr + token * w_step + head, mask=pair < pairs, other=0.0) * factor
        """,
        """
        bits = scale_bits(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4))
        weight = weight * bits.to(tl.float32, bitcast=True)
        tl.store(code_ptr + pair[:, None] * DIM + column[None, :], e4m3_code(scaled(x, bits[:, None])), mask=live)
        """
        if fp8
        else rows.store("out_ptr + pair[:, None] * DIM", "x", spec.store),
        "tl.store(weight_ptr + pair, weight, mask=pair < pairs)",
    )
    return module(
        spec,
        numerics=f"""fp32 throughout, RoPE without fused multiply-add;
            {"rounded to bf16, then to fp8" if through_bf16 else "rounded once, to the store"}.""",
        kernel=body,
        meta=Meta(signature, aligned=rows.strides(signature), fp_fusion=False),
        helpers=(rows.HADAMARD if spec.hadamard else None, *rows.rounders(spec.store, through_bf16=through_bf16)),
        constants={
            "ROWS": rows.ROWS, "DIM": spec.dim, "HEADS": spec.heads,
            **(rows.hadamard_constants(spec.dim) if spec.hadamard else {}),
        },
        interpret=interpret,
    )  # fmt: skip
