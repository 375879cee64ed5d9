# SPDX-License-Identifier: Apache-2.0
"""Every invariant holds on a clean body and is seen red on a body broken in exactly its way."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import fx

from pcp_passes.aten import consistency
from pcp_passes.collectives import all_gather_rows_op, is_collective
from pcp_passes.errors import InvariantError
from pcp_passes.ir import invariants, meta
from pcp_passes.ir.markers import reshard_op
from pcp_passes.ir.placements import RankMajor, Shard
from pcp_passes.passes import SHARDED, SHARDED_UNPACKED, PassContext
from pcp_passes.passes.bodies.dispatch_experts import DISPATCHED
from pcp_passes.passes.bodies.split_stages import STAGED
from pcp_passes.passes.steps.keep_stage import STAGE_FITS
from pcp_passes.piecewise.invariants import OF_SPLITS
from pcp_passes.step.invariants import OF_STEPS
from tests import toy, toy_runs

pytestmark = pytest.mark.unit
CTX = PassContext(4)


def body(steps=SHARDED) -> fx.GraphModule:
    return toy_runs.apply(steps, toy_runs.captured()[1].gm, CTX)[0]


def find(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def insert(before: fx.Node, target, *args, where=None) -> fx.Node:
    """A node as a pass would insert it."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    return meta.adopt(node, before, "sabotage", where or meta.placement(args[0]))


def unused_node(gm: fx.GraphModule) -> None:
    insert(find(gm, "dep"), torch.neg, find(gm, "k_1"))


