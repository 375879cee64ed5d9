# SPDX-License-Identifier: Apache-2.0
"""Which meshes vLLM may run with this package: the table of :mod:`pcp_passes.mesh.combinations`, and what vLLM
itself adds to it."""

from __future__ import annotations

import re
from typing import Any

from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.combinations import require_allowed

#: What the table calls otherwise than vLLM does.
_NAMES = {
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "tp": "tensor_parallel_size",
    "graph_mode": "cudagraph_mode",
    "expert_parallel": "enable_expert_parallel",
}


def mesh_of(config: Any) -> Mesh:
    """The mesh of a ``VllmConfig``."""
    parallel = config.parallel_config
    return Mesh(
        dp=parallel.data_parallel_size,
        pp=parallel.pipeline_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        tp=parallel.tensor_parallel_size,
    )


def mesh(config: Any) -> str | None:
    """What the table says against this configuration, a sentence or several; ``None`` when it may run.

    Stages alone run vLLM's own bodies: experts are then no matter of ours, and neither is a recurrent state that
    nothing has to be rolled back in.
    """
    model, parallel, speculative = config.model_config, config.parallel_config, config.speculative_config
    mode, sharded = config.compilation_config.cudagraph_mode, parallel.prefill_context_parallel_size > 1
    try:
        require_allowed(
            mesh_of(config),
            frontend="vllm",
            # vLLM spreads experts where there are some; its flag on a dense model does nothing.
            expert_parallel=sharded and parallel.enable_expert_parallel and model.is_moe,
            graph_mode="none" if mode is None else mode.name.lower(),
            experts=model.get_num_experts(),
            layers=model.get_total_num_hidden_layers(),
            hybrid=(model.is_hybrid or model.has_inner_state) and (sharded or speculative is not None),
        )
    except ConfigError as refused:
        return as_vllm_says(" ".join(str(refused).splitlines()))
    return None


def as_vllm_says(sentence: str) -> str:
    """A sentence of the table with vLLM's names of the options."""
    return re.sub(rf"\b({'|'.join(_NAMES)})\b", lambda found: _NAMES[found[0]], sentence)


def staged_drafter(config: Any) -> str | None:
    """Drafters that need more of the other stages than a step's tokens were never run here. Without PCP they are
    refused where we have a part in them: drafts ride on outputs, and on a CPU we ship the rounds."""
    speculative, stages = config.speculative_config, config.parallel_config.pipeline_parallel_size
    if stages == 1 or speculative is None or speculative.method == "mtp":
        return None
    if config.parallel_config.prefill_context_parallel_size == 1 and config.scheduler_config.async_scheduling:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return None
    return (
        f"speculative decoding with method {speculative.method!r} is not supported over pipeline_parallel_size="
        f"{stages} stages; use 'mtp', drop speculative_config, or set pipeline_parallel_size to 1."
    )


def latent_ahead(config: Any) -> str | None:
    """vLLM's latent attention on CPU reads the context's length from the host, which runs ahead of the accepted
    drafts there."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and config.scheduler_config.async_scheduling):
        return None
    if config.speculative_config is None or not config.model_config.use_mla:
        return None
    return (
        "async_scheduling=true with speculative decoding and latent attention on CPU would read context lengths "
        "before they are settled; set async_scheduling to false."
    )


def shared_selection(config: Any) -> str | None:
    """vLLM sends hidden states from stage to stage, and no selected keys."""
    model, stages = config.model_config.hf_text_config, config.parallel_config.pipeline_parallel_size
    if stages == 1 or not hasattr(model, "index_topk"):
        return None
    from vllm.distributed.utils import get_pp_indices

    starts = [get_pp_indices(model.num_hidden_layers, stage, stages)[0] for stage in range(1, stages)]
    shared = [layer for layer in starts if _shares(model, layer)]
    if not shared:
        return None
    return (
        f"pipeline_parallel_size={stages} has stages start at layers {shared}, which use the selection of the layer "
        "before, and vLLM sends none to another stage; set VLLM_PP_LAYER_PARTITION so that every stage starts on a "
        "layer with an indexer of its own, or pipeline_parallel_size to 1."
    )


def _shares(model: Any, layer: int) -> bool:
    """Whether ``layer`` has no indexer, by a pattern (``S``) or by its distance from the first ones that have."""
    pattern = getattr(model, "index_topk_pattern", None)
    if pattern is not None:
        return layer < len(pattern) and pattern[layer] == "S"
    offset, every = getattr(model, "index_skip_topk_offset", 2), getattr(model, "index_topk_freq", 1)
    return bool(max(layer - offset + 1, 0) % every)


PARALLEL_REFUSALS = (mesh, staged_drafter, latent_ahead)
