# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with an indexer: lowered, they select what they selected and compute what they computed.

Their own top-k breaks ties as it pleases and ours by position, so two things are compared: the selections, up to ties
of the scores (``tests.comparator``); and the logits, with the model alone where it selects the same keys, and
everywhere with the model when it is given our indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from pcp_kernels.reference import select
from pcp_passes import simulate_model
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.ir import meta
from pcp_passes.passes.tokens import lower_indexer, match_selected
from pcp_passes.sparse.ops import select_keys_op, sparse_attend_op
from pcp_passes.zoo.models import Inputs, call, make_inputs, randomise, recipes
from pcp_passes.zoo.sharded import ShardedModels
from tests.attention_programs import squares
from tests.comparator import compare_selected

pytestmark = pytest.mark.unit
Tensor = torch.Tensor

TOKENS, TOPK = 96, 8
CLOSE = 1e-5
"""Logits are near 4. Clean runs differ by at most 4e-6; the sabotaged one by over 0.1."""
EPSILON = 1e-5
"""Scores are near 1, and summed in another order."""

NAMES = ("glm_moe_dsa", "deepseek_v32", "few heads")


@lru_cache(maxsize=1)
def model_of(name: str) -> nn.Module:
    """GLM's second layer reuses the selection of the first; with few heads many scores are exactly 0, and tie."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = "deepseek_v32" if name == "deepseek_v32" else "glm_moe_dsa"
    values: dict[str, Any] = {**(recipes()[kind].values or {}), "index_topk": TOPK}
    if kind == "glm_moe_dsa":
        layers = 3
        values |= {
            "num_hidden_layers": layers, "indexer_types": ["full", "shared", "full"],
            "layer_types": ["indexed_attention"] * layers, "mlp_layer_types": ["dense"] * layers,
        }  # fmt: skip
    if name == "few heads":
        values["index_n_heads"] = 2
    config = CONFIG_MAPPING[kind](**values)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    randomise(model)
    return model.requires_grad_(False)


def indexers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Indexer")]


@dataclass
class Selections:
    """What was selected: ``(positions, indices)``. Simulated ranks run each op one after the other."""

    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def whole(self, layers: int, pcp: int) -> list[Tensor]:
        """i32 ``[T, topk]`` of each indexer, rows of all ranks in place."""
        found = [torch.full((TOKENS, TOPK), -2, dtype=torch.int32) for _ in range(layers)]
        assert len(self.calls) == layers * pcp, "every rank selects in every layer, once"
        for number, (positions, indices) in enumerate(self.calls):
            found[number // pcp][positions] = indices
        assert all(bool((one >= -1).all()) for one in found), "every row is selected for"
        return found


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Selections]:
    held, real = Selections(), select.topk_rows

    def topk_rows(
        q: Tensor, w: Tensor, k: Tensor, k_scale: Any, ks: Tensor, ke: Tensor, *rest: Any, **kw: Any
    ) -> Tensor:
        found = real(q, w, k, k_scale, ks, ke, *rest, **kw)
        held.calls.append((ke.long() - 1, found))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(select, "topk_rows", topk_rows)
        yield held


def fed(model: nn.Module, inputs: Inputs, indices: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits of the model itself when its indexers answer ``indices``; what they would have said, and the scores."""
    theirs: list[Tensor] = []
    scores: list[Tensor] = []
    waiting = iter(indices)
    topk = torch.Tensor.topk

    def spied(self: Tensor, *rest: Any, **options: Any) -> Any:
        if self.shape[-2:] == (TOKENS, TOKENS):
            scores.append(self[0].clone())
        return topk(self, *rest, **options)

    def answer(module: nn.Module, given: Any, said: Tensor) -> Tensor:
        theirs.append(said[0])
        return next(waiting).clamp(min=0)[None]

    hooks = [one.register_forward_hook(answer) for one in indexers(model)]
    torch.Tensor.topk = spied  # type: ignore[method-assign, assignment]
    try:
        return call(model, inputs), theirs, scores
    finally:
        torch.Tensor.topk = topk  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("name", "pcp"), [("glm_moe_dsa", 1), ("glm_moe_dsa", 3), ("deepseek_v32", 2), ("few heads", 2)]
)
def test_lowered_models_select_and_compute_the_same(name: str, pcp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    inputs, runner = make_inputs(model, TOKENS), ShardedModels()
    with recorded(monkeypatch) as held:
        logits = runner(model, dict(inputs), pcp).logits
    require_lowered(runner, model, pcp)
    mine = held.whole(len(indexers(model)), pcp)
    given, theirs, scores = fed(model, inputs, mine)
    assert float((logits - given).abs().max()) < CLOSE
    seen = torch.arange(TOKENS) + 1
    ties = [compare_selected(*one, seen, TOPK, EPSILON) for one in zip(mine, theirs, scores, strict=True)]
    if name == "few heads":
        assert sum(ties) > 0, "the comparison up to ties was not needed"
        return
    assert ties == [0] * len(ties)
    assert float((logits - call(model, inputs)).abs().max()) < CLOSE


def require_lowered(runner: ShardedModels, model: nn.Module, pcp: int) -> None:
    """Counts of every indexer and attention; nothing of size T x T, and no fallback."""
    (variant,) = runner._variants(model, pcp)
    assert variant.rewritten is not None
    gm = variant.rewritten.gm
    counts = {op: sum(node.target is op for node in gm.graph.nodes) for op in (select_keys_op, sparse_attend_op)}
    assert counts == {select_keys_op: len(indexers(model)), sparse_attend_op: model.config.num_hidden_layers}
    assert not squares(gm)
    assert runner.account(model, pcp).fallbacks == ()
    for node in gm.graph.nodes:
        if node.target is select_keys_op:
            assert node.args[5] == "replicated"
            assert meta.module_path(node).endswith("self_attn.indexer")


def test_indices_of_another_layer_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the last layer attends to what the first selected."""
    model = model_of("glm_moe_dsa")
    inputs = make_inputs(model, TOKENS)
    real: Callable[[Any], Any] = match_selected._selection

    def first(index: Any) -> Any:
        found = real(index)
        return found and next(node for node in found.graph.nodes if node.target is select_keys_op)

    monkeypatch.setattr(match_selected, "_selection", first)
    logits = ShardedModels()(model, dict(inputs), 2).logits
    assert float((logits - call(model, inputs)).abs().max()) > 0.1


def test_a_wrong_layout_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the pass says that a rank's rows are all there are."""
    model = model_of("glm_moe_dsa")
    monkeypatch.setattr(lower_indexer, "has_plan", lambda graph: False)
    with pytest.raises(ConfigError, match="layout 'local': there are 96 keys and 48 rows"):
        ShardedModels()(model, dict(make_inputs(model, TOKENS)), 2)


def test_experts_that_loop_are_refused_with_what_to_set() -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = "glm_moe_dsa"
    values: dict[str, Any] = {
        **(recipes()[kind].values or {}), "num_hidden_layers": 1, "indexer_types": ["full"],
        "layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"],
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values), experts_implementation="eager").eval()
    inputs = {"input_ids": torch.arange(24)[None] % 32}
    with pytest.raises(Refusal, match="loops or branches") as refused:
        simulate_model(model, inputs, pcp=2)
    assert 'set_experts_implementation("grouped_mm")' in str(refused.value) and "expert_hit" in str(refused.value)
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        close = torch.allclose(simulate_model(model, inputs, pcp=2).logits, model(**inputs).logits, atol=1e-4)
    assert close, "what it says to set runs"
