# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, sharded through the public front end, have the logits that they have alone.

The rest of the types, and more lengths and ranks, are in the soak tier. Measured clean: at most 2e-6 of the largest
logit; a restore that is one row off: at least 0.05.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from pcp_passes.zoo.models import build, make_inputs, recipes
from pcp_passes.zoo.row import Plan, run_type
from pcp_passes.zoo.sharded import ShardedModels

CLEAN = 1e-5
ATTENTION_ONLY = (
    "llama", "gpt2", "qwen3", "mixtral", "mistral", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "deepseek_v32",
    "glm_moe_dsa", "bloom", "phi3@longrope",
)  # fmt: skip
"""Nothing but attention mixes tokens in these, so nothing may fall back. dbrx is not one: the loop over the experts
that its tokens hit depends on data, breaks the graph, and runs whole."""

PLAN = Plan(pcp=(4,), lengths=(64, 7, 33))


def require_exact(row: dict[str, Any]) -> None:
    assert row["verdict"] == "exact", f"{row['type']}: {row['verdict']}: {row['reason']}"
    assert row["worst"] < CLEAN
    assert row["probes"]["restore"]["smallest"] > 0.01, "a restore that is one row off would not be seen"


def require_sharded(row: dict[str, Any]) -> None:
    assert row["fallbacks"] == []
    work = row["work"]
    assert work["share"] >= 0.95
    assert work["rank"] - work["recomputed"] <= 0.3 * work["whole"]
    assert work["collectives"] > 0


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "gpt_oss", "deepseek_v3", "glm_moe_dsa"])
def test_attention_only_types_are_exact_and_sharded(name: str) -> None:
    row = run_type(PLAN, name)
    require_exact(row)
    require_sharded(row)
    assert (row["graphs"], row["compilations"]) == (1, 1), "one compilation serves all lengths"


@pytest.mark.parametrize("name", ["lfm2", "bert"])
def test_other_types_are_exact_and_say_what_falls_back(name: str) -> None:
    row = run_type(Plan(pcp=(3,), lengths=(64, 7), measure=False), name)
    require_exact(row)
    if name == "lfm2":
        assert {fallback["reason"] for fallback in row["fallbacks"]} != set()
        assert all(fallback["module"] and fallback["source"] for fallback in row["fallbacks"])


def test_counted_work_is_what_the_graph_says() -> None:
    """Two counters agree: PyTorch's while the ranks run, and ours on the rewritten graph."""
    model = build("mistral")
    runner = ShardedModels()
    runner(model, make_inputs(model, 64), 4)
    work = runner.account(model, 4, measure=True).work
    assert work is not None
    assert work.rank == work.sharded // 4 + work.replicated + work.recomputed
    assert work.whole == work.sharded + work.replicated


def test_a_spoilt_restore_is_seen_and_leaves_the_model_as_it_was() -> None:
    model = build("mistral")
    runner = ShardedModels()
    inputs = make_inputs(model, 33)
    clean = runner(model, inputs, 2).logits
    assert (runner.spoilt(model, inputs, 2).logits - clean).abs().max() > 0.1
    assert (runner(model, inputs, 2).logits - clean).abs().max() == 0


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_chosen_type(name: str) -> None:
    row = run_type(Plan(), name)
    assert row["verdict"] in ("exact", "mixed", "refused", "replicated"), f"{row['verdict']}: {row['reason']}"
    if name in ATTENTION_ONLY:
        require_exact(row)
        require_sharded(row)
