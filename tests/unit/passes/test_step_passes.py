# SPDX-License-Identifier: Apache-2.0
"""Passes on the step program: what each takes away and puts in, on programs of two ranks, and what it may not touch."""

import inspect
import re
from dataclasses import dataclass, field

import pytest
from torch import fx

from pcp_passes.errors import InvariantError
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes import STEP, Event, PassContext
from pcp_passes.passes.observers import VerifyObserver
from pcp_passes.passes.steps.broadcast_verified import broadcast_verified
from pcp_passes.passes.steps.elide_boundary import ElideBoundary, elide_boundary
from pcp_passes.passes.steps.lower_step import LowerStep, lower_step
from pcp_passes.passes.steps.place_step import PlaceStep, place_step
from pcp_passes.passes.steps.regather_block_tables import RegatherBlockTables, regather_block_tables
from pcp_passes.passes.steps.share_topk import share_topk
from pcp_passes.passes.steps.shift_draft_inputs import ShiftDraftInputs, shift_draft_inputs
from pcp_passes.passes.steps.sink_restores import SinkRestores, sink_restores
from pcp_passes.step import invariants, ops
from tests import steps

pytestmark = pytest.mark.unit
CTX = PassContext(2)


def lines(text: str) -> list[str]:
    """One node a line; a line that ends in a backslash goes on in the next."""
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def test_place_step_shards_and_restores_around_each_call() -> None:
    taken, put = steps.changes(steps.program(2, 0), "place-step")
    assert taken == lines("""
        %target : f64[sT, 16] replicate = module target.replicated(%input_ids, %positions, %attention_inputs, %caches)
        %sampled_hidden : f64[sL, 16] replicate = pcp_step.select_rows(%target, %logit_rows)
    """)
    assert put == lines("""
        %local_rows : i64[sM] shard(0) = input
        %gather_index : i64[2*sM] replicate = input
        %write_mask : b8[2*sM] replicate = input
        %row_request : i64[sN] shard(0) = input
        %row_query_start_loc : i64[sN + 1] shard(0) = input
        %restore_index : i64[sT] replicate = input
        %sampled_local : i64[sS] shard(0) = input
        %sampled_restore : i64[sL] replicate = input
        %shard : i64[sM] shard(0) = pcp.shard(%input_ids, %local_rows, 0, 1, 1)
        %shard_1 : i64[sM] shard(0) = pcp.shard(%positions, %local_rows, 0, 1, 1)
        %expanded_slots : i64[2*sM] rank_major = pcp_step.expand_slots(%slots, %gather_index, %write_mask)
        %row_requests : i64[sN] shard(0) = pcp_step.select_rows(%requests, %row_request)
        %row_tables : i32[sN, sB] shard(0) = \
            pcp_step.gather_block_tables(%block_table_pool, %row_requests, %table_buffer)
        %shard_2 : i64[sM] shard(0) = pcp.shard(%positions, %local_rows, 0, 1, 1)
        %row_lengths : i64[sN] shard(0) = pcp_step.row_lengths(%shard_2, %row_query_start_loc)
        %row_inputs : AttentionInputs shard(0) = \
            pcp_step.attention_inputs(%expanded_slots, 'rank_major', %row_tables, %row_query_start_loc, \
            %row_lengths, %shard_2)
        %target : f64[sM, 16] shard(0) = module target.sharded(%shard, %shard_1, %row_inputs, %caches)
        %restore : f64[sT, 16] replicate = pcp.restore(%target, %restore_index, 0, 1, 1, 2, 'pcp')
        %sampled_hidden : f64[sL, 16] replicate = pcp_step.select_rows(%restore, %logit_rows)
    """)


