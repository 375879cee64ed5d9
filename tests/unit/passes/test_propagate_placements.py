# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from pcp_passes.errors import Refusal
from pcp_passes.frontends.torch.capture import capture
from pcp_passes.ir import meta
from pcp_passes.passes import PassContext
from pcp_passes.passes.tokens.normalize import Normalize
from pcp_passes.passes.tokens.pipeline import TokenOptions, rewrite_tokens
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements
from tests.graphs import ATEN, Given, after, given, on_ranks, rewritten, traced, with_plan, worst
from tests.unit.frontends_torch.decoders import traced as through_dynamo

pytestmark = pytest.mark.unit
CTX = PassContext(4)
Tensor = torch.Tensor
IDS = given(1, "T", dtype=torch.int64, high=9)
TABLE, WEIGHT = given(9, 6), given(6, 6)


def placed(function: Callable[..., Any], *inputs: Given, **options: Any) -> tuple[dict[str, str], fx.Graph, Any]:
    """Placements by node name: ``replicate``, ``shard(1)``, or ``replicate, taken as shard(1)``."""
    gm, results = after(traced(function, *inputs), (Normalize(), PropagatePlacements(**options)), CTX)

    def text(node: fx.Node) -> str:
        rows = meta.info(node).rows
        return ", ".join(map(str, meta.placements(node))) + (f", taken as {rows}" if rows else "")

    nodes = [node for node in gm.graph.nodes if node.op != "output" and not node.name.startswith("pcp_")]
    return {node.name: text(node) for node in nodes}, gm.graph, results[-1]


