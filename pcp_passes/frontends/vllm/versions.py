# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this front end fits, and the signature of every vLLM symbol it overrides or calls.

An override that upstream changed under us would be a wrong answer, not a crash; so the signatures are compared
at start and an unknown version refuses. Checked by executing 0.32.0 and by reading the sources of 0.33.0.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pcp_passes.errors import ConfigError

#: version prefix -> how far it has been proven
KNOWN: dict[str, str] = {
    "0.32": "executed on CPU with Model Runner V2",
    "0.33": "signatures checked against its sources; never executed",
}


@dataclass(frozen=True)
class Symbol:
    """An upstream function and the parameter names it must have, per version prefix (``""``: every version)."""

    module: str
    qualname: str
    parameters: dict[str, tuple[str, ...]]

    def expected(self, version: str) -> tuple[str, ...] | None:
        """Parameter names for ``version``; ``None`` when the symbol does not exist there."""
        for prefix, names in self.parameters.items():
            if version.startswith(prefix):
                return names
        return None


_MANAGER = "vllm.v1.worker.gpu.pcp_manager"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_STAGES = "vllm.v1.worker.gpu.pp_utils"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"

SYMBOLS: tuple[Symbol, ...] = (
    Symbol("vllm.engine.arg_utils", "EngineArgs.create_engine_config", {"": ("self", "usage_context", "headless")}),
    Symbol("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_device", {"": ("self",)}),
    Symbol("vllm.v1.worker.worker_base", "WorkerWrapperBase.shutdown", {"": ("self",)}),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.execute_model", {"": ("self", "scheduler_output")}),
    Symbol("vllm.v1.executor.multiproc_executor", "MultiprocExecutor._init_executor", {"": ("self",)}),
    Symbol(
        "vllm.distributed.device_communicators.shm_broadcast",
        "MessageQueue.enqueue",
        {"": ("self", "obj", "timeout")},
    ),
    Symbol(
        "vllm.compilation.backends",
        "VllmBackend.__init__",
        {
            "0.33": ("self", "vllm_config", "prefix", "is_encoder", "use_aot_compile"),
            "0.32": ("self", "vllm_config", "prefix", "is_encoder"),
        },
    ),
    Symbol("vllm.compilation.backends", "VllmBackend.__call__", {"": ("self", "graph", "example_inputs")}),
    Symbol(
        _MANAGER,
        "PCPManager.__init__",
        {
            "0.33": (
                "self",
                "pcp_world_size",
                "pcp_rank",
                "device",
                "shard_decode_requests",
                "max_num_reqs",
                "max_num_tokens",
                "block_tables",
                "dcp_world_size",
                "dcp_rank",
                "cp_interleave",
                "moe_gathers_tokens",
            ),
            "0.32": (
                "self",
                "pcp_world_size",
                "pcp_rank",
                "device",
                "shard_decode_requests",
                "max_num_reqs",
                "max_num_tokens",
                "block_tables",
                "dcp_world_size",
                "dcp_rank",
                "cp_interleave",
            ),
        },
    ),
    Symbol(_MANAGER, "PCPManager.validate_config", {"": ("vllm_config", "supports_mm_inputs")}),
    Symbol(
        _MANAGER,
        "PCPManager.get_num_tokens_for_dispatch",
        {"": ("self", "num_scheduled_tokens", "is_prefilling")},
    ),
    Symbol(_MANAGER, "PCPManager.partition_batch", {"": ("self", "input_batch", "batch_desc")}),
    Symbol(_MANAGER, "PCPManager.prepare_attn", {"": ("self", "input_batch")}),
    Symbol(_MANAGER, "PCPManager.prepare_slot_mappings", {"": ("self",)}),
    Symbol(_MANAGER, "PCPManager.set_block_tables", {"0.33": ("self", "block_tables")}),
    Symbol(_MANAGER, "PCPManager.prepare_inputs_to_capture", {"0.32": ("self", "input_batch")}),
    Symbol(_MANAGER, "PCPManager.prepare_inputs_for_capture_or_profile", {"0.33": ("self", "input_batch")}),
    Symbol(_MANAGER, "PCPManager.get_dummy_block_tables", {"": ("self", "num_reqs")}),
    Symbol(_MANAGER, "PCPManager.get_dummy_slot_mappings", {"": ("self", "num_tokens")}),
    Symbol(_MANAGER, "PCPManager._convert_to_gathered_slot_mappings", {"": ("self", "global_batch_slot_mappings")}),
    Symbol(_MANAGER, "PCPManager.restore_hidden_states", {"": ("self", "hidden_states")}),
    Symbol(_MANAGER, "PCPManager.restore_for_sampling", {"": ("self", "hidden_states", "aux_hidden_states")}),
    Symbol(_MANAGER, "PCPManager.prepare_draft_prefill", {"": ("self", "input_batch", "input_ids")}),
    Symbol(
        _MANAGER,
        "PCPManager.get_draft_input_buffers",
        {"0.33": ("self", "input_buffers", "num_tokens"), "0.32": ("self", "input_buffers")},
    ),
    Symbol(_MANAGER, "PCPManager.restore_draft_prefill", {"": ("self", "last_hidden_states", "hidden_states")}),
    Symbol(
        _SPECULATOR,
        "TargetDependentARSpeculator._run_model",
        {
            "": (
                "self",
                "num_tokens",
                "attn_metadata",
                "slot_mappings",
                "num_tokens_across_dp",
                "cudagraph_runtime_mode",
                "mm_inputs",
            )
        },
    ),
    Symbol(
        _SPECULATOR,
        "TargetDependentARSpeculator.propose",
        {
            "": (
                "self",
                "input_batch",
                "attn_metadata",
                "slot_mappings",
                "last_hidden_states",
                "aux_hidden_states",
                "num_sampled",
                "num_rejected",
                "last_sampled",
                "next_prefill_tokens",
                "temperature",
                "seeds",
                "dp_sync_state",
                "dummy_run",
                "skip_attn_for_dummy_run",
                "mm_inputs",
                "is_profile",
                "num_speculative_tokens",
            )
        },
    ),
    Symbol(_RUNNER, "GPUModelRunner.capture_model", {"": ("self", "profile_only")}),
    Symbol(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "ModelCudaGraphManager.capture",
        {
            "": (
                "self",
                "model",
                "model_state",
                "input_buffers",
                "intermediate_tensors",
                "block_tables",
                "attn_groups",
                "kv_cache_config",
                "pcp_manager",
                "has_lora",
                "use_aux_hidden_state_outputs",
                "lora_capture_hook",
                "progress_bar_desc",
            )
        },
    ),
    Symbol(
        "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils",
        "SpeculatorCudaGraphManager.capture",
        {
            "": (
                "self",
                "forward_fn",
                "model_state",
                "input_buffers",
                "block_tables",
                "attn_groups",
                "kv_cache_config",
                "progress_bar_desc",
                "specialize_spec_tokens",
            )
        },
    ),
    Symbol("vllm.compilation.monitor", "set_cudagraph_capturing_enabled", {"": ("enabled",)}),
    Symbol("vllm.compilation.partition_rules", "should_split", {"": ("node", "splitting_ops")}),
    Symbol(
        _RUNNER,
        "GPUModelRunner.execute_model",
        {
            "": (
                "self",
                "scheduler_output",
                "intermediate_tensors",
                "dummy_run",
                "skip_attn_for_dummy_run",
                "is_profile",
                "context_len",
                "valid_dummy_state_slots",
                "randomize_inputs",
            )
        },
    ),
    Symbol(_RUNNER, "GPUModelRunner.sample_tokens", {"": ("self", "grammar_output")}),
    Symbol(_RUNNER, "GPUModelRunner.take_draft_token_ids", {"": ("self",)}),
    Symbol(_STAGES, "compute_need_sampled_mask", {"": ("input_batch",)}),
    Symbol("vllm.v1.engine.core", "EngineCore.post_step", {"": ("self", "model_executed")}),
    Symbol(_SCHEDULER, "Scheduler.update_from_output", {"": ("self", "scheduler_output", "model_runner_output")}),
    Symbol(_SCHEDULER, "Scheduler.update_draft_token_ids", {"": ("self", "draft_token_ids")}),
    # Taken over on CPU alone, where nothing newer than 0.32 was executed.
    Symbol(_STAGES, "PPHandler.__init__", {"": ("self", "max_num_reqs", "num_speculative_steps", "device")}),
    Symbol(
        _STAGES,
        "PPHandler.get_prev_sampled_outputs",
        {"0.33": ("self",), "0.32": ("self", "draft_tokens_to_update")},
    ),
    Symbol(
        _STAGES,
        "PPHandler.receive",
        {"0.33": ("self", "input_batch", "recv_drafts"), "0.32": ("self", "input_batch")},
    ),
    Symbol(
        _STAGES,
        "PPHandler.broadcast",
        {"": ("self", "sampled_token_ids", "num_sampled", "num_rejected", "input_batch")},
    ),
    Symbol(
        _STAGES,
        "PPHandler.broadcast_drafts",
        {"0.33": ("self", "draft_tokens"), "0.32": ("self", "draft_tokens", "input_batch")},
    ),
    Symbol("vllm.v1.worker.gpu.async_utils", "AsyncOutput.get_output", {"": ("self",)}),
    Symbol(
        "vllm.v1.worker.gpu.kv_connector",
        "ActiveKVConnector.pre_forward",
        {"": ("self", "scheduler_output", "input_batch", "attn_metadata")},
    ),
    Symbol(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "DFlashSpeculator._run_model",
        {
            "": (
                "self",
                "num_tokens",
                "attn_metadata",
                "slot_mappings",
                "num_tokens_across_dp",
                "cudagraph_runtime_mode",
            )
        },
    ),
    Symbol(_RUNNER, "GPUModelRunner.sample", {"": ("self", "hidden_states", "input_batch", "grammar_output")}),
    Symbol(_RUNNER, "GPUModelRunner.__init__", {"": ("self", "vllm_config", "device")}),
    Symbol(_RUNNER, "GPUModelRunner.load_model", {"": ("self", "load_dummy_weights", "args", "model", "kwargs")}),
    Symbol(
        "vllm.v1.worker.gpu.block_table",
        "BlockTables.compute_slot_mappings",
        {"": ("self", "idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out")},
    ),
    Symbol(
        "vllm.v1.worker.gpu.block_table",
        "BlockTables.gather_block_tables",
        {
            "0.33": ("self", "idx_mapping", "num_reqs_padded", "out", "out_ptrs", "num_computed_tokens"),
            "0.32": ("self", "idx_mapping", "num_reqs_padded", "out", "out_ptrs"),
        },
    ),
)

