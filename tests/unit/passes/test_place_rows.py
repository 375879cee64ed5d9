# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pcp_passes.errors import PlacementConflict, Refusal
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Replicate, Shard
from pcp_passes.ir.rules import RowLocal, temporary_rule
from pcp_passes.passes import PassContext, PlaceRows, build_variants, copy_graph_module
from tests import toy, toy_runs

pytestmark = pytest.mark.unit
CTX = PassContext(4)
LAYER = "model.layers.0.attn"


def place(function, *args: torch.Tensor, ctx: PassContext = CTX):
    return toy_runs.apply([PlaceRows()], toy_runs.traced(function, *args), ctx)


def by_name(gm) -> dict:
    return {node.name: meta.placement(node) for node in gm.graph.nodes}


def test_token_rows_are_shard_and_the_rest_replicate() -> None:
    weight = torch.randn(4, 8)
    gm, results = place(lambda x: torch.nn.functional.linear(x, weight.T) * 2, torch.randn(6, 4))
    placements = [meta.placement(node) for node in gm.graph.nodes if meta.holds_tensor(node)]
    assert placements.count(Replicate()) == 2  # the weight and its transpose
    assert placements.count(Shard(0)) == len(placements) - 2 == results[0].rewrites - 2


def test_the_replicated_body_has_no_sharded_value() -> None:
    gm = toy_runs.captured()[1].gm
    body, _ = toy_runs.apply([PlaceRows()], gm, PassContext(4, variant="replicated"))
    assert set(by_name(body).values()) <= {Replicate(), None}


def test_a_graph_without_values_gives_a_reason() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    result = PlaceRows().run(gm.graph, CTX)
    assert result.rewrites == 0
    assert "captured with example values" in str(result.notes[0])


def unruled(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.pcp_toy.kv_cache_update(x, x, toy.LayerName(LAYER))


def test_every_family_member_without_a_rule_is_named_with_node_module_line_and_next_step() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x):
            dep = torch.ops.pcp_toy.kv_cache_update(x, x, toy.LayerName(LAYER))
            output = torch.empty_like(x)
            torch.ops.pcp_toy.attention_with_output(x, x, x, output, toy.LayerName(LAYER), kv_cache_dummy_dep=dep)
            return output

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention()

        def forward(self, x):
            return self.attn(x)

    gm = toy_runs.traced(Outer(), torch.randn(6, 2, 8))
    with (
        temporary_rule("pcp_toy::kv_cache_update", None),
        temporary_rule("pcp_toy::attention_with_output", None),
        pytest.raises(Refusal) as refused,
    ):
        PlaceRows().run(gm.graph, CTX)
    text = str(refused.value)
    assert text.startswith("pcp_toy::attention_with_output, pcp_toy::kv_cache_update cannot run on rows split over 4")
    assert [label for label, _ in refused.value.details].count("node") == 2
    for part in ("%dep : f32[0] = pcp_toy.kv_cache_update(", "module  attn  test_place_rows.py:", "place-rows",
                 "takes a layer name", "register_rule"):  # fmt: skip
        assert part in text, text


def test_an_op_named_like_attention_is_refused_without_a_layer_name() -> None:
    library = torch.library.Library("pcp_toy_other", "FRAGMENT")
    library.define("paged_attention(Tensor x) -> Tensor")
    torch.library.register_fake("pcp_toy_other::paged_attention", torch.empty_like, lib=library)
    gm = toy_runs.traced(lambda x: torch.ops.pcp_toy_other.paged_attention(x), torch.randn(6, 4))
    with pytest.raises(Refusal, match="is named like an op of the attention family"):
        PlaceRows().run(gm.graph, CTX)
    with temporary_rule("pcp_toy_other::paged_attention", RowLocal("a test says so")):
        assert PlaceRows().run(gm.graph, CTX).rewrites == 2


def test_attention_outside_the_cache_is_refused_with_its_reason() -> None:
    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    with pytest.raises(Refusal, match="attends over the rows of this rank alone"):
        place(attend, torch.randn(6, 2, 8))


