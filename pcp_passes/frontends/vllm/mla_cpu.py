# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill and prefix caching for latent attention on CPU, which vLLM's CPU platform switches off.

Both need attention over keys that earlier steps wrote: the *context*. vLLM's CPU latent back end can do that (it
gathers context rows from the paged cache, attends to them without a mask and merges by log-sum-exp), and PCP relies
on it in every sharded prefill, whose context was computed by other ranks in the same step. So the switch alone is
lifted, for configurations that ask for this package, and nothing of the attention is replaced.

It has to be lifted where the configuration is made, in whichever process that happens.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from pcp_passes.frontends.vllm.config import options_of

logger = logging.getLogger(__name__)


def keep_chunked_prefill(module: ModuleType) -> None:
    """Wrap ``CpuPlatform.check_and_update_config`` of ``vllm.platforms.cpu`` (idempotent).

    The back end reads the context's length from the host, which is exact only while the scheduler waits for each
    step; vLLM's CPU platform schedules no other way, and a configuration that did is left alone.
    """
    platform = module.CpuPlatform
    original = platform.check_and_update_config.__func__
    if hasattr(original, "__pcp_passes_original__"):
        return

    @functools.wraps(original)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching)
        original(cls, vllm_config)
        model = vllm_config.model_config
        if options_of(vllm_config.additional_config) is None or model is None or not model.use_mla:
            return
        if scheduler.async_scheduling:
            return
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = asked
        logger.info(
            "pcp_passes: latent attention on CPU with chunked prefill %s (budget %d) and prefix caching %s, as asked",
            *asked,
        )

    check_and_update_config.__pcp_passes_original__ = original  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)
