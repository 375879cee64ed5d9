# SPDX-License-Identifier: Apache-2.0
"""Several replicas of a PCP engine under one vLLM front end: what differs, and what is refused.

A dense model's replicas know nothing of each other: each worker finds ``data_parallel_size=1`` and its own PCP group.
With experts they step in lockstep, and vLLM's row counts have to be those of the *local* batches. They are:

* the runner asks the batch manager for the padded rows of the coming step before the replicas exchange their counts,
  and what :meth:`~pcp_passes.frontends.vllm.manager.PassesPCPManager.get_num_tokens_for_dispatch` answers is a function
  of the batch alone, the same on all PCP ranks of a replica;
* vLLM spreads them over the expert-parallel ranks in flattened order (dp, pcp, tp), each entry ``P`` times;
* an idle replica runs a dummy step of one row per rank. It enters the sharded body, whose own collectives stay within
  the replica, so the replicas need not agree on a body: only the expert layers cross, with row counts of their own.

vLLM dispatches by one gather over the flattened group instead of one over DP and one over PCP. The rows arrive by
(dp, pcp) instead of (pcp, dp); each comes back to where it was, because the combine uses the same list of sizes.
"""

from __future__ import annotations

from typing import Any

from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.combinations import Asked, refusals


def refuse_fold_on_tp(asked: Any) -> None:
    """``fold_on_tp`` is an option of the embedded engine. Here it deserves the table's sentence, not a misspelling's.

    Args:
        asked: ``additional_config["pcp_passes"]``, unchecked.

    Raises:
        ConfigError: it is asked for.
    """
    if isinstance(asked, dict) and asked.get("fold_on_tp"):
        folded = Asked(Mesh(pcp=2, tp=2, fold_on_tp=True), "vllm")
        raise ConfigError("pcp_passes.fold_on_tp=true: " + " ".join(refusals(folded)))


def spread_experts(config: Any) -> str | None:
    """Why these replicas or these spread experts do not run under PCP, in one sentence; ``None`` when they do."""
    parallel = config.parallel_config
    replicas, spread = parallel.data_parallel_size, parallel.enable_expert_parallel
    if not config.model_config.is_moe or (replicas == 1 and not spread):
        return None
    if parallel.enable_eplb:
        return "enable_eplb=true moves experts between ranks while they run, which is not supported; drop it."
    if replicas > 1 and not spread:
        return (
            f"data_parallel_size={replicas} without expert parallelism cuts every expert over all replicas; "
            "set enable_expert_parallel to true."
        )
    return _on_cpu(config)


def _on_cpu(config: Any) -> str | None:
    """Expert layers run on CPU only so far, and there not all of them; some combinations were never run."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    parallel, speculative = config.parallel_config, config.speculative_config
    replicas, tensor = parallel.data_parallel_size, parallel.tensor_parallel_size
    if replicas > 1 and tensor > 1:
        return (
            f"data_parallel_size={replicas} with tensor_parallel_size={tensor} splits the rows of an expert layer once "
            "more, which was never run on a CPU; set one of them to 1."
        )
    if replicas > 1 and speculative is not None and speculative.method == "dspark":
        return (
            f"method 'dspark' beside experts over data_parallel_size={replicas} replicas was never run on a CPU; use "
            "'mtp', drop speculative_config, or set data_parallel_size to 1."
        )
    quantization = config.model_config.quantization
    if quantization is None:
        return None
    return (
        f"experts quantized as {quantization!r} read past their weights on a CPU when they are spread over ranks; use "
        "an unquantized checkpoint, or drop enable_expert_parallel."
    )