def test_elide_boundary_hands_the_hidden_states_on() -> None:
    taken, put = steps.changes(steps.program(2, 1), "elide-boundary")
    assert put[-1] == (
        "%drafter : f64[sM, 16] shard(0) = module drafter.sharded(%shard_3, %shard_1, %target, %row_inputs, %caches)"
    )
    assert "%shard_5 : f64[sM, 16] shard(0) = pcp.shard(%restore, %local_rows, 0, 1, 1)" in taken
    assert [line.partition(" ")[0] for line in put] == ["%row_lengths", "%row_inputs", "%drafter"]
    gone = {line.partition(" ")[0] for line in taken} - {"%row_lengths", "%row_inputs", "%drafter"}
    assert gone == {
        "%shard_2", "%shard_4", "%shard_5", "%shard_6", "%expanded_slots_1", "%row_requests_1", "%row_tables_1",
        "%row_lengths_1", "%row_inputs_1",
    }  # fmt: skip


def test_shift_draft_inputs_writes_over_the_targets_tokens() -> None:
    taken, put = steps.changes(steps.program(2, 1), "shift-draft-inputs")
    assert taken == lines("""
        %shard_3 : i64[sM] shard(0) = pcp.shard(%shift, %local_rows, 0, 1, 1)
        %drafter : f64[sM, 16] shard(0) = module drafter.sharded(%shard_3, %shard_1, %target, %row_inputs, %caches)
    """)
    assert put == lines("""
        %shard_into : i64[sM] shard(0) = pcp_step.shard_into(%shift, %local_rows, %shard)
        %drafter : f64[sM, 16] shard(0) = module drafter.sharded(%shard_into, %shard_1, %target, %row_inputs, %caches)
    """)


def test_sink_restores_gathers_rows_with_logits_only() -> None:
    taken, put = steps.changes(steps.program(2, 1), "sink-restores")
    assert put == lines("""
        %offered : f64[sS, 16] shard(0) = pcp_step.select_rows(%target, %sampled_local)
        %restored : f64[sL, 16] replicate = pcp.restore(%offered, %sampled_restore, 0, 1, 1, 2, 'pcp')
        %logits : f64[sL, 11] replicate = module target.head(%restored)
        %offered_1 : f64[sS, 16] shard(0) = pcp_step.select_rows(%drafter, %sampled_local)
        %restored_1 : f64[sL, 16] replicate = pcp.restore(%offered_1, %sampled_restore, 0, 1, 1, 2, 'pcp')
        %chosen : f64[sR, 16] replicate = pcp_step.select_rows(%restored_1, %last_valid)
        %logits_1 : f64[sR, 11] replicate = module drafter.head(%chosen)
    """)
    assert "%restore : f64[sT, 16] replicate = pcp.restore(%target, %restore_index, 0, 1, 1, 2, 'pcp')" in taken


def test_sink_restores_joins_what_is_restored_in_full() -> None:
    taken, put = steps.changes(steps.block_program(2, 1), "sink-restores")
    assert [line for line in put if "joined" in line] == lines("""
        %joined : f64[sM, 32] shard(0) = pcp_step.join_rows([%aux, %aux_1])
        %restored_1 : f64[sT, 32] replicate = pcp.restore(%joined, %restore_index, 0, 1, 1, 2, 'pcp')
    """)
    assert sum("pcp.restore(" in line for line in taken) == 3 and sum("pcp.restore(" in line for line in put) == 2


def test_regather_block_tables_repeats_the_gather_in_front_of_the_first_draft_step() -> None:
    taken, put = steps.changes(steps.program(2, 2), "regather-block-tables")
    assert put == lines("""
        %regathered : i32[sR, sB] replicate = pcp_step.gather_block_tables(%block_table_pool, %requests, %table_buffer)
        %draft_query : (i64[sR], i64[sR + 1], i64[sR], i64[sR]) replicate = \
            pcp_step.draft_query(%regathered, %positions_1, %num_sampled, 1, %caches)
        %attention_inputs_1 : AttentionInputs replicate = \
            pcp_step.attention_inputs(%slots_1, 'replicated', %regathered, %starts, %lengths, %rows, 1)
    """)
    assert taken == [put[0].replace("%regathered", "%tables"), *(x.replace("%regathered", "%tables") for x in put[1:])]


