# SPDX-License-Identifier: Apache-2.0
"""``pcp inspect``: tables, JSON, and models that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from typer.testing import CliRunner

from pcp_passes.cli import app
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.inspection.run import inspect_config
from pcp_passes.inspection.weightless import Weightless, build_weightless, capture_model
from tests.unit.inspection.configs import LENGTH_BOUND, LLAMA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 1024, "head_dim": 16}))
    return tmp_path


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["inspect", *arguments])


def test_json_and_tables_hold_the_same_figures(folder: Path) -> None:
    done = invoke(str(folder), "--pcp", "4", "--tokens", "256", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["pcp"], report["tokens"], report["rows"], report["layout"]) == (4, 256, 64, "zigzag")
    assert report["totals"]["collectives"] == sum(line["count"] * line["times"] for line in report["gathers"])
    assert report["graph"].count("all_gather_rows(") == report["totals"]["collectives"] - 1, "one layer stands for two"
    shown = invoke(str(folder), "--pcp", "4", "--tokens", "256", "--graph")
    text = " ".join(shown.stdout.split())
    assert f"{report['totals']['collectives']} collectives a prefill" in text
    assert f"cache {report['memory']['cache_per_token']:,} B a token" in text
    assert f"at most {report['totals']['bound_seen']:.2f} times as fast" in text
    assert "no fallback" in text
    assert report["graph"].splitlines()[0] in shown.stdout


def test_a_refused_model_exits_with_1_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LENGTH_BOUND))
    done = invoke(str(tmp_path), "--tokens", "64")
    assert done.exit_code == 1
    assert "this model holds for one length only" in done.output
    assert "input_ids dim 1 is the constant 64" in done.output


@pytest.mark.parametrize(
    "changes, options, told",
    [
        ({"model_type": "no_such_type"}, {}, "knows no model type 'no_such_type'"),
        ({"num_attention_heads": "many"}, {}, "cannot build a causal language model of this llama"),
        ({}, {"dtype": "int8"}, "unknown dtype 'int8'; accepted: bf16"),
        ({}, {"tokens": 1}, "at least 2; found 1"),
        ({}, {"layout": "spiral"}, "layout is one of zigzag"),
        ({}, {"pcp": 0}, "at least 1; found 0"),
    ],
)
def test_what_cannot_be_inspected_is_refused_before_any_capture(
    changes: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        inspect_config({**LLAMA, **changes}, **options)


class Branching(nn.Module):
    """Its control flow depends on data: not one graph."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> tuple[torch.Tensor]:
        if input_ids.sum() > 3:
            return (input_ids + 1,)
        return (input_ids,)


def test_a_model_that_is_not_one_graph_is_refused_with_its_line() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with pytest.raises(Refusal, match="Branching cannot be captured as one graph") as refused:
        capture_model(Weightless(Branching(), None, mode), 64, 16)
    details = dict(refused.value.details)
    assert details["source"].startswith("test_command.py:")
    assert details["next"]


def test_no_weight_is_allocated() -> None:
    built = build_weightless(LLAMA, torch.bfloat16)
    tensors = [*built.model.parameters(), *built.model.buffers()]
    assert tensors
    assert all(isinstance(tensor, torch._subclasses.FakeTensor) for tensor in tensors)
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}
