# SPDX-License-Identifier: Apache-2.0
"""Everything that can be refused before a worker starts, one sentence each.

``prepare`` runs before vLLM builds its configuration (what vLLM would reject less clearly, and defaults it should
take from us); ``validate`` runs on the finished ``VllmConfig``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm.config_drafts import (
    draft_cache,
    draft_counts,
    draft_method,
    draft_modules,
    fast_prefill,
)
from pcp_passes.frontends.vllm.config_graphs import (
    compiled_sizes,
    cut,
    graph_arguments,
    graph_drafter,
    graph_mode,
    no_graphs_by_default,
    settle_sizes,
    whole_graph_arguments,
)
from pcp_passes.frontends.vllm.config_parallel import PARALLEL_REFUSALS, shared_selection
from pcp_passes.frontends.vllm.data_parallel import refuse_fold_on_tp, spread_experts
from pcp_passes.frontends.vllm.placement import device_affinity
from pcp_passes.frontends.vllm.sparse import settings as sparse
from pcp_passes.frontends.vllm.sparse.settings import sparse_attention
from pcp_passes.options import PcpOptions

KEY = "pcp_passes"
#: Also in ``additional_config``, because vLLM hashes that into every compile-cache key: a changed pass must miss.
BUILD_KEY = "pcp_passes_build"

BACKENDS = {name: f"pcp_passes.frontends.vllm.backend.{name}" for name in ("inductor", "eager")}
#: The piecewise split cuts at our collectives and at what takes a gathered pack apart, so that no compiled piece
#: has P*M rows among its inputs: vLLM picks a piece's compiled range by the first size it sees.
SPLITTING_OPS = ("pcp::all_gather_rows", "aten::split_with_sizes", "aten::unflatten.int", "aten::squeeze.dim")


def options_of(additional_config: Any) -> PcpOptions | None:
    """The options in ``additional_config``; ``None`` when absent or ``mode`` is ``off``."""
    if not isinstance(additional_config, dict) or KEY not in additional_config:
        return None
    options = PcpOptions.parse(additional_config[KEY])
    return None if options.mode == "off" else options


def prepare(args: Any) -> PcpOptions | None:
    """Check the engine arguments and fill in what follows from them.

    Args:
        args: vLLM's ``EngineArgs``; ``additional_config`` and ``compilation_config`` may be updated.
    """
    _refuse_near_miss(args.additional_config)
    if isinstance(args.additional_config, dict):  # vLLM takes other objects too
        refuse_fold_on_tp(args.additional_config.get(KEY))
    options = options_of(args.additional_config)
    if options is None:
        return None
    import vllm

    from pcp_passes.frontends.vllm import versions
    from pcp_passes.frontends.vllm.runtime import build_id

    versions.require_known(vllm.__version__)
    build = build_id(options, args.prefill_context_parallel_size)
    args.additional_config = {**args.additional_config, BUILD_KEY: build}
    if args.prefill_context_parallel_size > 1 or options.mode == "check":
        _refuse_arguments(args, options)
        _compile_on_cpu(args)
        sparse.keep_graphs()
    if args.prefill_context_parallel_size > 1:
        no_graphs_by_default(args)
    _use_our_backend(args)
    _whole_graph_every_start()
    return options


def _refuse_near_miss(additional_config: Any) -> None:
    """vLLM accepts any key in ``additional_config``, so a misspelt ``pcp_passes`` would silently do nothing."""
    if not isinstance(additional_config, dict) or KEY in additional_config:
        return
    near = get_close_matches(KEY, map(str, additional_config), n=1, cutoff=0.85)
    if near:
        raise ConfigError(f"unknown key {near[0]!r} in additional_config, which nobody reads. Did you mean {KEY!r}?")


def _refuse_arguments(args: Any, options: PcpOptions) -> None:
    for refuse in _ARGUMENT_REFUSALS:
        reason = refuse(args)
        if reason:
            raise ConfigError(reason)
    size = args.prefill_context_parallel_size
    if options.share_topk != "off":
        raise ConfigError(
            f"pcp_passes.share_topk={options.share_topk!r} is not supported in vLLM: there every draft step selects "
            "its own keys; set it to 'off'."
        )
    if options.ranks is not None and options.mode != "check":
        raise ConfigError(
            f"pcp_passes.ranks={options.ranks} is for pcp_passes.mode='check'; with {options.mode!r} the number of "
            f"ranks is prefill_context_parallel_size={size}. Drop pcp_passes.ranks."
        )
    if size > 1:
        _require_v2_runner(size)


def _decode_context_parallel(args: Any) -> str | None:
    size = args.decode_context_parallel_size
    if size == 1:
        return None
    return (
        f"decode_context_parallel_size={size} is not supported with pcp_passes: "
        "the KV cache is replicated over the PCP ranks; set it to 1."
    )


def _eager(args: Any) -> str | None:
    if not args.enforce_eager:
        return None
    return "enforce_eager leaves no graph to rewrite; drop it, or set pcp_passes.mode to off."


def _one_worker(args: Any) -> str | None:
    """vLLM would start one worker, which then waits for the other ranks."""
    size = args.prefill_context_parallel_size
    if args.distributed_executor_backend != "uni" or size == 1:
        return None
    return (
        f"distributed_executor_backend='uni' starts one worker, but prefill_context_parallel_size={size} needs "
        f"at least {size}; set it to 'mp', or leave it out."
    )


def _ubatching(args: Any) -> str | None:
    """Asked here, because vLLM's CPU platform switches it off by itself."""
    if not args.enable_dbo and args.ubatch_size <= 1:
        return None
    return (
        f"dual-batch overlap (enable_dbo={args.enable_dbo}, ubatch_size={args.ubatch_size}) is not supported with "
        "pcp_passes; drop both."
    )


