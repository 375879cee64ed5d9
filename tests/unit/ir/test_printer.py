# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import torch
from torch import fx

from pcp_passes.errors import RankMismatch
from pcp_passes.ir.invariants import same_on_all_ranks
from pcp_passes.ir.printer import dtype_text, graph_fingerprint, print_graph, print_node, rank_free_text, type_text
from pcp_passes.passes import PassContext, build_variants
from tests import toy, toy_runs

pytestmark = pytest.mark.unit


def body(pcp: int = 4) -> fx.GraphModule:
    return build_variants(toy_runs.captured()[1].gm, PassContext(pcp))["sharded"]


def test_one_line_per_node_with_type_placement_call_and_module() -> None:
    text = print_graph(body())
    symbol = re.search(r"^%(s\d+) : sym \1 = input$", text, re.MULTILINE).group(1)
    origin = r"   # layers\.0  toy\.py:\d+  layer model\.layers\.0\.self_attn\.attn  by lower-reshards\n"
    cat = f"%cat : f32[{symbol}, 32] shard(0) = torch.cat([%flatten, %flatten_1], 1)"
    gather = f"%all_gather_rows : f32[4*{symbol}, 32] rank_major = pcp.all_gather_rows(%cat, 4, 'pcp')"
    assert re.search(re.escape(cat) + origin, text)
    assert re.search(re.escape(gather) + origin, text)
    assert re.search(r" = torch.zeros\(.*   # layers\.0  toy\.py:\d+  changed by mask-padding\n", text)
    assert re.search(r"^%l_self_modules\S+ : f32\[61, 32\] replicate = input$", text, re.MULTILINE)
    assert ": layer 'model.layers.0.self_attn.attn' = input\n" in text
    assert len(text.splitlines()) == len(body().graph.nodes)


def test_options_leave_parts_out() -> None:
    text = print_graph(body(), numbered=True, placements=False, comments=False)
    assert "   # " not in text
    assert "rank_major" not in text
    assert text.startswith("%0 : ")


def test_text_of_two_captures_is_the_same() -> None:
    model = toy_runs.captured()[0]
    one, two = (build_variants(toy.capture(model).gm, PassContext(4))["sharded"] for _ in range(2))
    assert print_graph(one) == print_graph(two)
    assert graph_fingerprint(one) == graph_fingerprint(two)


def test_text_holds_no_address_path_or_group_object() -> None:
    def weird(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    gm = toy_runs.traced(weird, torch.randn(6, 4))
    add = next(node for node in gm.graph.nodes if node.op == "call_function")
    add.args = (*add.args, object(), weird)
    text = print_graph(gm)
    assert "0x" not in text
    assert "/" not in text
    assert "<object>, <function>" in text


def test_a_device_index_is_not_part_of_the_text() -> None:
    def graph(index: int) -> fx.Graph:
        graph = fx.Graph()
        graph.call_function(torch.empty, ((4,),), {"device": torch.device("cuda", index), "dtype": torch.float32})
        return graph

    assert print_graph(graph(0)) == print_graph(graph(3)) == "%empty = torch.empty((4,), device=cuda, dtype=f32)\n"


def test_arguments_of_every_kind() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(
        torch.add, (x, [1, (2,), {"k": x}], slice(None, 3), slice(0, None, 2), ..., None, True, 1.5, "text"),
        {"memory_format": torch.contiguous_format, "layout": torch.strided},
    )  # fmt: skip
    assert print_graph(graph).splitlines()[1] == (
        "%add = torch.add(%x, [1, (2,), {'k': %x}], :3, 0::2, ..., None, True, 1.5, 'text', "
        "memory_format=torch.contiguous_format, layout=torch.strided)"
    )


def test_methods_modules_and_outputs() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.proj(x).view(-1, 4), x

    lines = print_graph(fx.symbolic_trace(Holder()), comments=False).splitlines()
    assert lines[1:] == ["%proj = module proj(%x)", "%view = %proj.view(-1, 4)", "return (%view, %x)"]


def test_a_constant_is_part_of_the_text() -> None:
    def with_constant(value: int) -> fx.GraphModule:
        root = torch.nn.Module()
        root.register_buffer("offset", torch.tensor([value, 5]))
        graph = fx.Graph()
        graph.output(graph.get_attr("offset"))
        return fx.GraphModule(root, graph)

    zero, one = with_constant(0), with_constant(1)
    assert re.search(r"attribute offset #[0-9a-f]{12}$", print_graph(zero), re.MULTILINE)
    assert graph_fingerprint(zero) == graph_fingerprint(with_constant(0))
    assert graph_fingerprint(zero) != graph_fingerprint(one)


def test_a_parameter_is_not() -> None:
    root = torch.nn.Module()
    root.weight = torch.nn.Parameter(torch.ones(3))
    graph = fx.Graph()
    graph.output(graph.get_attr("weight"))
    assert "#" not in print_graph(fx.GraphModule(root, graph))


def test_fingerprints_ignore_symbol_and_node_names_only() -> None:
    base = body()
    renamed = body()
    for index, node in enumerate(renamed.graph.nodes):
        node.name = f"renamed_{index}"
    assert graph_fingerprint(renamed) == graph_fingerprint(base)
    assert graph_fingerprint(body(2)) != graph_fingerprint(base)
    changed = body()
    scale = next(node for node in changed.graph.nodes if node.args[1:] == (1e-06,))
    scale.update_arg(1, 2e-06)
    assert graph_fingerprint(changed) != graph_fingerprint(base)


def test_ranks_with_other_graphs_are_named_with_the_first_differing_line() -> None:
    texts = {
        0: rank_free_text(body()),
        1: rank_free_text(body()),
        2: rank_free_text(body(2)),
        3: rank_free_text(body()),
    }
    same_on_all_ranks(dict.fromkeys(texts, texts[0]))
    with pytest.raises(RankMismatch) as raised:
        same_on_all_ranks(texts)
    text = str(raised.value)
    assert "the graph of rank 2 differs from that of rank 0" in text
    assert re.search(r"^-.*all_gather_rows\(%\d+, 4", text, re.MULTILINE)
    assert re.search(r"^\+.*all_gather_rows\(%\d+, 2", text, re.MULTILINE)


def test_short_texts() -> None:
    assert dtype_text(torch.bfloat16) == "bf16"
    assert dtype_text(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert type_text((torch.zeros(2, 3), torch.zeros((), dtype=torch.int64))) == "(f32[2, 3], i64[])"
    assert type_text(None) == ""
    assert type_text((128, None)) == "(128, )"
    gm = body()
    assert print_node(next(n for n in gm.graph.nodes if n.name == "cat")).endswith(
        "torch.cat([%flatten, %flatten_1], 1)"
    )