def test_regather_block_tables_makes_inputs_anew_that_were_made_before() -> None:
    _, put = steps.changes(steps.block_program(2, 2), "regather-block-tables")
    assert put[1:3] == lines("""
        %attention_inputs_2 : AttentionInputs replicate = \
            pcp_step.attention_inputs(%slots, 'replicated', %regathered, %query_start_loc, %seq_lens, %positions)
        %drafter : f64[0] replicate = module drafter.context(%positions, %restored_1, %attention_inputs_2, %caches)
    """)


def test_share_topk_gives_later_steps_the_choice_of_the_last_valid_row() -> None:
    taken, put = steps.changes(steps.program(2, 2, topk=True, share_topk="owner"), "share-topk")
    assert taken == lines("""
        %drafter_1 : (f64[sR, 16], i32[sR, 3]) replicate = \
            module drafter.replicated(%draft, %rows, %draft_hidden, %attention_inputs_1, %caches)
        %hidden_1 : f64[sR, 16] replicate = operator.getitem(%drafter_1, 0)
        %logits_2 : f64[sR, 11] replicate = module drafter.head(%hidden_1)
    """)
    assert put == lines("""
        %topk : i32[sT, 3] replicate = operator.getitem(%drafter, 1)
        %shared_topk : i32[sR, 3] replicate = pcp_step.select_rows(%topk, %last_rows)
        %drafter_1 : f64[sR, 16] replicate = \
            module drafter.replicated_shared(%draft, %rows, %draft_hidden, %shared_topk, %attention_inputs_1, %caches)
        %logits_2 : f64[sR, 11] replicate = module drafter.head(%drafter_1)
    """)


def test_the_shared_row_travels_like_the_sampled_ones() -> None:
    program = steps.program(2, 2, topk=True, share_topk="owner")
    shared = next(n for n in program.sharded.graph.nodes if "replicated_shared" in str(n.target)).args[3]
    path = []
    while shared.op != "placeholder" and "sharded" not in str(shared.target):
        path.append(str(getattr(shared.target, "__name__", shared.target)))
        shared = shared.args[0]
    assert path[:4] == ["select_rows", "select_rows", "all_gather_rows.default", "select_rows"]


def test_broadcast_verified_goes_on_with_the_rows_of_rank_0() -> None:
    _, put = steps.changes(steps.program(2, 1, verify_tokens="broadcast"), "broadcast-verified")
    assert put == lines("""
        %packed : i64[sR, 3] replicate = pcp_step.pack_verified(%verified, %accepted)
        %gathered : i64[2*sR, 3] rank_major = pcp.all_gather_rows(%packed, 2, 'pcp')
        %of_rank_0 : i64[sR, 3] replicate = pcp_step.of_rank_0(%gathered, %packed)
        %unpacked : (i64[sR, 2], i64[sR]) replicate = pcp_step.unpack_verified(%of_rank_0)
        %verified_1 : i64[sR, 2] replicate = operator.getitem(%unpacked, 0)
        %accepted_1 : i64[sR] replicate = operator.getitem(%unpacked, 1)
        %outcome : (i64[sR, 2], i64[sR], i64[sR], i64[sR]) replicate = \
            pcp_step.outcome(%verified_1, %accepted_1, %cu_logits, %next_prefill)
        %gathered_1 : i64[2*sR] rank_major = pcp.all_gather_rows(%draft, 2, 'pcp')
        %of_rank_1 : i64[sR] replicate = pcp_step.of_rank_0(%gathered_1, %draft)
        %drafts : i64[sR, 1] replicate = pcp_step.stack_drafts([%of_rank_1])
    """)
    plain = steps.program(2, 1, verify_tokens="broadcast").plain
    assert sum("all_gather_rows" in str(node.target) for node in plain.graph.nodes) == 2, "replicated steps too"


