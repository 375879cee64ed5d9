# SPDX-License-Identifier: Apache-2.0
"""The step plan's buffers against the per-token oracle, the kinds of fault seen in the field, and broken variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_passes.errors import LayoutError
from pcp_passes.layout import Batch, Layout, build_layout
from pcp_passes.plan import StepPlan
from tests.unit.layout.oracle import DECODES, KINDS, check_plan, deal, device_batch, make_batch, run_plan

pytestmark = pytest.mark.unit

BUFFERS = (
    "input_ids",
    "positions",
    "is_padding",
    "query_start_loc",
    "seq_lens",
    "row_request",
    "gather_index",
    "write_mask",
    "restore_index",
    "slots",
)


def make_plan(pcp: int, rank: int, max_tokens: int = 64, max_rows: int = 64, groups: int = 1) -> StepPlan:
    return StepPlan(pcp, rank, max_tokens=max_tokens, max_rows=max_rows, device="cpu", slot_groups=groups)


def captured_write(plan: StepPlan, cache: torch.Tensor) -> None:
    """What a graph captured for the largest bucket does: write every row of the slot buffer that has a slot."""
    slots = plan.slots[0]
    cache[slots[slots >= 0]] += 1


REQUEST = st.one_of(
    st.tuples(st.integers(0, 25), st.just(0), st.just(True)),
    st.tuples(st.integers(1, 25), st.integers(1, 90), st.just(True)),
    st.tuples(st.just(1), st.integers(1, 90), st.just(False)),
    st.tuples(st.integers(2, 5), st.integers(1, 90), st.just(False)),
)
STEP = st.lists(REQUEST, min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(STEP, min_size=1, max_size=3),
    pcp=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
    decode=st.sampled_from(DECODES),
    spare=st.integers(0, 4),
    groups=st.integers(1, 2),
)
def test_drawn_steps_through_one_plan(
    steps: list[list[tuple[int, int, bool]]], pcp: int, kind: str, decode: str, spare: int, groups: int
) -> None:
    plans = [make_plan(pcp, rank, 200, 200, groups) for rank in range(pcp)]
    for number, step in enumerate(steps):
        lens, computed, flags = (list(column) for column in zip(*step, strict=True))
        batch = make_batch(lens, computed, flags)
        smallest = build_layout(batch, pcp, kind=kind, decode=decode)
        layout = build_layout(batch, pcp, kind=kind, decode=decode, padded_tokens=smallest.padded_tokens + spare)
        data = device_batch(batch, groups=groups, seed=number)
        for plan in plans:
            run_plan(plan, layout, data, padded_rows=layout.max_rows + spare)
            check_plan(plan, layout, data)


def test_addresses_never_change() -> None:
    plan = make_plan(2, 1)
    before = {name: getattr(plan, name).data_ptr() for name in BUFFERS}
    for lens in ([50, 3], [2], [31, 1, 1]):
        layout = build_layout(make_batch(lens), 2)
        data = device_batch(layout.batch)
        view = run_plan(plan, layout, data)
        for field in dataclasses.fields(view):
            offset = plan.slots.data_ptr() if field.name == "slots" else before[field.name]
            assert getattr(view, field.name).data_ptr() == offset, "a view starts where its buffer starts"
    plan.reset_for_dummy(7)
    assert {name: getattr(plan, name).data_ptr() for name in BUFFERS} == before


def test_dtypes_and_prefill_of_slots() -> None:
    plan = make_plan(3, 0, 8, 5, groups=2)
    assert (plan.slots == -1).all() and plan.slots.shape == (2, 24)
    kinds = {name: getattr(plan, name).dtype for name in BUFFERS}
    assert {name for name, kind in kinds.items() if kind == torch.int32} == {"input_ids", "query_start_loc", "seq_lens"}
    assert {name for name, kind in kinds.items() if kind == torch.bool} == {"is_padding", "write_mask"}
    assert len([name for name, kind in kinds.items() if kind == torch.int64]) == 5


class KeepsOldSlots(StepPlan):
    """A broken plan: it expands only the step's own part."""

    def expand_slots(self, global_slots: torch.Tensor) -> torch.Tensor:
        tail = self.slots[:, self.pcp * self.layout.padded_tokens :].clone()
        view = super().expand_slots(global_slots)
        self.slots[:, self.pcp * self.layout.padded_tokens :] = tail
        return view


class PadsWithSlotZero(StepPlan):
    """A broken plan: padded rows get slot 0, a real slot."""

    def expand_slots(self, global_slots: torch.Tensor) -> torch.Tensor:
        return super().expand_slots(global_slots).masked_fill_(~self.view().write_mask, 0)


