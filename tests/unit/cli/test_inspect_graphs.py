# SPDX-License-Identifier: Apache-2.0
"""``pcp inspect --cudagraph``, on configurations without weights."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pcp_passes.errors import ConfigError
from pcp_passes.inspection.graphs import inspect_graphs_config, weights
from pcp_passes.inspection.layers import LayerKind, LayerStack
from tests.unit.inspection.configs import LLAMA

pytestmark = pytest.mark.unit


def _stack(*labels: str) -> LayerStack:
    kinds = {label: tuple(i for i, one in enumerate(labels) if one == label) for label in labels}
    return LayerStack("layers", tuple(LayerKind(label, layers) for label, layers in kinds.items()))


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        ("abbbccc", (0, 1, 2, 4, 5)),
        ("abc", (0, 1, 2)),
        ("abbbbc", (0, 1, 2, 5)),
        ("aabababac", (0, 1, 2, 3, 8)),
        ("abbabbabbc", (0, 1, 2, 3, 4, 9)),
        ("a", (0,)),
    ],
)
def test_kept_layers_show_every_pair_of_neighbours_and_no_other(labels: str, kept: tuple[int, ...]) -> None:
    found = _stack(*labels).every_transition()
    pairs = {labels[i : i + 2] for i in range(len(labels) - 1)}
    assert {labels[a] + labels[b] for a, b in pairwise(found)} == pairs
    assert found == kept


def test_a_layer_and_a_border_count_as_often_as_their_kinds_occur() -> None:
    stack = _stack(*"abbbcbcbbd")  # layers 0 1 2 3 4 5 6 7 8 9
    kept = stack.every_transition()
    assert kept == (0, 1, 2, 4, 5, 9)
    weigh = weights(stack, kept)
    assert [weigh(i, i) for i in range(6)] == [1, 2, 2, 2, 2, 1]  # six of b, three of them kept; two of c
    assert [weigh(i, i + 1) for i in range(5)] == [1, 3, 2, 2, 1]  # a-b, b-b, b-c, c-b, b-d
    assert weigh(None, 0) == weigh(5, None) == 1


def test_times_are_those_of_all_layers() -> None:
    """Six layers of three kinds, of which two are left out, counted as if all were captured."""
    config = {**LLAMA, "num_hidden_layers": 6}
    some, every = (inspect_graphs_config(config, pcp=2, budget=256, full=full) for full in (False, True))
    assert (some.captured, every.captured) == (4, 6)
    for part, whole in zip(some.bodies, every.bodies, strict=True):
        assert [(p.key, p.times, p.kernels) for p in part.pieces] == [(p.key, p.times, p.kernels) for p in whole.pieces]
        assert [(c.op, c.times) for c in part.cuts] == [(c.op, c.times) for c in whole.cuts]
        assert [(c.op, c.times) for c in part.stops] == [(c.op, c.times) for c in whole.stops]
        assert part.cuts == whole.cuts and part.pieces[-1].modules == whole.pieces[-1].modules
        assert part.pieces[-1].modules[0].startswith("body.decoder.layers.5."), "layers are numbered as in the model"
    assert some.static_bytes == every.static_bytes


def test_the_command_lists_pieces_cuts_inputs_and_buckets(pcp: Any, pcp_json: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = ("inspect", str(tmp_path), "--pcp", "4", "--cudagraph", "--budget", "512", "--max-requests", "16")
    code, data = pcp_json(*given)
    assert code == 0
    sharded = next(body for body in data["bodies"] if body["name"] == "target.sharded")
    # Between the writes and the attention of a layer nothing computes: 4 layers are 5 pieces of 3 kinds.
    assert [line["times"] for line in sharded["pieces"]] == [1, 3, 1] and sharded["piece_count"] == 5
    assert {line["op"]: line["times"] for line in sharded["cuts"]} == {
        "pcp.all_gather_rows": 4, "pcp.kv_write": 4, "pcp.kv_attend": 4,
    }  # fmt: skip
    assert {line["op"] for line in sharded["stops"]} == {"pcp.all_gather_rows"}
    # 512 tokens on 4 ranks are 128 rows; 16 decodes on each of them beside the rest are 140.
    assert 128 in data["buckets"]["rows"] and data["buckets"]["rows"][-1] >= 140
    assert data["buckets"]["requests"][-1] == 16
    slots = {line["name"]: line["bytes_per_row"] for line in sharded["slots"]}
    assert slots["ids"] == slots["positions"] == 8 and slots["result"] == 64 * 2
    assert data["capturable"] and "No GPU run is recorded" in data["gpu_runs"]

    shown = pcp(*given).output
    for piece in sharded["pieces"]:
        assert piece["key"] in shown
    for text in (
        "target.sharded: 5 pieces of 3 kinds", "attends over the cache at the lengths and block tables of the step",
        "what stops a full graph", "target.replicated: nothing stops a full graph", f"{data['static_bytes']:,} B",
        "CAPTURABLE yes", "static check", "bfloat16[rows, 64]",
    ):  # fmt: skip
        assert text in shown, text


def test_a_fault_is_shown_and_changes_the_verdict(pcp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pcp_passes.piecewise import report

    true = report.offences

    def planted(gm: Any, collectives: Any) -> Any:
        node = next(node for node in gm.graph.nodes if node.op == "call_function")
        return [*true(gm, collectives), (node, "was planted")]

    monkeypatch.setattr(report, "offences", planted)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    shown = pcp("inspect", str(tmp_path), "--cudagraph").output
    assert "CAPTURABLE no" in shown and "what keeps pieces from being captured" in shown and "was planted" in shown


def test_options_that_do_not_fit_are_refused(pcp: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = pcp("inspect", str(tmp_path), "--cudagraph", "--vllm").exception
    assert isinstance(found, ConfigError) and "--cudagraph" in str(found)
    with pytest.raises(ConfigError, match="unknown drafter 'dspark'"):
        inspect_graphs_config(LLAMA, drafter="dspark")
    with pytest.raises(ConfigError, match="unknown dtype"):
        inspect_graphs_config(LLAMA, dtype="int4")
