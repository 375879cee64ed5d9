# SPDX-License-Identifier: Apache-2.0
"""An executor whose model is arithmetic over what the caches hold: a wrong slot, table, position or id shows at once.

The target's cache holds the token and the position of each slot, the drafter's the token after it. A row's next token
is a function of *all* cached tokens of its request, so the whole output follows from the prompt alone
(:func:`reference`), whatever the schedule. Drafts are right except where :func:`guess` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.executor import Executor
from pcp_passes.engine.options import EngineOptions
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs

VOCAB = 50
EMPTY = -7


def following(history: Sequence[int]) -> int:
    """The token after ``history``."""
    value = 17
    for token in history:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def guess(history: Sequence[int]) -> int:
    """The drafter's token after ``history``: wrong for about a third of the histories."""
    right = following(history)
    return (right + 1) % VOCAB if sum(history) % 3 == 0 else right


def reference(prompt: Sequence[int], max_tokens: int, eos: Sequence[int] = ()) -> list[int]:
    """What greedy decoding gives."""
    history = list(prompt)
    for _ in range(max_tokens):
        history.append(following(history))
        if history[-1] in eos:
            break
    return history[len(prompt) :]


class ArithmeticExecutor(Executor):
    """One rank (the scheduler does not depend on how many there are); checks every read against the positions."""

    def __init__(self, options: EngineOptions, steps: int) -> None:
        super().__init__(options, steps, [0], cache_dtype=torch.float64, device="cpu")
        size = options.num_blocks * options.block_size
        self.token = torch.full((size,), EMPTY)
        self.position = torch.full((size,), EMPTY)
        self.after = torch.full((size,), EMPTY)
        self.between: Callable[[], None] = lambda: None
        self.seen: list[StepInputs] = []

    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        (step,) = inputs
        self.seen.append(step)
        written = step.slots >= 0
        assert len(step.slots[written].unique()) == int(written.sum()), "two rows write one slot"
        self.token[step.slots[written]] = step.input_ids[written]
        self.position[step.slots[written]] = step.positions[written]
        requests, steps = len(step.requests), self.steps
        sampled = torch.full((requests, steps + 1), -1)
        accepted, last_rows = torch.zeros(requests, dtype=torch.int64), torch.zeros(requests, dtype=torch.int64)
        logits = torch.zeros(len(step.logit_rows), VOCAB, dtype=torch.float64)
        starts, cu = step.query_start_loc.tolist(), step.cu_logits.tolist()
        for r in range(requests):
            for row in range(cu[r], cu[r + 1]):
                logits[row, following(self._history(step, r, int(step.logit_rows[row])))] = 9.0
            best = logits[cu[r] : cu[r + 1]].argmax(1).tolist()
            drafts = step.draft_ids[r].tolist()
            count = 0
            while count < len(best) - 1 and drafts[count] == best[count]:
                count += 1
            sampled[r, : count + 1] = torch.tensor(best[: count + 1])
            accepted[r] = count
            last_rows[r] = starts[r + 1] - 1 - (len(best) - 1 - count)
        prefilling = step.next_prefill >= 0
        next_token = torch.where(prefilling, step.next_prefill, sampled.gather(1, accepted[:, None])[:, 0])
        self.between()
        drafts = self._draft(step, last_rows, next_token, ~prefilling) if steps else sampled[:, :0]
        rejected = step.cu_logits.diff() - 1 - accepted
        sampled = sampled.masked_fill(prefilling[:, None], -1)
        num_sampled = (accepted + 1).masked_fill(prefilling, 0)
        logprobs = torch.zeros(sampled.shape, dtype=torch.float64)
        return [StepOutputs(sampled, num_sampled, rejected, next_token, drafts, None, logprobs)], CollectiveLog()

    def _slots(self, step: StepInputs, r: int, count: int) -> torch.Tensor:
        size = self.options.block_size
        blocks = step.block_table_pool[step.requests[r], : -(-count // size)].long()
        assert (blocks >= 0).all(), "a block that the request does not have"
        return (blocks[:, None] * size + torch.arange(size)).flatten()[:count]

    def _history(self, step: StepInputs, r: int, row: int) -> list[int]:
        count = int(step.positions[row]) + 1
        if not (step.slots >= 0).any():
            return [0] * count
        slots = self._slots(step, r, count)
        assert torch.equal(self.position[slots], torch.arange(count)), "slots of other positions"
        return self.token[slots].tolist()

    def _draft(
        self, step: StepInputs, last_rows: torch.Tensor, next_token: torch.Tensor, drafting: torch.Tensor
    ) -> torch.Tensor:
        after = step.input_ids.roll(-1)
        ends = step.query_start_loc[1:] - 1
        after[ends] = step.input_ids[ends]
        after[last_rows] = next_token
        written = step.slots >= 0
        self.after[step.slots[written]] = after[written]
        drafts = torch.zeros(len(step.requests), self.steps, dtype=torch.int64)
        for r in range(len(step.requests)):
            if not drafting[r] or not written.any():
                continue
            count = int(step.positions[last_rows[r]]) + 1
            slots = self._slots(step, r, count)
            history = [*self.token[slots].tolist(), int(next_token[r])]
            assert self.after[slots].tolist() == history[1:], "a drafter row made from another next token"
            for k in range(self.steps):
                drafts[r, k] = guess(history)
                history.append(int(drafts[r, k]))
                self.after[self._slots(step, r, count + k)[-1]] = history[-1] if k else int(next_token[r])
        return drafts
