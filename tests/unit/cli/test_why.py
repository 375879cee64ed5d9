# SPDX-License-Identifier: Apache-2.0
"""``pcp why``: origin, placement, rule, operands, users and history of one node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pcp_passes.cli.why import qualified
from pcp_passes.errors import DumpError
from pcp_passes.ir.parsing.syntax import read_statements


def test_a_node_that_a_pass_made_and_another_took_away(dump: Path, pcp_json: Callable[..., Any]) -> None:
    code, data = pcp_json("why", dump, "%reshard")
    assert code == 0
    assert data["origin"] == "made by gather-cache-writes" and data["stage"] == "03-mask-padding.txt"
    assert data["placement"] == "rank_major" and data["placed_by"] == "gather-cache-writes"
    assert (data["module"], data["layer"]) == ("layers.0", "model.layers.0.self_attn.attn")
    assert data["source"].startswith("toy.py:")
    assert [text.split(" ")[0] for text in data["operands"]] == ["%k_1"]
    assert [text.split(" ")[0] for text in data["users"]] == ["%dep"]
    assert [(event["stage"], event["event"]) for event in data["history"]] == [
        ("02-gather-cache-writes.txt", "appears"), ("04-coalesce-reshards.txt", "is gone"),
    ]  # fmt: skip


def test_a_captured_node_that_a_pass_changed(dump: Path, pcp_json: Any, pcp: Any) -> None:
    _, data = pcp_json("why", dump, "output")
    assert data["origin"] == "captured, changed by mask-padding"
    assert data["placement"] == "shard(0)" and data["placed_by"] == "place-rows"
    assert [(event["stage"][:2], event["event"]) for event in data["history"]] == [
        ("00", "appears"), ("01", "changes"), ("03", "changes"),
    ]  # fmt: skip
    assert "torch.empty" in data["history"][1]["text"] and "torch.zeros" in data["history"][2]["text"]
    shown = pcp("why", dump, "output").stdout
    assert "captured, changed by mask-padding" in shown and "shard(0), first stated by place-rows" in shown


def test_rules_and_notes(dump: Path, pcp_json: Any) -> None:
    _, data = pcp_json("why", dump, "%dep")
    assert data["rule"] == "CacheWrite(rows=(0, 1), layout=None)"
    manifest = dump / "manifest.json"
    text = manifest.read_text()
    assert '"notes": []' in text
    manifest.write_text(text.replace('"notes": []', '"notes": ["%dep (l.0): a remark", "%dep_1: another"]', 1))
    _, data = pcp_json("why", dump, "%dep")
    assert data["notes"] == [{"pass": "captured", "text": "%dep (l.0): a remark"}]


@pytest.mark.parametrize(
    "call, name",
    [
        ("aten.add.Tensor(%x)", "aten::add"),
        ("aten.linear(%x)", "aten::linear"),
        ("torch.nn.functional.linear(%x)", "torch::linear"),
        ("vllm.unified_attention(%x)", "vllm::unified_attention"),
        ("%x.view(1)", "method::view"),
    ],
)
def test_rules_are_found_by_qualified_name(call: str, name: str) -> None:
    assert qualified(read_statements(f"%y = {call}")[0]) == name


def test_why_a_node_runs_replicated_and_the_rule_of_an_aten_op(dump: Path, pcp_json: Any) -> None:
    path = dump / "05-lower-reshards.txt"
    line = "%extra : f32[4] replicate = aten.cumsum(%mul_24, 0)   # layers.0  by made-up  because it sums over tokens\n"
    path.write_text(path.read_text().replace("return (%mul_24,)", line + "return (%mul_24,)"))
    _, data = pcp_json("why", dump, "%extra")
    assert data["because"] == "it sums over tokens" and data["origin"] == "made by made-up"
    assert data["rule"].startswith("reductions.")


def test_unknown_nodes_are_refused_with_close_names(dump: Path, pcp: Any) -> None:
    result = pcp("why", dump, "%reshard_9")
    assert isinstance(result.exception, DumpError)
    assert "has a node %reshard_9. Did you mean %reshard" in str(result.exception)
