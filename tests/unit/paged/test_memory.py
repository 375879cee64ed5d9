# SPDX-License-Identifier: Apache-2.0
"""The selection of keys stays within its budget, and the measurement can tell when it does not."""

from __future__ import annotations

import pytest
import torch

from pcp_passes.errors import ConfigError
from pcp_passes.live_bytes import LiveBytes
from pcp_passes.sparse.memory import measure_index_step

MIB = 1 << 20


@pytest.mark.parametrize("store", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("budget", [2 * MIB, 8 * MIB])
def test_the_budget_is_kept(store: str, budget: int) -> None:
    """Less memory than one fp32 score per row and key would take."""
    found = measure_index_step(
        rows=256, keys=8192, heads=8, dim=64, topk=256, store=store, workspace_bytes=budget, measured_rows=64
    )
    assert found.within and found.scores_bytes == 256 * 8192 * 4 and found.output_bytes == 64 * 256 * 4
    assert found.peak_bytes < found.scores_bytes * (0.3 if budget == 2 * MIB else 1.1)
    assert found.to_json()["unlowered_bytes"] == 8 * 8192 * 8192 * 4


def test_more_rows_hold_no_more() -> None:
    sizes = {"keys": 4096, "heads": 8, "dim": 64, "topk": 128, "workspace_bytes": 2 * MIB}
    few, many = (measure_index_step(rows=rows, **sizes) for rows in (64, 192))
    assert many.peak_bytes - many.output_bytes <= 1.05 * (few.peak_bytes - few.output_bytes)


def test_a_selection_that_keeps_all_scores_is_seen() -> None:
    """Sabotage: the formula as the unlowered graph has it."""
    q, keys = torch.randn(64, 8, 64), torch.randn(8192, 64)
    with LiveBytes() as live:
        torch.relu(torch.einsum("nhd,sd->nhs", q, keys)).sum(1).topk(256)
    assert live.peak >= 2 * 64 * 8 * 8192 * 4 > 8 * MIB


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="store='int8'"):
        measure_index_step(store="int8")
    with pytest.raises(ConfigError, match="64 measured of 32 rows"):
        measure_index_step(rows=32, measured_rows=64)
