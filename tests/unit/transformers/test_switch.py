# SPDX-License-Identifier: Apache-2.0
"""The context manager: what it sets, restores and refuses, and what a traced graph then holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, masking_utils

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.transformers import pcp_attention, why_unsupported
from pcp_passes.frontends.transformers import switch as switch_module
from tests.unit.transformers.tiny import MODELS, VOCABULARY, build, error, randomise, tokens

SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def implementations(model: torch.nn.Module) -> list[Any]:
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


def test_sets_and_restores_every_configuration() -> None:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 32}
    config = AutoConfig.for_model("bart", vocab_size=VOCABULARY, **layers)
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.model.encoder.config = copied = type(config)(**config.to_dict(), attn_implementation="eager")
    search = masking_utils.find_packed_sequence_indices
    before = implementations(model)
    assert set(before) == {"sdpa", "eager"}
    with pcp_attention(model):
        assert set(implementations(model)) == {"pcp"}
        assert copied._attn_implementation == "pcp"
        assert masking_utils.find_packed_sequence_indices is not search
    assert implementations(model) == before
    assert masking_utils.find_packed_sequence_indices is search
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_restores_sub_configurations() -> None:
    text = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config={**SMALL, "intermediate_size": 32})
    holder = torch.nn.Module()
    holder.language = build("llama")
    original, holder.language.config = holder.language.config, config
    try:
        with pcp_attention(holder):
            assert config.text_config._attn_implementation == "pcp"
            assert config.vision_config._attn_implementation == "pcp"
    finally:
        holder.language.config = original
    assert config.text_config._attn_implementation != "pcp"
    assert config.vision_config._attn_implementation != "pcp"


def test_restores_after_an_exception_and_when_nested() -> None:
    model = build("llama")
    search = masking_utils.find_packed_sequence_indices
    with (
        pytest.raises(RuntimeError, match="inside"),
        pcp_attention(model),
        pcp_attention(model, positions="consecutive"),
    ):
        raise RuntimeError("inside")
    assert set(implementations(model)) == {"eager"}
    assert masking_utils.find_packed_sequence_indices is search
    assert not switch_module.PACKED.excluded


def test_an_exception_in_the_model_does_not_leave_packing_excluded() -> None:
    model = build("llama")
    with pcp_attention(model):
        with pytest.raises(ValueError, match="exactly one"):
            model()
        assert not switch_module.PACKED.excluded


def test_models_with_their_own_attention_are_refused_and_still_work() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    model = randomise(AutoModelForCausalLM.from_config(config))
    ids = tokens(9)
    with torch.no_grad():
        required = model(ids).logits
        reason = why_unsupported(model)
        assert reason is not None
        assert "Bloom" in reason
        with (
            pytest.raises(Refusal, match=r"(?s)Bloom.*AttentionInterface.*keeps its own attention"),
            pcp_attention(model),
        ):
            pytest.fail("the block of a refused model ran")
        assert torch.equal(model(ids).logits, required)


def test_models_that_mask_by_the_name_of_their_attention_are_refused() -> None:
    """With another name, DeepSeek-V3.2 would not put its selection of keys into the mask."""
    from transformers.models.deepseek_v32 import DeepseekV32ForCausalLM

    holder = torch.nn.Module()
    with torch.device("meta"):
        fields = {**MODELS["deepseek_v3"], "index_topk": 4, "index_n_heads": 2, "index_head_dim": 8}
        config = AutoConfig.for_model("deepseek_v32", **SMALL, **fields)
        holder.model = DeepseekV32ForCausalLM(config)
    assert "by the name of its attention implementation" in str(why_unsupported(holder))


def test_plain_modules_are_refused() -> None:
    assert "no PreTrainedModel" in str(why_unsupported(torch.nn.Linear(1, 1)))


@pytest.mark.parametrize("name", MODELS)
def test_the_tiny_models_are_supported(name: str) -> None:
    assert why_unsupported(build(name)) is None


def test_unknown_positions() -> None:
    with (
        pytest.raises(ConfigError, match="'auto', 'consecutive' or 'packed'"),
        pcp_attention(build("llama"), positions="any"),  # type: ignore[arg-type]
    ):
        pytest.fail("the block of a refused option ran")


def trace(model: torch.nn.Module, ids: torch.Tensor, **inputs: Any) -> tuple[fx.Graph, torch.Tensor]:
    """The whole call as one graph with a dynamic token dim, and its logits."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: object) -> fx.GraphModule:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    for given in (ids, *inputs.values()):
        torch._dynamo.mark_dynamic(given, 1)
    logits = torch.compile(model, backend=keep, fullgraph=True)(ids, use_cache=False, **inputs).logits
    (gm,) = graphs
    return gm.graph, logits


def squares(graph: fx.Graph) -> list[str]:
    """Values with two token dims."""
    found = []
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            symbolic = [size for size in value.shape if not isinstance(size, int)]
            found += [node.name] if len(symbolic) > 1 else []
    return found


def attends(graph: fx.Graph) -> int:
    return sum("pcp.attend" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize("name", MODELS)
def test_a_traced_model_holds_no_mask(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        required = model(tokens(33), use_cache=False).logits
        with pcp_attention(model):
            graph, logits = trace(model, tokens(33))
    assert attends(graph) == 2
    assert squares(graph) == []
    assert error(logits, required) <= 1e-5


def test_a_call_from_inside_a_traced_function_holds_no_mask() -> None:
    model, graphs = build("mistral"), []

    def keep(gm: fx.GraphModule, inputs: object) -> fx.GraphModule:
        graphs.append(gm)
        return gm

    def scaled(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(ids, use_cache=False).logits
        return logits * 2

    ids = tokens(19)
    with torch.no_grad():
        required = scaled(ids)
        torch._dynamo.reset()
        torch._dynamo.mark_dynamic(ids, 1)
        with pcp_attention(model):
            found = torch.compile(scaled, backend=keep, fullgraph=True)(ids)
            assert not switch_module.PACKED.excluded
    assert [attends(gm.graph) for gm in graphs] == [2]
    assert squares(graphs[0].graph) == []
    assert error(found, required) <= 1e-5


def test_traced_positions_may_pack_unless_excluded() -> None:
    model, ids = build("llama"), tokens(20)
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad():
        required = model(ids, position_ids=packed, use_cache=False).logits
        with pcp_attention(model):
            graph, logits = trace(model, ids, position_ids=packed)
        assert attends(graph) == 0
        assert squares(graph)
        assert error(logits, required) <= 1e-5
        with pcp_attention(model, positions="packed"):
            graph, _ = trace(model, ids)
        assert attends(graph) == 0

        counted = torch.arange(2, 22)[None]
        required = model(ids, position_ids=counted, use_cache=False).logits
        with pcp_attention(model, positions="consecutive"):
            graph, logits = trace(model, ids, position_ids=counted)
        assert attends(graph) == 2
        assert squares(graph) == []
        assert error(logits, required) <= 1e-5


def test_traced_padding_stays_an_explicit_mask() -> None:
    model, ids = build("llama"), tokens(20, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    with torch.no_grad():
        required = model(ids, attention_mask=mask, use_cache=False).logits
        with pcp_attention(model):
            graph, logits = trace(model, ids, attention_mask=mask)
    assert attends(graph) == 0
    assert error(logits[1, 6:], required[1, 6:]) <= 1e-5
