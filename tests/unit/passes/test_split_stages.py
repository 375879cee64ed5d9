# SPDX-License-Identifier: Apache-2.0
"""split-stages: a stage is what a model of just its layers captures to; what cannot be cut is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from pcp_passes.engine.bodies import capture
from pcp_passes.errors import ConfigError, InvariantError, Refusal
from pcp_passes.ir import meta
from pcp_passes.ir.copies import copy_graph_module
from pcp_passes.ir.placements import RankMajor, Replicate
from pcp_passes.ir.printer import rank_free_text
from pcp_passes.paged import kv_attend, kv_write
from pcp_passes.passes import PassContext, Variant
from pcp_passes.passes.bodies.split_stages import STAGED, SplitStages, require_whole, split_body, staged
from pcp_passes.passes.bodies.stage_cut import StageCut, Wire, decoder_layers, even_layers
from tests import steps

pytestmark = pytest.mark.unit
VARIANTS: tuple[Variant, ...] = ("sharded", "replicated")
IDS = torch.arange(7)


class First(nn.Module):
    """Embedding and layer 0 of :class:`tests.steps.Target`, under its names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(steps.VOCAB, steps.HIDDEN)
        self.layers = nn.ModuleList([steps.Layer("target.0")])

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layers[0](self.embed(ids), positions)[0],)


class Second(nn.Module):
    """Layer 1 and the norm, on what layer 0 gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"1": steps.Layer("target.1")})

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return steps._norm(self.layers["1"](rows, positions)[0])


@cache
def body(variant: Variant, aux: bool = False) -> fx.GraphModule:
    return steps.target(2, aux).bodies[variant]


def context(variant: Variant) -> PassContext:
    return PassContext(2, variant=variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_stage_is_what_its_layers_capture_to(variant: Variant) -> None:
    rows = torch.zeros(7, steps.HIDDEN, dtype=torch.float64)
    expected = [
        capture(First().double(), (IDS, IDS), PassContext(2))[variant],
        capture(Second().double(), (IDS, IDS, rows), PassContext(2))[variant],
    ]
    found = split_body(body(variant), context(variant), (1, 1))
    for stage, wanted in zip(found, expected, strict=True):
        assert rank_free_text(stage.gm) == rank_free_text(wanted)
    assert found[0].gives == found[1].takes == (Wire("add_79", (16,), torch.float64),)
    assert not found[0].takes and not found[1].gives
    assert set(dict(found[0].gm.named_parameters())) == {
        "embed.weight", "layers.0.qkv.weight", "layers.0.out.weight", "layers.0.place.weight"
    }  # fmt: skip


def test_what_depends_on_inputs_alone_is_computed_again() -> None:
    """Positions' sines are of no layer here: both stages make them, and one wire crosses."""
    first, second = split_body(made(Rotated()), context("replicated"), (1, 1))
    for stage in (first, second):
        assert sum(node.target is torch.ops.aten.sin.default for node in stage.gm.graph.nodes) == 1
    assert [wire.shape for wire in first.gives] == [(16,)]


def test_views_do_not_cross() -> None:
    """A drafter's state is a view of what the next stage goes on with: the rows cross once."""
    first, second = split_body(body("sharded", True), context("sharded"), (1, 1))
    assert len(first.gives) == 1
    given = second.gm.graph.find_nodes(op="placeholder")[-1]
    assert given in second.gm.graph.output_node().all_input_nodes  # handed on as it came


class Rotated(nn.Module):
    """Two layers that share what is computed of positions, on rows that stand behind a dimension of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(steps.VOCAB, steps.HIDDEN)
        self.layers = nn.ModuleList(self.layer(i) for i in range(2))

    def layer(self, index: int) -> nn.Module:
        return Attend(f"target.{index}")

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        angle = positions.double().sin()[None, :, None]
        x = self.embed(ids)[None]
        carry = None
        for layer in self.layers:
            x, carry = layer(x, angle, carry)
        return x[0]


class Attend(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.out = nn.Linear(steps.HIDDEN, steps.HIDDEN, bias=False)

    def write(self, rows: torch.Tensor, carry: Any) -> Any:
        return kv_write(rows, rows, self.name)

    def forward(self, x: torch.Tensor, angle: torch.Tensor, carry: Any) -> Any:
        rows = (x * angle)[0].view(-1, steps.HEADS, steps.DIM)
        written = self.write(rows, carry)
        found = kv_attend(rows, written, self.name)
        return x + self.out(found.reshape(1, -1, steps.HIDDEN)), written


class SharesCache(Attend):
    """The second layer attends over the first one's keys."""

    def write(self, rows: torch.Tensor, carry: Any) -> Any:
        self.name = "target.0"
        return super().write(rows, carry) if carry is None else carry


class InFront(Attend):
    """What crosses has a dimension of heads in front of its rows."""

    def forward(self, x: torch.Tensor, angle: torch.Tensor, carry: Any) -> Any:
        x, _ = super().forward(x, angle, None)
        heads = self.out(x).view(-1, steps.HEADS, steps.DIM).transpose(0, 1).contiguous() * 2
        return (x if carry is None else x + carry.sum((0, 2))[None, :, None]), heads


class Merged(Attend):
    """What crosses has two rows per token."""

    def forward(self, x: torch.Tensor, angle: torch.Tensor, carry: Any) -> Any:
        x, _ = super().forward(x, angle, None)
        return (x if carry is None else x + carry.view(x.shape)), self.out(x).view(-1, steps.DIM) * 2


