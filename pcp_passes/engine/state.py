# SPDX-License-Identifier: Apache-2.0
"""The device's truth about every running request, and the step inputs made from it.

The host knows an upper bound of each position; the device knows the position, for it knows how many drafts were
accepted. So positions, slots, lengths and ids of a step are computed here, from tensors on the device, and the host
adds only what it decides: which rows run, how many tokens each, and which are prefilling. Nothing is read back: a step
can be prepared while the one before still runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.plan import PAD_SLOT_ID, upload
from pcp_passes.step.inputs import StepInputs, StepOutputs

NO_BLOCK = -1
"""Entry of a block table past a request's blocks: a slot computed from it is negative, so it is never written."""


class DeviceState:
    """State of up to ``max_requests`` running requests, one row each, on one rank's device.

    Attributes:
        computed: i64[max_requests], tokens whose cache rows are final; the position of the next token.
        last_token: i64[max_requests], the sampled token that is not computed yet; unused while prefilling.
        drafts: i64[max_requests, K], drafts that follow it.
        draft_logits: [max_requests, K, V], what the drafts were sampled from; None until a step gives some.
        tokens: i64[max_requests, max_len], what is being prefilled.
        block_table: i32[max_requests, B].
        generations: of each row on the host, counts the requests that it was given to.
    """

    def __init__(self, options: EngineOptions, steps: int, device: torch.device | str) -> None:
        rows, self.device = options.max_requests, torch.device(device)
        self.block_size, self.steps = options.block_size, steps
        self.generations = [0] * rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.computed, self.last_token, self.seeds = zeros(rows), zeros(rows), zeros(rows)
        self.temperature = zeros(rows, dtype=torch.float64)
        self.drafts = zeros(rows, steps)
        self.draft_logits: torch.Tensor | None = None
        self.tokens = zeros(rows, options.max_len)
        self.block_table = zeros(rows, options.blocks_per_request(steps), dtype=torch.int32) + NO_BLOCK

    def admit(self, row: int, tokens: Sequence[int], computed: int, params: SamplingParams) -> None:
        """Start a request in ``row``: ``tokens`` to prefill; the first ``computed`` have cache rows already."""
        self.generations[row] += 1
        self.tokens[row, : len(tokens)] = self._upload(np.asarray(tokens, dtype=np.int64))
        self.computed[row] = computed
        self.temperature[row] = params.temperature
        self.seeds[row] = params.seed
        self.block_table[row] = NO_BLOCK

    def set_blocks(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Entries ``first`` and on of a row's block table."""
        self.block_table[row, first : first + len(blocks)] = self._upload(np.asarray(blocks, dtype=np.int32))

    def prepare(self, batch: ScheduledBatch, *, real: bool = True) -> StepInputs:
        """The step's global inputs. Every value of the sequence comes from the device, none from the host's cursor.

        A step that is not ``real`` counts from position 0: its rows may belong to other requests, or to none.
        """
        lengths = batch.lengths.astype(np.int64)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
        owner = np.repeat(np.arange(len(lengths)), lengths)
        drafts = np.array([entry.drafts for entry in batch.entries], dtype=np.int64)
        cu_logits = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(drafts + 1)))
        rows = self._upload(np.array([entry.row for entry in batch.entries], dtype=np.int64))
        offset = self._upload(np.arange(starts[-1]) - starts[owner])
        decoding = self._upload(np.array([not entry.is_prefilling for entry in batch.entries])[owner])
        of_token = rows[self._upload(owner)]

        final = self.computed if real else torch.zeros_like(self.computed)
        computed = final[rows]
        positions = final[of_token] + offset
        if not real:
            positions = positions.clamp(max=self.block_table.shape[1] * self.block_size - 1)
        prompt = self.tokens[of_token, positions.clamp(max=self.tokens.shape[1] - 1)]
        guesses = torch.cat((self.last_token[:, None], self.drafts), dim=1)
        guessed = guesses[of_token, offset.clamp(max=self.steps)]
        block = self.block_table[of_token, positions // self.block_size].long()
        verified = self._upload(drafts)[:, None] > torch.arange(self.steps, device=self.device)
        return StepInputs(
            input_ids=torch.where(decoding, guessed, prompt),
            positions=positions,
            slots=(block * self.block_size + positions % self.block_size).clamp(min=PAD_SLOT_ID),
            query_start_loc=self._upload(starts),
            seq_lens=computed + self._upload(lengths),
            requests=rows,
            block_table_pool=self.block_table,
            logit_rows=self._upload(batch.logit_rows),
            cu_logits=self._upload(cu_logits),
            draft_ids=self.drafts[rows].masked_fill(~verified, -1),
            next_prefill=self._upload(np.array([entry.next_prefill for entry in batch.entries], dtype=np.int64)),
            temperature=self.temperature[rows],
            seeds=self.seeds[rows],
            draft_logits=None if self.draft_logits is None else self.draft_logits[rows],
        )

    def apply(self, batch: ScheduledBatch, outputs: StepOutputs) -> None:
        """Advance the rows of a batch by what was accepted, and keep its drafts for the next step."""
        rows = self._upload(np.array([entry.row for entry in batch.entries], dtype=np.int64))
        lengths = self._upload(batch.lengths.astype(np.int64))
        self.computed[rows] += lengths - outputs.num_rejected
        self.last_token[rows] = outputs.next_token
        self.drafts[rows] = outputs.drafts
        if outputs.draft_logits is not None:
            if self.draft_logits is None:
                shape = (len(self.computed), *outputs.draft_logits.shape[1:])
                self.draft_logits = outputs.draft_logits.new_zeros(shape)
            self.draft_logits[rows] = outputs.draft_logits

    def advance_prefills(self, batch: ScheduledBatch) -> None:
        """Advance the rows in the middle of a prefill, of which nothing can be rejected: on a stage without outputs."""
        middle = [entry for entry in batch.entries if not entry.samples]
        rows = self._upload(np.array([entry.row for entry in middle], dtype=np.int64))
        self.computed[rows] += self._upload(np.array([entry.length for entry in middle], dtype=np.int64))

    def apply_round(
        self,
        batch: ScheduledBatch,
        current: torch.Tensor,
        advance: torch.Tensor,
        next_token: torch.Tensor,
        drafts: torch.Tensor | None,
    ) -> None:
        """:meth:`apply` on a stage without outputs, of the rows that sampled and are ``current`` bool[R] still.

        ``advance`` i64[R], ``next_token`` i64[R] and ``drafts`` i64[R, K] are on the CPU, as a round brings them.
        """
        keep = current & torch.tensor([entry.samples for entry in batch.entries])
        rows = torch.tensor([entry.row for entry in batch.entries])[keep].to(self.device)
        self.computed[rows] += advance[keep].to(self.device)
        self.last_token[rows] = next_token[keep].to(self.device)
        if drafts is not None:
            self.drafts[rows] = drafts[keep].to(self.device)

    def _upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        return upload(array, self.device)