#: What sparse attention on CPU replaces or calls, beside the above. Executed with 0.32 alone: sources of 0.33 were not
#: at hand, so there the check at the start of a worker decides.
SPARSE_SYMBOLS: tuple[Symbol, ...] = (
    Symbol(
        "vllm.platforms.cpu",
        "CpuPlatform.get_attn_backend_cls",
        {"": ("cls", "selected_backend", "attn_selector_config", "num_heads")},
    ),
    Symbol(
        "vllm.model_executor.layers.mla",
        "MultiHeadLatentAttentionWrapper.forward",
        {"": ("self", "positions", "hidden_states", "llama_4_scaling")},
    ),
    Symbol(
        "vllm.model_executor.models.deepseek_v2",
        "DeepseekV32IndexerCache.__init__",
        {"": ("self", "head_dim", "dtype", "prefix", "cache_config")},
    ),
    Symbol(
        "vllm.model_executor.layers.rotary_embedding.base",
        "RotaryEmbedding.forward_native",
        {"": ("self", "positions", "query", "key")},
    ),
    Symbol(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build",
        {"": ("self", "common_prefix_len", "common_attn_metadata", "fast_build")},
    ),
)


def require_known(version: str) -> str:
    """Return how far ``version`` has been proven.

    Raises:
        ConfigError: when this front end was never checked against ``version``.
    """
    for prefix, proof in KNOWN.items():
        if version.startswith(prefix + ".") or version == prefix:
            return proof
    raise ConfigError(
        f"vLLM {version} is not known to pcp_passes (known: {', '.join(KNOWN)}); its PCP hooks may have changed. "
        "Install a known version, or run with additional_config pcp_passes.mode=off."
    )


