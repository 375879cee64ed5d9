# SPDX-License-Identifier: Apache-2.0
"""Absorbed attention over selected rows of a latent cache: the fallback where no tuned sparse kernel is installed.

Sixteen heads a program: with a latent of 512 the accumulator of 32 heads no longer fits into registers.
"""

from __future__ import annotations

from pcp_kernels.generate import rows
from pcp_kernels.generate.scatter import latent_bytes
from pcp_kernels.generate.text import POINTERS, SCALARS, Meta, module
from pcp_kernels.specs import KernelSpec, MlaSpec


def generate(spec: KernelSpec, interpret: bool) -> str:
    """Text of the attention kernel; grid ``(rows, ceil(heads / 16))``."""
    assert isinstance(spec, MlaSpec), spec
    fp8, rope = spec.store == "fp8", spec.rope_dim > 0
    kept = "bf16" if fp8 else spec.store
    signature = {"q_ptr": POINTERS[kept], "q_stride": "i64", "q_head_stride": "i64", "latent_ptr": POINTERS[spec.store]}
    if fp8:
        # The width of a record is written out: a row's alignment, 656 = 41 * 16, is then known to the compiler.
        width = latent_bytes(spec.latent, spec.rope_dim, spec.store)
        at_latent, at_rope = f"latent_ptr + slot[:, None] * {width}", f"rope_ptr + slot[:, None] * {width // 2}"
        signature |= {"scale_ptr": "*fp32"} | ({"rope_ptr": "*bf16"} if rope else {})
    else:
        at_latent, at_rope = "latent_ptr + slot[:, None] * latent_stride", "rope_ptr + slot[:, None] * rope_stride"
        signature["latent_stride"] = "i64"
        signature |= {"rope_ptr": POINTERS[kept], "rope_stride": "i64"} if rope else {}
    signature |= {"slot_ptr": "*i32", "slot_stride": "i64", "out_ptr": POINTERS[kept], "lse_ptr": "*fp32"}
    signature |= {"heads": "i32", "topk": "i32", "softmax_scale": "fp32"}
    # The interpreter cannot compute in bf16, and sums products of fp16 in fp16: there all of it is fp32.
    working = "tl.float32" if interpret or spec.store == "fp32" else SCALARS[kept]
    precision = ', input_precision="ieee"' if working == "tl.float32" else ""
    # A matrix product is at least 16 deep.
    held = "seen[:, None]" + (f" & (part < {spec.rope_dim})[None, :]" if spec.rope_dim < 16 else "")
    load = ".to(tl.float32)" if interpret and kept != "fp32" else ""
    body = rows.define(
        signature,
        "Sixteen heads of one row a program; slots below 0 select nothing, and a row without slots gets (0, -inf).",
        f"""
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
        column = tl.arange(0, LATENT)
        live = (head < heads)[:, None] & (column < LATENT)[None, :]
        source = q_ptr + row * q_stride + head[:, None] * q_head_stride
        q = tl.load(source + column[None, :], mask=live, other=0.0){load}
        best = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        sums = tl.zeros((HEADS, LATENT), tl.float32)
        """,
        f"""
        part = tl.arange(0, {max(spec.rope_dim, 16)})
        turned = (head < heads)[:, None] & (part < {spec.rope_dim})[None, :]
        q_rope = tl.load(source + LATENT + part[None, :], mask=turned, other=0.0){load}
        """
        if rope
        else None,
        rows.loop(
            "for start in range(0, topk, KEYS):",
            """
            place = start + tl.arange(0, KEYS)
            slot = tl.load(slot_ptr + row * slot_stride + place, mask=place < topk, other=-1).to(tl.int64)
            seen = slot >= 0
            """,
            f"key = tl.load({at_latent} + column[None, :], mask=seen[:, None], other=0.0){'' if fp8 else load}",
            _dequantise(spec, width // 4, working) if fp8 else None,
            f"scores = tl.dot(q, tl.trans(key){precision})",
            f"""
            turn = tl.load({at_rope} + part[None, :], mask={held}, other=0.0){load}
            scores += tl.dot(q_rope, tl.trans(turn){precision})
            """
            if rope
            else None,
            f"""
            scores = tl.where(seen[None, :], scores * softmax_scale, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, axis=1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            share = tl.exp(scores - level[:, None])
            fade = tl.exp(best - level)
            total = total * fade + tl.sum(share, axis=1)
            sums = tl.dot(share.to({working}), key, sums * fade[:, None]{precision})
            best = higher
            """,
        ),
        f"""
        some = total > 0.0
        whole = tl.where(some, total, 1.0)
        out = sums / whole[:, None]
        target = row * heads + head
        tl.store(out_ptr + target[:, None] * LATENT + column[None, :], {rows.cast("out", kept)}, mask=live)
        lse = tl.where(some, best + tl.log(whole), float("-inf"))
        tl.store(lse_ptr + target, lse, mask=head < heads)
        """,
    )
    return module(
        spec,
        numerics=f"""products of {working[3:]} accumulated in fp32; softmax in fp32, block by block of {spec.block_keys}
            selected rows.""",
        kernel=body,
        meta=Meta(signature, aligned=rows.strides(signature)),
        helpers=rows.rounders(kept),
        constants={"HEADS": spec.block_heads, "KEYS": spec.block_keys, "LATENT": spec.latent},
        interpret=interpret,
    )


def _dequantise(spec: MlaSpec, words: int, working: str) -> str:
    """e4m3 times a power of two is exact, in bf16 as well."""
    group = min(spec.latent, 128)
    groups = spec.latent // group
    return f"""
        group = tl.arange(0, {groups})
        scale = tl.load(scale_ptr + slot[:, None] * {words} + group[None, :], mask=seen[:, None], other=0.0)
        scale = scale.to({working})
        key = tl.reshape(tl.reshape(key.to({working}), (KEYS, {groups}, {group})) * scale[:, :, None], (KEYS, LATENT))
    """