def long_then_short(kind: type[StepPlan]) -> None:
    """The cache holds one write per owned slot after a long and a short batch, and nothing else."""
    plan = kind(2, 0, max_tokens=64, max_rows=8, device="cpu")
    for lens in ([61], [5]):
        layout = build_layout(make_batch(lens), 2)
        data = device_batch(layout.batch)
        cache = torch.zeros(1000, dtype=torch.int64)
        run_plan(plan, layout, data)
        captured_write(plan, cache)
        expected = torch.zeros_like(cache)
        expected[data.slots[0]] = 1
        assert torch.equal(cache, expected), f"batch of {lens[0]} tokens wrote outside its slots"


def test_short_batch_after_long_one_leaves_no_slots() -> None:
    long_then_short(StepPlan)


@pytest.mark.parametrize("broken", [KeepsOldSlots, PadsWithSlotZero])
def test_sabotage_slots(broken: type[StepPlan]) -> None:
    with pytest.raises(AssertionError, match="wrote outside its slots"):
        long_then_short(broken)


def test_positions_follow_the_device_when_the_host_is_ahead() -> None:
    # Two of three drafts were rejected: the host still counts them.
    batch = make_batch([4, 4, 6], [13, 25, 0], [False, False, True])
    for decode in DECODES:
        layout = build_layout(batch, 2, decode=decode)
        data = device_batch(batch, device_computed=[11, 25, 0])
        for rank in range(2):
            plan = make_plan(2, rank)
            view = run_plan(plan, layout, data)
            check_plan(plan, layout, data)
            rows = layout.rows(rank)
            behind = torch.from_numpy(rows.seq_lens_host) - view.seq_lens
            assert behind.tolist() == [2 if request == 0 else 0 for request in rows.row_request]


