# SPDX-License-Identifier: Apache-2.0
"""Each part of a sharded program that makes it right, broken in turn: a test must see it."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx

from pcp_passes.passes.steps.broadcast_verified import BroadcastVerified
from pcp_passes.passes.steps.pipeline import STEP
from pcp_passes.passes.steps.regather_block_tables import RegatherBlockTables
from pcp_passes.step import StepInputs, StepPlanInputs, StepProgram, ops
from pcp_passes.step.calls import HeadCall
from tests import steps

pytestmark = pytest.mark.unit
SEEN = 1e-3
"""Intact programs differ by 1e-14 (test_program.py)."""


@pytest.fixture(scope="module")
def alone() -> steps.Host:
    return steps.run(steps.program(1))


def _rebuilt(gm: fx.GraphModule) -> None:
    gm.graph.lint()
    gm.recompile()
    gm.__dict__.pop("_pcp_segments", None)


def _nodes(program: StepProgram, op: ops.StepOp) -> list[fx.Node]:
    return [node for node in program.sharded.graph.nodes if ops.is_op(node, op)]


def _local_shift(program: StepProgram) -> None:
    """Each rank shifts its own tokens: right everywhere but at the edges of its chunks."""
    (into,) = _nodes(program, ops.shard_into)
    ids, rows = program.sharded.graph.find_nodes(op="placeholder")[0], into.args[1]

    def shifted(ids: torch.Tensor, rows: torch.Tensor, shift: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        own = ids[rows]
        following = torch.cat([own[1:], own[-1:]])
        last = torch.isin(rows + 1, rows, invert=True) & (shift[rows] != ids.roll(-1)[rows])
        return buffer.copy_(torch.where(last, shift[rows], following))

    with program.sharded.graph.inserting_before(into):
        made = program.sharded.graph.call_function(shifted, (ids, rows, into.args[0], into.args[2]))
    into.replace_all_uses_with(made)
    program.sharded.graph.erase_node(into)


def _tables_of_the_rank(program: StepProgram) -> None:
    """The buffer as the sharded calls left it, read as if its rows were those of the requests."""
    (again,) = [node for node in _nodes(program, ops.gather_block_tables) if "regathered" in node.name]
    graph = program.sharded.graph
    own, whole = (graph.find_nodes(op="placeholder", target=name)[0] for name in ("row_request", "requests"))
    with graph.inserting_before(again):
        rows = graph.call_function(lambda own, whole: own[torch.arange(len(whole)) % len(own)], (own, whole))
    again.args = (again.args[0], rows, again.args[2])


def _in_gathered_order(which: int) -> Callable[[StepProgram], None]:
    def break_(program: StepProgram) -> None:
        found = [node for node in _nodes(program, ops.select_rows) if str(node.args[1]) == "sampled_restore"][which]
        with program.sharded.graph.inserting_before(found):
            index = program.sharded.graph.call_function(lambda like: torch.arange(len(like)), (found.args[1],))
        found.args = (found.args[0], index)

    return break_


def _last_row_is_not_the_valid_one(program: StepProgram) -> None:
    (last,) = _nodes(program, ops.last_valid)
    with program.sharded.graph.inserting_after(last):
        made = program.sharded.graph.call_function(lambda last, cu: cu[1:] - 1, (last, last.args[0]))
    last.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _lengths_without_the_own_chunk(program: StepProgram) -> None:
    """A row's last key is that of its token; one less, and the token does not see itself."""
    (lengths,) = _nodes(program, ops.row_lengths)
    with program.sharded.graph.inserting_after(lengths):
        made = program.sharded.graph.call_function(lambda lengths: (lengths - 1).clamp_min(0), (lengths,))
    lengths.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _every_copy_is_written(program: StepProgram) -> None:
    """Slots without the write mask: padded rows write where token 0 goes."""
    for node in _nodes(program, ops.expand_slots):
        with program.sharded.graph.inserting_before(node):
            made = program.sharded.graph.call_function(torch.ones_like, (node.args[2],))
        node.args = (*node.args[:2], made)


