# SPDX-License-Identifier: Apache-2.0
"""A block drafter (DSpark) beside a sharded target: every rank runs it whole, on the global batch.

vLLM builds such a drafter with a configuration of its own whose PCP size is 1. It projects the target's auxiliary
states of *all* rows into its own cache, then drafts every position in one pass of a few rows per request. Sharding it
would save little, so its graph is left alone and its attention back end need not know of PCP; only the auxiliary states
have to be in global order, which the batch manager's restore sees to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import runtime as runtimes


def around_block_forward(original: Callable[..., Any], speculator: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``DFlashSpeculator._run_model``: a graph captured in here is compiled as it is, and never sharded.

    Raises:
        ConfigError: when vLLM built the drafter for a PCP group, whose layers would wait for gathers of their own.
    """
    runtime = runtimes.current()
    if runtime is None:
        return original(speculator, *args, **kwargs)
    size = speculator.vllm_config.parallel_config.prefill_context_parallel_size
    if size != 1:
        raise ConfigError(
            f"the block drafter ({type(speculator).__name__}) was configured with prefill_context_parallel_size="
            f"{size}; it runs whole on every rank and needs 1. Use a vLLM version that pcp_passes knows."
        )
    with runtime.playing("alone"):
        return original(speculator, *args, **kwargs)


def restore_together(restore: Callable[[torch.Tensor], torch.Tensor], states: list[torch.Tensor]) -> list[torch.Tensor]:
    """``restore`` several states [M, H_i] to [T, H_i] each, in one collective instead of one per state."""
    if len(states) < 2:
        return [restore(one) for one in states]
    widths = [one.shape[-1] for one in states]
    return list(restore(torch.cat(states, dim=-1)).split(widths, dim=-1))
