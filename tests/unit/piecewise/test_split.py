# SPDX-License-Identifier: Apache-2.0
"""split-piecewise: the split body is the body, to the bit; its pieces are few; and every broken split is seen."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from pcp_passes.collectives import bound_axis
from pcp_passes.engine.bodies import Model, capture
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.ir import invariants, meta
from pcp_passes.ir.copies import copy_graph_module
from pcp_passes.paged import AttentionInputs, PagedCaches, running
from pcp_passes.passes import PassContext
from pcp_passes.passes.bodies.split_piecewise import ON_SPLIT, split_pipeline
from pcp_passes.passes.observers import VerifyObserver
from pcp_passes.piecewise.cuts import NO_ROWS
from pcp_passes.piecewise.invariants import PIECEWISE
from pcp_passes.piecewise.listing import EagerEntry, PieceEntry, listing
from pcp_passes.piecewise.pieces import Slot, entered, pieces_of, static_slots
from pcp_passes.piecewise.split import split_body
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step import StepProgram
from tests import steps
from tests.unit.piecewise.splits import (
    CopyingRunner,
    alive_together,
    attend,
    between,
    body,
    constant,
    constant_beside_rows,
    lines,
    odd,
    odd_inside,
    run,
    several_results,
    sized,
    turned,
    two,
    view_of_eager,
)

pytestmark = pytest.mark.unit
CTX = PassContext(2)
GUARANTEED = (PIECEWISE, *ON_SPLIT)


def verified(gm: fx.GraphModule, collectives: Any = "outside") -> fx.GraphModule:
    """The split body, with every invariant that holds of one checked."""
    split = split_body(gm, CTX, collectives)
    invariants.check(GUARANTEED, split.graph, CTX)
    return split


def test_before_and_after() -> None:
    split = verified(body(between))
    assert lines(split) == [
        "%hidden : f64[sM, 8] = input",
        "%hold : f64[sM, 8] = pcp_graph.hold(%hidden, 'hidden', 0)",
        "%piece_0 : (f64[sM, 8]) = module piece_0(%hold, %first)",
        "%sin : f64[sM, 8] = operator.getitem(%piece_0, 0)",
        "%view : f64[sM, 2, 4] = aten.view(%sin, [-1, 2, 4])",
        "%kv_write : f64[0] = pcp.kv_write(%view, %view, 'target.0')",
        "%kv_attend : f64[sM, 2, 4] = pcp.kv_attend(%view, %kv_write, 'target.0', scale=0.5)",
        "%hold_1 : f64[sM, 2, 4] = pcp_graph.hold(%kv_attend, 'held.0', 0)",
        "%piece_1 : (f64[sM, 8]) = module piece_1(%hold_1, %second)",
        "%matmul_1 : f64[sM, 8] = operator.getitem(%piece_1, 0)",
        "%hold_2 : f64[sM, 8] = pcp_graph.hold(%matmul_1, 'result', 0)",
        "return %hold_2",
    ]
    first, second = pieces_of(split)
    assert lines(first.gm) == [
        "%in_0 : f64[sM, 8] = input",
        "%in_1 : f64[8, 8] = input",
        "%matmul : f64[sM, 8] = aten.matmul(%in_0, %in_1)",
        "%sin : f64[sM, 8] = aten.sin(%matmul)",
        "return (%sin,)",
    ]
    assert lines(second.gm)[2:] == [
        "%view_1 : f64[sM, 8] = aten.view(%in_0, [-1, 8])",
        "%matmul_1 : f64[sM, 8] = aten.matmul(%view_1, %in_1)",
        "return (%matmul_1,)",
    ]
    assert (second.held, second.parameter_inputs, second.rows) == ((0,), (1,), (0, 0))
    assert static_slots(split) == (
        Slot("hidden", (None, 8), torch.float64, 0), Slot("held.0", (None, 2, 4), torch.float64, 0),
        Slot("result", (None, 8), torch.float64, 0),
    )  # fmt: skip
    assert [(slot.bytes_per_row, slot.constant_bytes) for slot in static_slots(split)] == [(64, 0)] * 3


def test_the_body_is_not_changed() -> None:
    gm = body(between)
    before = lines(gm)
    split = split_body(gm, CTX)
    assert lines(gm) == before and not pieces_of(gm)
    assert split.first is gm.first


SHAPES = (
    between, odd, odd_inside, constant, constant_beside_rows, several_results, alive_together, view_of_eager, sized,
    turned, two,
)  # fmt: skip


@pytest.mark.parametrize("function", SHAPES)
def test_the_split_body_is_the_body(function: Any) -> None:
    gm = body(function)
    split = verified(gm)
    with entered(CopyingRunner()):
        held = [run(split, rows) for rows in (5, 5, 3)]
    for rows, under_runner in zip((5, 5, 3), held, strict=True):
        wanted, found = run(gm, rows), run(split, rows)
        for one, other, third in zip(*map(_each, (wanted, found, under_runner)), strict=True):
            assert torch.equal(one, other)
            if rows == 3:  # what lies in a slot is only the last step's
                assert torch.equal(one, third)


def _each(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _eager(gm: fx.GraphModule) -> dict[str, str]:
    return {entry.name: entry.reason for entry in listing(gm) if isinstance(entry, EagerEntry)}


def test_odd_sizes_stay_inside_a_piece_or_are_eager() -> None:
    assert {name for name, why in _eager(verified(body(odd))).items() if "a size of 8*sM" in why} == {
        "sin", "mul_17", "add_23",
    }  # fmt: skip
    assert not any("8*sM" in why for why in _eager(verified(body(odd_inside))).values())


def test_constants_alone_run_eagerly_and_are_held() -> None:
    split = verified(body(constant))
    assert _eager(split)["exp"] == NO_ROWS
    (slot,) = [slot for slot in static_slots(split) if slot.dim is None]
    assert (slot.shape, slot.bytes_per_row, slot.constant_bytes) == ((8, 8), 0, 512)
    assert "exp" not in _eager(verified(body(constant_beside_rows))), "beside rows they are made in the piece"


def test_dead_values_are_in_no_piece() -> None:
    gm = body(between)
    matmul = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.matmul.default)
    with gm.graph.inserting_after(matmul):
        dead = gm.graph.call_function(torch.ops.aten.cos.default, (matmul,))
    meta.set_value(dead, meta.compute_value(dead))
    meta.set_placement(dead, meta.placement(matmul))
    assert [piece.key for piece in pieces_of(verified(gm))] == [
        piece.key for piece in pieces_of(verified(body(between)))
    ]


def test_a_late_part_is_read_from_its_call() -> None:
    gm = body(several_results)
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes["kv_attend"].append(nodes["getitem_1"])  # still in front of what reads it
    split = verified(gm)
    assert torch.equal(run(split), run(body(several_results)))


def test_results_that_do_not_lie_row_after_row_are_copied() -> None:
    split = verified(body(turned))
    assert static_slots(split)[-1] == Slot("result", (8, None), torch.float64, 1)
    assert _eager(split)["clone_default"] == "makes what is held lie row after row"


def test_slots_are_shared_by_what_is_not_alive_together() -> None:
    def chain(module: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in range(5):
            x = x + attend(x.sin(), str(layer)) @ module.first
        return x

    assert [slot.name for slot in static_slots(verified(body(chain)))] == ["hidden", "held.0", "result"]
    held = [slot.name for slot in static_slots(verified(body(alive_together)))]
    assert held == ["hidden", "held.0", "held.1", "held.2", "result"]


def test_collectives_inside() -> None:
    gm = body(between, "sharded")
    outside, inside = verified(gm), verified(gm, "inside")
    assert "all_gather_rows" in _eager(outside) and "all_gather_rows" not in _eager(inside)
    assert any("2*sM" in line for line in lines(pieces_of(inside)[0].gm))
    rows = torch.randn(3, 8, dtype=torch.float64)
    for split in (outside, inside):
        with bound_axis("pcp", lambda x: torch.cat([x, x])), torch.no_grad(), running(*_two_ranks()):
            assert split(rows).shape == (3, 8)


def _two_ranks() -> tuple[PagedCaches, Any]:
    return PagedCaches(4, 4, torch.float64), AttentionInputs(
        slots=torch.arange(6), slot_layout="rank_major", block_tables=torch.arange(4, dtype=torch.int32)[None],
        query_start_loc=torch.tensor([0, 3]), seq_lens=torch.tensor([3]), positions=torch.arange(3),
    )  # fmt: skip


# models of whole programs


def split_model(model: Model) -> Model:
    """The model with all its bodies split and checked."""
    return replace(model, bodies={name: verified(gm) for name, gm in model.bodies.items()})


@pytest.mark.parametrize("pcp", [1, 2])
@pytest.mark.parametrize("topk", [False, True])
def test_whole_steps_are_equal_to_the_bit(pcp: int, topk: bool) -> None:
    made = StepProgram(split_model(steps.target(pcp)), MTP(split_model(steps.drafter(pcp, topk)), 3), pcp=pcp)
    plain = steps.run(steps.program(pcp, topk=topk))
    assert steps.difference(steps.run(made), plain) == 0.0


def test_a_block_drafter_is_equal_to_the_bit() -> None:
    drafter = steps.dspark()
    made = StepProgram(
        split_model(steps.target(2, aux=True)), replace(drafter, model=split_model(drafter.model)), pcp=2
    )
    assert steps.difference(steps.run(made), steps.run(steps.block_program(2))) == 0.0


@functools.cache
def hf(model_type: str) -> Model:
    pytest.importorskip("transformers")
    from tests.unit.transformers.test_targets import target

    return target(model_type)


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_targets_of_transformers_are_equal_to_the_bit(model_type: str) -> None:
    from tests.unit.transformers.test_targets import requests

    given = requests()
    bodies = hf(model_type).bodies
    split = {name: verified(gm) for name, gm in bodies.items()}
    one, other = given.caches(), given.caches()
    ranks, others = [given.caches() for _ in range(2)], [given.caches() for _ in range(2)]
    for rows in ((9, 1, 17, 0), (1, 1, 0, 9)):
        step = given.next(rows)
        assert torch.equal(step.run(bodies["replicated"], one), step.run(split["replicated"], other))
        found = step.run_sharded(split["sharded"], others)
        assert torch.equal(step.run_sharded(bodies["sharded"], ranks), found)


@pytest.mark.parametrize("store", ["native", "fp8"])
def test_packed_records_stay_inside(store: Any) -> None:
    model = hf("glm_moe_dsa").over(CTX, store)
    names = {line.split(" = ")[1].split("(")[0] for piece in pieces_of(verified(model.bodies["sharded"]))
             for line in lines(piece.gm) if " = " in line}  # fmt: skip
    assert names & {"pcp.pack_record", "pcp_kernels.dsa_pack", "pcp_kernels.index_pack"}, names


# equal layers


class Layers(nn.Module):
    """A small decoder of any depth."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(steps.VOCAB, steps.HIDDEN)
        self.layers = nn.ModuleList(steps.Layer(f"target.{i}") for i in range(count))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x, positions)
        return x