def _routed_experts(args: Any) -> str | None:
    """vLLM itself would fail at the first request."""
    if not args.enable_return_routed_experts:
        return None
    return "returning routed experts is not supported with pcp_passes; drop enable_return_routed_experts."


def _placement(args: Any) -> str | None:
    """A rank is a worker, and every node takes the same number of them."""
    nodes = args.nnodes
    workers = args.tensor_parallel_size * args.pipeline_parallel_size * args.prefill_context_parallel_size
    if nodes == 1 or workers % nodes == 0:
        return None
    return (
        f"nnodes={nodes} does not divide the {workers} workers (TP={args.tensor_parallel_size} x "
        f"PP={args.pipeline_parallel_size} x PCP={args.prefill_context_parallel_size}), which are spread evenly; "
        "change one of them."
    )


def _graphs_on_cpu(args: Any) -> str | None:
    from vllm.platforms import current_platform

    mode = args.compilation_config.cudagraph_mode
    if mode is None or mode.name == "NONE" or not current_platform.is_cpu():
        return None
    if current_platform.support_static_graph_mode():  # the stand-in of `cpu_graphs`
        return None
    return f"cudagraph_mode={mode.name} needs a CUDA device, and this platform is CPU; set it to NONE."


_ARGUMENT_REFUSALS: tuple[Callable[[Any], str | None], ...] = (
    _decode_context_parallel,
    _eager,
    _one_worker,
    _ubatching,
    _routed_experts,
    fast_prefill,
    _placement,
    _graphs_on_cpu,
    whole_graph_arguments,
    graph_arguments,
)


def _require_v2_runner(pcp: int) -> None:
    import vllm.envs
    from vllm.triton_utils import HAS_TRITON

    if vllm.envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise ConfigError(
            f"VLLM_USE_V2_MODEL_RUNNER=0 asks for Model Runner V1, but prefill_context_parallel_size={pcp} runs on "
            "Model Runner V2 only; unset the variable, or set it to 1."
        )
    if not HAS_TRITON:
        raise ConfigError(
            "PCP runs on vLLM's Model Runner V2, which needs Triton, and Triton found no device here; "
            "for tests on CPU call pcp_passes.frontends.vllm.cpu_runner.enable() before importing vllm."
        )


def _compile_on_cpu(args: Any) -> None:
    """Without a compilation mode, vLLM takes 3 on CUDA, which reaches the passes; on CPU, 2 with a backend that
    does not. ``-O0`` asks for no compilation and is refused later."""
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and args.compilation_config.mode is None and int(args.optimization_level) > 0:
        args.compilation_config.mode = CompilationMode.DYNAMO_TRACE_ONCE


def _use_our_backend(args: Any) -> None:
    """Mode 2 takes a whole-graph backend by name; ``inductor`` and ``eager`` mean ours of the same name."""
    compilation = args.compilation_config
    if compilation.mode is None or int(compilation.mode) != 2:
        return
    name = compilation.backend or "inductor"
    if name == "inductor" and not {"all", "none"} & set(compilation.custom_ops):
        # vLLM's own choice for the backend of this name, which it does not recognise by ours: native ops, so that
        # Inductor can fuse them. (Its CPU rotary kernel, the other choice, reads MLA's strided halves wrongly.)
        compilation.custom_ops = [*compilation.custom_ops, "none"]
    if name in BACKENDS:
        compilation.backend = BACKENDS[name]
    elif name not in BACKENDS.values():
        raise ConfigError(
            f"compilation mode 2 with backend {name!r} would run without the PCP rewrite; use one of {list(BACKENDS)}."
        )


def _whole_graph_every_start() -> None:
    """AOT artifacts replay a compiled model without calling any backend, so no pass, and no agreement between
    ranks, would run. vLLM's other caches stay on: they are keyed by our build."""
    asked = os.environ.get("VLLM_USE_AOT_COMPILE")
    if asked not in (None, "0"):
        raise ConfigError(
            f"VLLM_USE_AOT_COMPILE={asked} would load a compiled model without running the passes; unset it."
        )
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"


