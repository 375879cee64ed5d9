# SPDX-License-Identifier: Apache-2.0
"""How token rows pass through the ops of :mod:`.ops`. Imports nothing of vLLM."""

from __future__ import annotations

from pcp_passes.ir.rules import CacheWrite, LocalQuery, Rule, register_rule

LATENT_WRITE = "pcp::vllm_latent_write"
RECORD_WRITE = "pcp::vllm_record_write"
INDEX_TOPK = "pcp::vllm_index_topk"
SPARSE_ATTEND = "pcp::vllm_sparse_attend"

_READ = LocalQuery(query=0, output=None, writes_padding=True, cache_dep="dep")

RULES: dict[str, Rule] = {
    LATENT_WRITE: CacheWrite(rows=(0, 1), layout="layout"),
    RECORD_WRITE: CacheWrite(rows=(0, 1, 2), layout="layout"),
    INDEX_TOPK: _READ,
    SPARSE_ATTEND: _READ,
}


def register() -> None:
    """Add the rules to the package's table (idempotent)."""
    for name, rule in RULES.items():
        register_rule(name, rule)