def mismatches(
    version: str, parameters_of: Callable[[Symbol], tuple[str, ...] | None], symbols: tuple[Symbol, ...] = SYMBOLS
) -> Iterator[str]:
    """Compare every symbol's parameters, found by ``parameters_of``, with what this front end expects."""
    for symbol in symbols:
        expected = symbol.expected(version)
        if expected is None:
            continue
        found = parameters_of(symbol)
        if found != expected:
            yield f"{symbol.module}.{symbol.qualname}: expected {expected}, found {found}"


def require_signatures(version: str, symbols: tuple[Symbol, ...] = SYMBOLS) -> None:
    """Check the imported vLLM.

    Raises:
        ConfigError: listing every symbol whose signature differs.
    """
    wrong = list(mismatches(version, _imported_parameters, symbols))
    if wrong:
        raise ConfigError(
            f"vLLM {version} does not have the functions that pcp_passes overrides:\n  "
            + "\n  ".join(wrong)
            + "\nInstall an unmodified vLLM of a known version, or run with pcp_passes.mode=off."
        )


def _imported_parameters(symbol: Symbol) -> tuple[str, ...] | None:
    found: object = importlib.import_module(symbol.module)
    for name in symbol.qualname.split("."):
        if not hasattr(found, name):
            return None
        found = getattr(found, name)
    original = getattr(found, "__pcp_passes_original__", found)
    return tuple(inspect.signature(original).parameters)  # type: ignore[arg-type]


def source_parameters(root: Path, symbol: Symbol) -> tuple[str, ...] | None:
    """Parameter names of ``symbol`` read from the sources of a vLLM tree, without importing it.

    Args:
        root: the folder that contains the ``vllm`` package.
    """
    tree: ast.AST = ast.parse((root / (symbol.module.replace(".", "/") + ".py")).read_text())
    for name in symbol.qualname.split("."):
        body = getattr(tree, "body", [])
        tree = next((n for n in body if getattr(n, "name", None) == name), ast.Pass())
    if not isinstance(tree, ast.FunctionDef):
        return None
    args = tree.args
    names = [a.arg for a in (*args.posonlyargs, *args.args)]
    names += [args.vararg.arg] if args.vararg else []
    names += [a.arg for a in args.kwonlyargs]
    names += [args.kwarg.arg] if args.kwarg else []
    return tuple(names)
