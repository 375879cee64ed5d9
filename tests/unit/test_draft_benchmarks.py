# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of speculative decoding in small: what they count is right, and their bounds can be missed."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType

import pytest

from tests.unit.test_benchmarks import ROOT, run

pytestmark = pytest.mark.unit


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark of the draft prefill, from its file."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("draft_prefill")


def test_draft_prefill_counts_rows_and_operations(module: ModuleType) -> None:
    lines = module.measure("dense", 509, [2], 1)  # one row of 2 * 255 is padding
    one, sharded, replicated = lines
    assert [found.way for found in lines] == ["one rank", "sharded", "replicated"]
    assert (one.rows, sharded.rows, replicated.rows) == (509, 255, 509) and sharded.padding_rows == 1
    layers = (2 * 512 + (8 + 8) * 64 + 8 * 64 + 3 * 3 * 512) * 512
    assert one.linear_flops == 2 * 509 * layers and sharded.linear_flops == 2 * 255 * layers
    assert replicated.linear_flops == one.linear_flops and replicated.restored_bytes == 255 * 512 * 4
    assert one.attention_flops == 2 * 8 * 2 * 64 * (509 * 510 // 2)
    assert sharded.attention_flops < 0.51 * one.attention_flops
    assert not [found for found in module.failures(lines) if "operations" in found]
    assert "recomputed" in module.table(lines)


def test_draft_prefill_misses_its_bounds_with_a_replicated_drafter(module: ModuleType) -> None:
    """Sabotage: what is called sharded runs all rows."""
    one, sharded, replicated = module.measure("dense", 256, [2], 1)
    pretended = dataclasses.replace(replicated, way="sharded")
    found = module.failures([one, pretended])
    assert len(found) == 3 and "CPU time" in found[2]
    assert not module.failures([one, dataclasses.replace(sharded, ratio=0.5)])


def test_the_sustained_stream_runs_on_two_ranks() -> None:
    one, two = run("sustained_stream", "--pcp", "1", "2", "--prefill", "301", "--stream", "16", "--steps", "2")
    assert one["equal"] and two["equal"] and one["steps"] == two["steps"]
    assert one["prefill_tokens"] == two["prefill_tokens"] == one["prefill_rows"] > 301
    assert two["prefill_rows"] < 0.6 * one["prefill_rows"] and two["prefill_bytes"] > 0 == one["prefill_bytes"]
