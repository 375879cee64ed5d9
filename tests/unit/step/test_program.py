# SPDX-License-Identifier: Apache-2.0
"""Whole programs: P simulated ranks against one, in float64."""

import pytest
import torch

from pcp_passes.collectives import CollectiveLog
from pcp_passes.errors import ConfigError
from pcp_passes.layout import Batch, build_layout
from pcp_passes.passes.observers import VerifyObserver
from pcp_passes.speculative.mtp import MTP
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step import StepProgram, plan_inputs
from tests import steps

pytestmark = pytest.mark.unit
BOUND = 1e-11
"""Measured: at most 1.1e-14 where ranks are right; every sabotage of these tests gives other tokens or above 1e-3."""
CHECKED = {"observers": (VerifyObserver("every"),)}

VARIANTS = {
    "mtp": (lambda pcp: steps.program(pcp, **CHECKED), {}),
    "mtp sampled": (lambda pcp: steps.program(pcp, **CHECKED), {"temperature": 0.8}),
    "mtp certain drafts": (lambda pcp: steps.program(pcp, keep_draft_logits=False, **CHECKED), {"temperature": 0.8}),
    "mtp 1": (lambda pcp: steps.program(pcp, 1, **CHECKED), {}),
    "mtp 5": (lambda pcp: steps.program(pcp, 5, **CHECKED), {}),
    "no drafter": (lambda pcp: steps.program(pcp, 0, **CHECKED), {}),
    "naive": (lambda pcp: steps.program(pcp, optimize=False, **CHECKED), {}),
    "owned decodes": (lambda pcp: steps.program(pcp, **CHECKED), {"decode": "owner"}),
    "indexer": (lambda pcp: steps.program(pcp, topk=True, **CHECKED), {}),
    "shared top-k": (lambda pcp: steps.program(pcp, topk=True, share_topk="owner", **CHECKED), {}),
    "broadcast": (lambda pcp: steps.program(pcp, verify_tokens="broadcast", **CHECKED), {}),
    "block drafter": (lambda pcp: steps.block_program(pcp, **CHECKED), {"temperature": 0.5}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_sample_what_one_rank_samples(name: str) -> None:
    make, given = VARIANTS[name]
    alone = steps.run(make(1), **given)
    assert min(len(r.tokens) - r.prompt for r in alone.requests) > 0, "every request got tokens"
    for pcp in (2, 4):
        found = steps.run(make(pcp), **given)
        assert steps.difference(found, alone) < BOUND, f"{pcp} ranks"


def test_the_schedule_accepts_and_rejects() -> None:
    """Without both, the tests above would show less."""
    accepted = [count for request in steps.run(steps.program(1)).requests for count in request.accepted]
    assert 0 in accepted and 3 in accepted and {1, 2} & set(accepted)


def test_speculation_does_not_change_greedy_text() -> None:
    drafted = steps.run(steps.program(1))
    plain = steps.run(steps.program(1, 0), steps=(*steps.MIXED, *([tuple((r, 0) for r in range(4))] * 12)))
    for mine, theirs in zip(drafted.requests, plain.requests, strict=True):
        common = min(len(mine.tokens), len(theirs.tokens))
        assert common >= mine.prompt + 3
        assert mine.tokens[:common] == theirs.tokens[:common]


def test_shared_topk_changes_what_is_drafted() -> None:
    """So equality over ranks with it says something of its own."""
    own, shared = (steps.run(steps.program(1, topk=True, share_topk=option)) for option in ("off", "owner"))
    assert not torch.equal(own.outputs[0].draft_logits[:, 1], shared.outputs[0].draft_logits[:, 1])
    assert torch.equal(own.outputs[0].draft_logits[:, 0], shared.outputs[0].draft_logits[:, 0])


def test_prefilling_requests_sample_nothing_and_their_draft_steps_write_nothing() -> None:
    host = steps.Host(steps.program(2), steps.requests())
    found = host.step([(0, 9), (1, 6)])
    assert found.num_sampled.tolist() == [0, 1] and found.num_rejected.tolist() == [0, 0]
    assert found.sampled[0].tolist() == [-1] * 4
    assert int(found.next_token[0]) == host.requests[0].tokens[9]
    drafted = host.states[0].caches.tensors["drafter.0.k"].flatten(0, 1)
    beyond = [int(host.pool[0, p // steps.BLOCK]) * steps.BLOCK + p % steps.BLOCK for p in (9, 10, 11)]
    assert not drafted[beyond].any()
    behind = [int(host.pool[1, p // steps.BLOCK]) * steps.BLOCK + p % steps.BLOCK for p in (6, 7)]
    assert drafted[behind].abs().sum(dim=(1, 2)).gt(0).all(), "a decoding request drafts into its cache"


def test_a_dummy_step_takes_the_global_path_and_writes_nothing() -> None:
    program = steps.program(4)
    host = steps.Host(program, steps.requests())
    inputs, _ = host.batch([(0, 9), (1, 6)])
    dummy = type(inputs)(**{**vars(inputs), "slots": torch.full_like(inputs.slots, -1),
                            "block_table_pool": torch.full_like(inputs.block_table_pool, -1),
                            "seq_lens": torch.zeros_like(inputs.seq_lens)})  # fmt: skip
    logs: list[CollectiveLog] = []
    program.simulate(host.states, [dummy] * 4, None, logs=logs)
    assert [log.calls for log in logs] == [0] * 4
    assert not any(held.any() for state in host.states for held in state.caches.tensors.values())
    assert not any("regather" in node.name for node in program.plain.graph.nodes)


def test_the_block_table_buffer_keeps_its_address() -> None:
    host = steps.Host(steps.program(2), steps.requests())
    host.step([(0, 9), (1, 6), (2, 1), (3, 9)])
    before = [state.tables.data_ptr() for state in host.states]
    host.step([(1, 3), (0, 7)])
    assert [state.tables.data_ptr() for state in host.states] == before


def test_only_sharded_steps_communicate() -> None:
    host = steps.run(steps.program(2))
    assert [log.calls for log in host.logs] == [0, 0], "the last step only decodes"
    host.step([(0, 3)])
    assert [log.calls for log in host.logs] == [0, 0]


def test_a_replicated_layout_has_no_plan() -> None:
    layout = build_layout(Batch([1, 2], [4, 9], [4, 9]), 2)
    with pytest.raises(ConfigError, match="has no plan"):
        plan_inputs(layout, 0, [0, 1, 2])


def test_a_plan_for_one_rank_is_refused() -> None:
    host = steps.Host(steps.program(2), steps.requests())
    inputs, layout = host.batch([(0, 9)])
    plan = plan_inputs(layout, 0, inputs.logit_rows.numpy())
    with pytest.raises(ConfigError, match="built for pcp=1"):
        steps.program(1).run(host.states[0], inputs, plan)


def test_counts_of_ranks_must_agree() -> None:
    host = steps.Host(steps.program(2), steps.requests())
    inputs, _ = host.batch([(0, 9)])
    with pytest.raises(ConfigError, match="found 1 states, 2 inputs"):
        host.program.simulate(host.states[:1], [inputs] * 2)


def test_options_that_cannot_run_are_refused_before_anything_is_built() -> None:
    target, drafter = steps.target(2), steps.drafter(2)
    with pytest.raises(ConfigError, match="share_topk is 'both'"):
        StepProgram(target, MTP(drafter, 1), pcp=2, share_topk="both")
    with pytest.raises(ConfigError, match="verify_tokens is 'maybe'"):
        StepProgram(target, MTP(drafter, 1), pcp=2, verify_tokens="maybe")
    with pytest.raises(ConfigError, match="needs a drafter body 'replicated_shared'"):
        StepProgram(target, MTP(drafter, 2), pcp=2, share_topk="owner")
    with pytest.raises(ConfigError, match="needs a drafter with an indexer"):
        StepProgram(target, NoDrafter(), pcp=2, share_topk="owner")
    with pytest.raises(ConfigError, match=r"share cache layers target\.0, target\.1"):
        StepProgram(target, MTP(target, 1), pcp=2)
    with pytest.raises(ConfigError, match="steps=0"):
        MTP(drafter, 0)
    with pytest.raises(ConfigError, match="required 1 to 5"):
        steps.dspark(6)
    with pytest.raises(ConfigError, match="returns 0 auxiliary states"):
        StepProgram(target, steps.dspark(), pcp=2)


def test_a_body_of_another_group_size_is_found_at_its_first_collective() -> None:
    program = StepProgram(steps.target(4), NoDrafter(), pcp=2)
    with pytest.raises(ConfigError, match="gathers over 4 ranks"):
        steps.run(program)


def test_the_program_has_one_text_on_all_ranks() -> None:
    assert steps.program(2).fingerprint == steps.program(2).fingerprint
    others = {steps.program(2, 2).fingerprint, steps.program(4).fingerprint,
              steps.program(2, verify_tokens="broadcast").fingerprint}  # fmt: skip
    assert len(others) == 3 and steps.program(2).fingerprint not in others
