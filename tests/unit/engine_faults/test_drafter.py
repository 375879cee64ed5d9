# SPDX-License-Identifier: Apache-2.0
"""What the drafter is given: the globally next token, one permutation, its own metadata, the variant its rows need."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.errors import InvariantError
from pcp_passes.ir.copies import copy_graph, module_like
from pcp_passes.paged import AttentionInputs
from pcp_passes.passes.base import PassContext
from pcp_passes.step import StepProgram, ops
from pcp_passes.step.calls import BodyCall
from pcp_passes.step.invariants import operands_fit
from tests import steps as small
from tests.unit.engine_faults.world import ATOL, difference, reference, replace_op

PCP = 2
ENTRIES = ({"steps": 1}, {"steps": 3}, {"topk": True}, {"topk": True, "share_topk": "owner"},
           {"verify_tokens": "broadcast"}, {"keep_draft_logits": False}, {"steps": 0})  # fmt: skip


def body_calls(program: StepProgram) -> list[str]:
    assert program.sharded is not None
    return [
        str(node.target) for node in program.sharded.graph.find_nodes(op="call_module") if "head" not in node.target
    ]


@pytest.mark.parametrize("given", ENTRIES, ids=str)
@pytest.mark.parametrize("pcp", [2, 4])
def test_every_entry_point_of_the_drafter_runs_sharded_as_on_one_rank(given: dict[str, Any], pcp: int) -> None:
    program = small.program(pcp, **given)
    assert difference(program, reference(**given)) < ATOL
    later = "drafter.replicated_shared" if "share_topk" in given else "drafter.replicated"
    drafts = program.steps
    assert body_calls(program) == ["target.sharded", *["drafter.sharded"][:drafts], *[later] * (drafts - 1)]


def edited(edit: Callable[[fx.Graph, fx.Node], None]) -> StepProgram:
    """A program whose first draft pass is edited."""
    program = small.program(PCP)
    assert program.sharded is not None
    graph = program.sharded.graph
    (first,) = (node for node in graph.nodes if node.target == "drafter.sharded")
    with graph.inserting_before(first):
        edit(graph, first)
    program.sharded.recompile()
    return program


def test_an_entry_point_that_was_not_sharded_is_seen_in_the_graph_and_by_the_result() -> None:
    def unshard(graph: fx.Graph, first: fx.Node) -> None:
        first.target = "drafter.replicated"

    broken = edited(unshard)
    assert broken.sharded is not None
    with pytest.raises(InvariantError, match="OPERANDS_FIT"):
        operands_fit(broken.sharded.graph, PassContext(PCP))
    assert difference(broken, reference()) > 1e-3


class Given:
    """Operands of every call of the drafter's sharded body."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        original = BodyCall.nested

        def watched(call: BodyCall, operands: Any) -> Any:
            if call.layers == ("drafter.0",) and call.sharded:
                self.calls.append((operands[0].clone(), operands[1].clone()))
            return original(call, operands)

        monkeypatch.setattr(BodyCall, "nested", watched)

    def edges(self, host: small.Host) -> Iterator[tuple[int, int]]:
        """``(given, next)`` token at every real row that is not a request's last of the step."""
        calls = iter(self.calls)
        for scheduled in small.MIXED:
            inputs, layout = host.batch(scheduled)
            plans = host.plans(inputs, layout)
            host.step(scheduled)
            ends = set((inputs.query_start_loc[1:] - 1).tolist())
            rejecting = {
                r for r, (start, end) in enumerate(inputs.cu_logits.unfold(0, 2, 1).tolist()) if end - start > 1
            }
            owner = torch.repeat_interleave(torch.arange(len(scheduled)), inputs.query_start_loc.diff()).tolist()
            for plan, count in zip(plans or (), layout.per_rank_tokens, strict=bool(plans)):
                ids, positions = next(calls)
                assert torch.equal(positions, inputs.positions[plan.local_rows])
                for row, token in enumerate(plan.local_rows.tolist()):
                    if row < count and token not in ends and owner[token] not in rejecting:
                        yield int(ids[row]), int(inputs.input_ids[token + 1])


