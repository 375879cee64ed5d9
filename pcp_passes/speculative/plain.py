# SPDX-License-Identifier: Apache-2.0
"""No drafter: plain decoding, one token per request and step, through the same step program and engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pcp_passes.speculative.contract import Drafted, TargetValues
from pcp_passes.step import ops

if TYPE_CHECKING:
    from pcp_passes.step.builder import StepBuilder


@dataclass(frozen=True)
class NoDrafter:
    """K = 0."""

    steps: int = 0
    model: None = None

    def extend(self, builder: StepBuilder, values: TargetValues) -> Drafted:
        """An empty ``i64[R, 0]``."""
        return Drafted(builder.call(ops.no_drafts, values.next_token, 0, name="drafts"), None)
