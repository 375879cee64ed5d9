# SPDX-License-Identifier: Apache-2.0
"""CAPTURABLE of the models this package serves: dense, MLA and GLM-DSA targets and their drafters, off the CPU.

They are captured on ``meta``, so that a tensor which a model makes on the CPU stops the capture.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from pcp_passes.inspection.graphs import ModelGraphs, inspect_graphs_config
from pcp_passes.passes import PassContext
from pcp_passes.piecewise.capturable import offences
from pcp_passes.piecewise.split import split_body
from tests import steps as small
from tests.unit.inspection.configs import GLM, LLAMA

pytestmark = pytest.mark.unit

MLA: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "max_position_embeddings": 512, "num_nextn_predict_layers": 1,
}  # fmt: skip
SPARSE: dict[str, Any] = {
    **GLM, "num_hidden_layers": 2, "first_k_dense_replace": 1, "indexer_types": ["full", "shared"],
    "num_nextn_predict_layers": 1,
}  # fmt: skip

MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({**LLAMA, "num_hidden_layers": 2}, "none"),
    "MLA + MTP": (MLA, "mtp"),
    "GLM-DSA + MTP": (SPARSE, "mtp"),
}


@cache
def _report(name: str) -> ModelGraphs:
    config, drafter = MODELS[name]
    return inspect_graphs_config(config, drafter=drafter, pcp=2, budget=256, max_requests=8, full=True)


@pytest.mark.parametrize("name", MODELS)
def test_every_piece_can_be_captured(name: str) -> None:
    report = _report(name)
    assert report.capturable, [body.faults for body in report.bodies]
    assert all(body.piece_count > 1 for body in report.bodies)
    assert {body.name.partition(".")[0] for body in report.bodies} == (
        {"target", "drafter"} if MODELS[name][1] == "mtp" else {"target"}
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_replicated_body_can_be_one_graph_and_a_sharded_one_waits_only_for_ranks(name: str) -> None:
    for body in _report(name).bodies:
        assert {line.op for line in body.stops} <= ({"pcp.all_gather_rows"} if "sharded" in body.name else set())
        assert bool(body.stops) == ("sharded" in body.name)


@pytest.mark.parametrize("variant", ["context", "query"])
def test_a_block_drafter_can_be_captured(variant: str) -> None:
    bodies = small.dspark().model.bodies
    assert variant in bodies, sorted(bodies)
    assert offences(bodies[variant]) == []
    assert offences(split_body(bodies[variant], PassContext(2, variant="replicated"))) == []
