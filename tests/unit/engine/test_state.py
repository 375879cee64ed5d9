# SPDX-License-Identifier: Apache-2.0
"""Positions, slots and ids of a step come from the device; the host's cursor cannot leak into them."""

from __future__ import annotations

import pytest
import torch

from pcp_passes.engine.dummies import dummy_batch, without_writes
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import Entry, Request, ScheduledBatch
from pcp_passes.engine.state import DeviceState
from pcp_passes.step.inputs import StepInputs, StepOutputs
from tests.engine_double import ArithmeticExecutor, reference

OPTIONS = EngineOptions(block_size=4, num_blocks=64, max_len=40, max_requests=4)


def state_with_two() -> DeviceState:
    """Row 2 decodes at position 7, row 0 prefills from position 4."""
    state = DeviceState(OPTIONS, 3, "cpu")
    state.admit(2, [5] * 6, 6, SamplingParams(temperature=0.5, seed=9))
    state.set_blocks(2, 0, [11, 12, 13, 14])
    state.admit(0, list(range(20, 32)), 4, SamplingParams())
    state.set_blocks(0, 0, [1, 2, 3])
    state.computed[2], state.last_token[2] = 7, 40
    state.drafts[2] = torch.tensor([41, 42, 43])
    return state


def batch(start_of_decode: int = 7, drafts: int = 2) -> ScheduledBatch:
    decode, prefill = (
        Request("d", (5,) * 6, SamplingParams(), prefill_len=6),
        Request("p", tuple(range(20, 32)), SamplingParams(), prefill_len=12),
    )
    return ScheduledBatch(
        1,
        (
            Entry(decode, 0, 2, start_of_decode, 1 + drafts, drafts, False, -1),
            Entry(prefill, 0, 0, 4, 5, 0, True, 29),
        ),
    )


def test_a_mixed_step() -> None:
    inputs = state_with_two().prepare(batch())
    assert inputs.input_ids.tolist() == [40, 41, 42, 24, 25, 26, 27, 28]
    assert inputs.positions.tolist() == [7, 8, 9, 4, 5, 6, 7, 8]
    assert inputs.slots.tolist() == [12 * 4 + 3, 13 * 4, 13 * 4 + 1, 8, 9, 10, 11, 12]
    assert inputs.query_start_loc.tolist() == [0, 3, 8]
    assert inputs.seq_lens.tolist() == [10, 9]
    assert inputs.requests.tolist() == [2, 0]
    assert inputs.logit_rows.tolist() == [0, 1, 2, 7]
    assert inputs.cu_logits.tolist() == [0, 3, 4]
    assert inputs.draft_ids.tolist() == [[41, 42, -1], [-1, -1, -1]]
    assert inputs.next_prefill.tolist() == [-1, 29]
    assert inputs.temperature.tolist() == [0.5, 0.0] and inputs.seeds.tolist() == [9, 0]


def test_what_was_accepted_moves_the_device() -> None:
    state, step = state_with_two(), batch()
    outputs = StepOutputs(
        sampled=torch.tensor([[41, 30, -1, -1], [-1] * 4]),
        num_sampled=torch.tensor([2, 0]),
        num_rejected=torch.tensor([1, 0]),
        next_token=torch.tensor([30, 29]),
        drafts=torch.tensor([[31, 32, 33], [0, 0, 0]]),
        draft_logits=torch.arange(2 * 3 * 5.0).view(2, 3, 5),
        logprobs=torch.zeros(2, 4, dtype=torch.float64),
    )
    state.apply(step, outputs)
    assert state.computed.tolist() == [9, 0, 9, 0]
    inputs = state.prepare(batch())
    assert inputs.input_ids.tolist()[:3] == [30, 31, 32]
    assert inputs.draft_logits is not None
    assert torch.equal(inputs.draft_logits, outputs.draft_logits)


def same(a: StepInputs, b: StepInputs) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("input_ids", "positions", "slots", "seq_lens")
    )


def test_a_stale_host_cursor_changes_nothing() -> None:
    state = state_with_two()
    assert same(state.prepare(batch(start_of_decode=7)), state.prepare(batch(start_of_decode=10)))


def test_positions_follow_the_device_alone() -> None:
    state = state_with_two()
    before = state.prepare(batch())
    state.computed[2] += 1
    after = state.prepare(batch())
    assert after.positions.tolist()[:3] == [8, 9, 10] and after.seq_lens.tolist()[0] == 11
    assert after.slots.tolist()[:3] == [13 * 4, 13 * 4 + 1, 13 * 4 + 2]
    assert not same(before, after)


def test_positions_from_the_host_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: prepare a step from the scheduler's cursor, as if nothing were ever rejected."""
    honest = DeviceState.prepare

    def from_the_host(self: DeviceState, batch: ScheduledBatch) -> StepInputs:
        for entry in batch.entries:
            self.computed[entry.row] = entry.start
        return honest(self, batch)

    def run() -> list[int]:
        engine = Engine(ArithmeticExecutor(OPTIONS, 3))
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=20), "a")
        return list(engine.run()["a"].tokens)

    assert run() == reference([1, 2, 3], 20)
    monkeypatch.setattr(DeviceState, "prepare", from_the_host)
    with pytest.raises(AssertionError, match=r"slots of other positions|made from another next token"):
        run()


def test_a_row_forgets_the_request_before() -> None:
    state = state_with_two()
    state.admit(2, [1, 2], 0, SamplingParams())
    assert state.block_table[2].tolist() == [-1] * state.block_table.shape[1]
    entry = Entry(Request("n", (1, 2), SamplingParams(), prefill_len=2), 0, 2, 0, 2, 0, True, -1)
    inputs = state.prepare(ScheduledBatch(2, (entry,)))
    assert inputs.positions.tolist() == [0, 1] and inputs.input_ids.tolist() == [1, 2]
    assert (inputs.slots < 0).all(), "without blocks nothing is written"


def test_without_writes_leaves_no_trace_and_every_row_has_a_key() -> None:
    given = state_with_two().prepare(batch())
    inputs = without_writes(given, OPTIONS.block_size)
    lengths = given.query_start_loc.diff()
    assert (inputs.slots == -1).all() and (inputs.block_table_pool == 0).all() and (inputs.next_prefill == 0).all()
    assert inputs.seq_lens.tolist() == lengths.tolist()
    assert inputs.positions.tolist() == [i for n in lengths.tolist() for i in range(n)]
    assert inputs.slots.shape == (8,)


def test_without_writes_stays_inside_the_block_table() -> None:
    inputs = without_writes(state_with_two().prepare(dummy_batch(90, 2)), OPTIONS.block_size)
    held = inputs.block_table_pool.shape[1] * OPTIONS.block_size
    assert held < 45 * 2 and int(inputs.positions.max()) < held and int(inputs.seq_lens.max()) <= held