GRAPHS: dict[str, Callable[[StepProgram], None]] = {
    "the shift is rank-local": _local_shift,
    "draft steps have the rank's tables": _tables_of_the_rank,
    "the target's restore is in gathered order": _in_gathered_order(0),
    "the drafter's restore is in gathered order": _in_gathered_order(1),
    "the drafter samples a rejected row": _last_row_is_not_the_valid_one,
    "a row ends one key early": _lengths_without_the_own_chunk,
    "padded rows are written": _every_copy_is_written,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_broken_program_is_seen(name: str, alone: steps.Host) -> None:
    program = steps.program(2)
    GRAPHS[name](program)
    _rebuilt(program.sharded)
    assert steps.damage(program, alone, decode="owner") > SEEN


def test_the_same_schedule_intact_is_not(alone: steps.Host) -> None:
    assert steps.damage(steps.program(2), alone, decode="owner") < 1e-11


class _Damaged(steps.Host):
    """A host that gives a rank something else of the plan."""

    break_: Callable[[list[StepPlanInputs], StepInputs], list[StepPlanInputs]]

    def plans(self, inputs, layout):
        plans = super().plans(inputs, layout)
        return plans if plans is None else type(self).break_(plans, inputs)


def _swap(name: str) -> Callable[[list[StepPlanInputs], StepInputs], list[StepPlanInputs]]:
    """Ranks get each other's part."""
    return lambda plans, inputs: [
        dataclasses.replace(plan, **{name: getattr(other, name)})
        for plan, other in zip(plans, reversed(plans), strict=True)
    ]


def _reverse(name: str) -> Callable[[list[StepPlanInputs], StepInputs], list[StepPlanInputs]]:
    return lambda plans, inputs: [dataclasses.replace(p, **{name: getattr(p, name).flip(0)}) for p in plans]


PLANS = {
    "local rows": _swap("local_rows"),
    "sampled rows": _swap("sampled_local"),
    "restore": _reverse("sampled_restore"),
    "gathered order": _reverse("gather_index"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_something_else_is_seen(name: str, alone: steps.Host) -> None:
    class Broken(_Damaged):
        break_ = staticmethod(PLANS[name])

    host = Broken(steps.program(2), steps.requests())
    try:
        for scheduled in steps.MIXED:
            host.step(scheduled)
    except (steps.RanksDifferError, IndexError):
        return
    assert steps.difference(host, alone) > SEEN


def test_stale_positions_are_seen(alone: steps.Host) -> None:
    """A host cursor that has not heard of a rejection: positions and slots one draft too far."""

    class Stale(steps.Host):
        def batch(self, scheduled):
            for request in self.requests:
                if request.accepted and request.accepted[-1] < self.program.steps and len(request.accepted) == 2:
                    request.computed += 1
            return super().batch(scheduled)

    host = Stale(steps.program(1), steps.requests())
    for scheduled in steps.MIXED:
        host.step(scheduled)
    assert steps.difference(host, alone) > SEEN


class _Noisy(torch.nn.Module):
    """A head whose logits are all but tied, and rounded differently by each rank that calls it."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.calls = ranks, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.ones(hidden.shape[0], steps.VOCAB, dtype=hidden.dtype)
        logits[:, self.calls % self.ranks] = torch.nextafter(torch.tensor(1.0).double(), torch.tensor(2.0).double())
        self.calls += 1
        return logits


def _noisy(verify_tokens: str) -> steps.Host:
    program = steps.program(2, verify_tokens=verify_tokens)
    for gm in (program.plain, program.sharded):
        noisy = _Noisy(2)
        for name in ("target.head", "drafter.head"):
            head = gm.get_submodule(name)
            assert isinstance(head, HeadCall)
            gm.set_submodule(name, HeadCall(noisy, steps.VOCAB, torch.float64))
        _rebuilt(gm)
    host = steps.Host(program, steps.requests())
    for scheduled in steps.MIXED:
        host.step(scheduled)
    return host


def test_broadcast_makes_ranks_agree_where_rounding_does_not() -> None:
    with pytest.raises(steps.RanksDifferError):
        _noisy("identical")
    host = _noisy("broadcast")
    assert all(len(request.tokens) > request.prompt for request in host.requests)


def test_without_the_broadcast_the_same_program_is_seen_to_differ() -> None:
    """Sabotage of the pass: everything but it runs."""
    assert BroadcastVerified in map(type, STEP) and RegatherBlockTables in map(type, STEP)
    names = [name for name, _ in steps.program(2, verify_tokens="broadcast").reports["sharded"].results]
    assert "broadcast-verified" in names
    assert "broadcast-verified" not in steps.program(2).reports["sharded"].rewrites