def made(module: nn.Module) -> fx.GraphModule:
    return capture(module.double(), (IDS, IDS), PassContext(1))["replicated"]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (SharesCache, "keep the layers that share it in one stage"),
        (InFront, "has dimensions in front of its rows"),
        (Merged, "is no tensor with one dimension of rows"),
    ],
)
def test_what_is_not_a_row_per_token_may_not_cross(kind: type[Attend], why: str) -> None:
    class Model(Rotated):
        def layer(self, index: int) -> nn.Module:
            return kind(f"target.{index}")

    gm = made(Model())
    with pytest.raises(Refusal, match="one row per token") as caught:
        split_body(gm, context("replicated"), (1, 1))
    assert why in str(caught.value) and "layers.0" in str(caught.value)
    assert len(split_body(gm, context("replicated"), (2,))) == 1


def test_gathered_rows_and_later_layers_are_refused() -> None:
    gm = copy_graph_module(body("sharded"))
    wire = StageCut(gm.graph, (1, 1)).makes(0)[0]
    meta.set_placement(wire, RankMajor())
    with pytest.raises(Refusal, match="is rank_major; required rows of one rank"):
        StageCut(gm.graph, (1, 1))
    gm = copy_graph_module(body("sharded"))
    last = [node for node in gm.graph.nodes if meta.module_path(node) == "body.layers.0"][-1]
    made_by_layer_1 = next(node for node in gm.graph.nodes if meta.module_path(node) == "body.layers.1")
    made_by_layer_1.replace_input_with(made_by_layer_1.all_input_nodes[0], last)
    moved = gm.graph.output_node().all_input_nodes[0]
    for node in gm.graph.nodes:  # what layer 1 gives is said to be made in layer 0
        if node is moved:
            meta.restore(node, meta.value(node), meta.info(node), "body.layers.0")
    with pytest.raises(Refusal, match=r"a later stage[\s\S]*reads %\w+ of stage 1, and is in stage 0"):
        StageCut(gm.graph, (1, 1))


def test_layers_and_their_division() -> None:
    assert decoder_layers(body("sharded").graph) == ("body.layers.0", "body.layers.1")
    assert decoder_layers(steps.drafter(1).bodies["replicated"].graph) == ()
    assert [even_layers(n, pp) for n, pp in ((4, 2), (4, 3), (5, 3), (7, 4), (3, 1), (3, 3))] == [
        (2, 2), (1, 2, 1), (2, 2, 1), (2, 2, 2, 1), (3,), (1, 1, 1)
    ]  # fmt: skip
    for pp, why in ((3, "pp=3 stages need a layer each, and the model has 2; lower pp."), (0, "at least 1, found 0")):
        with pytest.raises(ConfigError, match=why):
            even_layers(2, pp)
    for layers in ((), (2, 0), (1, 2)):
        with pytest.raises(ConfigError, match="required a layer or more in each stage and 2 in all"):
            StageCut(body("sharded").graph, layers)


def test_staged_names_what_crosses_wrongly() -> None:
    def stage(index: int) -> fx.GraphModule:
        return copy_graph_module(split_body(body("sharded"), context("sharded"), (1, 1))[index].gm)

    last = stage(1)
    staged(last.graph, context("sharded"))
    with pytest.raises(InvariantError, match=rf"{STAGED}.*\n[\s\S]*is shard\(0\); required replicate"):
        staged(last.graph, context("replicated"))
    wire = last.graph.find_nodes(op="placeholder")[-1]
    meta.set_placement(wire, Replicate())
    with pytest.raises(InvariantError, match=r"%add_\w+ [\s\S]*is replicate; required shard\(0\)"):
        staged(last.graph, context("sharded"))
    first = stage(0)
    weight = first.graph.find_nodes(op="get_attr")[0]
    first.graph.output_node().args = ((*first.graph.output_node().args[0], weight),)
    with pytest.raises(InvariantError, match="crosses with sizes"):
        staged(first.graph, context("sharded"))
    whole = copy_graph_module(made(Rotated()))
    staged(whole.graph, context("replicated"))
    for node in whole.graph.nodes:
        if "kv_attend" in node.name:
            node.args = tuple("target.9" if argument == "target.0" else argument for argument in node.args)
    with pytest.raises(InvariantError, match=r"the cache of target.9, which no node of this stage writes"):
        staged(whole.graph, context("replicated"))


def test_stages_that_do_not_add_up_are_seen() -> None:
    """Sabotage: a stage twice, a stage left out, a gather dropped."""
    first, last = (stage.gm for stage in split_body(body("sharded"), context("sharded"), (1, 1)))
    require_whole(body("sharded"), [first, last])
    with pytest.raises(InvariantError, match=r"missing parameter layers.1.*too many parameter embed.weight"):
        require_whole(body("sharded"), [first, first])
    with pytest.raises(InvariantError, match=r"missing .*all_gather_rows.*write of target.1"):
        require_whole(body("sharded"), [first])
    with pytest.raises(InvariantError, match=r"missing nothing; too many .*all_gather_rows"):
        require_whole(body("replicated"), [first, last])


def test_the_pass_stands_for_one_stage() -> None:
    report = SplitStages((1, 1), 1).run(copy_graph_module(body("sharded")).graph, context("sharded"))
    assert report.rewrites == 1
    alone = SplitStages((2,), 0).run(copy_graph_module(body("sharded")).graph, context("sharded"))
    assert alone.rewrites == 0 and "nothing crosses" in str(alone.notes[0])