def test_attention_that_writes_the_cache_itself_is_refused_unless_it_shares_one() -> None:
    def attend(x):
        output = torch.empty_like(x)
        torch.ops.pcp_toy.attention_with_output(x, x, x, output, toy.LayerName(LAYER))
        return output

    with pytest.raises(Refusal, match="no cache write precedes this op"):
        place(attend, torch.randn(6, 2, 8))
    shared = PassContext(4, shared_cache_layers=frozenset({LAYER}))
    gm, _ = place(attend, torch.randn(6, 2, 8), ctx=shared)
    attends = [node for node in gm.graph.nodes if meta.info(node).layer == LAYER]
    assert len(attends) == 1


def test_rows_captured_with_a_constant_count_are_refused() -> None:
    """One row is always specialised: nothing would be gathered, silently."""
    gm = toy_runs.copy_graph_module(toy.capture(toy_runs.captured()[0], rows=8, dynamic=False).gm)
    with pytest.raises(PlacementConflict, match="4 cache-write operands have no token dimension") as refused:
        PlaceRows().run(gm.graph, CTX)
    assert "operand 0 is f32[8, 2, 8]: its first size is not symbolic" in str(refused.value)
    assert "mark_dynamic" in str(refused.value)
    PlaceRows().run(gm.graph, PassContext(4, variant="replicated"))


@pytest.mark.parametrize(
    "mix, why",
    [
        (lambda x: x.sum(0), "reduces or selects over the token dimension"),
        (lambda x: x - x.mean(), "reduces or selects over the token dimension"),
        (lambda x: x[-1], "reduces or selects over the token dimension"),
        (lambda x: x.T @ x, "reduces or selects over the token dimension"),
        (lambda x: x @ x.T, "pairs rows with rows"),
        (lambda x: x.cumsum(0), "works along the token dimension"),
        (lambda x: torch.cumsum(x, dim=-2), "works along the token dimension"),
        (lambda x: torch.roll(x, 1, 0), "works along the token dimension"),
        (lambda x: torch.flip(x, (0,)), "works along the token dimension"),
        (lambda x: x.softmax(0), "works along the token dimension"),
        (lambda x: x.sort(dim=0).values, "works along the token dimension"),
        (lambda x: x.argsort(dim=0), "works along the token dimension"),
    ],
)
def test_ops_that_mix_rows_are_refused(mix, why: str) -> None:
    with pytest.raises(PlacementConflict, match=why) as refused:
        place(mix, torch.randn(6, 4))
    assert "mixes tokens, but its input is split over 4 pcp ranks" in str(refused.value)


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: x.sum(-1),
        lambda x: x.softmax(-1),
        lambda x: x.cumsum(1),
        lambda x: torch.topk(x, 2, dim=-1).indices,
        lambda x: x.sort(dim=-1).values,
        lambda x: torch.roll(x, 1, 1),
        lambda x: x @ torch.ones(4, 4),
        lambda x: x.view(-1),
        lambda x: torch.empty((x.shape[0], 3)),
    ],
)
def test_row_local_ops_are_not(keep) -> None:
    _, results = place(keep, torch.randn(6, 4))
    assert results[0].rewrites


def test_replicated_body_keeps_what_sharding_refuses() -> None:
    gm, _ = place(lambda x: x.sum(0), torch.randn(6, 4), ctx=PassContext(4, variant="replicated"))
    assert set(by_name(gm).values()) <= {Replicate(), None}


@pytest.mark.parametrize("pack", [True, False])
def test_a_rewritten_graph_is_refused(pack: bool) -> None:
    gm = toy_runs.captured()[1].gm
    bodies = build_variants(gm, CTX, pack=pack)
    with pytest.raises(Refusal, match=r"already been rewritten: it holds (2|4) collectives"):
        build_variants(bodies["sharded"], CTX)
    assert build_variants(copy_graph_module(gm), CTX)["sharded"] is not gm


def test_a_model_that_gathers_by_itself_is_refused() -> None:
    with pytest.raises(Refusal, match="already been rewritten: it holds 1 collectives"):
        place(lambda x: torch.ops.pcp.all_gather_rows(x, 4, "pcp"), torch.randn(6, 4))
