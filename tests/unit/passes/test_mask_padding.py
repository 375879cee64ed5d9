# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pcp_passes.ir import invariants, meta
from pcp_passes.ir.rules import LocalQuery, temporary_rule
from pcp_passes.passes import SHARDED, MaskPadding, PassContext, PlaceRows
from tests import toy, toy_runs

pytestmark = pytest.mark.unit
CTX = PassContext(2)
STEPS = (PlaceRows(), MaskPadding())
OPS = torch.ops.pcp_toy


def attend(x: torch.Tensor, output: torch.Tensor) -> None:
    dep = OPS.kv_cache_update(x, x, toy.LayerName("attn"))
    OPS.attention_with_output(x, x, x, output, toy.LayerName("attn"), kv_cache_dummy_dep=dep)


def through(allocate):
    """A function that allocates with ``allocate`` and attends into the allocation."""

    def run(x: torch.Tensor) -> torch.Tensor:
        output = allocate(x)
        attend(x, output.view(-1, 2, 8))
        return output

    return run


def filled(x: torch.Tensor) -> torch.Tensor:
    output = x * 3
    view = output.view(-1, 2, 8)
    dep = OPS.kv_cache_update(x, x, toy.LayerName("attn"))
    view.zero_()
    OPS.attention_with_output(x, x, x, view, toy.LayerName("attn"), kv_cache_dummy_dep=dep)
    return output


PAIRS = {
    "empty": (
        lambda x: torch.empty((x.shape[0], 16), dtype=x.dtype, device=x.device),
        lambda x: torch.zeros((x.shape[0], 16), dtype=x.dtype, device=x.device),
    ),
    "empty, keyword size": (
        lambda x: torch.empty(size=(x.shape[0], 16), memory_format=torch.contiguous_format),
        lambda x: torch.zeros(size=(x.shape[0], 16)),
    ),
    "empty_like": (torch.empty_like, torch.zeros_like),
    "new_empty": (lambda x: x.new_empty((x.shape[0], 16)), lambda x: x.new_zeros((x.shape[0], 16))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_fresh_buffer_is_allocated_zero_filled(name: str) -> None:
    before, expected = (toy_runs.traced(through(allocate), torch.randn(6, 2, 8)) for allocate in PAIRS[name])
    after, results = toy_runs.apply(STEPS, before, CTX)
    assert toy_runs.structure(after) == toy_runs.structure(expected)
    assert results[1].rewrites == 1
    invariants.padding_defined(after.graph, CTX)
    invariants.meta_fresh_full(after.graph, CTX)


def test_a_buffer_that_is_no_fresh_allocation_is_filled_before_the_op() -> None:
    before = toy_runs.traced(through(lambda x: x * 3), torch.randn(6, 2, 8))
    after, results = toy_runs.apply(STEPS, before, CTX)
    assert toy_runs.structure(after) == toy_runs.structure(toy_runs.traced(filled, torch.randn(6, 2, 8)))
    assert "no fresh allocation" in str(results[1].notes[0])
    invariants.padding_defined(after.graph, CTX)
    invariants.no_new_alias(after.graph, CTX)


def test_the_pass_is_stable() -> None:
    before = toy_runs.traced(through(lambda x: x * 3), torch.randn(6, 2, 8))
    once, _ = toy_runs.apply(STEPS, before, CTX)
    twice, results = toy_runs.apply(STEPS, once, CTX)
    assert toy_runs.structure(once) == toy_runs.structure(twice)
    assert results[1].rewrites == 0
    assert "zero-filled already" in str(results[1].notes[0])


@pytest.mark.parametrize(
    "rule",
    [LocalQuery(query=0, output=3, writes_padding=True), LocalQuery(query=0, output=None)],
)
def test_an_op_that_defines_its_padding_is_left_alone_and_noted(rule: LocalQuery) -> None:
    before = toy_runs.traced(through(torch.empty_like), torch.randn(6, 2, 8))
    with temporary_rule("pcp_toy::attention_with_output", rule):
        after, results = toy_runs.apply(STEPS, before, CTX)
    assert results[1].rewrites == 0
    assert "defines its padded rows itself" in str(results[1].notes[0])
    assert toy_runs.structure(after) == toy_runs.structure(before)


def test_no_attention_gives_a_reason() -> None:
    _, results = toy_runs.apply(STEPS, toy_runs.traced(lambda x: x + 1, torch.randn(6, 4)), CTX)
    assert results[1].rewrites == 0
    assert "no attention in the graph" in str(results[1].notes[0])


def test_the_value_of_a_changed_allocation_is_still_shared_with_its_views() -> None:
    before = toy_runs.traced(through(PAIRS["empty"][0]), torch.randn(6, 2, 8))
    after, _ = toy_runs.apply(STEPS, before, CTX)
    zeros = next(node for node in after.graph.nodes if node.target is torch.zeros)
    view = next(node for node in after.graph.nodes if node.target == "view")
    assert meta.tensor(zeros).untyped_storage()._cdata == meta.tensor(view).untyped_storage()._cdata
    assert meta.info(zeros).changed_by == "mask-padding"
    assert meta.info(zeros).created_by is None


@pytest.fixture
def nan_filled_memory():
    """Uninitialised float memory reads NaN, so an undefined row shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_padded_rows_are_finite_and_without_the_pass_are_not(kind: str) -> None:
    world = toy.World(toy_runs.MIXED, 2)
    gm = toy_runs.captured(kind)[1].gm
    masked, _ = toy_runs.apply(SHARDED, gm, CTX)
    unmasked, _ = toy_runs.apply([step for step in SHARDED if step.name != "mask-padding"], gm, CTX)
    clean, sabotaged = (toy_runs.sharded(body, world, kind) for body in (masked, unmasked))
    assert len(clean.padded)
    assert clean.padded.isfinite().all()
    assert sabotaged.padded.isnan().all()
    torch.testing.assert_close(clean.restored, toy_runs.unsharded(world, kind), rtol=0, atol=1e-5)