@pytest.mark.parametrize("prefix", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("extend", [3666, 3669, 3670, 3671, 3672])
def test_prefix_lengths_come_from_real_not_padded_lengths(prefix: int, extend: int) -> None:
    batch = make_batch([extend, 1], [prefix, 9], [True, False])
    smallest = build_layout(batch, 4).padded_tokens
    layout = build_layout(batch, 4, padded_tokens=smallest + 11)
    data = device_batch(batch)
    seen = []
    for rank in range(4):
        plan = make_plan(4, rank, smallest + 20, 8)
        view = run_plan(plan, layout, data)
        real = layout.rows(rank).num_tokens
        index = layout.gather_index[rank * layout.padded_tokens :][:real]
        seen += [p for p, i in zip(view.positions[:real].tolist(), index.tolist(), strict=True) if i < extend]
        starts = view.seq_lens - view.query_start_loc.diff()
        assert starts.tolist() == layout.rows(rank).row_start.tolist()
    assert sorted(seen) == list(range(prefix, prefix + extend))


def test_rank_without_tokens_inside_a_mixed_batch() -> None:
    batch = make_batch([1, 2], [5, 0], [False, True])
    layout = build_layout(batch, 4, decode="owner")
    assert layout.per_rank_tokens.tolist() == [1, 1, 1, 0]
    data = device_batch(batch)
    for rank in range(4):
        plan = make_plan(4, rank)
        view = run_plan(plan, layout, data)
        check_plan(plan, layout, data)
    assert view.query_start_loc.tolist() == [0, 0] and view.seq_lens.tolist() == [0]
    assert view.is_padding.tolist() == [True]


@pytest.mark.parametrize("decode", DECODES)
def test_requests_verify_different_numbers_of_drafts(decode: str) -> None:
    batch = make_batch([1 + 1, 1 + 3, 1 + 4, 17], [10, 20, 30, 0], [False, False, False, True])
    layout = build_layout(batch, 2, decode=decode)
    data = device_batch(batch)
    for rank in range(2):
        plan = make_plan(2, rank)
        run_plan(plan, layout, data)
        check_plan(plan, layout, data)


def test_batch_of_no_tokens_with_padding() -> None:
    plan = make_plan(2, 0)
    data = device_batch(make_batch([5]))
    run_plan(plan, build_layout(make_batch([5]), 2), data)
    layout = build_layout(make_batch([0]), 2, padded_tokens=3)
    empty = device_batch(layout.batch)
    run_plan(plan, layout, empty)
    check_plan(plan, layout, empty)


def test_every_token_major_tensor_shares_one_index() -> None:
    batch = make_batch([13, 1, 6], [0, 3, 2], [True, False, True])
    layout = build_layout(batch, 3, decode="owner")
    data = device_batch(batch)
    hidden = torch.randn(20, 4)
    parts = []
    for rank in range(3):
        plan = make_plan(3, rank)
        view = run_plan(plan, layout, data)
        part = plan.shard_rows(hidden)
        real = ~view.is_padding
        assert torch.equal(plan.shard_rows(data.ids.long())[real], view.input_ids[real].long())
        assert not part[~real].any()
        parts.append(part)
    assert torch.equal(plan.restore_rows(torch.cat(parts)), hidden)
    with pytest.raises(LayoutError, match="Rank-major rows of this step are 3 x"):
        plan.restore_rows(hidden)


@pytest.mark.parametrize(("tokens", "rows"), [(7, 1), (12, 3), (4, 4)])
def test_dummy_step_has_the_shapes_of_a_real_one(tokens: int, rows: int) -> None:
    dummy, real = make_plan(2, 1, groups=2), make_plan(2, 1, groups=2)
    run_plan(dummy, build_layout(make_batch([30]), 2), device_batch(make_batch([30]), groups=2))
    shown = dummy.reset_for_dummy(tokens, num_rows=rows)
    # One row: rank 1's part of a prefill. More: a decode step, as the dummy of a decode graph stands for.
    batch = make_batch([2 * tokens]) if rows == 1 else make_batch([tokens // rows] * rows, [3] * rows, [False] * rows)
    expected = run_plan(real, build_layout(batch, 2, padded_tokens=tokens), device_batch(batch, groups=2))
    for field in dataclasses.fields(expected):
        if field.name != "restore_index":  # its length is the global count, which graphs never see
            a, b = getattr(shown, field.name), getattr(expected, field.name)
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), field.name
    assert (dummy.slots == -1).all() and not shown.write_mask.any()
    assert shown.seq_lens.tolist() == shown.query_start_loc.diff().tolist()
    assert shown.positions.max() < shown.seq_lens.max() and not shown.is_padding.any()
    data = torch.arange(2 * tokens).reshape(2, tokens)
    assert (dummy.expand_slots(data) == -1).all(), "even slots handed to a dummy step are not written"
    with pytest.raises(LayoutError, match="1 <= num_rows <= num_tokens"):
        dummy.reset_for_dummy(2, num_rows=3)


def test_wide_ids_and_longer_buffers_are_accepted() -> None:
    batch = make_batch([9])
    layout = build_layout(batch, 2)
    data = device_batch(batch)
    plan = make_plan(2, 0)
    plan.load(layout)
    spare = torch.full((5,), 9)
    plan.shard_tokens(torch.cat([data.ids.long(), spare]), torch.cat([data.positions, spare]))
    plan.expand_slots(torch.cat([data.slots, torch.full((1, 5), 77)], dim=1))
    check_plan(plan, layout, data)


def _refusals() -> dict[str, tuple[Callable[[], object], str]]:
    layout = build_layout(make_batch([40, 40]), 2)
    data = device_batch(layout.batch)

    def loaded() -> StepPlan:
        plan = make_plan(2, 0)
        plan.load(layout)
        return plan

    return {
        "group": (lambda: make_plan(4, 0).load(layout), "for 2 pcp ranks, the step plan for 4"),
        "tokens": (lambda: make_plan(2, 0, max_tokens=39).load(layout), "40 rows per rank.*holds 39; raise max_tokens"),
        "rows": (lambda: make_plan(2, 1, max_rows=3).load(layout), "4 attention rows.*holds 3; raise max_rows"),
        "padded-rows": (lambda: make_plan(2, 0).load(layout, padded_rows=65), "65 attention rows"),
        "rank": (lambda: make_plan(2, 2), "rank 2 of 2"),
        "size": (lambda: make_plan(2, 0, max_tokens=0), "max_tokens=0"),
        "not-loaded": (lambda: make_plan(2, 0).view(), "call load"),
        "not-loaded-rows": (lambda: make_plan(2, 0).rows, "call load"),
        "short-ids": (lambda: loaded().shard_tokens(data.ids[:79], data.positions), r"80 tokens.*\[79\]"),
        "slot-groups": (lambda: loaded().expand_slots(data.slots.repeat(2, 1)), r"\[1, 80\].*\[2, 80\]"),
    }


@pytest.mark.parametrize("name", _refusals())
def test_refused(name: str) -> None:
    action, message = _refusals()[name]
    with pytest.raises(LayoutError, match=message):
        action()


def test_refused_load_leaves_the_loaded_step() -> None:
    layout = build_layout(make_batch([9]), 2)
    data = device_batch(layout.batch)
    plan = make_plan(2, 0, max_tokens=8)
    run_plan(plan, layout, data)
    with pytest.raises(LayoutError):
        plan.load(build_layout(make_batch([99]), 2))
    check_plan(plan, layout, data)


def _sabotage() -> dict[str, Callable[[StepPlan], object]]:
    def swap(tensor: torch.Tensor, first: int = 0, second: int = 1) -> object:
        order = torch.arange(tensor.shape[-1])
        order[first], order[second] = second, first
        return tensor.copy_(tensor[..., order])

    return {
        "ids-permuted": lambda plan: swap(plan.input_ids),
        "positions-permuted": lambda plan: swap(plan.positions),
        "gather-permuted": lambda plan: swap(plan.gather_index),
        "restore-permuted": lambda plan: swap(plan.restore_index),
        "slots-permuted": lambda plan: swap(plan.slots),
        "rows-permuted": lambda plan: swap(plan.row_request),
        "length-off-by-one": lambda plan: plan.seq_lens[:1].add_(1),
        "row-start-off-by-one": lambda plan: plan.query_start_loc[1:2].add_(1),
        "pad-slot-0": lambda plan: plan.slots.masked_fill_(plan.slots == -1, 0),
        "mask-all-true": lambda plan: plan.write_mask.fill_(True),
        "padding-flag-off": lambda plan: plan.is_padding.fill_(False),
    }


@pytest.mark.parametrize("name", _sabotage())
def test_sabotage(name: str) -> None:
    """Each plan tensor broken in turn, before the tokens are sharded when it is an input of that."""
    batch = make_batch([1, 11, 3], [4, 0, 6], [False, True, False])
    layout = build_layout(batch, 2, padded_tokens=12)
    data = device_batch(batch)

    def step(spoil: Callable[[StepPlan], object] | None) -> None:
        plan = make_plan(2, 1)
        early = name.split("-")[0] in ("gather", "mask")
        plan.load(layout)
        if spoil is not None and early:
            spoil(plan)
        plan.shard_tokens(data.ids, data.positions)
        plan.expand_slots(data.slots)
        if spoil is not None and not early:
            spoil(plan)
        check_plan(plan, layout, data)

    spoil = _sabotage()[name]
    step(None)
    with pytest.raises(AssertionError):
        step(spoil)


def test_compat_layout_drives_the_same_plan() -> None:
    """vLLM's chunks: every token on its rank has its own id, position and slot, and each row its own length."""
    batch = make_batch([7, 1, 10], [2, 8, 0], [True, False, True])
    layout: Layout = build_layout(batch, 3, decode="owner", compat="vllm")
    data = device_batch(batch)
    for rank in range(3):
        view = run_plan(make_plan(3, rank), layout, data)
        real = layout.rows(rank).num_tokens
        index = layout.gather_index[rank * layout.padded_tokens :][:real]
        assert view.positions[:real].tolist() == data.positions[index].tolist()
        assert view.seq_lens.tolist() == layout.rows(rank).seq_lens_host.tolist()


def test_oracle_is_not_the_package() -> None:
    """The oracle deals a batch by hand as the documentation does."""
    ranks = deal(Batch([6, 1], [0, 9], [6, 4]), 2, "zigzag", "owner")
    assert [[t.index for t in tokens] for tokens in ranks] == [[6, 0, 1, 5], [2, 3, 4]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_step_without_host_sync() -> None:
    batch = make_batch([300, 1, 4], [0, 9, 12], [True, False, False])
    layout = build_layout(batch, 2, padded_tokens=200)
    data = device_batch(batch)
    plan = StepPlan(2, 1, max_tokens=256, max_rows=16, device="cuda")
    ids, positions, slots = data.ids.cuda(), data.positions.cuda(), data.slots.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.load(layout)
        plan.shard_tokens(ids, positions)
        plan.expand_slots(slots)
        plan.reset_for_dummy(64)
        plan.load(layout)
        plan.shard_tokens(ids, positions)
        plan.expand_slots(slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    host = StepPlan(2, 1, max_tokens=256, max_rows=16, device="cpu")
    run_plan(host, layout, data)
    for name in BUFFERS:
        assert torch.equal(getattr(plan, name).cpu(), getattr(host, name)), name
    assert np.array_equal(plan.view().restore_index.cpu().numpy(), layout.restore_index)
