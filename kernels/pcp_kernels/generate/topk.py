# SPDX-License-Identifier: Apache-2.0
"""Fused scorer and selector: streams the keys, holds ``CAPACITY`` candidates per row, never a row of logits.

The scan has two levels: ``INNER`` blocks of keys without a branch or a barrier, which Triton can pipeline, then one
look at the number of candidates. :mod:`pcp_kernels.generate.decode` makes the kernel for a range of keys of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pcp_kernels.generate.blocks import (
    BEST,
    CONTIGUOUS_GATE,
    CONTIGUOUS_RANGE,
    NEXT_REQUEST,
    NUMERICS,
    ORDER_KEY,
    PAGED_GATE,
    PRUNE,
    aligned,
    define,
    load_queries,
    load_rows,
    score_constants,
    score_signature,
    score_strides,
    score_tile,
    selector_constants,
    stack,
)
from pcp_kernels.generate.text import Meta, block, module
from pcp_kernels.specs import KernelSpec, SplitSpec, TopKSpec

HELD: Mapping[str, str] = {"held_key_ptr": "*i32", "held_id_ptr": "*i32"}
"""Candidates: i32 ``[programs, BLOCK_QUERIES, CAPACITY]`` each."""

_TILES = """
lane = tl.arange(0, BLOCK_QUERIES)
step = tl.arange(0, BLOCK_KEYS)
order = tl.arange(0, OUT)
tiles = tl.cdiv(rows, BLOCK_QUERIES)
held = base + lane * CAPACITY
for turn in range(tl.program_id(0), tiles, tl.num_programs(0)):
    # Later rows see more keys: they come first, so that the last programs to finish have little to do.
    first_row = (tiles - 1 - turn) * BLOCK_QUERIES
    row = first_row + lane
"""

_EMPTY = """
count = tl.zeros((BLOCK_QUERIES,), tl.int32)
floor = tl.full((BLOCK_QUERIES,), VOID, tl.int32)
if tl.max(live.to(tl.int32), axis=0) > 0:
"""

_LOOPS = """
for outer in range(low, high, BLOCK_KEYS * INNER):
    last = tl.minimum(outer + BLOCK_KEYS * INNER, high)
    for begin in tl.range(outer, last, BLOCK_KEYS, num_stages=STAGES):
"""

_APPEND = """
key = order_key(score)
enter = {gate} & (key > floor[None, :])
new = enter.to(tl.int32)
place = (held + count)[None, :] + tl.cumsum(new, axis=0) - 1
tl.store(held_key_ptr + place, key, mask=enter)
tl.store(held_id_ptr + place, {index}, mask=enter)
count += tl.sum(new, axis=0)
"""

_PRUNE_FULL = """
# At the end as well, so that what is held is what is selected.
if (tl.max(count, axis=0) > CAPACITY - BLOCK_KEYS * INNER) | (last == high):
    for lane_index in range(BLOCK_QUERIES):
        size = tl.sum(tl.where(lane == lane_index, count, 0), axis=0)
        if size > TOPK:
            spot = base + lane_index * CAPACITY
            cut = prune(held_key_ptr + spot, held_id_ptr + spot, size)
            floor = tl.where(lane == lane_index, cut, floor)
            count = tl.where(lane == lane_index, TOPK, count)
"""


def generate(spec: KernelSpec, interpret: bool = False) -> str:
    """Text of a :class:`TopKSpec`. Grid: any number of programs; each needs its own held candidates."""
    assert isinstance(spec, TopKSpec)
    return streaming(
        spec,
        interpret,
        outputs={"out_ptr": "*i32"},
        strides={"out_stride": "i64"},
        summary="Select the TOPK best keys of each row; out: i32 [rows, TOPK], ascending, -1 tail.",
        program="tl.program_id(0).to(tl.int64)",
        narrow=None,
        emit="""
        for lane_index in range(BLOCK_QUERIES):
            target = first_row + lane_index
            valid = tl.sum(tl.where(lane == lane_index, valid_keys, 0), axis=0)
            if target < rows:
                out = out_ptr + target.to(tl.int64) * out_stride + order
                if valid <= TOPK:
                    tl.store(out, tl.where(order < valid, order, -1), mask=order < TOPK)
                else:
                    index = tl.load(held_id_ptr + base + lane_index * CAPACITY + order, mask=order < TOPK)
                    tl.store(out, index, mask=order < TOPK)
        """,
    )


def streaming(
    spec: TopKSpec | SplitSpec,
    interpret: bool,
    *,
    outputs: Mapping[str, str],
    strides: Mapping[str, str],
    summary: str,
    program: str,
    narrow: str | None,
    emit: str,
) -> str:
    """The text around an emission.

    Args:
        outputs, strides: arguments that ``emit`` uses.
        summary: docstring of the kernel.
        program: expression of the number of this program, for its held candidates.
        narrow: block that reduces ``low`` and ``high`` to the keys of this program.
        emit: block that writes the rows of the tile from ``count`` held candidates each.
    """
    signature = {**score_signature(spec), **outputs, **HELD, **score_strides(spec), **strides}
    kernel = stack(
        define("kernel", signature, summary),
        block(f"base = {program} * BLOCK_QUERIES * CAPACITY", 1),
        block(_TILES, 1),
        block(load_rows(spec, "TOPK"), 2),
        block(_EMPTY, 2),
        block(load_queries(spec, interpret), 3),
        block(_paged(spec, interpret, narrow) if spec.layout == "paged" else _contiguous(spec, interpret, narrow), 3),
        block("tl.debug_barrier()", 3),
        block(emit, 2),
        block("# The next tile overwrites what was held.\ntl.debug_barrier()", 2),
    )
    return module(
        spec,
        numerics=NUMERICS,
        constants={**score_constants(spec), "INNER": spec.inner, **selector_constants(spec.topk, spec.capacity)},
        helpers=(ORDER_KEY, BEST, PRUNE),
        kernel=kernel,
        meta=Meta(signature=signature, aligned=aligned(signature), scratch=tuple(HELD)),
        interpret=interpret,
    )


def _contiguous(spec: TopKSpec | SplitSpec, interpret: bool, narrow: str | None) -> str:
    return stack(
        block(CONTIGUOUS_RANGE),
        block(narrow),
        _stream(spec, interpret, gate=CONTIGUOUS_GATE, index="n[:, None] - start[None, :]"),
    )


def _paged(spec: TopKSpec | SplitSpec, interpret: bool, narrow: str | None) -> str:
    return stack(
        "waiting = live",
        block(NEXT_REQUEST),
        block("low = 0", 1),
        block(narrow, 1),
        block(_stream(spec, interpret, gate=PAGED_GATE, index="tl.broadcast_to(n[:, None], score.shape)"), 1),
    )


def _stream(spec: TopKSpec | SplitSpec, interpret: bool, gate: str, index: str) -> str:
    return stack(
        block(_LOOPS),
        block(score_tile(spec, interpret), 2),
        block(_APPEND.format(gate=gate, index=index), 2),
        block(_PRUNE_FULL, 1),
    )
