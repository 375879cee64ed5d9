# SPDX-License-Identifier: Apache-2.0
"""DSpark: a block drafter, wholly replicated.

Its context is what some layers of the target computed (*auxiliary* states), for all tokens of the step; so under PCP
these are restored in full, and every rank runs the whole drafter. One query of K rows per request, the token sampled
last and then mask tokens, gives a hidden state per draft; a small head that sees the draft before it adds what little
is sequential. Only the target's layers have to support PCP: the drafter is captured for one rank, whatever P is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import fx, nn

from pcp_passes.engine.bodies import Model, capture
from pcp_passes.errors import ConfigError
from pcp_passes.passes.base import PassContext
from pcp_passes.speculative.contract import BodyModel, Drafted, TargetValues
from pcp_passes.step import ops

if TYPE_CHECKING:
    from pcp_passes.step.builder import StepBuilder

ALONE = PassContext(1)
"""The drafter's own configuration: one rank. It is stated here, never taken over from the target."""
_EXAMPLE_ROWS = 7


class BlockConfig(Protocol):
    """What is read of the module's configuration (:class:`pcp_passes.speculative.dspark_model.DSparkConfig`)."""

    hidden_size: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int


@dataclass(frozen=True)
class DSpark:
    """A block drafter in the step program; :func:`capture_dspark` makes one from a torch module.

    Args:
        model: bodies ``context`` ``(positions, aux [N, A*H]) -> [0]``, which writes its caches, and ``query``
            ``(ids, positions) -> hidden [N, H]``.
        markov: previous token i64[n] to bias ``[n, V]``.
        steps: K.
        num_aux: A, auxiliary states it takes of the target.
        mask_token: stands for the tokens of a block that are not known yet.
        block_size: largest K that it was trained for.

    Raises:
        ConfigError: ``steps`` is not between 1 and ``block_size``.
    """

    model: BodyModel
    markov: nn.Module
    steps: int
    num_aux: int
    mask_token: int
    block_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= self.block_size:
            raise ConfigError(
                f"a block drafter has steps={self.steps}; required 1 to {self.block_size}, the block it was trained for"
            )

    def extend(self, builder: StepBuilder, values: TargetValues) -> Drafted:
        """Add the context pass, the query pass and the sequential sampling.

        Raises:
            ConfigError: the target gives another number of auxiliary states.
        """
        if len(values.aux) != self.num_aux:
            raise ConfigError(
                f"the target returns {len(values.aux)} auxiliary states, the block drafter takes {self.num_aux}; load "
                "the target with aux_layers=config.target_layer_ids"
            )
        given, width = builder.inputs, self.steps
        aux = builder.call(ops.join_rows, list(values.aux), name="aux_rows")
        builder.body(self.model, "context", (given["positions"], aux), values.inputs)
        begin = builder.call(ops.advance, values.last_positions, 1, name="positions")
        positions, inputs = builder.query(values.tables, begin, values.num_sampled, width)
        ids = builder.call(ops.block_query, values.next_token, self.mask_token, width)
        base = builder.head(self.model, builder.body(self.model, "query", (ids, positions), inputs))
        drafts: list[fx.Node] = []
        logits: list[fx.Node] = []
        before = values.next_token
        for row in range(width):
            bias = builder.extra_head("markov", self.markov, before)
            own = builder.call(ops.every_row, base, row, width)
            logits.append(builder.call(ops.add, own, bias, name="draft_row_logits"))
            where = builder.call(ops.every_row, positions, row, width)
            before = builder.call(
                ops.sample_draft, logits[-1], given["temperature"], given["seeds"], where, name="draft"
            )
            drafts.append(before)
        kept = builder.call(ops.stack_drafts, logits, name="draft_logits") if builder.keep_draft_logits else None
        return Drafted(builder.call(ops.stack_drafts, drafts, name="drafts"), kept)


def capture_dspark(module: nn.Module, steps: int) -> DSpark:
    """The drafter of a torch module such as :class:`pcp_passes.speculative.dspark_model.DSpark`.

    Args:
        module: has ``config``, ``cache_layers``, ``lm_head``, ``markov_head``, ``context(aux, positions)`` and
            ``query(ids, positions)``.
        steps: K.

    Raises:
        ConfigError: ``steps`` is not between 1 and the module's block size.
        Refusal: the module cannot be captured.
    """
    config = cast(BlockConfig, module.config)
    dtype = next(module.parameters()).dtype
    ids, aux = torch.arange(_EXAMPLE_ROWS), len(config.target_layer_ids)
    states = torch.zeros(_EXAMPLE_ROWS, aux * config.hidden_size, dtype=dtype)
    bodies = {
        "context": capture(_Context(module, aux), (ids, states), ALONE)["replicated"],
        "query": capture(_Query(module), (ids, ids), ALONE)["replicated"],
    }
    layers = cast("tuple[str, ...]", module.cache_layers)
    head, markov = cast(nn.Module, module.lm_head), cast(nn.Module, module.markov_head)
    model = Model("drafter", bodies, head, config.hidden_size, config.vocab_size, layers, dtype)
    return DSpark(model, markov, steps, aux, config.mask_token_id, config.block_size)


class _Context(nn.Module):
    def __init__(self, module: nn.Module, aux: int) -> None:
        super().__init__()
        self.module, self.aux = module, aux

    def forward(self, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        written: torch.Tensor = self.module.context(tuple(states.chunk(self.aux, 1)), positions)  # type: ignore[operator]
        return written


class _Query(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.module.query(ids, positions)  # type: ignore[operator]
        return hidden
