# SPDX-License-Identifier: Apache-2.0
"""Records into paged caches, copied as 4-byte words: nothing is computed, so every store is the same copy.

A page of fp8 index keys holds the values of all its rows, then their scales; every other page holds rows one after
the other. A row whose slot is negative is padding and is skipped, and so is one past the cache's last slot.
"""

from __future__ import annotations

from pcp_kernels.generate import rows
from pcp_kernels.generate.text import Meta, module, next_power
from pcp_kernels.specs import KernelSpec, LatentScatterSpec, ScatterSpec

BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
_SIGNATURE = {"record_ptr": "*i32", "record_words": "i64", "slot_ptr": "*i64", "cache_ptr": "*i32", "slots": "i64"}


def generate(spec: KernelSpec, interpret: bool) -> str:
    """Text of the kernel that scatters index records; grid ``ceil(rows / 16)``."""
    assert isinstance(spec, ScatterSpec), spec
    words = spec.dim * BYTES[spec.store] // 4
    if spec.store != "fp8":
        return _rows(spec, words, interpret)
    body = rows.define(
        [*_SIGNATURE, "rows"],
        f"{rows.ROWS} records of {spec.dim} values and a scale a program; words count from the start of the cache.",
        _SLOTS,
        f"""
        page = slot // {spec.page}
        place = slot % {spec.page}
        start = page * {spec.page * (words + 1)}
        column = tl.arange(0, {words})
        word = tl.load(source[:, None] + column[None, :], mask=kept[:, None], other=0)
        tl.store(cache_ptr + (start + place * {words})[:, None] + column[None, :], word, mask=kept[:, None])
        scale = tl.load(source + {words}, mask=kept, other=0)
        tl.store(cache_ptr + start + {spec.page * words} + place, scale, mask=kept)
        """,
    )
    return _module(spec, body, interpret)


def generate_latent(spec: KernelSpec, interpret: bool) -> str:
    """Text of the kernel that scatters latent records, row by row; grid ``ceil(rows / 16)``."""
    assert isinstance(spec, LatentScatterSpec), spec
    return _rows(spec, latent_bytes(spec.latent, spec.rope_dim, spec.store) // 4, interpret)


def latent_bytes(latent: int, rope_dim: int, store: str) -> int:
    """Of one latent row: with fp8 its values, a scale a group of at most 128, and the rope part as bf16."""
    if store == "fp8":
        return latent + 4 * -(-latent // 128) + 2 * rope_dim
    return (latent + rope_dim) * BYTES[store]


def _rows(spec: KernelSpec, words: int, interpret: bool) -> str:
    padded = next_power(words)
    body = rows.define(
        [*_SIGNATURE, "rows"],
        f"{rows.ROWS} records of {words} words a program; cache rows follow one another.",
        _SLOTS,
        f"""
        column = tl.arange(0, {padded})
        held = kept[:, None] & (column < {words})[None, :]
        word = tl.load(source[:, None] + column[None, :], mask=held, other=0)
        tl.store(cache_ptr + (slot * {words})[:, None] + column[None, :], word, mask=held)
        """,
    )
    return _module(spec, body, interpret)


def _module(spec: KernelSpec, body: str, interpret: bool) -> str:
    return module(
        spec,
        numerics="a copy.",
        kernel=body,
        meta=Meta({**_SIGNATURE, "rows": "i32"}),
        constants={"ROWS": rows.ROWS},
        interpret=interpret,
    )


_SLOTS = """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ptr + row, mask=row < rows, other=-1)
    kept = (slot >= 0) & (slot < slots)
    source = record_ptr + row * record_words
"""
