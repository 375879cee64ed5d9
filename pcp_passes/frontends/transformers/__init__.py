# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, unmodified: attention stated by positions, and a paged KV cache.

Needs transformers 5.19 to 5.24; nothing else in this package imports it.
"""

from pcp_passes.frontends.transformers.attention import pcp_attention_forward
from pcp_passes.frontends.transformers.cache import PagedKVCache, StepInputs
from pcp_passes.frontends.transformers.masks import MaskPattern, one_sequence_per_row, pcp_mask
from pcp_passes.frontends.transformers.mtp import load_mtp
from pcp_passes.frontends.transformers.switch import pcp_attention, register, why_unsupported
from pcp_passes.frontends.transformers.target import load_target

__all__ = [
    "MaskPattern",
    "PagedKVCache",
    "StepInputs",
    "load_mtp",
    "load_target",
    "one_sequence_per_row",
    "pcp_attention",
    "pcp_attention_forward",
    "pcp_mask",
    "register",
    "why_unsupported",
]
