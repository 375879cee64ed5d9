# SPDX-License-Identifier: Apache-2.0
"""What a scrape of ``/metrics`` would answer; runs in the engine's own process (``Group.front``)."""

from __future__ import annotations

#: Ours; and vLLM's own, counted by its scheduler in another process, to compare with.
_LABELS = {"rank", "position"}
_PREFIXES = ("vllm:pcp_", "vllm:spec_decode_", "vllm:prefix_cache_")


def snapshot() -> dict[str, float]:
    """Samples by name and labels: ``vllm:pcp_rows_total{rank="0"}`` becomes ``pcp_rows_total 0``. Labels that are the
    same for the whole engine are left out."""
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    text = generate_latest(get_prometheus_registry()).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        " ".join([sample.name.removeprefix("vllm:"), *(sample.labels[k] for k in _LABELS if k in sample.labels)]): (
            sample.value
        )
        for sample in samples
        if sample.name.startswith(_PREFIXES)
    }


SNAPSHOT = f"{__name__}:snapshot"
