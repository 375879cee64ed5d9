# SPDX-License-Identifier: Apache-2.0
"""Body calls through graphs: equal to the bodies as they are, and one fault at a time, each seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pcp_passes.errors import GraphError
from pcp_passes.paged.state import AttentionInputs
from pcp_passes.piecewise import runner as runners
from pcp_passes.piecewise.pieces import Piece
from pcp_passes.piecewise.prepare import late_results, prepare
from pcp_passes.piecewise.replayer import GraphKey, GraphMode
from pcp_passes.piecewise.runner import StepDispatch
from pcp_passes.piecewise.static import Buffer
from pcp_passes.step import ops
from tests import graph_steps, steps

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
ATOL = 1e-11
"""Float64; measured up to 2e-14. A stale or moved row changes tokens, or caches by more than 1e-3."""


@pytest.mark.parametrize(("mode", "decode_mode"), [(PIECEWISE, FULL), (PIECEWISE, PIECEWISE), (NONE, FULL)])
@pytest.mark.parametrize("pcp", [1, 2])
def test_steps_through_graphs_are_the_steps(pcp: int, mode: GraphMode, decode_mode: GraphMode) -> None:
    host = graph_steps.run(steps.program(pcp), mode=mode, decode_mode=decode_mode)
    assert steps.difference(host, steps.run(steps.program(1))) < ATOL
    for runner in host.runners:
        assert sum(runner.captured.values()) and sum(runner.hits.values())
        assert runner.keys == host.runners[0].keys


@pytest.mark.parametrize("pcp", [1, 2])
def test_a_drafter_with_an_indexer_and_shared_choices(pcp: int) -> None:
    for share in ("off", "owner"):
        made = steps.program(pcp, topk=True, share_topk=share)
        host = graph_steps.run(made)
        assert steps.difference(host, steps.run(steps.program(1, topk=True, share_topk=share))) < ATOL


@pytest.mark.parametrize("pcp", [1, 2])
def test_a_block_drafter(pcp: int) -> None:
    host = graph_steps.run(steps.block_program(pcp))
    assert steps.difference(host, steps.run(steps.block_program(1))) < ATOL
    plain = host.runners[0].plain
    assert plain["drafter.context"] == (4 if pcp == 2 else 0), "its context pass of a sharded step has no bucket"


def test_keys_name_role_variant_mode_and_bucket() -> None:
    keys = {str(key) for key in graph_steps.run(steps.program(2)).runners[0].keys}
    assert keys == {
        "target.sharded piecewise 8", "drafter.sharded piecewise 8",    # 15 and 11 tokens on two ranks
        "target.sharded piecewise 16", "drafter.sharded piecewise 16",  # a step with three requests
        "target.replicated full 16x4", "drafter.replicated full 16x4",  # decoding: rows are requests * (1 + K)
        "target.replicated full 8x2", "drafter.replicated full 8x2",
        "drafter.replicated full 4x4", "drafter.replicated full 2x2",   # draft steps
    }  # fmt: skip


def test_after_the_freeze_nothing_is_captured() -> None:
    host = graph_steps.run(steps.program(2))
    captured = [dict(runner.captured) for runner in host.runners]
    for runner in host.runners:
        runner.freeze()
        runner.hits.clear()
    host.requests = steps.requests()
    for scheduled in steps.MIXED:
        host.step(scheduled)
    assert [dict(runner.captured) for runner in host.runners] == captured
    for runner in host.runners:
        assert set(runner.hits) == set(runner.keys), "every captured bucket is hit again"
    host.requests = steps.requests()
    with pytest.raises(GraphError, match=r"target.sharded piecewise 4 runs after the warm-up but was never captured"):
        host.step([(0, 3)])


def damaged(**given: Any) -> float:
    """How far graphs that may be broken are from the plain steps; infinite when no step can run on their tokens."""
    try:
        return steps.difference(graph_steps.run(steps.program(2), **given), steps.run(steps.program(1)))
    except IndexError:  # sampled from NaN
        return math.inf


def test_an_input_buffer_that_moves_is_refused() -> None:
    host = graph_steps.run(steps.program(2))
    ids = next(one for kind, one in host.runners[1].static.slots.items() if (kind.role, kind.name) == ("target", "ids"))
    ids.flat = ids.flat.clone()
    host.requests = steps.requests()
    with pytest.raises(
        GraphError, match=r"target.sharded piecewise 8 piece 0 cannot be replayed.*target ids is torch.int64"
    ):
        host.step([(0, 9), (1, 6)])


def test_a_moved_buffer_of_a_full_graph_is_refused() -> None:
    host = graph_steps.run(steps.program(2))
    lengths = host.runners[0].static.attention.seq_lens
    lengths.flat = lengths.flat.clone()
    with pytest.raises(GraphError, match=r"full \d+x\d cannot be replayed.*seq_lens is torch.int64"):
        host.step([(0, 3), (1, 3)])


@pytest.mark.parametrize("what", ["parameter", "cache"])
def test_weights_and_caches_that_move_are_refused(what: str) -> None:
    host = graph_steps.run(steps.program(1))
    if what == "cache":
        held = host.states[0].caches.tensors
        held["target.0.k"] = held["target.0.k"].clone()
        with pytest.raises(GraphError, match=r"target.replicated full .*: target.0.k is"):
            host.step([(0, 3), (1, 3)])
        return
    weight = dict(host.prepared.body("target", "replicated").call.body.named_parameters())["layers.0.qkv.weight"]
    kept = weight.data
    try:
        weight.data = kept.clone()
        with pytest.raises(GraphError, match=r"layers.0.qkv.weight is"):
            host.step([(0, 3), (1, 3)])
    finally:
        weight.data = kept  # captured models are shared by tests


def test_a_tensor_that_is_remembered_between_calls_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention inputs that keep the lengths of an earlier call, as a memo of derived values would."""
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def memoising(slots: Any, layout: Any, tables: Any, starts: Any, lengths: torch.Tensor, positions: Any) -> Any:
        kept = known.setdefault(lengths.shape, lengths.clone())
        return AttentionInputs(slots, layout, tables, starts, kept, positions)

    monkeypatch.setattr(runners, "AttentionInputs", memoising)
    with pytest.raises(
        GraphError, match=r"full .* reads of memory that nothing keeps: torch.int64.* at (state|attend).py"
    ):
        damaged()


