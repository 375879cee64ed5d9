# SPDX-License-Identifier: Apache-2.0
"""Accepted counts: equal on all ranks whatever the rounding, different per request, never ahead of the device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.engine.state import DeviceState
from pcp_passes.errors import RankMismatch
from pcp_passes.passes.steps import broadcast_verified as module
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step import StepInputs, StepProgram, ops
from tests import steps as small
from tests.unit.engine_faults.world import (
    ATOL,
    difference,
    engine_run,
    reference,
    replace_op,
    run_mixed,
    schedule,
    verdict,
)

PCP = 2


def tied_program(verify_tokens: str) -> StepProgram:
    """The small models, but each token below the last has a twin with the same weights: every argmax is a tie."""
    target, drafter = small.target(PCP), small.drafter(PCP)
    weight = target.head.weight.detach().clone()
    weight[1:-1:2] = weight[0:-2:2]
    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    head.load_state_dict({"weight": weight})
    head.requires_grad_(False)
    models = replace(target, head=head), replace(drafter, head=head)
    return StepProgram(models[0], MTP(models[1], 3), pcp=PCP, verify_tokens=verify_tokens)  # type: ignore[arg-type]


def with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 rounds the logits of odd tokens one ULP up, as another kernel might; ranks verify one after another."""

    def noisy(logits: torch.Tensor, rank: int) -> torch.Tensor:
        up = torch.nextafter(logits, torch.full_like(logits, torch.inf))
        odd = torch.arange(logits.shape[1]) % 2 == 1
        return torch.where(odd & (rank == 1), up, logits)

    for op in (ops.verify, ops.sample_draft):
        turn = itertools.count()
        replace_op(
            monkeypatch, op, lambda original, logits, *rest, turn=turn: original(noisy(logits, next(turn) % PCP), *rest)
        )


def test_ranks_go_on_with_the_counts_of_rank_0_under_noise_of_one_ulp(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run_mixed(tied_program("broadcast"))
    with_noise(monkeypatch)
    noisy = run_mixed(tied_program("broadcast"))
    assert small.difference(noisy, wanted) < ATOL, "what rank 0 says is what it says without noise"
    assert any(any(request.accepted) for request in noisy.requests)


def test_without_the_broadcast_the_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run_mixed(tied_program("identical"))
    with_noise(monkeypatch)
    with pytest.raises(AssertionError, match="different tokens"):
        run_mixed(tied_program("identical"))


@pytest.mark.parametrize("left", ["verify", "draft"])
def test_half_a_broadcast_is_not_enough(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: only the drafts, or only what is verified, is taken from rank 0."""
    original = module._of_rank_0
    if left == "verify":
        monkeypatch.setattr(module, "_verified", lambda verify, ctx: None)
    else:
        monkeypatch.setattr(
            module, "_of_rank_0",
            lambda value, before, ctx: value if ops.is_op(value, ops.sample_draft) else original(value, before, ctx),
        )  # fmt: skip
    with_noise(monkeypatch)
    with pytest.raises(AssertionError, match="different tokens"):
        run_mixed(tied_program("broadcast"))


def test_the_engine_says_that_ranks_disagree_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(verify_tokens: str) -> Engine:
        made = Engine(SimulatedExecutor(tied_program(verify_tokens), EngineOptions(pcp=PCP, max_len=64)))
        made.add_request([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=8))
        return made

    quiet = engine("identical").run()
    with_noise(monkeypatch)
    with pytest.raises(RankMismatch, match="verify_tokens='broadcast'"):
        engine("identical").run()
    assert engine("broadcast").run()["request-0"].tokens == quiet["request-0"].tokens


DRAFT_COUNTS = ((0, 17), (1, 6), (3, 9)), ((0, 1), (1, 3), (3, 4)), ((1, 2), (3, 0), (0, 4))
"""Prefills, then verification of 1, 3 and 4 drafts in one batch, then of 2, 0 and 4."""


def draft_counts(pcp: int) -> small.Host:
    return small.run(small.program(pcp, 4), DRAFT_COUNTS)


@pytest.mark.parametrize("pcp", [2, 4])
def test_requests_verify_different_numbers_of_drafts(pcp: int) -> None:
    found = draft_counts(pcp)
    assert small.difference(found, draft_counts(1)) < ATOL
    accepted = [request.accepted for request in found.requests]
    assert any(sum(counts) for counts in accepted), f"no draft is accepted: {accepted}"


def test_assuming_one_count_for_all_requests_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the last row of a request is taken to be K rows after its first."""
    wanted, steps = draft_counts(1), 4

    def uniform(original: Any, cu_logits: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
        return (torch.arange(len(num_rejected)) * (1 + steps) + steps - num_rejected).clamp_max(int(cu_logits[-1]) - 1)

    replace_op(monkeypatch, ops.last_valid, uniform)
    assert small.difference(draft_counts(2), wanted) > 1e-3


REJECTING = schedule((9, 5, 14), max_tokens=12, temperature=0.8)


def test_positions_come_from_the_device_after_a_rejection() -> None:
    wanted = engine_run(REJECTING, 1)
    rejected = wanted.counts["drafted"] - wanted.counts["accepted"]
    assert rejected > 5, "the host's cursor runs ahead"
    assert not verdict(lambda: engine_run(REJECTING, 2), wanted)


def test_a_stale_host_cursor_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the device takes positions from the host, which counts drafts in flight as accepted."""
    wanted, original = engine_run(REJECTING, 1), DeviceState.prepare

    def stale(self: DeviceState, batch: ScheduledBatch) -> StepInputs:
        rows = torch.tensor([entry.row for entry in batch.entries])
        self.computed[rows] = torch.tensor([entry.start for entry in batch.entries])
        return original(self, batch)

    monkeypatch.setattr(DeviceState, "prepare", stale)
    assert verdict(lambda: engine_run(REJECTING, 2), wanted)


def test_positions_follow_the_device_cursor_alone() -> None:
    executor = SimulatedExecutor(small.program(PCP), EngineOptions(pcp=PCP, max_len=64, budget=20))
    engine = Engine(executor)
    engine.add_request(range(9), SamplingParams(max_tokens=12))
    engine.step()
    batch = engine.scheduler.schedule()
    assert batch is not None
    for rank in executor.ranks:
        before = rank.state.prepare(batch)
        rank.state.computed += 2
        after = rank.state.prepare(batch)
        assert torch.equal(after.positions, before.positions + 2)
        assert torch.equal(after.seq_lens, before.seq_lens + 2)
        assert not torch.equal(after.slots, before.slots)


def gathers(program: StepProgram) -> list[fx.Node]:
    assert program.sharded is not None
    return [node for node in program.sharded.graph.nodes if "all_gather_rows" in str(node.target)]


SHARING = {"topk": True, "share_topk": "owner"}


@pytest.mark.parametrize("index", range(3))
def test_every_restore_matters(index: int) -> None:
    """Sabotage: one restore (sampled rows of the target, top-k and sampled rows of the drafter) gives local rows."""
    wanted, program = reference(**SHARING), small.program(PCP, **SHARING)
    assert difference(program, wanted) < ATOL
    broken = small.program(PCP, **SHARING)
    found = gathers(broken)
    assert len(found) == 3
    node = found[index]
    local = node.args[0]
    with node.graph.inserting_before(node):
        own = node.graph.call_function(torch.cat, ([local] * PCP,))
    node.replace_all_uses_with(own)
    node.graph.erase_node(node)
    assert broken.sharded is not None
    broken.sharded.recompile()
    assert difference(broken, wanted) > 1e-3