def locally_rolled(original: Any, x: torch.Tensor, rows: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Sabotage: at a shard's edge the next token is that of the rank's next row."""
    own = buffer.roll(-1)
    made = original(x, rows, buffer)
    edge = rows.roll(-1) != rows + 1
    ends_here = torch.isin(rows, rows[edge])
    return made.copy_(torch.where(ends_here & edge, own, made))


def test_at_a_shard_edge_the_drafter_sees_the_globally_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(monkeypatch)
    pairs = list(given.edges(small.Host(small.program(PCP), small.requests())))
    assert len(pairs) > 20
    assert all(operator.eq(*pair) for pair in pairs)


def test_a_roll_of_the_rank_s_own_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = reference()
    replace_op(monkeypatch, ops.shard_into, locally_rolled)
    assert difference(small.program(PCP), wanted) > 1e-3
    given = Given(monkeypatch)
    pairs = list(given.edges(small.Host(small.program(PCP), small.requests())))
    assert 0 < sum(mine != following for mine, following in pairs) < len(pairs) / 2, "at the edges only"


@pytest.mark.parametrize("operand", range(3), ids=["ids", "positions", "hidden"])
def test_one_permutation_for_ids_positions_and_hidden_states(operand: int) -> None:
    """Sabotage: one of them is in another order than the others."""

    def permute(graph: fx.Graph, first: fx.Node) -> None:
        turned = graph.call_function(torch.flip, (first.args[operand], [0]))
        first.update_arg(operand, turned)

    assert difference(edited(lambda graph, first: None), reference()) < ATOL
    assert difference(edited(permute), reference()) > 1e-3


@pytest.mark.parametrize("model", ["target", "drafter"])
def test_the_gather_of_new_cache_rows_matters_in_both_models(model: str) -> None:
    """Sabotage: in one body a rank writes its own rows in the place of every rank's."""
    program = small.program(PCP)
    assert program.sharded is not None
    call = program.sharded.get_submodule(f"{model}.sharded")
    assert isinstance(call, BodyCall)
    graph = copy_graph(call.body)
    for node in [node for node in graph.nodes if is_collective(node)]:
        with graph.inserting_before(node):
            own = graph.call_function(torch.cat, ([node.args[0]] * PCP,))
        node.replace_all_uses_with(own)
        graph.erase_node(node)
    broken = BodyCall(module_like(call.body, graph), call.variant, call.layers)
    program.sharded.get_submodule(model).sharded = broken
    assert difference(program, reference()) > 1e-3


class Metadata:
    """Attention inputs in the order they are made, each with copies of its tensors at that moment."""

    FIELDS = ("slots", "query_start_loc", "seq_lens", "positions", "block_tables")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[AttentionInputs, tuple[torch.Tensor, ...]]] = []

        def record(original: Any, *operands: Any) -> AttentionInputs:
            inputs = original(*operands)
            self.made.append((inputs, self.copies(inputs)))
            return inputs

        replace_op(monkeypatch, ops.attention_inputs, record)

    def copies(self, inputs: AttentionInputs) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(inputs, name).clone() for name in self.FIELDS)

    def changed(self) -> int:
        """Of the later draft steps' inputs, those whose tensors are not any more what they were."""
        later = [(inputs, before) for inputs, before in self.made if inputs.slot_layout == "replicated"]
        return sum(
            not all(map(torch.equal, self.copies(inputs), before)) for inputs, before in later if len(before[0]) <= 4
        )


def after_three_draft_steps(monkeypatch: pytest.MonkeyPatch) -> Metadata:
    host = small.Host(small.program(PCP, 4), small.requests())
    seen = Metadata(monkeypatch)
    host.step(((0, 17), (1, 6), (3, 9)))
    assert len(seen.made) == PCP * 4, "one of the first pass and one of each later step, per rank"
    return seen


def test_a_draft_step_leaves_the_metadata_of_the_steps_before_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert after_three_draft_steps(monkeypatch).changed() == 0


def test_metadata_in_shared_storage_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: every draft step writes its slots, lengths and positions over those of the one before."""
    shared: list[torch.Tensor] = []

    def reuse(original: Any, *operands: Any) -> Any:
        made = original(*operands)
        if not shared:
            shared.extend(held.clone() for held in made)
        return tuple(kept.copy_(new) for kept, new in zip(shared, made, strict=True))

    replace_op(monkeypatch, ops.draft_query, reuse)
    assert after_three_draft_steps(monkeypatch).changed() > 0
