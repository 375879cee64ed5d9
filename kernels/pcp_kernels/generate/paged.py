# SPDX-License-Identifier: Apache-2.0
"""Attention of rows over all keys that they may see in a paged cache: decode, draft and short extend steps.

A program takes one row and sixteen query heads of one key head, and walks the row's own keys, whose bounds it reads
itself: one launch, of one shape, serves every length, so a CUDA graph can hold it.
"""

from __future__ import annotations

from pcp_kernels.generate import rows
from pcp_kernels.generate.scatter import latent_bytes
from pcp_kernels.generate.text import POINTERS, SCALARS, Meta, module, next_power
from pcp_kernels.specs import KernelSpec, PagedSpec


def generate(spec: KernelSpec, interpret: bool) -> str:
    """Text of the attention kernel; grid ``(rows, key heads, ceil(query heads of one key head / 16))``."""
    assert isinstance(spec, PagedSpec), spec
    shared, rope, kept = spec.value_dim == 0, spec.rope_dim > 0, spec.source
    widths = {"k": spec.head_dim, "v": spec.value_dim, "rope": spec.rope_dim}
    # The interpreter cannot compute in bf16, and sums products of fp16 in fp16: there all of it is fp32.
    working = "tl.float32" if interpret or kept == "fp32" else SCALARS[kept]
    precision = ', input_precision="ieee"' if working == "tl.float32" else ""
    queried = ".to(tl.float32)" if interpret and kept != "fp32" else ""

    def load(target: str, name: str, columns: str) -> str:
        """``target = `` rows of one cache at ``slot``; what a row must not see is not read."""
        store = "bf16" if spec.records and name == "rope" else spec.store
        stride = f"{name}_stride"
        if spec.records:
            # The width of a record is written out: a row's alignment, 656 = 41 * 16, is then known to the compiler.
            stride = str(latent_bytes(spec.head_dim, spec.rope_dim, "fp8") // (1 if store == "fp8" else 2))
        padded = widths[name] != _side(widths[name])
        widen = "" if not interpret and store == kept else f".to({working})"
        return f"""
            {f"held = seen[:, None] & ({columns} < {widths[name]})[None, :]" if padded else ""}
            source = {name}_ptr + slot[:, None] * {stride} + {columns}[None, :]
            {target} = tl.load(source, mask={"held" if padded else "seen[:, None]"}, other=0.0){widen}
        """

    signature = {"q_ptr": POINTERS[kept], "q_stride": "i64", "q_head_stride": "i64"}
    caches = ["k", *([] if shared else ["v"]), *(["rope"] if rope else [])]
    for name in caches:
        signature[f"{name}_ptr"] = "*bf16" if spec.records and name == "rope" else POINTERS[spec.store]
        if not spec.records:
            signature |= {f"{name}_stride": "i64", f"{name}_head_stride": "i64"}
    signature |= {"scale_ptr": "*fp32"} if spec.records else {}
    signature |= {"table_ptr": "*i32", "table_stride": "i64", "request_ptr": "*i32", "low_ptr": "*i32"}
    signature |= {"high_ptr": "*i32", "out_ptr": POINTERS[kept]}
    signature |= {"sink_ptr": "*fp32"} if spec.sinks else {}
    signature |= {"slope_ptr": "*fp32", "position_ptr": "*i64"} if spec.slopes else {}
    signature |= {"limit": "i32", "heads": "i32", "groups": "i32", "softmax_scale": "fp32"} | (
        {"cap": "fp32"} if spec.softcap else {}
    )
    body = rows.define(
        signature,
        "Sixteen heads of one row a program, over keys low to high of its request; a row without keys gets 0.",
        f"""
        row = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1).to(tl.int64)
        member = tl.program_id(2).to(tl.int64) * HEADS + tl.arange(0, HEADS)
        head = kv_head * groups + member
        column = tl.arange(0, {_side(spec.head_dim)})
        live = (member < groups)[:, None] & (column < {spec.head_dim})[None, :]
        asked = q_ptr + row * q_stride + head[:, None] * q_head_stride
        q = tl.load(asked + column[None, :], mask=live, other=0.0){queried}
        low = tl.load(low_ptr + row)
        high = tl.minimum(tl.load(high_ptr + row), limit)
        table = table_ptr + tl.load(request_ptr + row).to(tl.int64) * table_stride
        best = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        sums = tl.zeros((HEADS, {_side(spec.value_dim or spec.head_dim)}), tl.float32)
        """,
        None if shared else f"wide = tl.arange(0, {_side(spec.value_dim)})",
        f"""
        part = tl.arange(0, {_side(spec.rope_dim)})
        turned = (member < groups)[:, None] & (part < {spec.rope_dim})[None, :]
        q_rope = tl.load(asked + {spec.head_dim} + part[None, :], mask=turned, other=0.0){queried}
        """
        if rope
        else None,
        """
        slope = tl.load(slope_ptr + head, mask=member < groups, other=0.0)
        position = tl.load(position_ptr + row)
        """
        if spec.slopes
        else None,
        None if spec.records else "\n".join(f"{name}_ptr += kv_head * {name}_head_stride" for name in caches),
        rows.loop(
            # From a multiple of KEYS, so that a window does not change which keys are summed together.
            "for start in range(low // KEYS * KEYS, high, KEYS):",
            f"""
            place = start + tl.arange(0, KEYS)
            seen = (place >= low) & (place < high)
            block = tl.load(table + place // {spec.page}, mask=seen, other=0).to(tl.int64)
            slot = block * {spec.page} + place % {spec.page}
            """,
            load("key", "k", "column"),
            _dequantise(spec, working) if spec.records else None,
            f"scores = tl.dot(q, tl.trans(key){precision})",
            load("turn", "rope", "part") if rope else None,
            f"scores += tl.dot(q_rope, tl.trans(turn){precision})" if rope else None,
            "scores = scores * softmax_scale",
            # tanh by the logistic function, which Triton has everywhere.
            "scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)" if spec.softcap else None,
            "scores += slope[:, None] * (place - position).to(tl.float32)[None, :]" if spec.slopes else None,
            """
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, axis=1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            share = tl.exp(scores - level[:, None])
            fade = tl.exp(best - level)
            total = total * fade + tl.sum(share, axis=1)
            best = higher
            """,
            None if shared else load("value", "v", "wide"),
            f"sums = tl.dot(share.to({working}), {'key' if shared else 'value'}, sums * fade[:, None]{precision})",
        ),
        """
        sink = tl.load(sink_ptr + head, mask=member < groups, other=0.0)
        total += tl.where(total > 0.0, tl.exp(sink - best), 0.0)
        """
        if spec.sinks
        else None,
        f"""
        out = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        target = out_ptr + (row * heads + head)[:, None] * {spec.value_dim or spec.head_dim}
        """,
        f"live = (member < groups)[:, None] & (wide < {spec.value_dim})[None, :]" if not shared else None,
        f"tl.store(target + {'column' if shared else 'wide'}[None, :], {rows.cast('out', kept)}, mask=live)",
    )
    return module(
        spec,
        numerics=f"""products of {working[3:]} accumulated in fp32; softmax in fp32, block by block of {spec.block_keys}
            keys from a multiple of it, whatever the other rows are.""",
        kernel=body,
        meta=Meta(signature, aligned=[name for name in rows.strides(signature) if name != "table_stride"]),
        helpers=rows.rounders(kept),
        constants={"HEADS": spec.block_heads, "KEYS": spec.block_keys},
        interpret=interpret,
    )


def _side(width: int) -> int:
    """Side of a block that holds ``width`` columns: a power of two, and a matrix product is at least 16 deep."""
    return max(16, next_power(width))


def _dequantise(spec: PagedSpec, working: str) -> str:
    """e4m3 times a power of two is exact, in bf16 as well."""
    group = min(spec.head_dim, 128)
    groups = spec.head_dim // group
    words = latent_bytes(spec.head_dim, spec.rope_dim, "fp8") // 4
    return f"""
        group = tl.arange(0, {groups})
        scale = tl.load(scale_ptr + slot[:, None] * {words} + group[None, :], mask=seen[:, None], other=0.0)
        scale = scale.to({working})
        key = tl.reshape(key, (KEYS, {groups}, {group})) * scale[:, :, None]
        key = tl.reshape(key, (KEYS, {spec.head_dim}))
    """