def validate(vllm_config: Any, options: PcpOptions, *, sizes_asked: bool = True) -> None:
    """Refuse combinations, on the configuration that vLLM settled on.

    Args:
        sizes_asked: whether the user named the sizes of CUDA graphs.

    Raises:
        ConfigError: the first combination that is not supported, with what was found and what to do.
    """
    pcp = vllm_config.parallel_config.prefill_context_parallel_size
    sparse.settle(vllm_config)
    if options.mode == "check" or pcp == 1:
        reason = sparse.unsharded_sparse_attention(vllm_config)
        if reason:
            raise ConfigError(f"pcp_passes: {reason}")
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            _refuse(vllm_config, (*PARALLEL_REFUSALS, shared_selection))
        if options.mode == "check":
            _require_compiled(vllm_config)
        return
    _refuse(vllm_config, _REFUSALS)
    _require_compiled(vllm_config)
    if int(vllm_config.compilation_config.mode) == 3:
        cut(vllm_config, (*SPLITTING_OPS, *sparse.splitting_ops(vllm_config)))
        settle_sizes(vllm_config, sizes_asked)


def _refuse(vllm_config: Any, refusals: Sequence[Callable[[Any], str | None]]) -> None:
    pcp = vllm_config.parallel_config.prefill_context_parallel_size
    for refuse in refusals:
        reason = refuse(vllm_config)
        if reason:
            raise ConfigError(f"pcp_passes with prefill_context_parallel_size={pcp}: {reason}")


def _lora(config: Any) -> str | None:
    return "LoRA adapters are not supported; drop enable_lora." if config.lora_config is not None else None


def _multimodal(config: Any) -> str | None:
    if not config.model_config.is_multimodal_model:
        return None
    return (
        f"{_architecture(config)} is multimodal, and only token ids are sharded; "
        "name the text-only class in hf_overrides, or use a text-only model."
    )


def _architecture(config: Any) -> str:
    return ", ".join(config.model_config.architectures)


def _encoder(config: Any) -> str | None:
    if not config.model_config.is_encoder_decoder:
        return None
    return f"{_architecture(config)} is an encoder-decoder, which is not supported; use a decoder-only model."


def _pooling(config: Any) -> str | None:
    if config.model_config.runner_type == "generate":
        return None
    return f"the {config.model_config.runner_type!r} runner is not supported; use runner='generate'."


def _kv_transfer(config: Any) -> str | None:
    from pcp_passes.frontends.vllm import kv_transfer

    return kv_transfer.refusal(config)


def _prompt_embeddings(config: Any) -> str | None:
    if not config.model_config.enable_prompt_embeds:
        return None
    return "prompt embeddings are not supported, since only token ids are sharded; drop enable_prompt_embeds."


def _multi_axis_positions(config: Any) -> str | None:
    if not config.model_config.uses_mrope:
        return None
    return f"{_architecture(config)} has several positions per token (M-RoPE), not sharded; use another model."


def _prompt_window(config: Any) -> str | None:
    window = getattr(config.model_config, "rswa_window", None)
    return None if window is None else f"a window counted from the prompt's end ({window}) is not supported."


def _experts_off_cpu(config: Any) -> str | None:
    """Elsewhere the router skips padded rows by a mask over the *gathered* rows, which we do not build yet."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or not config.model_config.is_moe:
        return None
    return f"{_architecture(config)} has expert layers, which are supported on CPU only so far; use a dense model."


def _graph_partition(config: Any) -> str | None:
    if not config.compilation_config.use_inductor_graph_partition:
        return None
    return "use_inductor_graph_partition=true cuts the graph after our passes, inside Inductor; set it to false."


_REFUSALS: tuple[Callable[[Any], str | None], ...] = (
    _encoder,
    _multimodal,
    _pooling,
    _lora,
    *PARALLEL_REFUSALS,
    draft_method,
    draft_modules,
    draft_cache,
    draft_counts,
    sparse_attention,
    shared_selection,
    spread_experts,
    device_affinity,
    _kv_transfer,
    graph_mode,
    graph_drafter,
    compiled_sizes,
    _prompt_embeddings,
    _multi_axis_positions,
    _prompt_window,
    _experts_off_cpu,
    _graph_partition,
)


def _require_compiled(vllm_config: Any) -> None:
    compilation = vllm_config.compilation_config
    mode = int(compilation.mode)
    if mode == 3 or (mode == 2 and compilation.backend in BACKENDS.values()):
        return
    from vllm.platforms import current_platform

    others = "; mode 3 needs CUDA" if current_platform.is_cpu() else ' (whole graph) or {"mode": 3} (piecewise)'
    raise ConfigError(
        f"the model would run with compilation mode {mode} and backend {compilation.backend!r}, which never reaches "
        f'the passes; set compilation_config to {{"mode": 2}}{others}.'
    )