def mixing(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    hidden = torch.nn.functional.embedding(a, b)
    mixed = (hidden @ c).cumsum(1)
    return torch.relu(mixed) + torch.arange(a.shape[1])[None, :, None]


def test_rows_begin_at_the_embedding_and_end_where_tokens_mix() -> None:
    found, _, result = placed(mixing, IDS, TABLE, WEIGHT)
    assert {found[name] for name in "abc"} == {"replicate"}
    assert found["embedding"] == found["cumsum"] == "replicate, taken as shard(1)"
    assert found["matmul"] == found["relu"] == "shard(1)"
    assert found["arange"] == found["unsqueeze"] == "replicate"
    assert [where for name, where in found.items() if name.startswith("add")] == ["shard(1)"]
    assert any("cumsum" in str(note) and "holds the tokens" in str(note) for note in result.notes)
    assert result.rewrites > 0


def test_a_floating_point_input_is_rows_and_an_integer_one_is_whole() -> None:
    found, *_ = placed(lambda a, b: (a * 2, b * 2), given("T", 6), given("T", dtype=torch.int64))
    assert (found["a"], found["b"]) == ("replicate, taken as shard(0)", "replicate")
    assert [where for name, where in found.items() if name.startswith("mul")] == ["shard(0)", "replicate"]


def test_two_token_dimensions_are_no_rows() -> None:
    found, _, result = placed(lambda a: a * 2, given("T", "T"))
    assert set(found.values()) == {"replicate"}
    assert result.rewrites == 0
    assert "nothing is sharded" in str(result.notes[-1])


def test_several_results_have_a_placement_each() -> None:
    found, *_ = placed(lambda a: a.topk(2, dim=-1), given("T", 6))
    assert found["topk"] == "shard(0), shard(0)"
    assert found["getitem"] == found["getitem_1"] == "shard(0)"


def test_results_of_a_fallback_are_taken_as_rows_only_where_they_have_them() -> None:
    def decomposed(a: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.linalg.qr(a))

    program = traced(decomposed, given("T", 3))
    found, *_ = placed(decomposed, given("T", 3))
    assert found["getitem"].endswith("shard(0)")
    assert found["getitem_1"] == "replicate"
    assert worst(program, rewritten(program, 3).gm, 3) < 1e-9
    local = rewritten(program, 2, outputs="local").gm
    arguments = program.arguments(8)
    for one in on_ranks(local, arguments, 8, 2):
        torch.testing.assert_close(one[1], program.gm(*arguments)[1])


# Through Dynamo, for module paths and source lines


class Inner(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.change(self.linear(x))
        return found


class Outer(nn.Module):
    def __init__(self, *changes: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(Inner(change) for change in changes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def model(*changes: Callable[[Tensor], Any]) -> Outer:
    torch.manual_seed(0)
    return Outer(*changes).eval().requires_grad_(False)


def through(module: nn.Module, pcp: int = 2, **options: Any) -> Tensor:
    """What the ranks of a rewritten model return, the same on all of them."""
    ids = torch.arange(8)[None] % 9
    graph, given_ = through_dynamo(module, ids, marked=[(ids, 1)])
    found = capture(graph, given_, rows=4)
    gm = rewrite_tokens(found.gm, found.space, PassContext(pcp), options=TokenOptions(**options)).gm
    first, *others = on_ranks(gm, given_, 8, pcp)
    assert all(torch.equal(first[0], other[0]) for other in others)
    result: Tensor = first[0]
    return result


@torch.library.custom_op("pcp_graphs::overwrite", mutates_args=("x",))
def overwrite(x: Tensor) -> None:
    x.mul_(2)


@overwrite.register_fake
def _(x: Tensor) -> None:
    return None


def strided(x: Tensor) -> Tensor:
    return x.as_strided((1, x.shape[1], 3), (x.shape[1] * 6, 6, 1)).repeat(1, 1, 2)


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def dropped(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5, training=True)


def written(x: Tensor) -> Tensor:
    x = x * 1
    overwrite(x)
    return x


def counted(x: Tensor) -> Tensor:
    return x + torch.nonzero(x[0, :, 0] > 0).sum()


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "as_strided": (strided, "reads storage by strides"),
    "random": (noisy, "draws random numbers"),
    "dropout": (dropped, "draws random numbers"),
    "mutation": (written, "is a custom op that writes its operands"),
    "data-dependent size": (counted, "has a size that depends on data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_op_its_reason_its_module_and_its_line(name: str) -> None:
    change, reason = REFUSED[name]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), pytest.raises(Refusal) as refused:
        through(model(torch.relu, change))
    text = str(refused.value)
    assert reason in text
    assert "layers.1" in text
    first = change.__code__.co_firstlineno
    lines = [int(line) for part in text.split("test_propagate_placements.py:")[1:] for line in [part.split()[0]]]
    assert any(first < line <= first + 4 for line in lines), text
    assert "next" in text and "%" in text


def test_a_refusal_names_every_offender() -> None:
    with pytest.raises(Refusal) as refused:
        through(model(noisy, torch.relu, dropped))
    text = str(refused.value)
    assert text.startswith("2 ops")
    assert "layers.0" in text and "layers.2" in text and "layers.1" not in text


def test_an_op_that_writes_its_operand_is_refused() -> None:
    gm = with_plan(traced(lambda a, b: torch.relu(a @ b), given("T", 6), WEIGHT))
    (product,) = gm.graph.find_nodes(op="call_function", target=ATEN.matmul.default)
    with gm.graph.inserting_after(product):
        writes = gm.graph.call_function(ATEN.mul_.Tensor, (product, 2))
    writes.meta = dict(product.meta)
    with pytest.raises(Refusal, match="writes one of its operands"):
        PropagatePlacements().run(gm.graph, CTX)


def test_a_custom_op_that_writes_its_operand_may_be_left_replicated() -> None:
    module = model(torch.relu, written)
    found = through(module, unknown="replicate", balance=1e-6)
    torch.testing.assert_close(found, module(torch.arange(8)[None] % 9))


def test_what_is_not_in_the_way_is_not_refused() -> None:
    """Dropout that is off, and strides of a weight, are no reason."""

    def quiet(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=False)

    through(model(quiet))

    program = traced(lambda a, b: a @ b.as_strided((6, 6), (1, 6)), given("T", 6), WEIGHT)
    assert worst(program, rewritten(program, 2).gm, 2) < 1e-9


def test_a_data_dependent_size_may_be_left_replicated() -> None:
    module = model(torch.relu, counted)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = through(module, unknown="replicate", balance=1e-6)
    torch.testing.assert_close(found, module(torch.arange(8)[None] % 9))


def test_a_module_may_be_left_replicated() -> None:
    module = model(torch.relu, torch.tanh)
    ids = torch.arange(8)[None] % 9
    graph, given_ = through_dynamo(module, ids, marked=[(ids, 1)])
    found = capture(graph, given_, rows=4)
    options = TokenOptions(replicate=("layers.1",), balance=1e-6)
    report = rewrite_tokens(found.gm, found.space, CTX, options=options).passes
    notes = [str(note) for name, result in report.results if name == "propagate-placements" for note in result.notes]
    assert notes and all("by request" in note for note in notes)
    assert any("layers.1" in note for note in notes) and not any("layers.0" in note for note in notes)
    torch.testing.assert_close(through(module, replicate=("layers.1",), balance=1e-6), module(ids))
