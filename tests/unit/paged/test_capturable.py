# SPDX-License-Identifier: Apache-2.0
"""The forms of paged ops that a graph can hold: nothing read on the host, and what the host-reading forms give.

Every op runs once as on a CPU and once inside ``capturable_only`` under a check that fails on any host read. In
float64 the two agree to 2e-15 where attention sums in another order; writes are the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_kernels.reference import paged
from pcp_passes.capture_mode import capturable_only, host_free, is_capturable_only
from pcp_passes.errors import ConfigError, HostSync
from pcp_passes.live_bytes import LiveBytes
from pcp_passes.paged import (
    PagedCaches,
    experts,
    index_topk,
    index_write,
    kv_attend,
    kv_write,
    mla_attend,
    pack_record,
    record_write,
    running,
)
from pcp_passes.paged.explicit import paged_attend
from pcp_passes.paged.state import AttentionInputs
from pcp_passes.piecewise.sync_check import SyncCheck
from tests.unit.paged.test_experts import operands
from tests.unit.paged.test_ops import DV, HEADS, KV_HEADS, LENGTHS, NEW, OPTIONS, D, World

ROWS = sum(NEW)


def fresh(inputs: AttentionInputs) -> AttentionInputs:
    """The same tensors, nothing remembered: as a graph's replay finds them."""
    names = ("slots", "slot_layout", "block_tables", "query_start_loc", "seq_lens", "positions")
    return AttentionInputs(**{name: getattr(inputs, name) for name in names})


