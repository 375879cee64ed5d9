# SPDX-License-Identifier: Apache-2.0
"""Everything that can be refused before a worker starts, one sentence each.

``prepare`` runs before vLLM builds its configuration (what vLLM would reject less clearly, and defaults it should
take from us); ``validate`` runs on the finished ``VllmConfig``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pcp_passes.errors import ConfigError
from pcp_passes.options import PcpOptions

KEY = "pcp_passes"
#: Also in ``additional_config``, because vLLM hashes that into every compile-cache key: a changed pass must miss.
BUILD_KEY = "pcp_passes_build"

BACKENDS = {name: f"pcp_passes.frontends.vllm.backend.{name}" for name in ("inductor", "eager")}
#: The piecewise split cuts at our collectives and at what takes a gathered pack apart, so that no compiled piece
#: has P*M rows among its inputs: vLLM picks a piece's compiled range by the first size it sees.
SPLITTING_OPS = ("pcp::all_gather_rows", "aten::split_with_sizes", "aten::unflatten", "aten::squeeze.dim")


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
    options = options_of(args.additional_config)
    if options is None:
        return None
    import vllm

    from pcp_passes.frontends.vllm import versions
    from pcp_passes.frontends.vllm.runtime import build_id

    versions.require_known(vllm.__version__)
    args.additional_config[BUILD_KEY] = build_id(options, args.prefill_context_parallel_size)
    _refuse_arguments(args)
    _use_our_backend(args, options)
    _whole_graph_every_start()
    return options


def _refuse_arguments(args: Any) -> None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if args.decode_context_parallel_size > 1:
        raise ConfigError(
            f"decode_context_parallel_size={args.decode_context_parallel_size} is not supported with pcp_passes: "
            "the KV cache is replicated over the PCP ranks; set it to 1."
        )
    if args.enforce_eager:
        raise ConfigError("enforce_eager leaves no graph to rewrite; drop it, or set pcp_passes.mode to off.")
    if args.prefill_context_parallel_size > 1 and not HAS_TRITON:
        raise ConfigError(
            "PCP runs on vLLM's Model Runner V2, which needs Triton, and Triton found no device here; "
            "for tests on CPU call pcp_passes.frontends.vllm.cpu_runner.enable() before importing vllm."
        )
    mode = args.compilation_config.cudagraph_mode
    if current_platform.is_cpu() and mode is not None and mode.name != "NONE":
        raise ConfigError(f"cudagraph_mode={mode.name} needs a CUDA device, and this platform is CPU; set it to NONE.")


def _use_our_backend(args: Any, options: PcpOptions) -> None:
    """Mode 2 takes a whole-graph backend by name; ``inductor`` and ``eager`` mean ours of the same name."""
    compilation = args.compilation_config
    if compilation.mode is None or int(compilation.mode) != 2 or options.mode == "off":
        return
    name = compilation.backend or "inductor"
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


def validate(vllm_config: Any, options: PcpOptions) -> None:
    """Refuse combinations, on the configuration that vLLM settled on.

    Raises:
        ConfigError: the first combination that is not supported, with what was found and what to do.
    """
    pcp = vllm_config.parallel_config.prefill_context_parallel_size
    if pcp == 1 or options.mode != "rewrite":
        return
    for refuse in _REFUSALS:
        reason = refuse(vllm_config)
        if reason:
            raise ConfigError(f"pcp_passes with prefill_context_parallel_size={pcp}: {reason}")
    _require_compiled(vllm_config)
    _cut_at_collectives(vllm_config)


def _lora(config: Any) -> str | None:
    return "LoRA adapters are not supported; drop enable_lora." if config.lora_config is not None else None


def _multimodal(config: Any) -> str | None:
    if not config.model_config.is_multimodal_model:
        return None
    return "multimodal models are not supported, since only token ids are sharded; use the text-only model class."


def _encoder(config: Any) -> str | None:
    if not config.model_config.is_encoder_decoder:
        return None
    return "encoder-decoder models are not supported; only decoder-only models are."


def _pooling(config: Any) -> str | None:
    if config.model_config.runner_type == "generate":
        return None
    return f"the {config.model_config.runner_type!r} runner is not supported; use runner='generate'."


def _speculative(config: Any) -> str | None:
    if config.speculative_config is None:
        return None
    return f"speculative decoding ({config.speculative_config.method}) is not supported yet; drop speculative_config."


def _runner(config: Any) -> str | None:
    return None if config.use_v2_model_runner else "vLLM's Model Runner V2 is required; set VLLM_USE_V2_MODEL_RUNNER=1."


def _pipeline_parallel(config: Any) -> str | None:
    size = config.parallel_config.pipeline_parallel_size
    return None if size == 1 else f"pipeline_parallel_size={size} is not supported yet; set it to 1."


def _data_parallel(config: Any) -> str | None:
    size = config.parallel_config.data_parallel_size
    return None if size == 1 else f"data_parallel_size={size} is not supported yet; set it to 1."


def _sparse(config: Any) -> str | None:
    if not hasattr(config.model_config.hf_text_config, "index_topk"):
        return None
    return "sparse MLA (DeepSeek sparse attention) is not supported yet; use a dense-attention model."


def _ubatching(config: Any) -> str | None:
    return "dual-batch overlap is not supported; drop enable_dbo." if config.parallel_config.enable_dbo else None


def _kv_transfer(config: Any) -> str | None:
    return "KV transfer is not supported yet; drop kv_transfer_config." if config.kv_transfer_config else None


def _full_graphs(config: Any) -> str | None:
    mode = config.compilation_config.cudagraph_mode
    if mode is None or mode.name in ("NONE", "PIECEWISE"):
        return None
    return f"cudagraph_mode={mode.name} is not supported yet; use PIECEWISE or NONE."


_REFUSALS: tuple[Callable[[Any], str | None], ...] = (
    _encoder,
    _multimodal,
    _pooling,
    _lora,
    _speculative,
    _sparse,
    _pipeline_parallel,
    _data_parallel,
    _ubatching,
    _kv_transfer,
    _runner,
    _full_graphs,
)


def _require_compiled(vllm_config: Any) -> None:
    compilation = vllm_config.compilation_config
    mode = int(compilation.mode)
    if mode == 3 or (mode == 2 and compilation.backend in BACKENDS.values()):
        return
    raise ConfigError(
        f"the model would run with compilation mode {mode} and backend {compilation.backend!r}, which never reaches "
        'the passes; set compilation_config to {"mode": 2} (whole graph) or {"mode": 3} (piecewise, CUDA only).'
    )


def _cut_at_collectives(vllm_config: Any) -> None:
    compilation = vllm_config.compilation_config
    if int(compilation.mode) != 3:
        return
    if compilation.use_inductor_graph_partition:
        raise ConfigError("use_inductor_graph_partition bypasses the whole-graph split; set it to false.")
    ops = list(compilation.splitting_ops or ())
    compilation.splitting_ops = ops + [op for op in SPLITTING_OPS if op not in ops]