@pytest.mark.parametrize("variant", ["sharded", "replicated"])
def test_distinct_pieces_do_not_grow_with_layers(variant: str) -> None:
    counts = {}
    for layers in (3, 6):
        module = Layers(layers).double().requires_grad_(False)
        split = verified(capture(module, (torch.arange(7), torch.arange(7)), CTX)[variant])
        found = pieces_of(split)
        counts[layers] = {piece.key for piece in found}
        assert len(found) == layers + 1
        assert len({id(piece.gm) for piece in found}) == len(counts[layers]), "equal pieces share a module"
    assert counts[3] == counts[6] and len(counts[6]) == 3, "in front of, between and behind the attentions"


def test_a_key_tells_computation_and_types_apart() -> None:
    keys = {pieces_of(split_body(body(f), CTX))[0].key for f in (between, several_results, alive_together)}
    assert len(keys) == 3
    module = Layers(1).requires_grad_(False)
    single = capture(module, (torch.arange(7), torch.arange(7)), CTX)["replicated"]
    double = capture(module.double(), (torch.arange(7), torch.arange(7)), CTX)["replicated"]
    assert pieces_of(split_body(single, CTX))[1].key != pieces_of(split_body(double, CTX))[1].key


def test_a_listing_says_what_runs_and_why() -> None:
    first, write, attention, last = listing(verified(body(between)))
    assert isinstance(first, PieceEntry) and isinstance(last, PieceEntry)
    assert [(one.kind, one.slot, one.type) for one in last.inputs] == [
        ("held", "held.0", "f64[sM, 2, 4]"), ("parameter", "", "f64[8, 8]"),
    ]  # fmt: skip
    assert (first.kernels, first.nodes, last.kernels, last.nodes) == (2, 2, 1, 2)
    assert isinstance(write, EagerEntry) and isinstance(attention, EagerEntry)
    assert (write.op, write.module) == ("pcp.kv_write", "target.0") and "slots of the step" in write.reason
    assert attention.op == "pcp.kv_attend" and attention.source.startswith("splits.py:")


