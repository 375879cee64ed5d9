# SPDX-License-Identifier: Apache-2.0
"""The drafter's hooks of the batch manager, all ranks in one process; vLLM is not needed for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pcp_passes.frontends.vllm import drafting
from pcp_passes.frontends.vllm.drafting import DraftHooks
from pcp_passes.frontends.vllm.runtime import Runtime
from pcp_passes.layout import Batch, build_layout
from pcp_passes.options import PcpOptions
from pcp_passes.plan import StepPlan

HIDDEN = 6
#: Query lengths and, per request, whether it is still prefilling: ragged, alone, mixed with verifications, decodes.
BATCHES = {
    "ragged": ([1, 2, 3, 5, 37], [True] * 5),
    "one token": ([1], [True]),
    "verification beside prefills": ([4, 11, 1, 8, 3], [False, True, False, True, True]),
    "pure decode": ([4, 1, 2], [False] * 3),
}


class Manager(DraftHooks):
    """What ``PassesPCPManager`` keeps for one rank after it partitioned a batch."""

    def __init__(self, pcp: int, rank: int, lengths: list[int], prefilling: list[bool], **options: Any) -> None:
        counts = np.array(lengths, dtype=np.int32)
        computed = np.where(prefilling, 0, 50).astype(np.int32)
        batch = Batch(
            num_scheduled=counts,
            num_computed=computed,
            prefill_len=np.where(prefilling, 90, 40).astype(np.int32),
            is_prefilling=np.array(prefilling),
        )
        decode = options.pop("decode", "replicate")
        layout = build_layout(batch, pcp, kind="zigzag", decode=decode)
        total = int(counts.sum())
        self.runtime = Runtime(PcpOptions(poison=True, **options), pcp, rank)  # type: ignore[misc]
        self.runner = SimpleNamespace(  # type: ignore[misc]
            speculator=SimpleNamespace(last_token_indices=torch.zeros(9, dtype=torch.int64), num_speculative_steps=3)
        )
        ids = torch.arange(total, dtype=torch.int32) + 100
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        positions = torch.from_numpy(np.arange(total) - starts + np.repeat(computed, counts)).long()
        self._global_batch: Any = SimpleNamespace(num_reqs=len(lengths), input_ids=ids)
        self._layout = layout
        self._plan = StepPlan(pcp, rank, max_tokens=128, max_rows=64, device="cpu")
        self._local_batch: Any = None
        self.draft_prefill_batch: Any = None
        if not layout.is_replicated:
            self._plan.load(layout)
            self._plan.shard_tokens(ids, positions)
            self._local_batch = SimpleNamespace(input_ids=self._plan.input_ids[: layout.padded_tokens])


def ranks(pcp: int, name: str, **options: Any) -> list[Manager]:
    lengths, prefilling = BATCHES[name]
    return [Manager(pcp, rank, lengths, prefilling, **options) for rank in range(pcp)]


def restored(managers: list[Manager], states: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``restore_draft_prefill`` on every rank: once to learn what each offers, once with all offers gathered."""
    offers: list[torch.Tensor] = []
    learn = lambda rows, pcp, axis: (offers.append(rows), rows.repeat(pcp, 1))[1]  # noqa: E731
    for gather in (learn, lambda rows, pcp, axis: torch.cat(offers)):
        monkeypatch.setattr(drafting, "all_gather_rows", gather)
        results = []
        for manager, (last, hidden) in zip(managers, states, strict=True):
            manager.draft_prefill_batch = manager._local_batch
            results.append(manager.restore_draft_prefill(last, hidden))
    return results


SHARDED = [name for name in BATCHES if name != "pure decode"]


