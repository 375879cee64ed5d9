# SPDX-License-Identifier: Apache-2.0
import importlib.util
import operator
import re
from pathlib import Path

import pytest
import torch
from torch import fx

from pcp_passes.errors import ConfigError
from pcp_passes.ir import rules
from tests import toy, toy_runs

pytestmark = pytest.mark.unit

SPLITTING_OPS = """
unified_attention_with_output unified_mla_attention_with_output mamba_mixer2 mamba_mixer short_conv
qwen4_exp_ple_short_conv qwen4_exp_qsa_with_output qwen4_exp_qsa_prepare_with_output linear_attention
qwen_gdn_attention_core qwen_gdn_attention_core_fused_norm_packed gdn_attention_core_xpu
olmo_hybrid_gdn_full_forward sparse_attn_indexer rocm_aiter_sparse_attn_indexer deepseek_v4_attention
hpc_rope_norm_forward unified_kv_cache_update unified_mla_kv_cache_update
""".split()
"""Attention-family ops of vLLM 0.32 and 0.33: its splitting ops."""


@pytest.mark.parametrize("name", SPLITTING_OPS)
def test_every_splitting_op_of_vllm_has_a_rule_or_a_reason(name: str) -> None:
    assert (f"vllm::{name}" in rules.RULES) != (f"vllm::{name}" in rules.ABSENT)


def test_the_list_is_that_of_the_installed_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    source = (Path(spec.origin).parent / "config" / "compilation.py").read_text()
    listed = re.search(r"_attention_ops: ClassVar\[list\[str\]\] = \[(.*?)\]", source, re.DOTALL).group(1)
    found = set(re.findall(r'"vllm::(\w+)"', listed))
    assert found <= set(SPLITTING_OPS), "a new member of the attention family needs a rule, or a reason to have none"


def test_names_are_the_same_for_an_overload_and_its_packet() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    packet = torch.ops.pcp_toy.kv_cache_update
    names = [rules.op_name(graph.call_function(target, (x,))) for target in (
        packet, packet.default, torch.ops.aten.cat, torch.ops.aten.cat.default, torch.cat, operator.getitem,
        torch.nn.functional.linear, torch.nn.functional.silu,
    )]  # fmt: skip
    assert names == ["pcp_toy::kv_cache_update"] * 2 + ["aten::cat"] * 2 + [
        "torch::cat", "operator::getitem", "torch::linear", "torch::silu",
    ]  # fmt: skip
    assert rules.op_name(graph.call_method("view", (x,))) == "method::view"
    assert rules.op_name(x) == ""


def test_rules_can_be_added_and_taken_away() -> None:
    rule = rules.RowLocal("a test says so")
    with rules.temporary_rule("other::op", rule):
        assert rules.RULES["other::op"] == rule
        with rules.temporary_rule("other::op", None):
            assert "other::op" not in rules.RULES
        assert rules.RULES["other::op"] == rule
    assert "other::op" not in rules.RULES
    with pytest.raises(ConfigError, match="required 'namespace::op'"):
        rules.register_rule("unqualified", rule)


def attention_node(**extra) -> fx.Node:
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in ("query", "key", "value", "output", "layer_name")}
    return graph.call_function(torch.ops.pcp_toy.mla_attention_with_output, (inputs["query"], inputs["key"]), {
        "k_pe": inputs["value"], "output": inputs["output"], "layer_name": extra.get("layer", inputs["layer_name"]),
    })  # fmt: skip


def test_arguments_are_found_by_position_and_by_keyword() -> None:
    node = attention_node()
    assert [rules.argument(node, position).name for position in range(4)] == ["query", "key", "value", "output"]
    assert rules.argument(node, 5) is None
    assert rules.named_argument(node, "output").name == "output"
    assert rules.named_argument(node, "kv_c").name == "key"
    assert rules.named_argument(node, "kv_cache_dummy_dep") is None
    other = node.graph.placeholder("other")
    rules.set_argument(node, 1, other)
    rules.set_argument(node, 3, other)
    assert (node.args[1], node.kwargs["output"]) == (other, other)


def test_layer_names_are_found_hoisted_and_literal() -> None:
    assert rules.layer_of(attention_node(layer="model.layers.3.attn")) == "model.layers.3.attn"
    for kind in ("dense", "latent"):
        layers = [rules.layer_of(n) for n in toy_runs.captured(kind)[1].gm.graph.nodes if rules.rule_of(n)]
        assert layers == [f"model.layers.{i}.self_attn.attn" for i in (0, 0, 1, 1)]
    assert rules.layer_of(fx.Graph().call_function(torch.neg, ())) is None


def test_mutated_operands_are_found() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert rules.mutated_arguments(attention_node())[0].name == "output"
    for node, written in (
        (graph.call_method("add_", (x, y)), [x]),
        (graph.call_method("add", (x, y)), []),
        (graph.call_method("__len__", (x,)), []),
        (graph.call_function(operator.setitem, (x, 0, y)), [x]),
        (graph.call_function(operator.iadd, (x, y)), [x]),
        (graph.call_function(torch.add, (x, y), {"out": y}), [y]),
        (graph.call_function(torch.ops.aten.add_.Tensor, (x, y)), [x]),
        (graph.call_function(torch.ops.aten.add.Tensor, (x, y)), []),
        (graph.call_function(torch.relu_, (x,)), [x]),
    ):
        assert list(dict.fromkeys(rules.mutated_arguments(node))) == written, node


def test_plain_ops_are_never_refused() -> None:
    gm = toy_runs.captured()[1].gm
    assert [n for n in gm.graph.nodes if rules.why_refused(n)] == []
    with rules.temporary_rule("pcp_toy::kv_cache_update", None):
        assert len([n for n in gm.graph.nodes if rules.why_refused(n)]) == 2
    assert toy.ATTENTION_RULE.cache_dep == "kv_cache_dummy_dep"