def late_input(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(find(gm, "dep")):
        gm.graph.placeholder("late")


def stale_value(gm: fx.GraphModule) -> None:
    gather = find(gm, "all_gather_rows")
    meta.set_value(gather, meta.value(gather.args[0]))


def operand_changed_after(gm: fx.GraphModule) -> None:
    find(gm, "all_gather_rows").update_arg(0, find(gm, "flatten"))


def missing_value(gm: fx.GraphModule) -> None:
    find(gm, "cat").meta.pop("example_value")


def no_placement(gm: fx.GraphModule) -> None:
    find(gm, "cat").meta.pop("pcp_passes")


def ungathered_write(gm: fx.GraphModule) -> None:
    find(gm, "dep").update_arg(0, find(gm, "k_1"))


def gathered_query(gm: fx.GraphModule) -> None:
    find(gm, "attention_with_output").update_arg(0, find(gm, "unflatten"))


def mixed_operands(gm: fx.GraphModule) -> None:
    find(gm, "linear_1").update_arg(0, insert(find(gm, "linear_1"), torch.add, find(gm, "cat"), 1, where=RankMajor()))
    meta.set_placement(find(gm, "linear_1"), RankMajor())


def order_from_nowhere(gm: fx.GraphModule) -> None:
    meta.set_placement(find(gm, "flatten"), RankMajor())


def order_lost(gm: fx.GraphModule) -> None:
    meta.set_placement(find(gm, "all_gather_rows"), Shard(0))


def undefined_padding(gm: fx.GraphModule) -> None:
    find(gm, "output").target = torch.empty


def other_axis(gm: fx.GraphModule) -> None:
    find(gm, "all_gather_rows").update_arg(2, "tp")


def other_size(gm: fx.GraphModule) -> None:
    find(gm, "all_gather_rows").update_arg(1, 2)


def strided_operand(gm: fx.GraphModule) -> None:
    gather = find(gm, "all_gather_rows")
    gather.update_arg(0, insert(gather, torch.narrow, gather.args[0], 1, 0, 16))


def uneven_rows(gm: fx.GraphModule) -> None:
    gather = find(gm, "all_gather_rows")
    gather.update_arg(0, insert(gather, torch.repeat_interleave, gather.args[0], 2, 0))


def marker_left(gm: fx.GraphModule) -> None:
    gather = find(gm, "all_gather_rows")
    rows = insert(gather, reshard_op, gather.args[0], "shard", "rank_major", 4, "pcp", where=RankMajor())
    gather.replace_all_uses_with(rows)
    gm.graph.erase_node(gather)


def group_object(gm: fx.GraphModule) -> None:
    find(gm, "cat").kwargs = {"group": dist.ProcessGroup(0, 1)}


def asks_for_rank(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(find(gm, "cat")):
        gm.graph.call_function(dist.get_rank, ())


def one_device(gm: fx.GraphModule) -> None:
    find(gm, "cat").kwargs = {"device": torch.device("cuda", 1)}


def size_node(gm: fx.GraphModule) -> None:
    gather = find(gm, "all_gather_rows")
    rows = insert(find(gm, "dep"), torch.ops.aten.sym_size.int, gather, 0)
    find(gm, "unflatten").kwargs = {"size": rows}


def new_input(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        extra = gm.graph.placeholder("extra")
    meta.set_placement(extra, Shard(0))
    extra.meta["pcp_passes"] = meta.NodeInfo(Shard(0), created_by="sabotage")


def view_of_a_written_buffer(gm: fx.GraphModule) -> None:
    attend = find(gm, "attention_with_output")
    early = insert(attend, torch.flatten, attend.args[3], 1)
    late = find(gm, "linear_1")
    late.update_arg(0, early)


def returned_view(gm: fx.GraphModule) -> None:
    end = next(iter(reversed(gm.graph.nodes)))
    end.args = ((insert(end, torch.flatten, end.args[0][0]),),)


def returned_gather(gm: fx.GraphModule) -> None:
    end = next(iter(reversed(gm.graph.nodes)))
    end.args = ((find(gm, "all_gather_rows"),),)


def returned_sum(gm: fx.GraphModule) -> None:
    end = next(iter(reversed(gm.graph.nodes)))
    total = insert(end, torch.sum, end.args[0][0], 0, where=Shard(0))
    end.args = ((total,),)


RED: list[tuple[str, Callable[[fx.GraphModule], None], str]] = [
    (invariants.WELL_FORMED, unused_node, "used by nothing"),
    (invariants.WELL_FORMED, late_input, "an input after the first computation"),
    (invariants.META_FRESH, stale_value, "but its operands give f32[4*s"),
    (invariants.META_FRESH, operand_changed_after, "but its operands give"),
    (invariants.META_FRESH, missing_value, "no value"),
    (invariants.PLACED, no_placement, "no placement"),
    (invariants.CONFLICT_FREE, ungathered_write, "operand 0, %k_1, is shard(0); required rank_major"),
    (invariants.CONFLICT_FREE, gathered_query, "operand 0, %unflatten, is rank_major; required shard(0)"),
    (invariants.CONFLICT_FREE, mixed_operands, "reads rank-local and rank-major rows at once"),
    (invariants.ORDER_KNOWN, order_from_nowhere, "nothing it reads was gathered"),
    (invariants.ORDER_KNOWN, order_lost, "holds gathered rows, but is stated shard(0)"),
    (invariants.PADDING_DEFINED, undefined_padding, "%output_1 is not zero-filled"),
    (invariants.EQUAL_COLLECTIVES, other_axis, "required (4, 'pcp')"),
    (invariants.EQUAL_COLLECTIVES, other_size, "over (2, 'pcp')"),
    (invariants.EQUAL_COLLECTIVES, strided_operand, "is not contiguous"),
    (invariants.EQUAL_COLLECTIVES, uneven_rows, "required the bare token count"),
    (invariants.LOWERED, marker_left, "a marker has no body"),
    (invariants.RANK_FREE, group_object, "holds a process-group"),
    (invariants.RANK_FREE, asks_for_rank, "asks for the rank"),
    (invariants.RANK_FREE, one_device, "names one device"),
    (invariants.ONE_SYMBOL, size_node, "whose value is a size"),
    (invariants.ONE_SYMBOL, new_input, "an inserted input"),
    (invariants.NO_NEW_ALIAS, view_of_a_written_buffer, "after %attention_with_output wrote its storage"),
    (invariants.NO_NEW_ALIAS, returned_view, "inserted, and returned by the graph"),
    (invariants.NO_PARTIAL_OUT, returned_gather, "an output that is rank_major"),
    (invariants.NO_PARTIAL_OUT, returned_sum, "without a token dimension"),
]


OF_MESHES = {DISPATCHED, STAGED, STAGE_FITS}
"""Of bodies for several replicas or stages: tests/unit/passes/test_{dispatch_experts,split_stages}.py."""
# see tests/unit/{passes/test_step_passes,piecewise} for those of step programs and pieces
OF_BODIES = set(invariants.INVARIANTS) - OF_STEPS - OF_SPLITS - OF_MESHES


@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_a_clean_body_holds_every_invariant(kind: str) -> None:
    gm, _ = toy_runs.apply(SHARDED, toy_runs.captured(kind)[1].gm, CTX)
    invariants.check(OF_BODIES, gm.graph, CTX)
    invariants.meta_fresh_full(gm.graph, CTX)


@pytest.mark.parametrize("name, sabotage, found", RED, ids=[f"{name}-{s.__name__}" for name, s, _ in RED])
def test_a_broken_body_is_seen(name: str, sabotage: Callable[[fx.GraphModule], None], found: str) -> None:
    gm = body()
    sabotage(gm)
    with pytest.raises(InvariantError) as raised:
        invariants.check([name], gm.graph, CTX)
    text = str(raised.value)
    assert text.startswith(f"{name}: ")
    assert found in text, text
    assert "  next    " in text


def test_unpacked_gathers_of_one_write_are_seen() -> None:
    with pytest.raises(InvariantError, match=r"COALESCED.*2 offenders") as raised:
        invariants.coalesced(body(SHARDED_UNPACKED).graph, CTX)
    assert "2 collectives for 1 dtype(s)" in str(raised.value)


def test_every_invariant_has_a_red_test() -> None:
    of_tokens = {consistency.ROWS_CONSISTENT, consistency.SIZES_SHARED}  # tests/unit/aten/test_consistency.py
    assert {name for name, *_ in RED} | {invariants.COALESCED} | of_tokens == OF_BODIES


def test_all_offenders_are_listed_with_module_and_pass() -> None:
    gm = body()
    for node in gm.graph.nodes:
        if node.target is torch.zeros:
            node.target = torch.empty
    with pytest.raises(InvariantError) as raised:
        invariants.padding_defined(gm.graph, CTX)
    text = str(raised.value)
    assert "2 offenders" in text
    assert re.findall(r"^  module  (layers\.\d)  toy\.py:\d+$", text, re.MULTILINE) == ["layers.0", "layers.1"]
    gm = body()
    for gather in filter(is_collective, list(gm.graph.nodes)):
        gather.update_arg(1, 8)
    with pytest.raises(InvariantError) as raised:
        invariants.equal_collectives(gm.graph, CTX)
    assert str(raised.value).count("  pass    lower-reshards") == 2


def test_full_freshness_sees_what_the_incremental_check_does_not() -> None:
    gm = body()
    far = find(gm, "linear_7")
    meta.set_value(far, meta.value(far.args[0]))
    invariants.meta_fresh(gm.graph, CTX)
    with pytest.raises(InvariantError, match="META_FRESH"):
        invariants.meta_fresh_full(gm.graph, CTX)


def test_lint_failures_are_ours_to_report() -> None:
    gm = body()
    gather = find(gm, "all_gather_rows")
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.call_function(all_gather_rows_op, (gather, 4, "pcp"))
    with pytest.raises(InvariantError, match="WELL_FORMED: fx lint failed"):
        invariants.well_formed(gm.graph, CTX)


def test_checks_change_nothing() -> None:
    gm = body()
    before = toy_runs.structure(gm)
    invariants.check(OF_BODIES, gm.graph, CTX)
    invariants.meta_fresh_full(gm.graph, CTX)
    assert toy_runs.structure(gm) == before
    assert toy.BLOCK == 4
