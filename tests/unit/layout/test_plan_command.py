# SPDX-License-Identifier: Apache-2.0
"""What ``pcp plan`` shows, and the planner benchmark's own arithmetic."""

from __future__ import annotations

import importlib.util
import io
import json
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from pcp_passes.cli.plan import plan_json, render_plan
from pcp_passes.errors import ConfigError, LayoutError
from pcp_passes.layout import build_layout

pytestmark = pytest.mark.unit


def text(*args: object, **kwargs: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_plan(*args, **kwargs))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_is_plain_data_and_covers_every_token_once() -> None:
    for layout in ("zigzag", "interleave", "contiguous"):
        for decode in ("replicate", "owner"):
            plan = json.loads(
                json.dumps(plan_json([37, 5, 1], 4, layout=layout, decode=decode, computed=[0, 10, 3], decodes=2))
            )
            written = [
                (segment["request"], position)
                for rank in plan["ranks"]
                for segment in rank["segments"]
                if segment["written"]
                for position in range(segment["position"], segment["position"] + segment["length"])
            ]
            expected = [(0, p) for p in range(37)] + [(1, p) for p in range(10, 15)] + [(2, 3), (3, 1), (4, 1)]
            assert sorted(written) == expected
            assert plan["tokens"] == len(expected)
            held = sum(rank["tokens"] for rank in plan["ranks"])
            assert held == len(expected) + plan["copied_rows"]
            assert held + plan["padding_rows"] == 4 * plan["padded_tokens"]


def test_attention_pairs_are_counted_under_the_causal_mask() -> None:
    plan = plan_json([8], 2, computed=[4])
    assert sum(rank["attention_pairs"] for rank in plan["ranks"]) == sum(position + 1 for position in range(4, 12))
    assert [rank["attention_pairs"] for rank in plan["ranks"]] == [5 + 6 + 11 + 12, 7 + 8 + 9 + 10]


def test_text_shows_holders_padding_and_copies() -> None:
    shown = text([37, 5, 1], 4, decodes=1)
    assert "44 tokens over 4 ranks, zigzag, decode replicate: 12 rows per rank" in shown
    assert "0-4, 32-36" in shown and "1 (copy)" in shown and "sharded body" in shown
    assert "replicated body (no collective)" in text([], 4, decodes=3)
    assert "step 4" in text([64], 4, layout="interleave")
    assert "8 more requests" in text([9] * 40, 2)


def test_refused() -> None:
    with pytest.raises(ConfigError, match="one context length per prefill: found 1 for 2"):
        plan_json([3, 4], 2, computed=[1])
    with pytest.raises(ConfigError, match="at least one prefill length or decode"):
        render_plan([], 2)
    with pytest.raises(ConfigError, match="layout is one of"):
        plan_json([3], 2, layout="ring")
    with pytest.raises(LayoutError, match=r"num_scheduled\[0\] = -3"):
        plan_json([-3], 2)


@pytest.fixture
def benchmark_module() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "planner.py"
    spec = importlib.util.spec_from_file_location("planner_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_benchmark_reports_every_case(
    benchmark_module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark_module, "vllm_call", lambda *_: None)
    assert benchmark_module.main(["--rounds", "2", "--calls", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 8 and all(row["ours_us"] > 0 and row["ratio"] is None for row in rows)
    mixed = benchmark_module.batches()["32 prefills + 224 decodes"]
    assert (len(mixed.prefills), len(mixed.decodes)) == (32, 224)


def test_benchmark_ratio_is_theirs_over_ours(benchmark_module: ModuleType) -> None:
    result = benchmark_module.measure(lambda: time.sleep(0.002), lambda: time.sleep(0.02), 3, 1)
    assert 3 < result["ratio"] < 12
    assert result["ratio_min"] <= result["ratio"] <= result["ratio_max"]


def test_benchmark_refuses_to_time_a_different_layout(benchmark_module: ModuleType) -> None:
    batch = benchmark_module.batches()["32 prefills + 224 decodes"]

    class Manager:
        def __init__(self, compat: str | None) -> None:
            layout = build_layout(batch, 8, decode="owner", compat=compat)
            self._padded_gather_idx = torch.from_numpy(layout.gather_index)
            self._gathered_kv_write_mask = torch.from_numpy(layout.write_mask)
            self._hidden_restore_idx = torch.from_numpy(layout.restore_index)

    ours = build_layout(batch, 8, decode="owner", compat="vllm")
    benchmark_module.check_equal(ours, Manager("vllm"))
    with pytest.raises(AssertionError, match="differs from vLLM's"):
        benchmark_module.check_equal(ours, Manager(None))
