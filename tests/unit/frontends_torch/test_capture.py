# SPDX-License-Identifier: Apache-2.0
"""From a Dynamo graph to functional ATen: same values, same inputs, Dynamo's own graph untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from pcp_passes.errors import Refusal
from pcp_passes.frontends.torch.capture import Capture, DynamoGraph, capture
from pcp_passes.ir import fakes, meta
from pcp_passes.ir.printer import print_graph
from tests.unit.frontends_torch.decoders import decoder, tokens, traced

ATEN: Any = torch.ops.aten


def captured(function: Callable[..., Any], *args: Any, rows: int = 6, **options: Any) -> tuple[Capture, list[Any]]:
    """A capture made outside the backend, as the front end makes it."""
    graph, given = traced(function, *args, **options)
    return capture(graph, given, rows=rows), given


def of_decoder(count: int = 12) -> tuple[Capture, list[Any]]:
    ids = tokens(count)
    return captured(decoder(), ids, marked=[(ids, 1)])


def run(found: Capture, arguments: Sequence[Any]) -> Any:
    with torch.no_grad():
        return found.gm(*arguments)


def test_the_capture_computes_what_the_model_does() -> None:
    found, given = of_decoder()
    assert torch.equal(run(found, given)[0], decoder()(tokens(12))["logits"])


def test_the_capture_holds_for_other_lengths() -> None:
    found, given = of_decoder()
    for count in (2, 5, 33):
        arguments = list(given)
        for source in found.inputs:
            if source.last_name == "input_ids":
                arguments[source.index] = tokens(count)
            elif source.kind == "size":
                arguments[source.index] = count
        torch.testing.assert_close(run(found, arguments)[0], decoder()(tokens(count))["logits"], rtol=0, atol=1e-6)
        assert found.space.broken_guards(count, 6) == ()


def test_placeholders_are_those_of_dynamo_in_order() -> None:
    found, given = of_decoder()
    placeholders = found.gm.graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(found.inputs) == len(given)
    assert [node.name for node in placeholders][:2] == ["input_ids_size_1", "input_ids"]
    for node, source in zip(placeholders, found.inputs, strict=True):
        if source.is_parameter:
            assert node.name == source.source.replace(".", "_")


def test_attention_and_linear_stay_single_nodes_and_nothing_is_written_in_place() -> None:
    found, _ = of_decoder()
    targets = [node.target for node in found.gm.graph.nodes]
    assert targets.count(ATEN.scaled_dot_product_attention.default) == 2
    assert targets.count(ATEN.linear.default) == 9
    assert not [t for t in targets if isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable]


def test_every_node_has_a_value_of_the_fresh_environment() -> None:
    found, _ = of_decoder()
    for node in found.gm.graph.nodes:
        if node.op == "output" or node.target is ATEN._assert_tensor_metadata.default:
            continue
        assert meta.has_value(node), node.name
        assert fakes.fake_mode_of(meta.value(node)) in (None, found.space.fake_mode), node.name
    text = print_graph(found.gm)
    assert "input_ids : i64[1, sT]" in text and "f32[1, 4, sT, 8]" in text


def test_module_path_and_source_line_survive() -> None:
    found, _ = of_decoder()
    attention = [n for n in found.gm.graph.nodes if n.target is ATEN.scaled_dot_product_attention.default]
    assert [meta.module_path(node) for node in attention] == ["layers.0", "layers.1"]
    assert all(meta.source_line(node).startswith("decoders.py:") for node in attention)


def test_dynamos_graph_is_left_as_it_is() -> None:
    """Also when everything happens inside the backend: Dynamo reads its placeholders again afterwards."""

    def look(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[str, str, Capture]:
        before = str(gm.graph)
        made = capture(gm, inputs, rows=6)
        assert all("grapharg" in node.meta for node in gm.graph.find_nodes(op="placeholder"))
        return before, str(gm.graph), made

    ids = tokens(12)
    (before, after, made), given = traced(decoder(), ids, marked=[(ids, 1)], look=look)
    assert before == after
    assert torch.equal(run(made, given)[0], decoder()(ids)["logits"])


def test_floats_become_constants() -> None:
    model = decoder()
    found, given = captured(model, tokens(12), dynamic=True)
    folded = [source for source in found.inputs if source.kind == "float"]
    assert {source.last_name for source in folded} >= {"scale", "eps"}
    assert not any(found.gm.graph.find_nodes(op="call_function", target=ATEN._local_scalar_dense.default))
    assert "aten.mul.Tensor(%linear_1, 0.5)" in print_graph(found.gm)
    assert torch.equal(run(found, given)[0], model(tokens(12))["logits"])


def test_sizes_other_than_the_token_count_become_constants() -> None:
    ids = tokens(12, batch=3)
    graph, given = traced(decoder(), ids, marked=[(ids, 0), (ids, 1)])
    found = capture(graph, given, rows=6, tokens={"input_ids": 1})
    assert "f32[3, sT, 32]" in print_graph(found.gm)
    assert torch.equal(run(found, given)[0], decoder()(ids)["logits"])


def test_two_token_inputs_share_one_symbol() -> None:
    ids, positions = tokens(12), torch.arange(12)[None]
    graph, given = traced(decoder(), ids, positions, marked=[(ids, 1), (positions, 1)])
    found = capture(graph, given, rows=6, tokens={"input_ids": 1, "position_ids": 1})
    sizes = {str(node.meta["val"]) for node in found.gm.graph.find_nodes(op="placeholder") if "size" in node.name}
    assert sizes == {"sT"}, "both size inputs stay, and both are the token count"
    assert torch.equal(run(found, given)[0], decoder()(ids)["logits"])


def test_strides_of_inputs_are_kept() -> None:
    table = torch.randn(8, 12).t()
    found, _ = captured(lambda x: x + 1, table, marked=[(table, 0)])
    assert [str(s) for s in found.gm.graph.find_nodes(op="placeholder")[-1].meta["val"].stride()] == ["1", "sT"]


class Constant(nn.Module):
    """Holds a constant made in ``forward``, and sets modes that are set already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            return x * torch.tensor([1.0, 2.0, 3.0])


