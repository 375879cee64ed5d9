# SPDX-License-Identifier: Apache-2.0
"""What the last pipeline stage decided in a step, told to the other stages of a vLLM engine on CPU.

vLLM broadcasts it on a communicator of its own and on a stream beside the computation. Without streams, which is how
Model Runner V2 runs on a CPU, each broadcast waits: the first stage would run a step only when the last one is through
with the step before. So here :mod:`pcp_passes.distributed.stages.rounds` takes its place on the same group: rounds
are announced when a step was executed and awaited ``stages`` steps later, when the scheduler may first send a request
again. Beside that they know what they expect, and say so instead of waiting or guessing. On CUDA vLLM's own stays: the
host would have to wait for each round, and there nothing else does.

A hidden state travels by send and receive on another group, so the two never meet in an order that differs by stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.gpu.pp_utils import PPHandler, compute_need_sampled_mask

from pcp_passes.distributed.stages.round_state import RoundForm, StashedStep
from pcp_passes.distributed.stages.round_transport import GroupTransport
from pcp_passes.distributed.stages.rounds import RoundReceiver, RoundSender


class RoundHandler(PPHandler):  # type: ignore[misc]
    """A ``PPHandler`` whose payloads are rounds. ``queue`` holds, per step in flight, the rows that need its round."""

    queue: Any

    def __init__(self, max_num_reqs: int, num_speculative_steps: int, device: torch.device) -> None:
        super().__init__(max_num_reqs, num_speculative_steps, device)
        transport = GroupTransport(self.broadcast_group, device_group=get_pp_group().device_group)
        form = RoundForm(num_speculative_steps)
        self.rounds = 0
        self.sampled: torch.Tensor | None = None
        if self.is_last_rank:
            self.sender = RoundSender(transport, form)
        else:
            self.receiver = RoundReceiver(transport, form)

    # -- the last stage ----------------------------------------------------------------------------------

    def broadcast(
        self, sampled_token_ids: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor, input_batch: Any
    ) -> None:
        """Keep the sampled tokens, i64[R, n], until the drafts are there; without a drafter, send them."""
        if compute_need_sampled_mask(input_batch) is None:
            return
        places = torch.arange(sampled_token_ids.shape[1], device=sampled_token_ids.device)
        self.sampled = torch.where(places < num_sampled[:, None], sampled_token_ids, -1)
        if self.num_speculative_steps == 0:
            self._send(input_batch, None)

    def broadcast_drafts(self, draft_tokens: torch.Tensor, input_batch: Any) -> None:
        """Send the round of ``input_batch``; ``draft_tokens`` i64[rows, K] is the state of all requests."""
        if compute_need_sampled_mask(input_batch) is not None:
            self._send(input_batch, draft_tokens[input_batch.idx_mapping])

    def _send(self, batch: Any, drafts: torch.Tensor | None) -> None:
        assert self.sampled is not None, "a round is sampled before it is drafted"
        sampled, self.sampled = self.sampled, None
        self.sender.send(self.rounds, batch.num_reqs, sampled, drafts)
        self.rounds += 1

    # -- the others --------------------------------------------------------------------------------------

    def receive(self, input_batch: Any) -> bool:
        """Announce the round of the step that was just executed; nothing is waited for. Whether all requests of the
        batch are sampled in it."""
        needed = compute_need_sampled_mask(input_batch)
        if needed is None:
            return False
        self.receiver.stash(stashed(self.rounds, input_batch, self.req_idx_gen_np))
        self.rounds += 1
        self.queue[-1] = needed
        return bool(needed.all())

    def get_prev_sampled_outputs(
        self, draft_tokens_to_update: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor] | None:
        """The round of ``stages`` steps ago, as arguments of ``postprocess_sampled``; rows that have been freed since
        are -1. ``None`` when there is nothing to update."""
        if not self.queue:
            return None
        needed = self.queue.popleft()
        self.queue.append(None)
        if needed is None:
            return None
        found = self.receiver.receive()
        rows = torch.tensor(found.stash.rows, dtype=torch.int64)
        keep = found.current(self.req_idx_gen_np) & torch.from_numpy(needed)
        if not bool(keep.any()):
            return None
        if draft_tokens_to_update is not None and self.num_speculative_steps:
            assert found.drafts is not None
            draft_tokens_to_update[rows[keep].to(self.device)] = found.drafts[keep].to(self.device)
        return {
            "sampled_tokens": found.sampled.to(self.device),
            "num_sampled": found.derived.num_sampled.to(self.device, torch.int32),
            "num_rejected": found.derived.num_rejected.to(self.device, torch.int32),
            "idx_mapping": torch.where(keep, rows, -1).to(self.device),
        }


def stashed(step: int, batch: Any, generations: np.ndarray) -> StashedStep:
    """What a stage keeps of vLLM's ``batch``, from host values alone. Drafts behind the middle of a prompt are not
    verified; the next prompt token is not needed here, since vLLM has it on every stage."""
    rows, lengths = batch.idx_mapping_np, batch.num_scheduled_tokens
    prefilling = batch.num_computed_tokens_np + lengths < batch.prefill_len_np
    drafts = batch.num_draft_tokens_per_req
    drafts = np.zeros_like(lengths) if drafts is None else np.where(prefilling, 0, drafts)
    return StashedStep(
        step=step,
        rows=tuple(rows.tolist()),
        generations=tuple(generations[rows].tolist()),
        lengths=tuple(lengths.tolist()),
        drafts=tuple(drafts.tolist()),
        next_prefill=tuple(np.where(prefilling, 0, -1).tolist()),
    )
