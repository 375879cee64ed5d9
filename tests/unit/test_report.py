# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from pcp_passes.passes import SHARDED, PassContext, build_variants
from pcp_passes.report import build_report
from tests import toy, toy_runs

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("pcp", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_per_row_are_those_a_run_moves(pcp: int, dtype: torch.dtype) -> None:
    for kind in ("dense", "latent"):
        context = PassContext(pcp)
        body = build_variants(toy_runs.captured(kind, dtype=dtype)[1].gm, context)["sharded"]
        report = build_report(body, context)
        world = toy.World(toy_runs.MIXED, pcp)
        log = toy_runs.sharded(body, world, kind, dtype).logs[0]
        assert report.collectives == log.calls == 2
        assert report.sent * world.rows == log.bytes
        assert report.gathered == pcp * report.sent


def test_each_layer_names_its_ops_and_its_pack() -> None:
    context = PassContext(4)
    report = build_report(build_variants(toy_runs.captured()[1].gm, context)["sharded"], context)
    assert [layer.layer for layer in report.layers] == [f"model.layers.{i}.self_attn.attn" for i in range(2)]
    layer = report.layers[0]
    assert (layer.module, layer.cache_write, layer.attention) == (
        "layers.0", "pcp_toy::kv_cache_update", "pcp_toy::attention_with_output",
    )  # fmt: skip
    (collective,) = layer.collectives
    assert (collective.op, collective.parts, collective.row_elements) == ("pcp::all_gather_rows", 2, 32)
    assert (collective.sent, collective.gathered) == (128, 512)
    assert layer.padding == "zero: the output buffer is allocated zero-filled"
    assert report.gathered_ops["aten::unflatten"] == 4
    assert report.sharded_ops["torch::linear"] == 8
    assert report.nodes["replicated"] > 0


def test_unpacked_and_marked_bodies_are_reported_too() -> None:
    context = PassContext(4)
    gm = toy_runs.captured()[1].gm
    apart = build_report(build_variants(gm, context, pack=False)["sharded"], context)
    assert (apart.collectives, apart.sent) == (4, 256)
    marked = build_report(toy_runs.apply(SHARDED[:4], gm, context)[0], context)
    assert (marked.collectives, marked.sent, marked.layers[0].collectives[0].op) == (2, 256, "pcp::reshard_many")
    bare = build_report(toy_runs.apply(SHARDED[:1], gm, context)[0], context)
    assert (bare.collectives, bare.layers[0].padding) == (0, "undefined")


def test_the_replicated_body_moves_nothing() -> None:
    context = PassContext(4)
    report = build_report(build_variants(toy_runs.captured()[1].gm, context)["replicated"], context)
    assert (report.collectives, report.sent, report.nodes["gathered"], report.nodes["sharded"]) == (0, 0, 0, 0)


def test_json_and_text_hold_the_same_numbers() -> None:
    context = PassContext(2)
    report = build_report(build_variants(toy_runs.captured("latent")[1].gm, context)["sharded"], context)
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["totals"] == {"collectives": 2, "sent": 128, "gathered": 256}
    assert plain["layers"][1]["collectives"][0]["row_elements"] == 16
    assert set(plain["why"]) == set(plain["nodes"]) == {"sharded", "gathered", "replicated"}
    text = "\n".join(report.lines())
    assert "pcp over 2 ranks: 2 collectives a step, 256 bytes a row" in text
    assert "pcp::all_gather_rows of 2 parts, 16 x f32 a row: 64 B sent, 128 B kept" in text