def test_constants_stay_attributes_with_their_value() -> None:
    x = torch.randn(12, 3)
    found, given = captured(Constant(), x, marked=[(x, 0)])
    (attribute,) = found.gm.graph.find_nodes(op="get_attr")
    assert torch.equal(getattr(found.gm, attribute.target), torch.tensor([1.0, 2.0, 3.0]))
    assert fakes.fake_mode_of(attribute.meta["val"]) is found.space.fake_mode
    assert torch.equal(run(found, given)[0], Constant()(x))


def test_modes_that_are_set_already_leave_no_node() -> None:
    x = torch.randn(12, 3)
    found, _ = captured(Constant(), x, marked=[(x, 0)])
    assert "autocast" not in print_graph(found.gm) and "grad" not in print_graph(found.gm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph, given = traced(Constant(), x, marked=[(x, 0)])
        inside = capture(graph, given, rows=6)
    assert "_enter_autocast" in print_graph(inside.gm), "here the region does turn something off"


def test_ambient_autocast_is_that_of_the_call() -> None:
    model, ids = decoder(), tokens(12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph, given = traced(model, ids, marked=[(ids, 1)])
        found = capture(graph, given, rows=6)
        assert torch.equal(run(found, given)[0], model(ids)["logits"])
        assert run(found, given)[0].dtype == torch.bfloat16


def test_parameters_left_on_dynamos_module_become_attributes() -> None:
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    gm.register_buffer("table", torch.arange(3.0))
    gm.register_parameter("weight", nn.Parameter(torch.ones(3)))
    x = gm.graph.placeholder("x")
    total = gm.graph.call_function(torch.add, (x, gm.graph.get_attr("table")))
    gm.graph.output((gm.graph.call_function(torch.mul, (total, gm.graph.get_attr("weight"))),))
    gm.recompile()
    rows = torch.randn(12, 3)
    donor, given = traced(lambda x: x + 1, rows, marked=[(rows, 0)])
    size, tensor = donor.inputs
    graph = DynamoGraph(gm, (type(tensor)(**{**vars(tensor), "index": 0}),))
    found = capture(graph, given[1:], rows=6)
    assert [node.name for node in found.gm.graph.find_nodes(op="placeholder")] == ["x"]
    assert torch.equal(run(found, given[1:])[0], rows + torch.arange(3.0))
    assert size.kind == "size"


class Counting(nn.Module):
    """Writes a buffer in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.sum(0))
        return x * 2


def test_a_written_buffer_comes_first_among_the_outputs() -> None:
    x = torch.randn(12, 3)
    model = Counting()
    graph, given = traced(model, x, marked=[(x, 0)])
    found = capture(graph, given, rows=6)
    assert [found.inputs[index].source for index in found.written] == ["seen"]
    new, doubled = run(found, given)
    assert torch.equal(new, x.sum(0) + model.seen)
    assert torch.equal(doubled, x * 2)


def test_writing_rows_of_tokens_is_refused_by_name() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return x + 1

    x = torch.randn(12, 3)
    graph, given = traced(function, x, marked=[(x, 0)])
    with pytest.raises(Refusal, match=r"writes into 1 of its inputs|no functional form") as error:
        capture(graph, given, rows=6)
    assert "unknown" in str(error.value) or "use_cache=False" in str(error.value)


def test_in_place_ops_on_intermediates_are_made_functional() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 0] = 5.0
        y.add_(1.0)
        return y

    x = torch.randn(12, 3)
    found, given = captured(function, x, marked=[(x, 0)])
    assert not [n for n in found.gm.graph.nodes if getattr(getattr(n.target, "_schema", None), "is_mutable", False)]
    assert torch.equal(run(found, given)[0], function(x))