@pytest.mark.parametrize("pcp", [2, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_first_pass_takes_shifted_ids_in_global_order(name: str, pcp: int) -> None:
    """Every rank's rows hold the ids of the *global* shift, also where its part of a request ends."""
    for manager in ranks(pcp, name, decode="owner"):
        shifted = manager._global_batch.input_ids + 1
        before = manager._local_batch.input_ids.data_ptr()
        manager.prepare_draft_prefill(manager._global_batch, shifted)
        local, layout = manager._local_batch, manager._layout
        assert layout is not None
        count = int(layout.per_rank_tokens[manager.runtime.rank])
        own = layout.gather_index[manager.runtime.rank * layout.padded_tokens :][:count]
        assert local.input_ids[:count].tolist() == shifted[own].tolist()
        assert not local.input_ids[count:].any()
        assert manager.draft_prefill_batch is local and local.input_ids.data_ptr() == before
        assert manager.runtime.variants["drafter"] == "sharded"


def test_replicated_step_is_drafted_replicated() -> None:
    for manager in ranks(2, "pure decode"):
        manager.prepare_draft_prefill(manager._global_batch, manager._global_batch.input_ids + 1)
        assert manager.draft_prefill_batch is None
        assert manager.runtime.variants["drafter"] == "replicated"


def test_another_batch_is_drafted_globally_and_touches_nothing() -> None:
    """Equal is not enough: rank-local state belongs to one batch object."""
    manager = ranks(2, "ragged")[0]
    kept = manager._local_batch.input_ids.clone()
    manager.prepare_draft_prefill(manager._global_batch, manager._global_batch.input_ids)
    stale = SimpleNamespace(**vars(manager._global_batch))
    assert stale == manager._global_batch
    manager.prepare_draft_prefill(stale, stale.input_ids + 1)
    assert manager.draft_prefill_batch is None
    assert manager.runtime.variants["drafter"] == "replicated"
    assert manager._local_batch.input_ids.equal(kept)


def test_dummy_batch_runs_what_the_targets_dummy_ran() -> None:
    manager = ranks(2, "ragged")[0]
    manager._layout = manager._global_batch = manager._local_batch = None
    dummy = SimpleNamespace(num_reqs=1)
    manager.prepare_draft_prefill(dummy, torch.zeros(8, dtype=torch.int32))  # type: ignore[arg-type]
    assert manager.draft_prefill_batch is None
    assert manager.runtime.variants["drafter"] == "sharded"
    states = torch.zeros(8, HIDDEN)
    assert manager.restore_draft_prefill(states, states) == (states, states)
    assert manager.runtime.variants["drafter"] == "replicated", "the later passes"


def test_drafter_can_be_kept_replicated() -> None:
    manager = ranks(2, "ragged", drafter="replicate")[0]
    manager.prepare_draft_prefill(manager._global_batch, manager._global_batch.input_ids + 1)
    assert manager.draft_prefill_batch is None
    assert manager.runtime.variants["drafter"] == "replicated"


@pytest.mark.parametrize("rejected", [0, 1])
@pytest.mark.parametrize("decode", ["replicate", "owner"])
@pytest.mark.parametrize("pcp", [2, 4])
@pytest.mark.parametrize("name", SHARDED)
def test_only_sampled_rows_come_back(
    name: str, pcp: int, decode: str, rejected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last valid row of every request, wherever a rejection moved it, and NaN in all others; both states."""
    lengths, prefilling = BATCHES[name]
    managers = ranks(pcp, name, decode=decode)
    rows = torch.randn(sum(lengths), 2 * HIDDEN, dtype=torch.float64)
    ends = torch.tensor(lengths).cumsum(0) - 1
    moved = torch.tensor([0 if fresh or n == 1 else rejected for fresh, n in zip(prefilling, lengths, strict=True)])
    wanted = ends - moved
    states = []
    for manager in managers:
        manager.runner.speculator.last_token_indices[: len(lengths)] = wanted
        local = manager._plan.shard_rows(rows)
        states.append((local[:, :HIDDEN], local[:, HIDDEN:]))
    for last, hidden in restored(managers, states, monkeypatch):
        assert last.shape == hidden.shape == (sum(lengths), HIDDEN)
        assert torch.cat([last, hidden], dim=1)[wanted].equal(rows[wanted])
        others = [row for row in range(sum(lengths)) if row not in wanted.tolist()]
        assert last[others].isnan().all() and hidden[others].isnan().all()


def test_one_state_is_gathered_once_and_one_draft_step_needs_no_second(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []

    def gather(rows: torch.Tensor, pcp: int, axis: str) -> torch.Tensor:
        widths.append(rows.shape[1])
        return rows.repeat(pcp, 1)

    monkeypatch.setattr(drafting, "all_gather_rows", gather)
    for steps, same in ((3, False), (3, True), (1, False)):
        manager = ranks(2, "ragged")[0]
        manager.runner.speculator.num_speculative_steps = steps
        last = manager._plan.shard_rows(torch.randn(48, HIDDEN))
        manager.draft_prefill_batch = manager._local_batch
        first, second = manager.restore_draft_prefill(last, last if same else last.clone())
        assert (first is second) is (same or steps == 1)
    assert widths == [2 * HIDDEN, HIDDEN, HIDDEN]