def test_a_value_that_is_not_held_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners.BodyRunner, "hold", lambda self, value, slot, dim: value.clone())
    with pytest.raises(GraphError, match="at an address that nothing keeps"):
        damaged()


def test_a_stale_tail_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "_pad", lambda self, tail: None)
    with pytest.raises(GraphError, match=r"in padding row 0 of .*left by an earlier call"):
        damaged()


def test_a_stale_tail_would_write_over_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check is for: without it, a row of an earlier step is written again with other values."""
    monkeypatch.setattr(Buffer, "_pad", lambda self, tail: None)
    monkeypatch.setattr(runners.ReplayChecker, "filled", lambda self, *given: None)
    assert damaged() > 1e-3


def test_a_result_that_stays_in_a_graph_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = runners.BodyRunner.hold

    def skipping(self: Any, value: torch.Tensor, slot: str, dim: int | None) -> torch.Tensor:
        return value if slot == "result" else hold(self, value, slot, dim)

    monkeypatch.setattr(runners.BodyRunner, "hold", skipping)
    assert damaged() > 1e-3


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_attention_inputs_written_over_are_refused(mode: GraphMode) -> None:
    """A host that prepares the attention inputs of two draft steps before it runs the first."""
    host = graph_steps.run(steps.program(1))
    runner, call = host.runners[0], host.prepared.body("drafter", "replicated").call
    host.requests = steps.requests()
    inputs, _ = host.batch([(0, 3)])
    given = (inputs.input_ids, inputs.positions, torch.zeros(3, steps.HIDDEN, dtype=torch.float64))
    attention = ops.attention_inputs(
        inputs.slots, "replicated", host.pool[:1], inputs.query_start_loc, inputs.seq_lens, inputs.positions
    )
    runner.begin(StepDispatch(mode, rows=4, requests=1))
    first = runner.bind(call, given, attention)
    assert first is not None
    runner.static.attention.fill(attention, "draft step 2", 4, 1)
    with pytest.raises(GraphError, match=r"inputs of drafter.replicated .* but draft step 2 has written over them"):
        finished(first)


def finished(bound: runners.Bound) -> Any:
    """What a body call does with what it was given to run."""
    if bound.gm is None:
        return bound.finish(())
    with bound.enter():
        return bound.finish(bound.gm(*bound.operands))


def test_a_bucket_of_all_ranks_tokens_is_refused() -> None:
    host = graph_steps.GraphHost(steps.program(2), steps.requests())
    inputs, layout = host.batch([(0, 9), (1, 6)])
    for runner in host.runners:
        runner.begin(StepDispatch(PIECEWISE, rows=16, requests=2))
    with pytest.raises(
        GraphError, match=r"target.sharded has 8 rows on this rank and a bucket of 16; required exactly"
    ):
        host.program.simulate(host.states, [inputs] * 2, host.plans(inputs, layout))
    for runner in host.runners:
        runner.begin(StepDispatch(FULL, rows=8, requests=2))
    with pytest.raises(GraphError, match=r"target.sharded is sharded: it meets other ranks"):
        host.program.simulate(host.states, [inputs] * 2, host.plans(inputs, layout))


def test_buckets_that_are_too_small_are_refused() -> None:
    host = graph_steps.GraphHost(steps.program(1), steps.requests())
    inputs, _ = host.batch([(0, 9), (1, 6)])
    runner = host.runners[0]
    for dispatch, message in (
        (StepDispatch(PIECEWISE, rows=8), "has 15 rows on this rank and a bucket of 8; required at most"),
        (StepDispatch(FULL, rows=16, requests=1), "has 2 requests and a bucket of 1"),
        (StepDispatch(PIECEWISE, rows=32), "was allocated for 24 rows and is asked for 32"),
    ):
        runner.begin(dispatch)
        with pytest.raises(GraphError, match=message):
            host.program.run(host.states[0], inputs)


def test_beyond_the_bound_on_bytes_calls_run_without_graphs() -> None:
    host = graph_steps.run(steps.program(2), max_bytes=20_000)
    assert steps.difference(host, steps.run(steps.program(1))) < ATOL
    dropped = GraphKey("drafter", "sharded", PIECEWISE, 8)
    for runner in host.runners:
        assert dropped in runner.uncaptured and GraphKey("target", "sharded", PIECEWISE, 8) in runner.keys
        assert 0 < runner.captured_bytes <= 20_000 and runner.plain[str(dropped)]
        runner.freeze()
    host.requests = steps.requests()
    host.step([(0, 9), (1, 6)])  # a dropped call is not one that the warm-up forgot


def test_a_capture_that_an_error_cut_short_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first pieces would be replayed and the rest captured, over results that no longer keep their memory."""
    host = graph_steps.GraphHost(steps.program(1), steps.requests())
    inputs, _ = host.batch([(0, 9), (1, 6)])
    runner, run_piece = host.runners[0], runners.BodyRunner.run_piece

    def failing(self: Any, piece: Piece, args: Any) -> Any:
        if piece.index == 1:
            raise MemoryError("no room")
        return run_piece(self, piece, args)

    dispatch = runner.dispatch
    for broken in (True, False):
        monkeypatch.setattr(runners.BodyRunner, "run_piece", failing if broken else run_piece)
        runner.begin(dispatch)
        if broken:
            with pytest.raises(MemoryError):
                host.program.run(host.states[0], inputs)
            assert [key.piece for key in runner.replayer.keys] == [0]
        else:
            host.program.run(host.states[0], inputs)
    pieces = [key for key in runner.replayer.keys if key.role == "target"]
    assert len(pieces) > 2 and not any(runner.replayer.hits[key] for key in pieces)


