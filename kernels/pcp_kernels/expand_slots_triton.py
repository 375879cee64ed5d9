# SPDX-License-Identifier: Apache-2.0
"""Triton source of :func:`pcp_kernels.expand_slots`. Needs triton; imported on first launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pcp_kernels.expand_slots import PAD_SLOT_ID

if TYPE_CHECKING:
    import torch

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def expand_slots_kernel(
    slots_ptr,
    slots_stride,
    index_ptr,
    mask_ptr,
    out_ptr,
    out_stride,
    rows,
    capacity,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes ``BLOCK`` consecutive rows of one cache group."""
    # Group offsets can pass 2**31 elements; row offsets cannot.
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    written = tl.load(mask_ptr + row, mask=row < rows, other=0) != 0
    token = tl.load(index_ptr + row, mask=written, other=0)
    slot = tl.load(slots_ptr + group * slots_stride + token, mask=written, other=PAD)
    tl.store(out_ptr + group * out_stride + row, slot, mask=row < capacity)


def launch(slot_mapping: torch.Tensor, gather_index: torch.Tensor, write_mask: torch.Tensor, out: torch.Tensor) -> None:
    """Launch on the current stream; arguments as :func:`pcp_kernels.expand_slots` requires them."""
    groups, capacity = out.shape
    if out.numel() == 0:
        return
    expand_slots_kernel[(triton.cdiv(capacity, BLOCK), groups)](
        slot_mapping,
        slot_mapping.stride(0),
        gather_index,
        write_mask,
        out,
        out.stride(0),
        gather_index.shape[0],
        capacity,
        PAD=PAD_SLOT_ID,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
