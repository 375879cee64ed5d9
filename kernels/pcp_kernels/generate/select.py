# SPDX-License-Identifier: Apache-2.0
"""Selector over rows in memory: scores of a logits workspace, or candidates of several ranges of keys."""

from __future__ import annotations

from collections.abc import Mapping

from pcp_kernels.generate.blocks import BEST, ORDER_KEY, PRUNE, aligned, define, selector_constants, stack
from pcp_kernels.generate.text import Meta, block, module
from pcp_kernels.specs import KernelSpec, MergeSpec, SelectSpec

HELD: Mapping[str, str] = {"held_key_ptr": "*i32", "held_id_ptr": "*i32"}
"""Candidates: i32 ``[programs, CAPACITY]`` each."""


def generate(spec: KernelSpec, interpret: bool = False) -> str:
    """Text of a :class:`SelectSpec`. Grid: any number of programs; each needs its own held candidates."""
    assert isinstance(spec, SelectSpec)
    return selecting(
        spec,
        interpret,
        inputs={"score_ptr": "*fp32"},
        strides={"score_stride": "i64"},
        summary="Select the TOPK best of the first ``valid`` scores of each row; out: i32 [rows, TOPK].",
        numerics="scores are compared as integers (-0 is +0, NaN lowest); ties go to the smaller index.",
        helpers=(ORDER_KEY,),
        columns="valid",
        read="""
        score = tl.load(score_ptr + row.to(tl.int64) * score_stride + column, mask=column < valid, other=0.0)
        key = order_key(score)
        enter = (column < valid) & (key > floor)
        index = column
        """,
    )


def selecting(
    spec: SelectSpec | MergeSpec,
    interpret: bool,
    *,
    inputs: Mapping[str, str],
    strides: Mapping[str, str],
    summary: str,
    numerics: str,
    helpers: tuple[str, ...],
    columns: str,
    read: str,
) -> str:
    """The text around a reader.

    Args:
        inputs, strides: arguments that ``read`` uses.
        summary: docstring of the kernel.
        numerics: for the header.
        helpers: functions that ``read`` calls.
        columns: expression of the number of columns of a row.
        read: block that makes ``key``, ``enter`` (beats ``floor``) and ``index`` of the columns ``column``.
    """
    signature = {
        **inputs,
        "valid_ptr": "*i32",
        "out_ptr": "*i32",
        **HELD,
        "rows": "i32",
        **strides,
        "out_stride": "i64",
    }
    kernel = stack(
        define("kernel", signature, summary),
        block(
            f"""
            step = tl.arange(0, BLOCK)
            order = tl.arange(0, OUT)
            held_key_ptr += tl.program_id(0).to(tl.int64) * CAPACITY
            held_id_ptr += tl.program_id(0).to(tl.int64) * CAPACITY
            for turn in range(tl.program_id(0), rows, tl.num_programs(0)):
                row = rows - 1 - turn
                valid = tl.load(valid_ptr + row)
                out = out_ptr + row.to(tl.int64) * out_stride
                if valid <= TOPK:
                    tl.store(out + order, tl.where(order < valid, order, -1), mask=order < TOPK)
                else:
                    count = 0
                    floor = tl.full((), VOID, tl.int32)
                    for begin in range(0, {columns}, BLOCK):
                        column = begin + step
{block(read, 6)}
                        new = enter.to(tl.int32)
                        place = count + tl.cumsum(new, axis=0) - 1
                        tl.store(held_key_ptr + place, key, mask=enter)
                        tl.store(held_id_ptr + place, index, mask=enter)
                        count += tl.sum(new, axis=0)
                        # At the end as well, so that what is held is what is selected.
                        if (count > CAPACITY - BLOCK) | (begin + BLOCK >= {columns}):
                            floor = prune(held_key_ptr, held_id_ptr, count)
                            count = tl.minimum(count, TOPK)
                    tl.debug_barrier()
                    chosen = tl.load(held_id_ptr + order, mask=order < count, other=-1)
                    tl.store(out + order, chosen, mask=order < TOPK)
                # The next row overwrites what was held.
                tl.debug_barrier()
            """,
            1,
        ),
    )
    return module(
        spec,
        numerics=numerics,
        constants={"BLOCK": spec.block} | selector_constants(spec.topk, spec.capacity),
        helpers=(*helpers, BEST, PRUNE),
        kernel=kernel,
        meta=Meta(
            signature=signature,
            aligned=aligned(signature),
            scratch=tuple(HELD),
        ),
        interpret=interpret,
    )
