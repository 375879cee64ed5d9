# SPDX-License-Identifier: Apache-2.0
"""Which speculative decoding, and what else is at odds with it, is refused with PCP: one sentence each, with the values
found."""

from __future__ import annotations

from typing import Any


def draft_method(config: Any) -> str | None:
    """A next-token module (MTP) is sharded as its target is; a block drafter (DSpark) runs replicated."""
    speculative = config.speculative_config
    if speculative is None or speculative.method in ("mtp", "dspark"):
        return None
    return (
        f"speculative decoding with method {speculative.method!r} is not supported; use 'mtp' or 'dspark', or drop "
        "speculative_config."
    )


def draft_modules(config: Any) -> str | None:
    speculative = config.speculative_config
    if speculative is None or not speculative.use_multi_module_mtp():
        return None
    layers = speculative.draft_model_config.hf_config.num_nextn_predict_layers
    return (
        f"the checkpoint has num_nextn_predict_layers={layers} draft modules and num_speculative_tokens="
        f"{speculative.num_speculative_tokens} would use {min(layers, speculative.num_speculative_tokens)} of them, "
        "but only a single module is supported; set num_speculative_tokens to 1."
    )


def draft_cache(config: Any) -> str | None:
    speculative = config.speculative_config
    if speculative is None or not speculative.use_gemma4_mtp():
        return None
    return (
        f"the draft module ({', '.join(speculative.draft_model_config.architectures)}) reads its target's cache and "
        "writes none of its own, which is not supported; drop speculative_config."
    )


def draft_counts(config: Any) -> str | None:
    """Rows are planned on the host, from what the scheduler says; here the device decides how many there are."""
    speculative = config.speculative_config
    if speculative is None or not speculative.enable_adaptive_verification:
        return None
    return (
        "enable_adaptive_verification=true lets the device choose how many drafts are verified, and the rows of a step "
        "are planned before; drop it."
    )


def fast_prefill(args: Any) -> str | None:
    """vLLM would switch it off without a word."""
    if not args.kv_sharing_fast_prefill:
        return None
    return (
        "kv_sharing_fast_prefill=True skips the later layers of prompt tokens, whose rows are gathered and drafted "
        "from; drop it."
    )
