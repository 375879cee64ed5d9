# SPDX-License-Identifier: Apache-2.0
"""Scores of a tile of rows into a workspace, for the selector of :mod:`pcp_kernels.generate.select`."""

from __future__ import annotations

from pcp_kernels.generate.blocks import (
    CONTIGUOUS_GATE,
    CONTIGUOUS_RANGE,
    NEXT_REQUEST,
    NUMERICS,
    PAGED_GATE,
    aligned,
    define,
    load_queries,
    load_rows,
    score_constants,
    score_signature,
    score_strides,
    score_tile,
    stack,
)
from pcp_kernels.generate.text import Meta, block, module
from pcp_kernels.specs import KernelSpec, LogitsSpec

SPAN = 32
"""Blocks of keys that one program scores: enough to fill the pipeline, few enough to spread a row over programs."""

_TILE = """
first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_QUERIES
lane = tl.arange(0, BLOCK_QUERIES)
step = tl.arange(0, BLOCK_KEYS)
row = first_row + lane
"""

_PAGED_RANGE = """
low = tl.program_id(1) * BLOCK_KEYS * SPAN
waiting = live & (end > low)
if tl.max(waiting.to(tl.int32), axis=0) > 0:
"""

_STORE = """
out = out_ptr + row.to(tl.int64)[None, :] * out_stride + {column}
tl.store(out, score, mask={gate})
"""


def generate(spec: KernelSpec, interpret: bool = False) -> str:
    """Text of a :class:`LogitsSpec`. Grid: ``(ceil(rows / BLOCK_QUERIES), ceil(keys / (BLOCK_KEYS * SPAN)))``.

    Column ``j`` of row ``i`` of the workspace is the score of the row's key ``j``, counted from its first; columns
    past its last key are left as they are.
    """
    assert isinstance(spec, LogitsSpec)
    signature = {
        **score_signature(spec),
        "out_ptr": "*fp32",
        **score_strides(spec),
        "out_stride": "i64",
    }
    kernel = stack(
        define(
            "kernel", signature, "Write the scores of a tile of rows for SPAN blocks of keys; out: f32 [rows, keys]."
        ),
        block(_TILE, 1),
        block(load_rows(spec, "0"), 1),
        block(_paged(spec, interpret) if spec.layout == "paged" else _contiguous(spec, interpret), 1),
    )
    return module(
        spec,
        numerics=NUMERICS,
        constants={**score_constants(spec), "SPAN": SPAN},
        kernel=kernel,
        meta=Meta(signature=signature, aligned=aligned(signature)),
        interpret=interpret,
    )


def _contiguous(spec: LogitsSpec, interpret: bool) -> str:
    return stack(
        block(CONTIGUOUS_RANGE),
        # Compared before it is added: low is the largest i32 where no row of the tile sees a key.
        "skipped = tl.program_id(1) * BLOCK_KEYS * SPAN",
        "if low < high - skipped:",
        "    low += skipped",
        block(load_queries(spec, interpret), 1),
        block(_scan(spec, interpret, CONTIGUOUS_GATE, "(n[:, None] - start[None, :])"), 1),
    )


def _paged(spec: LogitsSpec, interpret: bool) -> str:
    return stack(
        block(_PAGED_RANGE),
        block(load_queries(spec, interpret), 1),
        block(NEXT_REQUEST, 1),
        block(_scan(spec, interpret, PAGED_GATE, "n[:, None]"), 2),
    )


def _scan(spec: LogitsSpec, interpret: bool, gate: str, column: str) -> str:
    return stack(
        "last = tl.minimum(low + BLOCK_KEYS * SPAN, high)",
        "for begin in tl.range(low, last, BLOCK_KEYS, num_stages=STAGES):",
        block(score_tile(spec, interpret), 1),
        block(_STORE.format(gate=gate, column=column), 1),
    )
