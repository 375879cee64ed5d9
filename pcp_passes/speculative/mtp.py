# SPDX-License-Identifier: Apache-2.0
"""MTP: one next-token module, run K times.

The first pass runs over all tokens of the step: row ``i`` takes the target's hidden state of token ``i`` and token
``i + 1``, at the position of token ``i``; so the module's cache follows the target's. Draft 1 comes from the row of
each request's last valid token. Passes 2 to K are decode queries of one row per request: the draft before, the module's
own output, the next position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from pcp_passes.errors import ConfigError
from pcp_passes.speculative.contract import BodyModel, Drafted, TargetValues
from pcp_passes.step import ops

if TYPE_CHECKING:
    from pcp_passes.step.builder import StepBuilder


@dataclass(frozen=True)
class MTP:
    """Single-module multi-token prediction.

    Args:
        model: bodies ``(ids i64[N], positions i64[N], hidden [N, H]) -> hidden [N, H]``; with an indexer whose choice
            later passes may share, ``-> (hidden, top-k i32[N, k])`` and a body ``replicated_shared`` that takes it.
        steps: K.

    Raises:
        ConfigError: ``steps`` is below 1, or a variant is missing.
    """

    model: BodyModel
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"an MTP drafter has steps={self.steps}; required at least 1 (no drafter: NoDrafter())")
        missing = {"sharded", "replicated"} - set(self.model.bodies)
        if missing:
            raise ConfigError(
                f"the MTP module has bodies {sorted(self.model.bodies)}; required {sorted(missing)} too: its first "
                "pass is sharded, later ones are replicated"
            )

    def extend(self, builder: StepBuilder, values: TargetValues) -> Drafted:
        given = builder.inputs
        shifted = builder.call(
            ops.shift, given["input_ids"], given["query_start_loc"], values.last_rows, values.next_token
        )
        hidden = builder.hidden_of(
            builder.body(self.model, "replicated", (shifted, given["positions"], values.hidden), values.inputs)
        )
        hidden = builder.call(ops.select_rows, hidden, values.last_rows, name="draft_hidden")
        drafts: list[fx.Node] = []
        logits: list[fx.Node] = []
        positions = values.last_positions
        for step in range(1, self.steps + 1):
            if step > 1:
                hidden, positions = self._decode(builder, values, drafts[-1], positions, hidden)
            logits.append(builder.head(self.model, hidden))
            drafts.append(
                builder.call(
                    ops.sample_draft, logits[-1], given["temperature"], given["seeds"], positions, name="draft"
                )
            )
        kept = builder.call(ops.stack_drafts, logits, name="draft_logits") if builder.keep_draft_logits else None
        return Drafted(builder.call(ops.stack_drafts, drafts, name="drafts"), kept)

    def _decode(
        self, builder: StepBuilder, values: TargetValues, draft: fx.Node, before: fx.Node, hidden: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        begin = builder.call(ops.advance, before, 1, name="positions")
        positions, inputs = builder.query(values.tables, begin, values.num_sampled, 1)
        called = builder.body(self.model, "replicated", (draft, positions, hidden), inputs)
        return builder.hidden_of(called), begin
