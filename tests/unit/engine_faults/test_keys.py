# SPDX-License-Identifier: Apache-2.0
"""Which keys a query sees: always its own, never one that nobody wrote."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch

from pcp_passes.layout import Batch, build_layout
from pcp_passes.paged import AttentionInputs
from pcp_passes.step import RankState, ops, plan_inputs
from tests import steps as small
from tests.engine_schedules import Watched, run_schedule, small_program
from tests.unit.engine_faults.world import ATOL, engine_run, reference, replace_op, run_mixed, schedule, verdict

EVERY_POSITION = {
    kind: schedule(range(1, 12), steps=2, max_tokens=3, budget=66, max_requests=11, num_blocks=200, layout=kind)
    for kind in ("zigzag", "contiguous")
}


def watch_own_keys(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Per attention row of every call: the last row's own key is the last key that is seen, and its slot is written."""
    seen: list[bool] = []

    def check(original: Any, *operands: Any) -> AttentionInputs:
        inputs: AttentionInputs = original(*operands)
        for _, _, end, keys in inputs.segments:
            seen.append(int(inputs.positions[end - 1]) + 1 == keys)
        for slots, (_, start, end, _) in zip(inputs.key_slots(4), inputs.segments, strict=True):
            own = slots[inputs.positions[start:end].clamp_max(len(slots) - 1)]
            seen.append(bool(torch.isin(own, inputs.slots).all()))
        return inputs

    replace_op(monkeypatch, ops.attention_inputs, check)
    return seen


@pytest.mark.parametrize("kind", EVERY_POSITION)
@pytest.mark.parametrize("pcp", [1, 2, 4])
def test_every_query_sees_its_own_key(kind: str, pcp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = engine_run(EVERY_POSITION[kind], 1)
    seen = watch_own_keys(monkeypatch)
    assert not verdict(lambda: engine_run(EVERY_POSITION[kind], pcp), wanted)
    assert len(seen) > 50 and all(seen)


def test_a_query_that_loses_its_own_key_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a row's length is its last position, without the one that it adds."""
    wanted = engine_run(EVERY_POSITION["zigzag"], 1)
    replace_op(monkeypatch, ops.row_lengths, lambda original, *operands: (original(*operands) - 1).clamp_min(0))
    seen = watch_own_keys(monkeypatch)
    assert verdict(lambda: engine_run(EVERY_POSITION["zigzag"], 2), wanted)
    assert not all(seen)


def fill(memory: RankState) -> None:
    """NaN in every cache row: it is seen by whoever looks where nobody has written."""
    caches = memory.caches
    shape = (caches.num_blocks, caches.block_size, small.HEADS, small.DIM)
    for layer in ("target.0", "target.1", "drafter.0"):
        for part in "kv":
            caches.tensors[f"{layer}.{part}"] = torch.full(shape, math.nan, dtype=torch.float64)


class Poisoned(small.Host):
    """Starts from caches full of NaN."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for state in self.states:
            fill(state)


def has_nan(host: small.Host) -> bool:
    return any(bool(out.logprobs.isnan().any()) for out in host.outputs)


@pytest.mark.parametrize("pcp", [1, 2, 4, 8])
def test_a_context_of_no_keys_is_none_and_not_garbage(pcp: int) -> None:
    """Ranks without rows of a request, requests without context, rows that draft nothing: NaN wherever they look."""
    found, wanted = run_mixed(small.program(pcp), Poisoned), reference()
    assert not has_nan(found)
    for mine, other in zip(found.requests, wanted.requests, strict=True):
        assert (mine.tokens, mine.accepted) == (other.tokens, other.accepted)
        assert mine.logprobs == pytest.approx(other.logprobs, abs=ATOL)


def test_a_key_that_nobody_wrote_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: every row sees one key more than it may. (A length that is too large alone is masked by positions.)"""

    def further(original: Any, slots: Any, layout: str, tables: Any, starts: Any, lengths: Any, where: Any) -> Any:
        return original(slots, layout, tables, starts, torch.where(lengths > 0, lengths + 1, 0), where + 1)

    replace_op(monkeypatch, ops.attention_inputs, further)
    seen: list[bool] = []

    def look(original: Any, logits: torch.Tensor, *rest: Any) -> Any:
        seen.append(bool(logits.isnan().any()))
        return original(logits, *rest)

    replace_op(monkeypatch, ops.verify, look)
    with suppress(AssertionError, IndexError):  # NaN as a token is one outside the vocabulary
        run_mixed(small.program(2), Poisoned)
    assert any(seen)


def test_the_prefix_of_a_long_request_on_four_ranks() -> None:
    """Prefix 1, extend 3,670, and neighbours: each rank's positions and lengths, from the plan, by counting."""
    for context, extend in ((1, 3670), (1, 3669), (1, 3671), (16, 3670), (0, 3671)):
        for pcp in (2, 4, 8):
            _check_rows(context, extend, pcp)


def _check_rows(context: int, extend: int, pcp: int) -> None:
    layout = build_layout(Batch([extend], [context], [context + extend]), pcp)
    positions = torch.arange(context, context + extend)
    seen = torch.zeros(extend, dtype=torch.int64)
    for rank in range(pcp):
        plan = plan_inputs(layout, rank, [extend - 1])
        local = positions[plan.local_rows]
        lengths = ops.row_lengths(local, plan.row_query_start_loc)
        starts = plan.row_query_start_loc.tolist()
        for row, (start, end) in enumerate(pairwise(starts)):
            if start == end:
                assert int(lengths[row]) == 0
                continue
            assert torch.equal(local[start:end], torch.arange(int(local[start]), int(local[start]) + end - start))
            assert int(lengths[row]) == int(local[end - 1]) + 1
            seen[local[start:end] - context] += 1
    assert bool((seen == 1).all()), "every position on exactly one rank"


def test_the_executor_starts_from_caches_that_nobody_wrote() -> None:
    """The same in the engine: caches full of NaN change nothing."""

    class Filled(Watched):
        check_steps = False

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            for rank in self.ranks:
                fill(rank.memory)

    given = schedule((17, 1, 9, 6), every=1, max_requests=3)
    wanted = engine_run(given, 1)
    found = run_schedule(given, 4, small_program, Filled)
    for name, other in wanted.outputs.items():
        assert (found.outputs[name].tokens, found.outputs[name].accepted) == (other.tokens, other.accepted)
        assert found.outputs[name].logprobs == pytest.approx(other.logprobs, abs=ATOL)