def test_lower_step_makes_a_gather_and_a_selection() -> None:
    taken, put = steps.changes(steps.program(2, 0), "lower-step")
    assert taken[0] == "%restored : f64[sL, 16] replicate = pcp.restore(%offered, %sampled_restore, 0, 1, 1, 2, 'pcp')"
    assert put[:2] == lines("""
        %gathered : f64[2*sS, 16] rank_major = pcp.all_gather_rows(%offered, 2, 'pcp')
        %restored_1 : f64[sL, 16] replicate = pcp_step.select_rows(%gathered, %sampled_restore)
    """)


@dataclass
class _Texts:
    """The sharded program in front of each pass and behind the last."""

    found: dict[str, list[str]] = field(default_factory=dict)
    before: dict[str, list[str]] = field(default_factory=dict)
    last: list[str] = field(default_factory=list)

    def observe(self, event: Event) -> None:
        if event.ctx.variant == "sharded":
            self.before[event.name], self.last = self.last, print_graph(event.graph, comments=False).splitlines()
            self.found[event.name] = self.last


def _shows(line: str, printed: list[str]) -> bool:
    """A docstring's model has 64 states in f32 and chooses 32 keys; it may leave out types, and ends of calls."""
    line = line.strip().replace("f32[", "f64[").replace(", 64]", ", 16]").replace("i32[sR, 32]", "i32[sR, 3]")
    pattern = re.escape(line.replace("i32[sT, 32]", "i32[sT, 3]")).replace(r"\.\.\.", ".*")
    return any(
        re.fullmatch(pattern, p) or re.fullmatch(pattern, re.sub(r" : .*? = ", " = ", p, count=1)) for p in printed
    )


@pytest.mark.parametrize("step", STEP, ids=[step.name for step in STEP])
def test_before_and_after_of_a_docstring_are_what_the_printer_prints(step) -> None:
    optional = step.name in ("share-topk", "broadcast-verified")
    options = {"topk": True, "share_topk": "owner", "verify_tokens": "broadcast"} if optional else {}
    texts = _Texts()
    steps.program(4, 3, observers=(texts,), **options)
    doc = inspect.cleandoc(type(step).__doc__ or "")
    blocks = re.findall(r"(?:Before|After)::\n\n(.*?)(?:\n\n(?=\S)|\Z)", doc, re.DOTALL)
    assert len(blocks) == 2
    for block, printed in zip(blocks, (texts.before[step.name], texts.found[step.name]), strict=True):
        missing = [line for line in block.splitlines() if not _shows(line, printed)]
        assert not missing, "\n".join([*missing, "not in", *printed])


def _placed() -> fx.GraphModule:
    return steps.with_passes(steps.program(2, 2), (PlaceStep(),)).sharded


@pytest.mark.parametrize("rewrite", [
    elide_boundary, shift_draft_inputs, sink_restores, regather_block_tables, share_topk, lower_step,
    lambda graph: broadcast_verified(graph, CTX),
])  # fmt: skip
def test_nothing_to_do_has_a_reason(rewrite) -> None:
    empty = fx.Graph()
    for name in ("input_ids", "logit_rows", "local_rows", "restore_index"):
        node = empty.placeholder(name)
        node.meta["val"] = steps.program(2, 0).plain.graph.find_nodes(op="placeholder")[0].meta["val"]
    empty.output(())
    result = rewrite(empty)
    assert result.rewrites == 0 and result.notes


def test_place_step_without_a_sharded_variant_says_so() -> None:
    program = steps.program(1, 0).plain
    del program.target
    for node in program.graph.find_nodes(op="call_module"):
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
    result = place_step(program.graph, CTX)
    assert result.rewrites == 0 and "no body call" in result.notes[0]


