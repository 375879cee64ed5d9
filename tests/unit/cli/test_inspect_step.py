# SPDX-License-Identifier: Apache-2.0
"""``pcp inspect --drafter``, on a configuration without weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from pcp_passes.cli.inspect_step import render_step
from pcp_passes.inspection.sources import load_config
from pcp_passes.inspection.step import inspect_step_config
from tests.unit.inspection.configs import GLM

pytestmark = pytest.mark.unit
CONFIG: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 512, "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_the_command_shows_that_nothing_moves_between_target_and_drafter(pcp_json: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code, data = pcp_json("inspect", str(tmp_path), "--pcp", "4", "--drafter", "mtp", "--tokens", "100", "--steps", "2")
    assert code == 0
    assert data["boundary"] == {"nodes": [], "bytes": 0, "same_inputs": True, "same_tokens": True, "copies": 0}
    assert [line["restored"] for line in data["restores"]] == [1, 1]
    # A row of a layer: 2 heads of 8 keys and values in bf16; all 4 layers of the target, and the drafter's.
    assert [(line["rows"], line["collectives"], line["bytes"]) for line in data["calls"]] == [
        (25, 4, 4 * 25 * 2 * 2 * 8 * 2), (25, 1, 25 * 2 * 2 * 8 * 2), (1, 0, 0),
    ]  # fmt: skip
    assert data["layers"] == 4 > data["captured_layers"]
    assert "pcp_step.shard_into(%shift, %local_rows, %shard)" in data["graph"]


def test_captured_layers_stand_for_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = load_config(str(tmp_path))
    one, _ = inspect_step_config(config, pcp=2, tokens=64, steps=1)
    every, _ = inspect_step_config(config, pcp=2, tokens=64, steps=1, full=True)
    assert one.step == every.step and (one.captured, every.captured) == (3, 4)
    assert len(render_step(one).renderables) == len(render_step(every).renderables) + 1, "says what was captured"


def test_a_layer_with_an_indexer_gathers_once() -> None:
    """Latent 32, rope key 16 and, in 4 of 6 layers and the drafter's, index key 32: one record of bf16 values."""
    found, _ = inspect_step_config({**GLM, "num_nextn_predict_layers": 1}, pcp=4, tokens=100, steps=2)
    assert [(line.body, line.collectives, line.bytes) for line in found.step.calls] == [
        ("target.sharded", 6, 25 * 2 * (6 * 48 + 4 * 32)), ("drafter.sharded", 1, 25 * 2 * 80),
        ("drafter.replicated", 0, 0),
    ]  # fmt: skip


def test_indexers_of_target_and_drafter_are_named(pcp_json: Any, pcp: Any, tmp_path: Path) -> None:
    """Latent 32 and rope key 16 in bf16, and an index key of 32 where keys are selected; 4 of 6 layers, and drafter."""
    config = {**GLM, "num_nextn_predict_layers": 1, "index_n_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ("inspect", str(tmp_path), "--pcp", "4", "--drafter", "mtp", "--tokens", "4096", "--steps", "2")
    code, data = pcp_json(*given)
    assert code == 0
    lines = data["indexers"]
    layers = {number: (line["model"], line["role"]) for line in lines for number in line["layers"]}
    roles = [*GLM["indexer_types"], "full"]
    assert layers == {at: ("target" if at < 6 else "drafter", role) for at, role in enumerate(roles)}
    assert sum(line["times"] for line in lines) == 7
    for line in lines:
        full = line["role"] == "full"
        assert (line["heads"], line["dim"], line["topk"], line["store"]) == (8, 32, 16, "bf16")
        assert (line["rope"], line["record"], line["index_key"]) == ("interleaved", 2 * (80 if full else 48), 64 * full)
        assert (line["record_fp8"], line["index_key_fp8"]) == (32 + 4 + 2 * 16 + 36 * full, 36 * full)
        calls = {"target": {"target.sharded"}, "drafter": {"drafter.sharded", "drafter.replicated"}}[line["model"]]
        assert set(line["selections"]) == (calls if full else set())
    drafting = lines[-1]["selections"]["drafter.replicated"]
    assert (drafting["plan"], drafting["rows"]) == ("split", 1)
    assert [one["spec"] for one in drafting["kernels"]] == ["split_h8_d32_bf16_paged64_k16", "merge_k16"]
    told = pcp(*given).stdout
    assert "split_h8_d32_bf16_paged64_k16" in told and drafting["kernels"][0]["file"][:12] in told


def test_a_dense_target_names_no_indexer(pcp_json: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _, data = pcp_json("inspect", str(tmp_path), "--pcp", "2", "--drafter", "mtp", "--tokens", "64", "--steps", "1")
    assert data["indexers"] == []


@pytest.mark.parametrize(
    "options, says",
    [
        (("--drafter", "eagle"), "unknown drafter 'eagle'"),
        (("--drafter", "mtp", "--pcp", "1"), "required at least 2"),
        (("--drafter", "mtp", "--dtype", "f8"), "unknown dtype 'f8'"),
        (("--drafter", "mtp", "--vllm"), "which vLLM does not run"),
    ],
)
def test_what_cannot_be_counted_is_refused(pcp: Any, tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    result = pcp("inspect", str(tmp_path), *options)
    assert result.exit_code != 0 and says in str(result.exception)
