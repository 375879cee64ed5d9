# SPDX-License-Identifier: Apache-2.0
"""The two tensors that tell a rewritten graph which tokens a rank runs.

A call runs one sequence of T tokens, laid out as one prefill. Worked example, P = 2, T = 6, zigzag::

    rows     [[0 1 5],      i64[P, M]  the tokens of each rank; rank r is given row r
              [2 3 4]]
    restore  [0 1 3 4 5 2]  i64[T]     global = rank_major[restore]

A padded row repeats token 0: every row is a real token, so a padded row computes what another rank computes too, and
nothing of it is ever restored.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from pcp_passes.layout import Batch, build_layout, dispatch_tokens

MIN_ROWS = 2
"""PyTorch compiles a size of 0 or 1 as a constant, so a rank has at least two rows."""


@dataclass(frozen=True, eq=False)
class TokenPlan:
    """Where the tokens of one call are.

    Attributes:
        rows: i64[P, M], the global token of each row of each rank.
        restore: i64[T], the place of each token among the P * M rank-major rows.
        real: for each rank, how many of its M rows are not padding; these come first.
    """

    rows: torch.Tensor
    restore: torch.Tensor
    real: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.restore.shape[0]

    @property
    def num_rows(self) -> int:
        """M."""
        return self.rows.shape[1]


def build_plan(num_tokens: int, pcp: int, layout: str, device: torch.device | str = "cpu") -> TokenPlan:
    """Lay ``num_tokens`` tokens of one sequence out over ``pcp`` ranks.

    Raises ConfigError for an unknown layout.
    """
    batch = Batch([num_tokens], [0], [num_tokens])  # type: ignore[arg-type]  # sequences are converted
    rows = max(MIN_ROWS, dispatch_tokens(batch, pcp, kind=layout))
    laid = build_layout(batch, pcp, kind=layout, padded_tokens=rows)
    gather = torch.from_numpy(laid.gather_index).to(device).view(pcp, rows)
    restore = torch.from_numpy(laid.restore_index).to(device)
    return TokenPlan(gather, restore, tuple(map(int, laid.per_rank_tokens)))


@dataclass
class PlanCache:
    """Plans of the lengths seen last; a server sees few lengths often."""

    pcp: int
    layout: str
    size: int = 64
    _held: OrderedDict[tuple[int, torch.device], TokenPlan] = field(default_factory=OrderedDict)

    def get(self, num_tokens: int, device: torch.device) -> TokenPlan:
        """The plan of ``num_tokens`` tokens, with its tensors on ``device``."""
        key = (num_tokens, device)
        plan = self._held.pop(key, None) or build_plan(num_tokens, self.pcp, self.layout, device)
        self._held[key] = plan
        while len(self._held) > self.size:
            self._held.popitem(last=False)
        return plan
