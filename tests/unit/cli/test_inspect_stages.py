# SPDX-License-Identifier: Apache-2.0
"""``pcp inspect --pp/--dp/--expert-parallel``, on configurations without weights."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pcp_passes.cli.inspect_stages import render_stages
from pcp_passes.errors import ConfigError
from pcp_passes.inspection.layers import LayerKind, LayerStack
from pcp_passes.inspection.stages import inspect_stages_config, kept_layers
from pcp_passes.mesh.axes import Mesh
from tests.unit.inspection.configs import GLM, LLAMA

pytestmark = pytest.mark.unit

#: Dense, then three layers of experts.
SMALL: dict[str, Any] = {**GLM, "num_hidden_layers": 4, "first_k_dense_replace": 1}
HIDDEN = 64 * 2  # bytes of a row in bf16
LATENT, INDEX_KEY = (32 + 16) * 2, 32 * 2
RECORD = HIDDEN + 2 * 8 + 2 * 4
"""A routed row: hidden states, two experts i64, two weights f32."""
TOPK = 16 * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def _written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_mesh_with_experts() -> None:
    """The second stage starts on a layer that reuses a top-k, which then travels."""
    config = {**SMALL, "indexer_types": ["full", "full", "shared", "full"]}
    found = inspect_stages_config(config, mesh=Mesh(dp=2, pp=2, pcp=2), expert_parallel=True)
    data = json.loads(json.dumps(found.to_json()))
    assert (data["world_size"], data["layers"], data["captured"]) == (8, 4, 4)
    first, last = data["stages"]
    assert (first["wires_in"], first["first_layer"], first["end_layer"]) == ([], 0, 2)
    assert (last["wires_out"], last["first_layer"], last["end_layer"]) == ([], 2, 4)
    assert first["wires_out"] == last["wires_in"]
    assert sorted(wire["name"] for wire in last["wires_in"]) == ["hidden state", "top-k of layer 1"]
    carried = {(line["op"], line["group"], line["carries"]) for line in last["exchanges"]["sharded"]}
    assert carried == {
        ("all_gather_rows", "pcp", "cache rows"), ("all_gather_rows", "pcp", "routed rows"),
        ("all_gather_rows", "pcp", "rows of target.sharded"), ("gather_ragged", "dp", "routed rows"),
        ("reduce_rows", "pcp", "expert outputs"), ("reduce_ragged", "dp", "expert outputs"),
    }  # fmt: skip
    assert sorted(wire["bytes_per_row"] for wire in last["wires_in"]) == [TOPK, HIDDEN]
    assert first["restores"] == {"sharded": [], "replicated": []}, "nothing is restored before the last stage"
    assert last["restores"] == {
        "sharded": [{"source": "target.sharded", "bytes_per_row": HIDDEN}], "replicated": []
    }  # fmt: skip
    lines = [_told(line) for line in last["exchanges"]["sharded"] if line["call"]]
    assert sorted(lines) == sorted([
        ("pcp", "all_gather_rows", 1, LATENT),  # of the shared layer
        ("pcp", "all_gather_rows", 1, LATENT + INDEX_KEY),  # of the full one
        ("dp", "gather_ragged", 2, RECORD),
        ("pcp", "all_gather_rows", 2, 2 * RECORD),  # of both replicas
        ("pcp", "reduce_rows", 2, 2 * 2 * HIDDEN),  # what all ranks brought
        ("dp", "reduce_ragged", 2, 2 * HIDDEN),
    ])  # fmt: skip
    assert [_told(line) for line in last["exchanges"]["replicated"]] == [
        ("dp", "gather_ragged", 2, RECORD),
        ("pcp", "reduce_rows", 2, 2 * HIDDEN),
        ("dp", "reduce_ragged", 2, 2 * HIDDEN),
    ]  # fmt: skip
    experts = [line for line in first["exchanges"]["sharded"] if line["op"] == "gather_ragged"]
    assert [line["times"] for line in experts] == [1], "the first layer is dense"
    console = Console(width=200, file=io.StringIO())
    console.print(render_stages(found))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("8 ranks", "0-1", "2-3", "rows of target.sharded", "gather_ragged", "an idle one runs a dummy step"):
        assert text in shown


def test_a_drafter_is_on_the_last_stage_and_restored_there(pcp_json: Any, folder: Path) -> None:
    """The second stage starts on a layer with an indexer of its own: no top-k travels."""
    path = _written(
        folder, {**SMALL, "indexer_types": ["full", "shared", "full", "shared"], "num_nextn_predict_layers": 1}
    )
    code, data = pcp_json("inspect", path, "--pp", 2, "--pcp", 2, "--drafter", "mtp", "--steps", 2)
    assert code == 0
    first, last = data["stages"]
    assert [stage["drafter"] for stage in data["stages"]] == [False, True]
    assert [wire["bytes_per_row"] for wire in last["wires_in"]] == [HIDDEN]
    assert [line["source"] for line in last["restores"]["sharded"]] == ["target.sharded", "drafter.sharded"]
    assert {line["call"] for line in first["exchanges"]["sharded"]} == {"target.sharded"}
    drafter = [_told(line) for line in last["exchanges"]["sharded"] if line["call"].startswith("drafter")]
    assert drafter == [("pcp", "all_gather_rows", 1, LATENT + INDEX_KEY)]


def _told(line: dict[str, Any]) -> tuple[str, str, int, int]:
    return line["group"], line["op"], line["times"], line["bytes_per_row"]


def test_layers_that_are_left_out_are_counted() -> None:
    config = {**LLAMA, "num_hidden_layers": 7}
    some, every = (inspect_stages_config(config, mesh=Mesh(pp=2, pcp=2), full=full) for full in (False, True))
    assert (some.captured, every.captured) == (5, 7)
    for part, whole in zip(some.stages, every.stages, strict=True):
        assert part.exchanges == whole.exchanges
        assert (part.first_layer, part.end_layer) == (whole.first_layer, whole.end_layer)
        assert [wire.bytes_per_row for wire in part.wires_in] == [wire.bytes_per_row for wire in whole.wires_in]
    assert [stage.exchanges["sharded"][0].times for stage in some.stages] == [4, 3]
    assert {line.carries for stage in some.stages for line in stage.exchanges["sharded"] if line.call} == {"cache rows"}
    assert [wire.name for wire in some.stages[1].wires_in] == ["hidden state"]


@pytest.mark.parametrize(
    ("labels", "each", "kept"),
    [
        ("abbbbb", (3, 3), ((0, 1), (1, 1), (2, 1), (3, 2), (5, 1))),
        ("abbbbb", (6,), ((0, 1), (1, 4), (5, 1))),
        ("abab", (1, 3), ((0, 1), (1, 1), (2, 1), (3, 1))),
        ("aaaaaaa", (4, 3), ((0, 3), (3, 1), (4, 2), (6, 1))),
        ("abcabcab", (4, 4), ((0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1))),
    ],
)
def test_kept_layers_count_for_all(labels: str, each: tuple[int, ...], kept: tuple[tuple[int, int], ...]) -> None:
    kinds = {label: tuple(i for i, one in enumerate(labels) if one == label) for label in labels}
    stack = LayerStack("layers", tuple(LayerKind(label, layers) for label, layers in kinds.items()))
    found = kept_layers(stack, each)
    assert found == kept
    assert sum(times for _, times in found) == len(labels)
    for end, size in zip((sum(each[: i + 1]) for i in range(len(each))), each, strict=True):
        own = labels[end - size : end]
        here = [(labels[n], times) for n, times in found if end - size <= n < end]
        for label in set(own):
            assert sum(times for one, times in here if one == label) == own.count(label)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--pp", 5), "pp=5 stages need a layer each, and the model has 4"),
        (("--expert-parallel",), "the model has no routed experts"),
        (("--pp", 2, "--vllm"), "found --vllm too"),
        (("--dp", 2, "--cudagraph"), "found --cudagraph too"),
        (("--pp", 2, "--drafter", "eagle"), "unknown drafter 'eagle'"),
        (("--budget", 512), "--budget 512 sizes what CUDA graphs hold; add --cudagraph"),
        (("--max-requests", 4), "--max-requests 4 sizes"),
        (("--pp", 2, "--budget", 512), "--budget 512"),
    ],
)
def test_what_does_not_go_together_is_refused(pcp: Any, folder: Path, given: tuple[object, ...], said: str) -> None:
    error = pcp("inspect", _written(folder, LLAMA), "--pcp", 2, *given).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)


def test_replicas_of_a_dense_model_exchange_nothing(pcp: Any, folder: Path) -> None:
    shown = pcp("inspect", _written(folder, {**LLAMA, "num_hidden_layers": 2}), "--dp", 2, "--pcp", 1).stdout
    assert "the 2 replicas exchange nothing" in shown
    assert "all_gather_rows" not in shown
    assert "a wire goes" not in shown and "experts" not in shown, "there are none"
