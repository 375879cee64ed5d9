# SPDX-License-Identifier: Apache-2.0
"""Rows of a step: whose they are, how far each sees, and their rotation. Imports nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepRows:
    """What the reads of a step know of its rows.

    Attributes:
        row_request: i32 [T], the row of ``block_table`` of each token row. A request that is cut into two segments has
            two rows there.
        visible: i32 [T], how many keys of its request each token row sees: its position plus one.
        block_table: i32 [R, blocks].
    """

    row_request: torch.Tensor
    visible: torch.Tensor
    block_table: torch.Tensor

    def padded(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``row_request`` and ``visible`` of ``rows`` rows, at least T; those past the step's own see nothing."""
        more = rows - self.visible.shape[0]
        if not more:  # asked twice a layer
            return self.row_request, self.visible
        pad = torch.nn.functional.pad
        return pad(self.row_request, (0, more)), pad(self.visible, (0, more))


def step_rows(query_start_loc: torch.Tensor, lengths: torch.Tensor, rows: int, block_table: torch.Tensor) -> StepRows:
    """Work on the device that the arguments are on, without asking it for a number.

    Args:
        query_start_loc: int [R + 1], first token row of each request row, then the end.
        lengths: int [R], keys of each request row up to its last token row.
        rows: T; those at or past the last end are padding.
        block_table: i32 [R, blocks].
    """
    ends = query_start_loc[1:]
    row = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    request = torch.searchsorted(ends, row, right=True)
    real = request < len(ends)
    request = request.clamp_(max=len(ends) - 1)
    visible = lengths[request] - (ends[request] - 1 - row)
    return StepRows(
        row_request=request.int(),
        visible=torch.where(real, visible, 0).clamp_(min=0).int(),
        block_table=block_table,
    )


def rotated(
    rotary: Any, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` ``[T, H, R]`` and ``k`` ``[T, 1, R]`` turned to ``positions`` by vLLM's layer, in its native form.

    Calling the layer may reach its CPU kernel (without Inductor, custom ops are on): that turns the heads of separate
    rows wrongly, and in place.
    """
    turned: tuple[torch.Tensor, torch.Tensor] = rotary.forward_native(positions, q, k)
    return turned
