# SPDX-License-Identifier: Apache-2.0
"""Paged caches and the ops that write and read them, with reference implementations for any device."""

from pcp_passes.paged.ops import index_keys, index_topk, index_write, kv_attend, kv_write, mla_attend
from pcp_passes.paged.records import pack_record, record_write
from pcp_passes.paged.state import (
    RANK_MAJOR_SLOTS,
    REPLICATED_SLOTS,
    AttentionInputs,
    PagedCaches,
    SlotLayout,
    SparseOptions,
    running,
)

__all__ = [
    "RANK_MAJOR_SLOTS",
    "REPLICATED_SLOTS",
    "AttentionInputs",
    "PagedCaches",
    "SlotLayout",
    "SparseOptions",
    "index_keys",
    "index_topk",
    "index_write",
    "kv_attend",
    "kv_write",
    "mla_attend",
    "pack_record",
    "record_write",
    "running",
]
