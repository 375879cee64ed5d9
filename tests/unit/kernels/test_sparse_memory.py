# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the sparse-index step's memory in small: what it prints, and that its gate can fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pcp_kernels.reference import cache as cache_reference
from pcp_kernels.reference import score, select
from pcp_passes.paged import index

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
MIB = 1 << 20
SMALL = [
    "--rows", "256", "--keys", "2048", "--heads", "8", "--dim", "64", "--topk", "128", "--workspace-mib", "2", "--json",
]  # fmt: skip


@pytest.fixture(scope="module")
def memory() -> Iterator[Any]:
    path, threads = list(sys.path), torch.get_num_threads()
    sys.path.insert(0, str(BENCHMARKS))
    import sparse_index_memory

    yield sparse_index_memory
    sys.path[:] = path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("store", ["fp8", "bf16", "fp32"])
def test_the_step_stays_within_its_budget(memory: Any, capsys: pytest.CaptureFixture[str], store: str) -> None:
    assert memory.main([*SMALL, "--store", store, "--check"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["peak_bytes"] - found["output_bytes"] <= found["budget_bytes"] == 2 * MIB
    assert found["unlowered_step_bytes"] == 8 * 256 * 2048 * 4 > 2 * MIB
    assert found["unlowered_bytes"] == 8 * 2048 * 2048 * 4
    # Prepared queries and records in 1, 2 or 4 bytes each, and some tiles of temporaries.
    assert found["linear_bytes"] < 256 * 9 * 64 * {"fp8": 1, "bf16": 2, "fp32": 4}[store] + 4 * MIB


def dense(
    q: torch.Tensor, w: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, request: torch.Tensor, ke: torch.Tensor,
    topk: int, page: int, *, workspace_bytes: int,
) -> torch.Tensor:  # fmt: skip
    """Every score at once, as the unlowered graph has them."""
    slots = (table[0].long()[:, None] * page + torch.arange(page)).flatten()
    keys, scale = cache_reference.gather(cache, slots, q.shape[2])
    return select.select_scores(score.score(q, w, keys, scale), ke, topk)


def test_a_dense_selection_fails_the_gate(
    memory: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "topk_paged", dense)
    assert memory.main([*SMALL, "--check"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] > found["unlowered_step_bytes"]


def test_what_cannot_be_measured_is_said(memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        memory.main(["--rows", "64", "--keys", "32"])
    assert "64 rows and 32 keys" in capsys.readouterr().err
