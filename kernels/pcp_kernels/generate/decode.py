# SPDX-License-Identifier: Apache-2.0
"""Few rows, many keys: the keys of a row are split over programs, and the best of each range are merged.

Exact for every number of ranges, because the order is total. A range emits its exact top-k in ascending order with
order keys; the ranges of a row ascend too, so the merge is the selector over their candidates.
"""

from __future__ import annotations

from pcp_kernels.generate.select import selecting
from pcp_kernels.generate.topk import streaming
from pcp_kernels.specs import KernelSpec, MergeSpec, SplitSpec

PARTS = {"part_key_ptr": "*i32", "part_id_ptr": "*i32"}
"""Candidates of the ranges: i32 ``[rows, ranges, TOPK]`` each; VOID keys fill a range that has fewer."""


def generate_split(spec: KernelSpec, interpret: bool = False) -> str:
    """Text of a :class:`SplitSpec`. Grid: ``(programs, ranges)``; rows of at most TOPK keys are left to the merge."""
    assert isinstance(spec, SplitSpec)
    return streaming(
        spec,
        interpret,
        outputs=PARTS,
        strides={},
        summary="Select the TOPK best keys of each row in range program_id(1) of its keys.",
        program="(tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1))",
        narrow="""
        ranges = tl.num_programs(1)
        span = tl.cdiv(tl.cdiv(high - low, ranges), BLOCK_KEYS) * BLOCK_KEYS
        low += tl.program_id(1) * span
        high = tl.minimum(high, low + span)
        """,
        emit="""
        for lane_index in range(BLOCK_QUERIES):
            target = first_row + lane_index
            valid = tl.sum(tl.where(lane == lane_index, valid_keys, 0), axis=0)
            size = tl.sum(tl.where(lane == lane_index, count, 0), axis=0)
            if (target < rows) & (valid > TOPK):
                spot = base + lane_index * CAPACITY + order
                part = (target.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * TOPK + order
                key = tl.load(held_key_ptr + spot, mask=order < size, other=VOID)
                index = tl.load(held_id_ptr + spot, mask=order < size, other=-1)
                tl.store(part_key_ptr + part, key, mask=order < TOPK)
                tl.store(part_id_ptr + part, index, mask=order < TOPK)
        """,
    )


def generate_merge(spec: KernelSpec, interpret: bool = False) -> str:
    """Text of a :class:`MergeSpec`: candidates ``[rows, width]`` in ascending order, VOID keys among them."""
    assert isinstance(spec, MergeSpec)
    return selecting(
        spec,
        interpret,
        inputs=PARTS,
        strides={"width": "i32"},
        summary="Merge the candidates of all ranges; out: i32 [rows, TOPK], ascending, -1 tail.",
        numerics="order keys are compared as integers; ties go to the smaller index.",
        helpers=(),
        columns="width",
        read="""
        offset = row.to(tl.int64) * width + column
        key = tl.load(part_key_ptr + offset, mask=column < width, other=VOID)
        enter = key > floor
        index = tl.load(part_id_ptr + offset, mask=enter, other=-1)
        """,
    )
