# SPDX-License-Identifier: Apache-2.0
"""Faults put into a running engine, one at a time, to show that the equality tests can fail.

Each function runs on every worker; :func:`undo` removes whatever is in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from pcp_passes import collectives
from pcp_passes import layout as layouts
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.layout import Layout, SampledRows
from pcp_passes.plan import StepPlan

_ORIGINAL = {
    "axis": None,
    "shard_tokens": StepPlan.shard_tokens,
    "expand_slots": StepPlan.expand_slots,
}


def undo(worker: Any) -> None:
    """Back to the real code."""
    if _ORIGINAL["axis"] is not None:
        collectives.bind_axis(runtimes.AXIS, _ORIGINAL["axis"])
    for name in ("shard_tokens", "expand_slots"):
        setattr(StepPlan, name, _ORIGINAL[name])
    _manager().sampled_rows = layouts.sampled_rows


def gather_dropped(worker: Any) -> None:
    """Each rank's rows stand in for everybody's."""
    _ORIGINAL["axis"] = _ORIGINAL["axis"] or collectives._axes[runtimes.AXIS]
    pcp = runtimes.current().pcp
    collectives.bind_axis(runtimes.AXIS, lambda rows: torch.cat([rows] * pcp))


def lengths_off_by_one(worker: Any) -> None:
    """Every row misses its own last key."""

    def shard_tokens(self: StepPlan, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        view = _ORIGINAL["shard_tokens"](self, ids, positions)
        self.seq_lens.sub_((self.seq_lens > 1).int())
        return view

    StepPlan.shard_tokens = shard_tokens


def plan_permuted(worker: Any) -> None:
    """The slots of two gathered rows change places."""

    def expand_slots(self: StepPlan, slots: torch.Tensor) -> torch.Tensor:
        expanded = _ORIGINAL["expand_slots"](self, slots)
        written = (expanded[0] >= 0).nonzero().flatten()
        if len(written) > 1:
            first, last = written[0], written[-1]
            expanded[:, [first, last]] = expanded[:, [last, first]]
        return expanded

    StepPlan.expand_slots = expand_slots


def padding_writes(worker: Any) -> None:
    """Padding rows carry the slot of a real token instead of -1. (Slot 0 alone would show nothing here: vLLM keeps
    block 0 for nobody. The planner's and the simulator's own tests break that one.)"""

    def expand_slots(self: StepPlan, slots: torch.Tensor) -> torch.Tensor:
        expanded = _ORIGINAL["expand_slots"](self, slots)
        return expanded.masked_fill(expanded < 0, int(slots[0, 0]))

    StepPlan.expand_slots = expand_slots


def restore_permuted(worker: Any) -> None:
    """Sampled rows come back in another order."""

    def sampled_rows(layout: Layout, indices: Any) -> SampledRows:
        rows = layouts.sampled_rows(layout, indices)
        return dataclasses.replace(rows, restore=rows.restore[::-1].copy())

    _manager().sampled_rows = sampled_rows


def _manager() -> Any:
    from pcp_passes.frontends.vllm import manager  # imports vllm

    return manager


#: In the order in which they are tried: the later ones leave NaN in the cache, which spoils whatever runs after them.
FAULTS = ("restore_permuted", "plan_permuted", "padding_writes", "gather_dropped", "lengths_off_by_one")


def qualified(name: str) -> str:
    """The name by which a session calls one of these functions."""
    return f"{__name__}:{name}"
