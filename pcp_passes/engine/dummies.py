# SPDX-License-Identifier: Apache-2.0
"""Batches that stand for real ones in profiling and warm-up: the same sizes and graphs, and nothing is written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pcp_passes.engine.options import SamplingParams
from pcp_passes.engine.request import Entry, Request, ScheduledBatch
from pcp_passes.errors import ConfigError
from pcp_passes.plan import PAD_SLOT_ID
from pcp_passes.step.inputs import StepInputs


def dummy_batch(num_tokens: int, num_requests: int = 1) -> ScheduledBatch:
    """Fresh prefills of rows that exist in no request. At least one token each: a rank always has a real row.

    Raises:
        ConfigError: fewer tokens than requests, or no request.
    """
    if not 1 <= num_requests <= num_tokens:
        raise ConfigError(
            f"a dummy step needs at least one request, and a token for each; found {num_tokens} tokens and "
            f"{num_requests} requests."
        )
    sizes = np.full(num_requests, num_tokens // num_requests)
    sizes[: num_tokens % num_requests] += 1
    entries = []
    for row, size in enumerate(sizes.tolist()):
        request = Request(f"dummy-{row}", (0,) * size, SamplingParams(), prefill_len=size)
        entries.append(Entry(request, 0, row, 0, size, 0, True, -1))
    return ScheduledBatch(0, tuple(entries), dummy=True)


def dummy_decodes(num_requests: int, drafts: int) -> ScheduledBatch:
    """Requests that verify ``drafts`` each."""
    entries = tuple(
        Entry(Request(f"dummy-{row}", (0,), SamplingParams()), 0, row, 0, 1 + drafts, drafts, False, -1)
        for row in range(num_requests)
    )
    return ScheduledBatch(0, entries, dummy=True)


def without_writes(inputs: StepInputs, block_size: int) -> StepInputs:
    """The same shapes for a step that leaves no trace: no row has a slot, and drafts are dropped as in a prefill.

    Rows read what exists, so attention over them is defined: positions count from 0 within a request, every request is
    as long as its own rows, and its blocks are block 0.
    """
    starts = inputs.query_start_loc
    owner = torch.searchsorted(
        starts[1:].contiguous(), torch.arange(len(inputs.positions), device=starts.device), right=True
    )
    held = inputs.block_table_pool.shape[1] * block_size
    positions = (torch.arange(len(owner), device=starts.device) - starts[owner]).clamp_(max=held - 1)
    return replace(
        inputs,
        positions=positions,
        slots=torch.full_like(inputs.slots, PAD_SLOT_ID),
        seq_lens=positions[starts[1:] - 1] + 1,
        block_table_pool=torch.zeros_like(inputs.block_table_pool),
        next_prefill=torch.zeros_like(inputs.next_prefill),
    )