def both(world: World, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A read of the world's rows, as on a CPU and without the host."""
    with running(world.caches, fresh(world.read)):
        on_cpu = call()
    inputs = fresh(world.read)
    with running(world.caches, inputs), capturable_only(), SyncCheck():
        captured = call()
    assert not {"segments", "kept"} & set(vars(inputs)), "these are read on the host"
    return on_cpu, captured


def written(world: World, value: int = DV) -> tuple[torch.Tensor, torch.Tensor]:
    """The dependency of a write of keys and values, and queries."""
    k, v = world.random(sum(LENGTHS), KV_HEADS, D), world.random(sum(LENGTHS), KV_HEADS, value)
    with running(world.caches, world.write):
        dep = kv_write(k, v, "l")
    return dep, world.random(len(world.read.positions), HEADS, D)


class TestMode:
    def test_it_nests_and_ends_with_an_error_too(self) -> None:
        here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
        assert not is_capturable_only() and not host_free(here) and host_free(elsewhere)
        with capturable_only():
            with capturable_only():
                assert is_capturable_only()
            assert is_capturable_only() and host_free(here)
        with pytest.raises(ZeroDivisionError), capturable_only():
            raise ZeroDivisionError
        assert not is_capturable_only()


class TestAttention:
    @pytest.mark.parametrize(
        "options",
        [*OPTIONS, {"slopes": torch.rand(HEADS, dtype=torch.float64)}, {"left": 3, "right": 2, "chunk": 7}],
        ids=lambda options: ",".join(options) or "causal",
    )
    def test_of_grouped_heads(self, options: dict[str, Any]) -> None:
        world = World()
        dep, q = written(world)
        on_cpu, captured = both(world, lambda: kv_attend(q, dep, "l", value_size=DV, **options))
        torch.testing.assert_close(captured, on_cpu, rtol=0, atol=1e-13)
        assert not captured[ROWS:].any()
        less = {**options, "right": -1} if "left" not in options else {**options, "left": 1}
        if less != options:
            _, other = both(world, lambda: kv_attend(q, dep, "l", value_size=DV, **less))
            assert (other - on_cpu).abs().max() > 1e-2

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def test_of_any_requests_in_any_window(self, data: st.DataObject) -> None:
        """Requests with and without rows or keys, pages of any size, rows that overlap no window."""
        page = data.draw(st.integers(1, 5), label="page")
        lengths = data.draw(st.lists(st.integers(0, 17), min_size=1, max_size=4), label="lengths")
        counts = [data.draw(st.integers(0, length), label="rows") for length in lengths]
        padding = data.draw(st.integers(0, 3), label="padding")
        window = {
            "left": data.draw(st.integers(-1, 6), label="left"),
            "right": data.draw(st.integers(-1, 3), label="right"),
            "chunk": data.draw(st.sampled_from([0, 0, 4, 7]), label="chunk"),
        }
        columns = 17 // page + 2
        generator = torch.Generator().manual_seed(len(lengths))
        tables = torch.randperm(len(lengths) * columns, generator=generator).view(-1, columns)
        ends = [torch.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)]
        positions = torch.nn.functional.pad(torch.cat(ends), (0, padding))
        starts = torch.tensor([0, *counts]).cumsum(0)
        q = torch.randn(len(positions), 4, 6, generator=generator, dtype=torch.float64)
        k, v = (torch.randn(len(lengths) * columns, page, 2, 6, generator=generator).double() for _ in range(2))
        where = tables, starts, torch.tensor(lengths), positions
        on_cpu = paged_attend(q, k, v, *where, **window)
        with capturable_only(), SyncCheck():
            captured = paged_attend(q, k, v, *where, **window)
        torch.testing.assert_close(captured, on_cpu, rtol=0, atol=1e-13)

    def test_with_caches_as_operands(self) -> None:
        world = World()
        _, q = written(world, D)
        read, caches = world.read, world.caches.tensors
        where = read.block_tables, read.query_start_loc, read.seq_lens, read.positions
        on_cpu, captured = both(world, lambda: paged_attend(q, caches["l.k"], caches["l.v"], *where))
        torch.testing.assert_close(captured, on_cpu, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("store", ["halves", "joined", "records"])
    def test_of_absorbed_heads(self, store: str) -> None:
        world = World()
        latent, rope = (160, 16) if store == "records" else (10, 4)
        if store == "records":
            world.caches = PagedCaches(world.caches.num_blocks, world.caches.block_size, torch.float8_e4m3fn)
        keys = world.random(sum(LENGTHS), 1, latent + rope).split([latent, rope], dim=2)
        with running(world.caches, world.write):
            if store == "halves":
                dep = kv_write(*keys, "l")
            else:
                record = pack_record(*keys, None, "fp8" if store == "records" else "native")
                dep = record_write(record, "l", latent=latent, rope=rope)
        q = world.random(len(world.read.positions), HEADS, latent + rope)
        on_cpu, captured = both(world, lambda: mla_attend(q, dep, "l", scale=0.4, latent=latent))
        torch.testing.assert_close(captured, on_cpu, rtol=0, atol=1e-12)
        assert captured.shape == (len(q), HEADS, latent) and not captured[ROWS:].any() and captured[:ROWS].any()
        _, other = both(world, lambda: mla_attend(q.flip(1), dep, "l", scale=0.4, latent=latent))
        assert (other - on_cpu).abs().max() > 1e-2
        with running(world.caches, world.read), capturable_only(), pytest.raises(ConfigError, match="wide"):
            mla_attend(q[..., 1:], dep, "l", scale=0.4, latent=latent)

    def test_bf16_over_fp8_rows(self) -> None:
        world = World()
        world.caches = PagedCaches(world.caches.num_blocks, world.caches.block_size, torch.float8_e4m3fn)
        dep, q = written(world)
        on_cpu, captured = both(world, lambda: kv_attend(q.bfloat16(), dep, "l", value_size=DV))
        assert captured.dtype == torch.bfloat16
        torch.testing.assert_close(captured.float(), on_cpu.float(), rtol=0, atol=1.6e-2)

    def test_table_entries_past_the_keys_may_hold_anything(self) -> None:
        """Blocks that are not there, and blocks full of NaN."""
        world = World()
        dep, q = written(world)
        clean, _ = both(world, lambda: kv_attend(q, dep, "l", value_size=DV))
        used = torch.zeros(world.caches.num_blocks * world.caches.block_size, dtype=torch.bool)
        used[world.write.slots] = True
        for name in ("l.k", "l.v"):
            world.caches.tensors[name].flatten(0, 1)[~used] = float("nan")
        spare = (~used.view(world.caches.num_blocks, -1).any(1)).nonzero().flatten()
        for garbage in (10**6, -(10**6), int(spare[0])):
            tables = world.read.block_tables
            tables[tables < 0] = garbage
            with running(world.caches, fresh(world.read)), capturable_only():
                found = kv_attend(q, dep, "l", value_size=DV)
            torch.testing.assert_close(found, clean, rtol=0, atol=1e-13)
            tables[tables == garbage] = -1

    def test_a_stale_length_or_position_is_seen(self) -> None:
        world = World()
        dep, q = written(world)
        clean, _ = both(world, lambda: kv_attend(q, dep, "l", value_size=DV, right=-1))
        world.read.seq_lens.sub_(1)
        _, shorter = both(world, lambda: kv_attend(q, dep, "l", value_size=DV, right=-1))
        assert (shorter - clean).abs().max() > 1e-2

    def test_no_rows_and_no_requests(self) -> None:
        world = World()
        dep, q = written(world)
        none = torch.zeros(0, dtype=torch.int64)
        one = torch.zeros(1, dtype=torch.int64)
        for rows in (0, 3):
            at = torch.zeros(rows, dtype=torch.int64)
            inputs = AttentionInputs(at - 1, "replicated", torch.zeros(0, 4, dtype=torch.int32), one, none, at)
            with running(world.caches, inputs), capturable_only():
                found = kv_attend(q[:rows], dep, "l", value_size=DV)
            assert found.shape == (rows, HEADS, DV) and not found.any()

    def test_the_host_reading_form_is_refused_where_nothing_may_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sabotage of the check itself: the other form inside ``capturable_only`` fails it."""
        from pcp_passes.paged import attend

        world = World()
        dep, q = written(world)
        monkeypatch.setattr(attend, "host_free", lambda on: False)
        with pytest.raises(HostSync, match=r"state\.py"):
            both(world, lambda: kv_attend(q, dep, "l", value_size=DV))


class TestWrites:
    def write(self, world: World, inputs: AttentionInputs, store: str) -> None:
        rows = torch.arange(sum(LENGTHS) * 64, dtype=torch.float64).view(-1, 64) / 512
        with running(world.caches, inputs):
            if store == "rows":
                kv_write(rows[:, None, :8], rows[:, None, 8:14], "l")
                index_write(rows[:, 32:48], "l")
            else:
                record = pack_record(rows[:, :32], rows[:, 32:40], rows[:, 40:56], "fp8")  # type: ignore[arg-type]
                record_write(record, "l", latent=32, rope=8, index=16)

    @pytest.mark.parametrize("store", ["rows", "records"])
    @pytest.mark.parametrize("skip", ["none", "some", "all", "all but slot 0"])
    def test_the_same_bytes(self, store: str, skip: str) -> None:
        dtype = torch.float64 if store == "rows" else torch.float8_e4m3fn
        kept, free = World(), World()
        for world in (kept, free):
            world.caches = PagedCaches(world.caches.num_blocks, world.caches.block_size, dtype)
            self.write(world, fresh(world.write), store)  # what skipped rows must leave alone
        slots = kept.write.slots.roll(3)
        if skip != "none":
            keep = {"some": torch.arange(len(slots)) % 3 == 1, "all": slots < 0, "all but slot 0": slots == 0}[skip]
            slots = slots.where(keep, -1)
        for world in (kept, free):
            inputs = fresh(world.write)
            object.__setattr__(inputs, "slots", slots)
            if world is kept:
                self.write(world, inputs, store)
            else:
                with capturable_only(), SyncCheck():
                    self.write(world, inputs, store)
                assert "kept" not in vars(inputs)
        assert set(kept.caches.tensors) == set(free.caches.tensors)
        for name, held in kept.caches.tensors.items():
            assert torch.equal(held.view(torch.uint8), free.caches.tensors[name].view(torch.uint8)), name

    def test_a_skipped_row_that_is_written_is_seen(self) -> None:
        kept, free = World(), World()
        self.write(kept, fresh(kept.write), "rows")
        inputs = fresh(free.write)
        object.__setattr__(inputs, "slots", inputs.slots.where(inputs.slots != inputs.slots[4], -1))
        with capturable_only():
            self.write(free, inputs, "rows")
        assert not torch.equal(kept.caches.tensors["l.k"], free.caches.tensors["l.k"])


def test_selection_reads_no_length_of_its_own() -> None:
    world = World()
    with running(world.caches, world.write):
        dep = index_write(world.random(sum(LENGTHS), D), "l")
    q, weights = world.random(len(world.read.positions), 2, D), world.random(len(world.read.positions), 2)
    on_cpu, captured = both(world, lambda: index_topk(q, weights, dep, "l", 5))
    assert torch.equal(on_cpu, captured)


class TestMemory:
    """Temporaries do not grow with rows or with the width of the block table."""

    @staticmethod
    def attend(rows: int, columns: int, workspace: int) -> int:
        q, cache = torch.randn(rows, 4, 32), torch.randn(columns, 16, 2, 32)
        ends = torch.full((rows,), columns * 16, dtype=torch.int32)
        tables = torch.arange(columns, dtype=torch.int32).view(1, columns)
        with LiveBytes() as live:
            paged.paged_attend_rows(
                q, cache, None, cache, tables, ends * 0, ends * 0, ends, ends.long(),
                scale=0.1, workspace_bytes=workspace,
            )  # fmt: skip
        return live.peak - q.numel() * 4

    def test_attention_stays_within_its_workspace(self) -> None:
        few, many = self.attend(8, 16, 1 << 20), self.attend(64, 128, 1 << 20)
        assert few < 1 << 20 and many < 1 << 20
        assert self.attend(64, 128, 1 << 24) > 4 << 20, "sabotage: with more to spend it is seen to spend more"

    def test_experts_copy_a_bounded_number_of_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hidden, chosen = torch.randn(64, 32), torch.arange(128).view(64, 2) % 8
        parts = hidden, chosen, torch.randn(8, 64, 32), torch.randn(8, 32, 32), experts.ACTIVATIONS["silu"]
        peaks = []
        for bound in (1 << 17, 1 << 28):
            monkeypatch.setattr(experts, "GATHERED_BYTES", bound)
            with LiveBytes() as live:
                experts.gathered(*parts)
            peaks.append(live.peak)
        assert peaks[0] < (1 << 17) + 4 * 128 * 32 * 4 and peaks[1] > 1 << 20


class TestExperts:
    @pytest.mark.parametrize("bound", [0, 500, 1 << 28])
    def test_gathered_weights_equal_loads(self, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = operands()
        on_cpu = experts.experts_op(*parts, "silu")
        monkeypatch.setattr(experts, "GATHERED_BYTES", bound)
        with capturable_only(), SyncCheck():
            captured = experts.experts_op(*parts, "silu")
        torch.testing.assert_close(captured, on_cpu, rtol=0, atol=1e-13)
        other = parts[0], parts[1].flip(1), *parts[2:]
        with capturable_only():
            assert (experts.experts_op(*other, "silu") - on_cpu).abs().max() > 1e-2

    def test_grouped_products_equal_loads(self) -> None:
        """In bf16, with an expert that has no row. The grouped product itself is PyTorch's; on a CPU it reads loads."""
        generator = torch.Generator().manual_seed(0)
        hidden, gate_up, down = (
            torch.randn(*shape, generator=generator).bfloat16() for shape in ((9, 16), (5, 48, 16), (5, 16, 24))
        )
        chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
        parts = hidden, chosen, gate_up, down, experts.ACTIVATIONS["silu"]
        wanted = experts.loaded(*parts)
        torch.testing.assert_close(experts.grouped(*parts), wanted, rtol=2e-2, atol=0.5)
        assert float((experts.grouped(hidden, chosen.flip(1), *parts[2:]) - wanted).abs().max()) > 10
        assert not experts.has_grouped(hidden, gate_up, down), "on a CPU"

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        hidden, chosen, weights, *matrices = operands()
        with capturable_only():
            whole = experts.experts_op(hidden, chosen, weights, *matrices, "silu")
            spoilt = hidden.clone()
            spoilt[torch.arange(len(hidden)) != 4] = float("nan")
            found = experts.experts_op(spoilt, chosen.flip(0).index_copy(0, torch.tensor([4]), chosen[4:5]), weights,
                                       *matrices, "silu")  # fmt: skip
        assert torch.equal(found[4], whole[4]) and found.isnan().any()

    def test_no_rows(self) -> None:
        hidden, chosen, weights, *matrices = operands()
        with capturable_only():
            assert experts.experts_op(hidden[:0], chosen[:0], weights[:0], *matrices, "silu").shape == (0, 6)

    def test_loads_are_refused_where_nothing_may_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(experts, "in_capture", lambda on: False)
        with pytest.raises(HostSync, match=r"experts\.py"), capturable_only(), SyncCheck():
            experts.experts_op(*operands(), "silu")
