# SPDX-License-Identifier: Apache-2.0
"""The drafter's part of a step in vLLM: which of its bodies runs, on which inputs, and what comes back.

A proposal of ``K`` tokens is one pass over the rows that the target just ran, then ``K - 1`` passes over one row per
request. The first pass runs on the target's own rank-local rows: its hidden states are used where they are, the
target's attention inputs and rank-major slots are used again, and the token ids, shifted by one *in global order*,
replace the ids in the input buffer that the target has consumed. Only the rows that are sampled come back. The later
passes are replicated: vLLM gathers block tables in global order before them, and its slots are then not rank-major.

What is rank-local is tied to one global batch object. Any other batch is drafted globally. With
``drafter="replicate"`` every batch is: the first pass then gets all hidden states and attention inputs of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pcp_passes.collectives import all_gather_rows
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.frontends.vllm.runtime import AXIS, Runtime

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from pcp_passes.layout import Layout
    from pcp_passes.plan import StepPlan


class DraftHooks:
    """The methods of the batch manager that vLLM's drafter calls. Mixed into ``PassesPCPManager``."""

    runtime: ClassVar[Runtime]
    runner: ClassVar[Any]
    draft_prefill_batch: InputBatch | None
    _global_batch: InputBatch | None
    _local_batch: InputBatch | None
    input_buffers: Any
    _layout: Layout | None
    _plan: StepPlan

    def global_attn_inputs(self, batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Block-table rows and slots of a batch that is not sharded, as vLLM's runner makes them without PCP."""
        tables = self.runner.block_tables
        block_tables = tables.gather_block_tables(batch.idx_mapping, batch.num_reqs_after_padding)
        slots = tables.compute_slot_mappings(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            num_tokens_padded=batch.num_tokens_after_padding,
        )
        return block_tables, slots

    if TYPE_CHECKING:

        def restore_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor: ...

    def prepare_draft_prefill(self, input_batch: InputBatch, input_ids: torch.Tensor) -> None:
        """Put this rank's part of the shifted ``input_ids`` i32[T] where the target's ids were.

        A dummy batch has no layout: the drafter then runs what the target's dummy ran, whose slots it is given.
        """
        self.draft_prefill_batch = None
        dummy = self._layout is None
        sharded = input_batch is self._global_batch and self.runtime.options.drafter != "replicate"
        local = self._local_batch if sharded else None
        self.runtime.variants["drafter"] = "sharded" if dummy or local is not None else "replicated"
        if local is None:
            return
        local.input_ids.copy_(self._plan.shard_rows(input_ids))
        self.draft_prefill_batch = local

    def get_draft_input_buffers(self, input_buffers: Any, *rows: int) -> Any:
        """What the pass reads: the rank-local batch, if there is one; for a dummy of the sharded body the buffers that
        such batches are in, so that graphs see one address; else the drafter's own."""
        sharded = self.runtime.variants["drafter"] == "sharded"
        upstream: Any = super()
        return upstream.get_draft_input_buffers(self.input_buffers if sharded else input_buffers, *rows)

    def restore_draft_prefill(
        self, last_hidden_states: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first pass's states, [M, H] each, as [T, H] of which only the sampled rows are defined (the others are
        NaN with ``poison``). Both states travel in one collective; with one draft step the second is never read."""
        batch, self.draft_prefill_batch = self.draft_prefill_batch, None
        self.runtime.variants["drafter"] = "replicated"
        if batch is None:
            return last_hidden_states, hidden_states
        speculator = self.runner.speculator
        assert self._global_batch is not None
        sampled = speculator.last_token_indices[: self._global_batch.num_reqs]
        if last_hidden_states is hidden_states or speculator.num_speculative_steps == 1:
            restored = self._restore_on_device(last_hidden_states, sampled)
            return restored, restored
        width = last_hidden_states.shape[1]
        both = self._restore_on_device(torch.cat([last_hidden_states, hidden_states], dim=1), sampled)
        return both[:, :width], both[:, width:]

    def global_draft_inputs(self, batch: InputBatch, hidden_states: torch.Tensor) -> tuple[Any, ...] | None:
        """Attention metadata and slots per layer, and hidden states [T, H], in global order; ``None`` when the target's
        own are so already, or when ``batch`` is not the one that they are for."""
        if self._layout is None or self._layout.is_replicated or batch is not self._global_batch:
            return None
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        runner = self.runner
        block_tables, slots = self.global_attn_inputs(batch)
        metadata = runner.model_state.prepare_attn(
            batch, CUDAGraphMode.NONE, block_tables, slots, runner.speculator.attn_groups, runner.kv_cache_config
        )
        by_layer = build_slot_mappings_by_layer(slots, runner.kv_cache_config)
        return metadata, by_layer, self.restore_hidden_states(hidden_states)

    def _restore_on_device(self, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """``wanted`` i64[R] rows of the global batch, of which only the device knows which they are: rejected drafts
        move them. So every rank offers one row per request, and the owner's is taken."""
        layout = self._layout
        assert layout is not None
        place = self._plan.restore_index.index_select(0, wanted)
        owner = place.div(layout.padded_tokens, rounding_mode="floor")
        offered = rows.index_select(0, place.remainder(layout.padded_tokens))
        gathered = all_gather_rows(offered, self.runtime.pcp, AXIS)
        requests = torch.arange(len(wanted), device=wanted.device)
        restored = rows.new_empty((layout.num_tokens, rows.shape[1]))
        if self.runtime.options.poison:
            restored.fill_(float("nan"))
        return restored.index_copy_(0, wanted, gathered.index_select(0, owner * len(wanted) + requests))


def around_draft_forward(original: Callable[..., Any], speculator: Any, *args: Any, **kwargs: Any) -> Any:
    """A graph captured or entered in here is the drafter's."""
    runtime = runtimes.current()
    if runtime is None:
        return original(speculator, *args, **kwargs)
    with runtime.playing("alone" if runtime.options.drafter == "replicate" else "drafter"):
        return original(speculator, *args, **kwargs)


def around_sample(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """``verify_tokens="broadcast"``: what PCP rank 0 sampled is what every rank goes on with. Nothing has read the
    sampler's result yet."""
    output, sampled, rejected = original(runner, *args, **kwargs)
    runtime = runtimes.current()
    if runtime is None or runtime.pcp == 1 or runtime.options.verify_tokens != "broadcast":
        return output, sampled, rejected
    tokens = output.sampled_token_ids
    columns = [tokens.long(), sampled.long().unsqueeze(1), rejected.long().unsqueeze(1)]
    first = _of_first_rank(torch.cat(columns, dim=1), runtime)
    tokens.copy_(first[:, :-2])
    sampled.copy_(first[:, -2])
    rejected.copy_(first[:, -1])
    return output, sampled, rejected


def around_propose(original: Callable[..., Any], speculator: Any, *args: Any, **kwargs: Any) -> Any:
    """``drafter="replicate"``: global inputs in place of the target's rank-local ones."""
    runtime, manager = runtimes.current(), speculator.pcp_manager
    if runtime is not None and runtime.options.drafter == "replicate" and isinstance(manager, DraftHooks):
        given = inspect.signature(original).bind(speculator, *args, **kwargs)
        values = given.arguments
        found = manager.global_draft_inputs(values["input_batch"], values["last_hidden_states"])
        if found is not None:
            values["attn_metadata"], values["slot_mappings"], values["last_hidden_states"] = found
        args, kwargs = given.args[1:], given.kwargs
    return around_block_propose(original, speculator, *args, **kwargs)


def around_block_propose(original: Callable[..., Any], speculator: Any, *args: Any, **kwargs: Any) -> Any:
    """``verify_tokens="broadcast"``: rank 0's drafts too, since the next step's target runs on them."""
    drafts = original(speculator, *args, **kwargs)
    runtime = runtimes.current()
    if runtime is not None and runtime.pcp > 1 and runtime.options.verify_tokens == "broadcast":
        drafts.copy_(_of_first_rank(drafts, runtime))
    return drafts


def _of_first_rank(rows: torch.Tensor, runtime: Runtime) -> torch.Tensor:
    return all_gather_rows(rows.contiguous(), runtime.pcp, AXIS)[: rows.shape[0]]


#: Drafters that vLLM runs eagerly although nothing in them forbids a whole graph.
_COMPILED_HERE = ("Glm4MoeMTP",)


def compile_draft_class(vllm_config: Any) -> None:
    """Have the drafter's class captured as its target is: an eager drafter has no graph to rewrite."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "mtp":
        return
    from vllm.compilation.decorators import support_torch_compile
    from vllm.model_executor.model_loader.utils import get_model_cls

    drafter = get_model_cls(speculative.draft_model_config)
    if drafter.__name__ in _COMPILED_HERE:
        support_torch_compile(drafter)


def require_compiled(runner: Any) -> None:
    """Refuse a model whose class vLLM does not compile: no pass would ever see it.

    Raises:
        ConfigError: naming the class.
    """
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    models = {"target": runner.model}
    options = runtimes.current().options  # type: ignore[union-attr]
    if isinstance(runner.speculator, TargetDependentARSpeculator) and options.drafter != "replicate":
        models["drafter"] = runner.speculator.model
    for role, model in models.items():
        if not any(getattr(module, "do_not_compile", True) is False for module in model.modules()):
            way_out = "set pcp_passes.drafter to 'replicate'" if role == "drafter" else "run this model without PCP"
            raise ConfigError(
                f"vLLM does not compile the {role} ({type(model).__name__}), so the passes cannot rewrite it; "
                f"{way_out}, or name a class that is compiled in hf_overrides."
            )
