# SPDX-License-Identifier: Apache-2.0
"""A fixed-seed tenth of the random schedules of ``make soak``, and proof that a fault in any part shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pcp_passes.plan import StepPlan
from tests.schedules import Schedule

CASES = [
    (pcp, kind, decode, model)
    for pcp in (2, 4, 8)
    for kind in ("zigzag", "interleave", "contiguous")
    for decode in ("replicate", "owner")
    for model in ("dense", "latent")
]


@pytest.mark.parametrize("pcp, kind, decode, model", CASES)
def test_schedule_equals_one_rank(pcp: int, kind: str, decode: str, model: str) -> None:
    Schedule(seed=11 * pcp + len(kind), pcp=pcp, kind=kind, decode=decode, model_kind=model).run()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(360))
def test_many_schedules(seed: int) -> None:
    pcp, kind, decode, model = CASES[seed % len(CASES)]
    Schedule(seed=1000 + seed, pcp=pcp, kind=kind, decode=decode, model_kind=model, steps=20).run()


def test_some_steps_have_no_collective() -> None:
    assert Schedule(seed=3, pcp=2, kind="zigzag", decode="replicate", steps=20).run().replicated_steps > 0


def stale_padding(plan: StepPlan, slots: torch.Tensor) -> torch.Tensor:
    """Pads keep slot 0 instead of -1."""
    return plan.slots[:, : plan.pcp * plan.layout.padded_tokens].clamp_min(0)


def swapped(plan: StepPlan, slots: torch.Tensor) -> torch.Tensor:
    """Two gathered rows exchange their slots."""
    view = plan.slots[:, : plan.pcp * plan.layout.padded_tokens]
    written = (view[0] >= 0).nonzero().flatten()
    if len(written) > 1:
        view[:, written[[0, -1]]] = view[:, written[[-1, 0]]]
    return view


@pytest.mark.parametrize("fault", [stale_padding, swapped])
def test_wrong_slots_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StepPlan.expand_slots

    def expand_slots(self: StepPlan, slots: torch.Tensor) -> torch.Tensor:
        original(self, slots)
        return fault(self, slots)

    monkeypatch.setattr(StepPlan, "expand_slots", expand_slots)
    with pytest.raises(AssertionError, match=r"differ by|does not own"):
        Schedule(seed=5, pcp=2, kind="zigzag", decode="owner", steps=12).run()


@pytest.mark.parametrize("buffer, change", [("restore_index", "flip"), ("gather_index", "roll")])
def test_a_permuted_plan_tensor_is_seen(buffer: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StepPlan.load

    def load(self: StepPlan, layout: Any, **kwargs: Any) -> Any:
        original(self, layout, **kwargs)
        values = getattr(self, buffer)[: layout.num_tokens]
        values.copy_(values.flip(0) if change == "flip" else values.roll(1))
        return self.view()

    monkeypatch.setattr(StepPlan, "load", load)
    with pytest.raises(AssertionError, match=r"differ by|does not own"):
        Schedule(seed=5, pcp=2, kind="zigzag", decode="owner", steps=12).run()


def test_lengths_off_by_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StepPlan.shard_tokens

    def shard_tokens(self: StepPlan, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        view = original(self, ids, positions)
        self.seq_lens.sub_((self.seq_lens > 1).int())
        return view

    monkeypatch.setattr(StepPlan, "shard_tokens", shard_tokens)
    with pytest.raises(AssertionError, match="differ by"):
        Schedule(seed=5, pcp=2, kind="zigzag", decode="owner", steps=12).run()
