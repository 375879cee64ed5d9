# SPDX-License-Identifier: Apache-2.0
"""Blocks that turn rows of keys, queries and latents into what is stored: RoPE, Hadamard, rounding, fp8 codes.

Values are rounded in integer arithmetic on their fp32 bits, not with Triton's casts: the text is then the same in the
interpreter (whose casts to bf16 and fp8 truncate) and on a GPU, and fp8 records can be written on one without fp8.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from pcp_kernels.generate.text import SCALARS, blocks

ROWS = 16
"""Rows that a program works on."""

ROUND_BF16 = """
    def round_bf16(x):
        # The nearest bf16 value, ties to even; infinities stay, and NaN is left alone.
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
"""

E4M3_CODE = """
    def e4m3_code(x):
        # The e4m3 byte nearest to |x| <= 448, ties to even. Below 2^-6 codes count steps of 2^-9: so does 2^14 + |x|.
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        coarse = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        fine = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(tl.abs(x) < 0.015625, fine, coarse)
        code = tl.where(x == x, code, 0x7F)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
"""

SCALE_BITS = """
    def scale_bits(amax):
        # Bits of the least power of two that is at least amax / 448 = amax / (1.75 * 2^8), without dividing.
        return ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - 0x04000000
"""

SCALED = """
    def scaled(x, bits):
        # x over the power of two with these bits, clamped to what e4m3 holds; NaN stays.
        y = x * (0x7F000000 - bits).to(tl.float32, bitcast=True)
        return tl.where(y == y, tl.minimum(tl.maximum(y, -448.0), 448.0), y)
"""

HADAMARD = """
    def hadamard(x):
        # Orthonormal Sylvester transform of each row: sums of neighbours, then differences, once per bit.
        for _ in tl.static_range(BITS):
            even, odd = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
            x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, DIM))
        return x * NORM
"""

FP8_HELPERS = (E4M3_CODE, SCALE_BITS, SCALED)


def define(arguments: Iterable[str], summary: str, *parts: str | None) -> str:
    """``def kernel(arguments)`` whose body is ``parts``, one below the other."""
    head = f"def kernel({', '.join(arguments)}):"
    if len(head) > 116:
        listed = textwrap.wrap(", ".join(arguments) + ",", width=108)
        head = "\n".join(["def kernel(", *(f"    {line}" for line in listed), "):"])
    return "\n".join([head, blocks(f'"""{summary}"""', *parts, indent=1)])


def rounders(store: str, *, through_bf16: bool = False) -> tuple[str, ...]:
    """Helpers that storing as ``store`` calls."""
    fp8 = FP8_HELPERS if store == "fp8" else ()
    return (ROUND_BF16, *fp8) if store == "bf16" or through_bf16 else fp8


def cast(value: str, store: str) -> str:
    """fp32 ``value`` as a value of ``store``, rounded to nearest even. Not for fp8."""
    return f"round_bf16({value}).to(tl.bfloat16)" if store == "bf16" else f"{value}.to({SCALARS[store]})"


def hadamard_constants(dim: int) -> dict[str, int | float]:
    """Constants that ``hadamard`` reads besides ``ROWS`` and ``DIM``."""
    return {"BITS": dim.bit_length() - 1, "NORM": dim**-0.5}


def partner(rope: str, rope_dim: int) -> str:
    """The column that RoPE turns together with ``column``."""
    return "column ^ 1" if rope == "interleaved" else f"column ^ {rope_dim // 2}"


def turn(rope: str, rope_dim: int, angle_row: str) -> str:
    """Turn ``x`` with ``other``, its partners, by the angles of ``angle_row``; columns from ``rope_dim`` on stay."""
    half = rope_dim // 2
    angle, first = (
        ("column // 2", "column % 2 == 0") if rope == "interleaved" else (f"column % {half}", f"column < {half}")
    )
    return f"""
        angle = {angle_row}[:, None] * angle_stride + ({angle})[None, :]
        cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
        x = x * cos + other * tl.where(({first})[None, :], -sin, sin)
    """


def strides(signature: Iterable[str]) -> tuple[str, ...]:
    """Arguments that are row strides, multiples of 16 unless rows are cut out of wider ones."""
    return tuple(name for name in signature if name.endswith("_stride"))


def store(target: str, value: str, store: str) -> str:
    """Store fp32 ``value``, columns of rows, at ``target``. Not for fp8."""
    return f"tl.store({target} + column[None, :], {cast(value, store)}, mask=live)"


def loop(head: str, *parts: str | None) -> str:
    """``head`` with ``parts`` as its body."""
    return f"{head}\n{blocks(*parts, indent=1)}"
