# SPDX-License-Identifier: Apache-2.0
"""Slot mappings from global order to rank-major order.

The scheduler maps each of the ``T`` tokens of a batch to a slot of the KV cache, once per cache group. Gathered
cache writes arrive in rank-major order instead, every rank padded to ``M`` rows. With P=2, M=4 and seven tokens
``A..G``, of which rank 0 holds A, B, G::

    gather_index  [0, 1, 6, 0 | 2, 3, 4, 5]        A B G _ | C D E F
    write_mask    [1, 1, 1, 0 | 1, 1, 1, 1]
    slot_mapping  [10, 11, 12, 13, 14, 15, 16]
    out           [10, 11, 16, -1 | 12, 13, 14, 15 | -1, ...]   up to the capacity of the buffer

``out[g, i] = slot_mapping[g, gather_index[i]] if i < P*M and write_mask[i] else PAD_SLOT_ID``
"""

from __future__ import annotations

import torch

PAD_SLOT_ID = -1
"""Slot that a cache write ignores; vLLM's value."""


def expand_slots(
    slot_mapping: torch.Tensor, gather_index: torch.Tensor, write_mask: torch.Tensor, out: torch.Tensor
) -> None:
    """Fill ``out`` with the rank-major slot mapping: no host synchronisation, and on CUDA no allocation.

    Args:
        slot_mapping: i64 ``[G, T]``, the slot of each token, per cache group.
        gather_index: i64 ``[P*M]``, the token that each rank-major row holds. Not read where a row is not written.
        write_mask: bool ``[P*M]``, whether the row is written.
        out: i64 ``[G, capacity]`` with ``capacity >= P*M``; every element is overwritten.

    The last dimension of each is contiguous, and all are on one device: CPU runs the reference, CUDA the Triton
    kernel. Opaque to torch.compile.

    Raises:
        ValueError: arguments other than these; all faults are named.
    """
    _expand_slots(slot_mapping, gather_index, write_mask, out)


def expand_slots_reference(
    slot_mapping: torch.Tensor, gather_index: torch.Tensor, write_mask: torch.Tensor, out: torch.Tensor
) -> None:
    """The definition of :func:`expand_slots`, in PyTorch operators; runs on any device."""
    rows = gather_index.shape[0]
    gathered = slot_mapping.index_select(1, gather_index.masked_fill(~write_mask, 0))
    out[:, :rows] = gathered.masked_fill(~write_mask, PAD_SLOT_ID)
    out[:, rows:] = PAD_SLOT_ID


def _check(slot_mapping: torch.Tensor, gather_index: torch.Tensor, write_mask: torch.Tensor, out: torch.Tensor) -> None:
    required = (
        ("slot_mapping", slot_mapping, 2, torch.int64),
        ("gather_index", gather_index, 1, torch.int64),
        ("write_mask", write_mask, 1, torch.bool),
        ("out", out, 2, torch.int64),
    )
    faults = [
        f"{name}: found {_kind(tensor)}; required {dtype}, {ndim} dimensions, the last contiguous, on {out.device}"
        for name, tensor, ndim, dtype in required
        if (tensor.ndim, tensor.dtype, tensor.device) != (ndim, dtype, out.device)
        or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1)
    ]
    if not faults:
        rows, capacity = gather_index.shape[0], out.shape[1]
        if write_mask.shape[0] != rows:
            faults.append(f"write_mask: found {write_mask.shape[0]} rows; required {rows}, as in gather_index")
        if out.shape[0] != slot_mapping.shape[0]:
            faults.append(f"out: found {out.shape[0]} cache groups; required {slot_mapping.shape[0]} of slot_mapping")
        if capacity < rows:
            faults.append(f"out: found room for {capacity} rows; required {rows}, so enlarge the buffer")
    if faults:
        raise ValueError("\n  ".join(["expand_slots cannot run:", *faults]))


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}, shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"


@torch.library.custom_op("pcp_kernels::expand_slots", mutates_args=("out",), device_types="cpu")
def _expand_slots(
    slot_mapping: torch.Tensor, gather_index: torch.Tensor, write_mask: torch.Tensor, out: torch.Tensor
) -> None:
    _check(slot_mapping, gather_index, write_mask, out)
    expand_slots_reference(slot_mapping, gather_index, write_mask, out)


@_expand_slots.register_kernel("cuda")
def _(slot_mapping: torch.Tensor, gather_index: torch.Tensor, write_mask: torch.Tensor, out: torch.Tensor) -> None:
    from pcp_kernels.expand_slots_triton import launch

    _check(slot_mapping, gather_index, write_mask, out)
    launch(slot_mapping, gather_index, write_mask, out)


@_expand_slots.register_fake
def _(slot_mapping: torch.Tensor, gather_index: torch.Tensor, write_mask: torch.Tensor, out: torch.Tensor) -> None:
    return None
