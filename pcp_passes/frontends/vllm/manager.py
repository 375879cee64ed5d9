# SPDX-License-Identifier: Apache-2.0
"""vLLM's batch manager with our planner behind it.

vLLM's runner calls a ``PCPManager`` at four places of a step: to size the step, to partition the batch, to build
attention inputs, and to restore hidden states before sampling; its drafter at two more (:mod:`.drafting`). This
subclass answers each from one :class:`~pcp_passes.layout.Layout`, and chooses the body that the step runs:

* a step with any sharded request: the ``sharded`` body, on ``M`` rank-local rows;
* a step whose requests are all replicated (a pure decode step with ``decode="replicate"``): the ``replicated``
  body on the global batch, exactly as without PCP. It contains no collective.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu import pcp_manager as upstream
from vllm.v1.worker.gpu.input_batch import InputBatch

from pcp_passes.collectives import all_gather_rows
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm.drafting import DraftHooks
from pcp_passes.frontends.vllm.dspark import restore_together
from pcp_passes.frontends.vllm.runtime import AXIS, Runtime, Variant
from pcp_passes.layout import Batch, Layout, RankRows, build_layout, dispatch_tokens, sampled_rows
from pcp_passes.plan import PAD_SLOT_ID, StepPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

_BUFFERS = ("input_ids", "positions", "is_padding", "query_start_loc", "seq_lens")
_INPUT_BATCH_FIELDS = {f.name for f in dataclasses.fields(InputBatch)}


class PassesPCPManager(DraftHooks, upstream.PCPManager):  # type: ignore[misc]
    """A ``PCPManager`` for any model whose graph our pass rewrites."""

    runtime: ClassVar[Runtime]
    runner: ClassVar[GPUModelRunner]

    @classmethod
    def bound(cls, runner: GPUModelRunner, runtime: Runtime) -> type[PassesPCPManager]:
        """The class for one runner. vLLM instantiates what this returns with arguments of its own, so the runner and
        the runtime ride on the class."""
        return type("PassesPCPManager", (cls,), {"runner": runner, "runtime": runtime})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        buffers = self._input_buffers
        assert buffers is not None, "vLLM builds the manager with its request and token limits"
        self._layout: Layout | None = None
        self._plan = StepPlan(
            self.pcp_world_size,
            self.pcp_rank,
            max_tokens=buffers.max_num_tokens,
            max_rows=buffers.max_num_reqs,
            device=self.device,
        )
        # One set of persistent buffers: capture, dummy and real batches read the same addresses.
        for name in _BUFFERS:
            setattr(buffers, name, getattr(self._plan, name))
        self._size_slots()

    def set_block_tables(self, block_tables: Any) -> None:  # vLLM 0.33 attaches them after construction
        """Attach the block tables, which only exist after the KV cache is planned."""
        super().set_block_tables(block_tables)
        if hasattr(self, "_plan"):
            self._size_slots()

    def _size_slots(self) -> None:
        if self._block_tables is not None:
            self._plan.set_slot_groups(self._block_tables.num_kv_cache_groups)

    @staticmethod
    def validate_config(vllm_config: VllmConfig, supports_mm_inputs: bool) -> None:
        """Upstream's refusals are replaced by ``config.validate``, run when the configuration is made."""
        if supports_mm_inputs:
            raise ConfigError("pcp_passes shards token ids; multimodal inputs are not supported with PCP.")

    # -- sizing ------------------------------------------------------------------------------------------

    def _layout_options(self) -> dict[str, Any]:
        options = self.runtime.options
        return {"kind": options.layout, "decode": options.decode}

    def get_num_tokens_for_dispatch(self, num_scheduled_tokens: np.ndarray, is_prefilling: np.ndarray) -> int:
        """Padded rows of the coming step, the same on all ranks (graph buckets are chosen by it)."""
        batch = Batch(
            num_scheduled=num_scheduled_tokens,
            num_computed=np.zeros_like(num_scheduled_tokens),
            prefill_len=np.zeros_like(num_scheduled_tokens),
            is_prefilling=is_prefilling,
        )
        return int(dispatch_tokens(batch, self.pcp_world_size, **self._layout_options()))

    # -- partition ---------------------------------------------------------------------------------------

    def partition_batch(self, input_batch: InputBatch, batch_desc: Any) -> InputBatch:
        """The rank-local batch of this step; the global batch itself when the step is replicated."""
        from vllm.config import CUDAGraphMode

        self._global_batch = input_batch
        padded_tokens = batch_desc.num_tokens if batch_desc.cg_mode != CUDAGraphMode.NONE else None
        layout = build_layout(
            Batch(
                num_scheduled=input_batch.num_scheduled_tokens,
                num_computed=input_batch.num_computed_tokens_np,
                prefill_len=input_batch.prefill_len_np,
                is_prefilling=input_batch.is_prefilling_np,
            ),
            self.pcp_world_size,
            padded_tokens=padded_tokens,
            **self._layout_options(),
        )
        self._layout = layout
        self._select_body(layout)
        if layout.is_replicated:
            self._local_batch = None
            return input_batch
        self._plan.load(layout)
        self._plan.shard_tokens(input_batch.input_ids, input_batch.positions)
        self._local_batch = self._local_input_batch(input_batch, layout, self._plan.rows)
        return self._local_batch

    def _select_body(self, layout: Layout) -> None:
        variant: Variant = "replicated" if layout.is_replicated else "sharded"
        self.runtime.variants["target"] = variant
        if not self.runtime.observers:
            return
        step = {
            "variant": variant,
            "tokens": layout.num_tokens,
            "padded_rows": layout.padded_tokens,
            "rows_per_rank": layout.per_rank_tokens.tolist(),
        }
        for observe in self.runtime.observers:
            observe(step)

    def _local_input_batch(self, batch: InputBatch, layout: Layout, rows: RankRows) -> InputBatch:
        plan, tokens, padded = self._plan, int(layout.per_rank_tokens[self.pcp_rank]), layout.padded_tokens
        request = rows.row_request
        count, padded_count = rows.num_rows, rows.num_padded_rows
        states_np = batch.idx_mapping_np[request]
        states = async_tensor_h2d(states_np.astype(np.int64), device=self.device)
        computed = rows.row_start
        prefill_len = batch.prefill_len_np[request]
        logits = count if tokens else 0
        # Rank-local logits are never sampled: the restored rows and the global batch are.
        logits_np = np.arange(count + 1, dtype=np.int32) if logits else np.zeros(count + 1, dtype=np.int32)
        query_start_loc = plan.query_start_loc[: padded_count + 1]
        has_prefill = bool(rows.is_prefilling.any())
        fields: dict[str, Any] = {
            "req_ids": [batch.req_ids[i] for i in request],
            "num_reqs": count,
            "num_reqs_after_padding": padded_count,
            "idx_mapping": states,
            "idx_mapping_np": states_np,
            "expanded_idx_mapping": states,
            "expanded_local_pos": batch.expanded_local_pos.new_zeros(count),
            "num_scheduled_tokens": rows.row_length,
            "num_tokens": tokens,
            "num_tokens_after_padding": padded,
            "num_draft_tokens": 0,
            "num_draft_tokens_per_req": None,
            "query_start_loc": query_start_loc,
            "query_start_loc_np": rows.query_start_loc,
            "seq_lens": plan.seq_lens[:padded_count],
            "seq_lens_cpu_upper_bound": torch.from_numpy(rows.seq_lens_host),
            "dcp_local_seq_lens": None,
            "num_computed_tokens_np": computed,
            "prefill_len_np": prefill_len,
            "num_computed_prefill_tokens_np": np.minimum(computed, prefill_len),
            "is_prefilling_np": rows.is_prefilling,
            "max_seq_len_np": None,
            "has_prefill": has_prefill,
            "decode_graph_eligible": not has_prefill,
            "prefill_runs_as_decode_np": None,
            "input_ids": plan.input_ids[:padded],
            "positions": plan.positions[:padded],
            "is_padding": plan.is_padding[:padded],
            "logits_indices": query_start_loc[1:] - 1,
            "cu_num_logits": async_tensor_h2d(logits_np, device=self.device),
            "cu_num_logits_np": logits_np,
            "prompt_lens": None,
        }
        if "pcp" in _INPUT_BATCH_FIELDS:  # vLLM 0.33
            fields["pcp"] = upstream.PCPBatchMetadata(
                global_num_tokens=batch.num_tokens,
                global_query_lens_np=batch.num_scheduled_tokens[request],
                global_seq_lens_cpu_upper_bound_np=batch.seq_lens_cpu_upper_bound.numpy()[request],
            )
        return dataclasses.replace(batch, **fields)

    # -- attention inputs --------------------------------------------------------------------------------

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Block-table rows of the local batch, and slots: rank-major when sharded, global when replicated."""
        assert self._layout is not None
        if self._layout.is_replicated:
            return self.global_attn_inputs(input_batch)
        inputs: tuple[tuple[torch.Tensor, ...], torch.Tensor] = super().prepare_attn(input_batch)
        return inputs

    def _convert_to_gathered_slot_mappings(self, global_batch_slot_mappings: torch.Tensor) -> torch.Tensor:
        return self._plan.expand_slots(global_batch_slot_mappings)

    # -- dummy, profile and capture batches --------------------------------------------------------------

    def _stage_dummy(self, input_batch: InputBatch) -> InputBatch:
        """Forget the last real batch: a dummy step owns no slot and restores nothing. The dummy's tensors come back as
        copies, because a capture makes it in these very buffers, which are reset here."""
        copies = {name: getattr(input_batch, name).clone() for name in _BUFFERS}
        self.runtime.variants["target"] = "sharded"
        self._global_batch = self._local_batch = self.draft_prefill_batch = None
        self._layout = None
        self._plan.reset_for_dummy(input_batch.num_tokens_after_padding)
        return dataclasses.replace(input_batch, **copies)

    def prepare_inputs_to_capture(self, input_batch: InputBatch) -> InputBatch:  # vLLM 0.32
        return super().prepare_inputs_to_capture(self._stage_dummy(input_batch))

    def prepare_inputs_for_capture_or_profile(self, input_batch: InputBatch) -> InputBatch:  # vLLM 0.33
        return super().prepare_inputs_for_capture_or_profile(self._stage_dummy(input_batch))

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        """Slots of a dummy batch, all padding, at the address that a real batch uses: ``[G, P * num_tokens]``."""
        self._plan.slots.fill_(PAD_SLOT_ID)
        return self._plan.slots[:, : num_tokens * self.pcp_world_size]

    # -- restore -----------------------------------------------------------------------------------------

    def restore_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """All rows in global order, ``[T, H]`` from ``[M, H]``; the input itself after a replicated step."""
        if self._layout is None or self._layout.is_replicated:
            return hidden_states
        return self._plan.restore_rows(all_gather_rows(hidden_states, self.pcp_world_size, AXIS))

    def restore_for_sampling(
        self, hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None, InputBatch]:
        """Hidden states in global order. Only the rows that are sampled are gathered, unless prompt logprobs
        or auxiliary states need them all; the others are undefined (NaN with ``poison``)."""
        batch = self._global_batch
        assert batch is not None, "restore follows a partitioned batch"
        if aux_hidden_states is not None:
            aux_hidden_states = restore_together(self.restore_hidden_states, aux_hidden_states)
        layout = self._layout
        if layout is None or layout.is_replicated or self._needs_all_rows(batch):
            return self.restore_hidden_states(hidden_states), aux_hidden_states, batch
        return self._restore_sampled(hidden_states, batch, layout), aux_hidden_states, batch

    def _needs_all_rows(self, batch: InputBatch) -> bool:
        worker = self.runner.prompt_logprobs_worker
        if worker is None:
            return True
        scored = getattr(worker, "token_id_scores", {})
        wanted = worker.uses_prompt_logprobs[batch.idx_mapping_np] & batch.is_prefilling_np
        return bool(wanted.any()) or (bool(scored) and any(req_id in scored for req_id in batch.req_ids))

    def _restore_sampled(self, hidden_states: torch.Tensor, batch: InputBatch, layout: Layout) -> torch.Tensor:
        ends = batch.query_start_loc_np[1 : batch.num_reqs + 1].astype(np.int64)
        counts = np.diff(batch.cu_num_logits_np[: batch.num_reqs + 1]).astype(np.int64)
        offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        indices = np.repeat(ends - counts, counts) + offset
        sampled = sampled_rows(layout, indices)
        to_device = functools.partial(async_tensor_h2d, device=self.device)
        mine = hidden_states.index_select(0, to_device(sampled.rows[self.pcp_rank]))
        rows = all_gather_rows(mine, self.pcp_world_size, AXIS).index_select(0, to_device(sampled.restore))
        restored = hidden_states.new_empty((layout.num_tokens, *hidden_states.shape[1:]))
        if self.runtime.options.poison:
            restored.fill_(float("nan"))
        return restored.index_copy_(0, to_device(indices), rows)