def test_the_targets_result_is_the_drafters_operand() -> None:
    """Handed over without a copy, because nothing reads it after draft steps write over the slot."""
    prepared = prepare(steps.program(2))
    assert [(a.role, a.name, b.role, b.name) for a, b in prepared.shared.items()] == [
        ("drafter", "hidden", "target", "result")
    ]
    assert not prepared.late and not prepare(steps.block_program(2)).shared


def test_a_result_that_is_read_late_is_neither_shared_nor_left_in_place() -> None:
    made = steps.program(1)
    graph = made.plain.graph
    nodes = {node.name: node for node in graph.nodes}
    end = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(end):
        late = graph.call_function(ops.select_rows, (nodes["target"], nodes["logit_rows"]))
        again = graph.call_function(ops.select_rows, (nodes["drafter"], nodes["logit_rows"]))
    end.args = ((*end.args[0], late),)
    assert not prepare(made).shared
    end.args = ((*end.args[0], again),)
    assert [(v.name, r.name) for v, _, r in late_results(graph, "drafter")] == [("drafter", again.name)]
    assert prepare(made).late == {"drafter"}


def test_a_call_outside_the_simulator_runs_the_same() -> None:
    host, other = (graph_steps.GraphHost(steps.program(1), steps.requests()) for _ in range(2))
    for mode in (PIECEWISE, FULL, NONE):
        inputs, _ = host.batch([(0, 9), (1, 6)])
        for one in (host, other):
            one.runners[0].begin(StepDispatch(mode, rows=16, requests=2, draft_mode=mode))
        found = host.program.run(host.states[0], inputs)
        (expected,) = other.program.simulate(other.states, [inputs])
        assert torch.equal(found.logprobs, expected.logprobs) and torch.equal(found.drafts, expected.drafts)
    assert host.runners[0].captured == other.runners[0].captured


