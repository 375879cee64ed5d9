# SPDX-License-Identifier: Apache-2.0
"""The verbs that start an engine, as a user runs them. Part of ``make test-full``: each starts one or two."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.models import build
from tests.vllm.engines import FULL


def pcp(*arguments: str, code: int = 0) -> str:
    """Run the command; its standard output."""
    command = [sys.executable, "-c", "from pcp_passes.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout


def test_a_mistake_is_one_message_and_no_traceback() -> None:
    command = [sys.executable, "-c", "from pcp_passes.cli import main; main()", "plan", "--lens", "5", "--layout", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Error" in done.stderr
    assert "Traceback" not in done.stderr


if FULL:

    def test_inspect_reports_every_layer() -> None:
        report: dict[str, Any] = json.loads(pcp("inspect", str(build("tiny_gqa")), "--vllm", "--pcp", "4", "--json"))
        assert [layer["layer"] for layer in report["layers"]] == [f"model.layers.{i}.self_attn.attn" for i in range(3)]
        assert report["totals"]["collectives"] == 3
        # K and V: two heads of 32 float32 values each.
        assert all(layer["sent"] == 2 * 2 * 32 * 4 for layer in report["layers"])
        assert report["graph"].count("all_gather_rows(") == 3

    def test_inspect_prints_tables() -> None:
        text = pcp("inspect", str(build("tiny_mla")), "--vllm", "--pcp", "2", "--layers", "1", "--graph")
        assert "1 collectives a step" in " ".join(text.split())

    def test_generate_compares_one_rank_with_two() -> None:
        prompt = " ".join(f"w{7 * i % 250}" for i in range(60))
        arguments = ("--pcp", "2", "--prompt", prompt, "--max-tokens", "8", "--backend", "eager", "--json")
        result: dict[str, Any] = json.loads(pcp("generate", str(build("tiny_gqa")), *arguments))
        assert result["tokens_equal"]
        assert result["max_logprob_diff"] <= 1e-4
        assert sum(result["rows_per_rank"]) == 60
        assert result["collectives"] == 3 + 1  # one per layer, and the sampled row