# refusals


def test_refusals() -> None:
    gm = body(between)
    with pytest.raises(ConfigError, match="collectives is 'no'; required one of outside, inside"):
        split_body(gm, CTX, "no")  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="calls modules") as caught:
        split_body(split_body(gm, CTX), CTX)
    assert "piece_0" in str(caught.value)
    sin = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.sin.default)
    sin.target = torch.ops.aten.sin_.default
    with pytest.raises(Refusal, match="writes into tensors") as caught:
        split_body(gm, CTX)
    assert "%sin" in str(caught.value)

    def flat(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return attend(hidden, "0").reshape(-1)

    with pytest.raises(Refusal, match="returns rows of one rank") as caught:
        split_body(body(flat), CTX)
    assert "8*sM" in str(caught.value)


def test_the_pipeline_verifies_the_split() -> None:
    gm = body(between, "sharded")
    report = split_pipeline("outside", (VerifyObserver("full"),)).run(copy_graph_module(gm), CTX)
    assert report.rewrites == {"split-piecewise": 2}


def test_an_input_that_does_not_lie_row_after_row_is_copied() -> None:
    gm = body(between)
    hidden = gm.graph.find_nodes(op="placeholder")[0]
    held = meta.tensor(hidden)
    assert held is not None
    with held.fake_mode:  # type: ignore[attr-defined]
        meta.set_value(hidden, torch.empty_strided(held.shape, (1, held.shape[0]), dtype=held.dtype))
    split = split_body(gm, CTX)
    invariants.check([PIECEWISE], split.graph, CTX)
    assert lines(split)[1:3] == [
        "%clone_default : f64[sM, 8] = aten.clone(%hidden, memory_format=torch.contiguous_format)",
        "%hold : f64[sM, 8] = pcp_graph.hold(%clone_default, 'hidden', 0)",
    ]
    assert torch.equal(run(split), run(body(between)))