@pytest.mark.parametrize("unwanted", [ElideBoundary, ShiftDraftInputs, SinkRestores])
def test_a_pass_that_saves_can_be_left_out(unwanted) -> None:
    """Numerics of each pass: with it and without it the ranks do what one rank does."""
    alone = steps.run(steps.program(1, topk=True, share_topk="owner"))
    made = steps.without(steps.program(2, topk=True, share_topk="owner"), unwanted)
    assert steps.difference(steps.run(made), alone) < 1e-11


def test_without_the_regather_drafts_read_foreign_tables_and_the_invariant_names_the_reader() -> None:
    alone = steps.run(steps.program(1))
    made = steps.without(steps.program(2), RegatherBlockTables)
    with pytest.raises(InvariantError, match=r"BUFFERS_IN_ORDER(.|\n)*draft_query(.|\n)*after %row_tables"):
        invariants.buffers_in_order(made.sharded.graph, CTX)
    assert steps.damage(made, alone) > 1e-3


def test_without_lowering_a_program_does_not_run() -> None:
    made = steps.without(steps.program(2), LowerStep)
    with pytest.raises(InvariantError, match="RESTORES_LOWERED"):
        invariants.restores_lowered(made.sharded.graph, CTX)
    with pytest.raises(Exception, match="restore markers"):
        steps.run(made)


def test_every_intermediate_program_holds_what_must_always_hold() -> None:
    program = steps.program(2, topk=True, share_topk="owner", observers=(VerifyObserver("every"),))
    assert invariants.operands_fit(program.sharded.graph, CTX) is None


def test_rank_local_rows_may_not_be_sampled() -> None:
    """Sabotage of a restore: the head reads the rank's own rows."""
    graph = _placed().graph
    head = next(node for node in graph.nodes if str(node.target) == "target.head")
    local = next(node for node in graph.nodes if str(node.target) == "target.sharded")
    head.args = (local,)
    with pytest.raises(InvariantError, match=r"OPERANDS_FIT(.|\n)*operands %target shard\(0\); required \(replicate\)"):
        invariants.operands_fit(graph, CTX)


def test_a_sharded_body_may_not_run_under_replicated_slots() -> None:
    """Sabotage of a placement: row counts of the two can be equal, so only the statement can tell."""
    graph = _placed().graph
    call = next(node for node in graph.nodes if str(node.target) == "drafter.sharded")
    whole = next(node for node in graph.nodes if ops.is_op(node, ops.attention_inputs) and node.args[1] == "replicated")
    call.args = (*call.args[:-2], whole, call.args[-1])
    with pytest.raises(InvariantError, match=r"required \(shard\(0\), shard\(0\), shard\(0\), shard\(0\)\)"):
        invariants.operands_fit(graph, CTX)


def test_slots_must_be_what_they_are_said_to_be() -> None:
    graph = _placed().graph
    made = next(node for node in graph.nodes if ops.is_op(node, ops.attention_inputs) and node.args[1] == "rank_major")
    made.args = (made.args[0], "replicated", *made.args[2:])
    with pytest.raises(InvariantError, match="slots are said to be replicated, but are rank_major"):
        invariants.operands_fit(graph, CTX)


def test_a_result_must_be_global() -> None:
    graph = _placed().graph
    end = next(iter(reversed(graph.nodes)))
    local = next(node for node in graph.nodes if str(node.target) == "target.sharded")
    end.args = ((*end.args[0][:-1], local),)
    with pytest.raises(InvariantError, match="returned, but shard"):
        invariants.operands_fit(graph, CTX)


def test_a_buffer_may_not_be_read_after_it_was_written_over() -> None:
    """Sabotage of shift-draft-inputs: the target's tokens are read behind the shift."""
    program = steps.program(2, 1)
    graph = program.sharded.graph
    into = next(node for node in graph.nodes if ops.is_op(node, ops.shard_into))
    drafter = next(node for node in graph.nodes if str(node.target) == "drafter.sharded")
    drafter.args = (into.args[2], *drafter.args[1:])
    with pytest.raises(InvariantError, match="after %shard_into has written over it"):
        invariants.buffers_in_order(graph, CTX)