class Counting:
    """A compiler whose artifacts are the pieces' graphs, and may be refused."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, int]] = set()
        self.frozen = False

    def callable_for(self, piece: Piece, rows: int) -> Any:
        if self.frozen and (piece.key, rows) not in self.asked:
            raise GraphError(f"would compile for {rows} rows")
        self.asked.add((piece.key, rows))
        return piece.gm


def test_pieces_run_compiled_in_both_modes() -> None:
    compiler = Counting()
    host = graph_steps.run(steps.program(2), compiler=compiler)
    assert steps.difference(host, steps.run(steps.program(1))) < ATOL
    assert {rows for _, rows in compiler.asked} == {2, 4, 8, 16}, "sharded in pieces, replicated inside whole graphs"
    compiler.frozen = True
    host.requests = steps.requests()
    for scheduled in steps.MIXED:
        host.step(scheduled)


def test_a_piece_that_is_replayed_is_not_asked_for() -> None:
    compiler = Counting()
    host = graph_steps.run(steps.program(2), compiler=compiler, decode_mode=GraphMode.PIECEWISE)
    compiler.frozen, compiler.asked = True, set()  # whatever is asked for now is refused
    host.requests = steps.requests()
    for scheduled in steps.MIXED:
        host.step(scheduled)


def test_target_and_drafter_share_what_they_hold_between_pieces() -> None:
    """It is read within one body call; what they are given and give has buffers of its own."""
    prepared = prepare(steps.program(1, steps=2))
    held = [{kind for name, kind in prepared.body(role, "replicated").types.items() if name.startswith("held.")}
            for role in ("target", "drafter")]  # fmt: skip
    assert held[0] & held[1]
    owners = {kind.role for body in prepared.bodies.values() for name, kind in body.types.items() if name == "result"}
    assert owners == {"target", "drafter"}
