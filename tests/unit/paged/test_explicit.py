# SPDX-License-Identifier: Apache-2.0
"""``pcp::write_cache`` and ``pcp::paged_attend`` against plain indexing and explicit masks.

Tolerance of attention in float64: 1e-12, clean at most 1e-15; with a planted fault at least 1e-2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pcp_passes.attention import attend_reference
from pcp_passes.errors import ConfigError
from pcp_passes.paged import attend
from pcp_passes.paged import rows as written_rows
from pcp_passes.paged.explicit import paged_attend, paged_attend_op, write_cache, write_cache_op

POISON = 777.0
BLOCKS, SIZE = 5, 4


def write_kept(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    written_rows._write_kept(rows, cache, written_rows.kept_rows(slots))


WRITES = {"rows kept": write_kept, "no sync": written_rows._write_without_sync}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "slots",
    [
        [3, -1, 19, 0, -1, 7],
        [-1, 0, -1, -1, 1, 2],
        [-1, 5, 6, 7, 8, 9],
        [-1] * 6,
        [-1, -1, -1, -1, -1, 0],
        list(range(6)),
    ],
)
def test_only_named_slots_are_written(write: str, slots: list[int]) -> None:
    rows = torch.randn(len(slots), 2, 3)
    rows[[i for i, slot in enumerate(slots) if slot < 0]] = float("nan")
    cache = torch.full((BLOCKS, SIZE, 2, 3), POISON)
    WRITES[write](rows, cache, torch.tensor(slots))
    required = torch.full((BLOCKS * SIZE, 2, 3), POISON)
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            required[slot] = row
    assert torch.equal(cache.flatten(0, 1), required)


class HostReads(TorchDispatchMode):
    """Counts what would wait for a CUDA device: values read on the host, and sizes that depend on values."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("write", WRITES)
def test_a_write_on_a_device_reads_nothing_on_the_host(write: str) -> None:
    with HostReads() as seen:
        WRITES[write](torch.randn(3, 2, 3), torch.zeros(BLOCKS, SIZE, 2, 3), torch.tensor([-1, 4, 9]))
    assert (seen.count == 0) == (write == "no sync")


def test_a_slot_off_by_one_is_seen() -> None:
    cache, shifted = torch.full((2, BLOCKS, SIZE, 2, 3), POISON)
    rows, slots = torch.randn(3, 2, 3), torch.tensor([4, -1, 9])
    write_kept(rows, cache, slots)
    write_kept(rows, shifted, slots + 1)
    assert not torch.equal(cache, shifted)


def test_write_converts_to_the_dtype_of_the_cache_and_takes_other_value_shapes() -> None:
    k, v = torch.randn(2, 1, 3), torch.randn(2, 4, 5)
    k_cache, v_cache = torch.zeros(BLOCKS, SIZE, 1, 3, dtype=torch.float16), torch.zeros(BLOCKS, SIZE, 4, 5)
    write_cache(k, v, k_cache, v_cache, torch.tensor([6, 1]))
    assert torch.equal(k_cache.flatten(0, 1)[6], k[0].half())
    assert torch.equal(v_cache.flatten(0, 1)[1], v[1])


def test_write_of_no_rows() -> None:
    cache = torch.full((BLOCKS, SIZE, 2, 3), POISON)
    none = torch.empty(0, 2, 3)
    write_cache(none, none, cache, cache.clone(), torch.empty(0, dtype=torch.int64))
    assert bool((cache == POISON).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(3, 2, 3)}, r"k is \[3, 2, 3\], required \[2, 2, 3\]"),
        ({"v": torch.zeros(2, 2, 4)}, r"v is \[2, 2, 4\], required \[2, 2, 3\]"),
        ({"k_cache": torch.zeros(BLOCKS, SIZE, 3, 2).transpose(2, 3)}, "k_cache is not contiguous"),
        ({"v_cache": torch.zeros(BLOCKS + 1, SIZE, 2, 3)}, "blocks and rows"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, r"torch.int32\[2\], required torch.int64"),
    ],
)
def test_writes_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    operands = {
        "k": torch.zeros(2, 2, 3),
        "v": torch.zeros(2, 2, 3),
        "k_cache": torch.zeros(BLOCKS, SIZE, 2, 3),
        "v_cache": torch.zeros(BLOCKS, SIZE, 2, 3),
        "slots": torch.tensor([0, 1]),
    }
    with pytest.raises(ConfigError, match=message):
        write_cache(**{**operands, **change})


def test_a_slot_beyond_the_cache_is_an_error() -> None:
    rows, cache = torch.zeros(1, 2, 3), torch.zeros(BLOCKS, SIZE, 2, 3)
    with pytest.raises(IndexError):
        write_cache(rows, rows, cache, cache.clone(), torch.tensor([BLOCKS * SIZE]))


@dataclass(frozen=True)
class Ragged:
    """Keys of each request in plain form, and the same in pages."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rows: list[int]
    """New rows of each request: its last ones."""
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor

    def paged(self, **options: Any) -> torch.Tensor:
        operands = (self.k_cache, self.v_cache, self.table, self.starts, self.lengths, self.positions)
        return paged_attend(self.q, *operands, **options)

    def reference(self, **options: Any) -> torch.Tensor:
        options = {"scale": self.q.shape[-1] ** -0.5, **options}
        out = torch.zeros(self.q.shape[0], self.q.shape[1], self.v_cache.shape[3], dtype=self.q.dtype)
        start = 0
        for key, value, rows in zip(self.keys, self.values, self.rows, strict=True):
            mine = slice(start, start + rows)
            if rows:
                q = self.q[mine].transpose(0, 1)[None]
                at = self.positions[mine]
                seen = attend_reference(q, key.transpose(0, 1)[None], value.transpose(0, 1)[None], at, **options)
                out[mine] = seen[0].transpose(0, 1)
            start += rows
        return out


def ragged(lengths: list[int], rows: list[int], *, size: int = SIZE, padding: int = 0, seed: int = 0) -> Ragged:
    """Requests with ``lengths`` keys, the last ``rows`` of them new, in shuffled blocks; unused cache rows are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys, values = [noise(n, 2, 6) for n in lengths], [noise(n, 2, 4) for n in lengths]
    needed = [-(-n // size) for n in lengths]
    free = iter(torch.randperm(sum(needed) + 2, generator=generator).tolist())
    k_cache = torch.full((sum(needed) + 2, size, 2, 6), float("nan"), dtype=torch.float64)
    v_cache = torch.full((sum(needed) + 2, size, 2, 4), float("nan"), dtype=torch.float64)
    table = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    for r, n in enumerate(needed):
        table[r, :n] = torch.tensor([next(free) for _ in range(n)])
        for j in range(lengths[r]):
            k_cache[table[r, j // size], j % size] = keys[r][j]
            v_cache[table[r, j // size], j % size] = values[r][j]
    total = sum(rows)
    positions = torch.cat([torch.arange(n - m, n) for n, m in zip(lengths, rows, strict=True)])
    return Ragged(
        keys,
        values,
        rows,
        noise(total + padding, 4, 6),
        k_cache,
        v_cache,
        table,
        torch.tensor([0, *rows], dtype=torch.int32).cumsum(0).int(),
        torch.tensor(lengths, dtype=torch.int32),
        torch.cat([positions, torch.zeros(padding, dtype=torch.int64)]),
    )


def off(batch: Ragged, **options: Any) -> float:
    return float((batch.paged(**options) - batch.reference(**options)).abs().max())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"left": 5},
    {"left": 0},
    {"right": -1},
    {"chunk": 3},
    {"left": 6, "chunk": 7},
    {"scale": 0.7, "softcap": 1.5},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64), "left": 6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_paged_attention_is_attention_per_request(options: dict[str, Any]) -> None:
    batch = ragged([13, 1, 22, 8], [5, 1, 22, 1], padding=3)
    assert off(batch, **options) <= 1e-12
    assert bool((batch.paged(**options)[-3:] == 0).all())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5).flatmap(
        lambda lengths: st.tuples(st.just(lengths), st.tuples(*(st.integers(0, n) for n in lengths)))
    ),
    st.integers(1, 7),
    st.sampled_from([-1, 0, 3, 9]),
    st.sampled_from([0, 4]),
    st.integers(0, 5),
)
def test_any_ragged_batch(
    shape: tuple[list[int], tuple[int, ...]], size: int, left: int, chunk: int, seed: int
) -> None:
    batch = ragged(shape[0], list(shape[1]), size=size, seed=seed)
    if sum(shape[1]):
        assert off(batch, left=left, chunk=chunk) <= 1e-12


def test_the_same_request_may_appear_twice() -> None:
    """As zigzag needs it: two segments of a prefill, each with its own length."""
    one = ragged([16], [16])
    twice = replace(
        one,
        table=one.table.repeat(2, 1),
        starts=torch.tensor([0, 4, 8], dtype=torch.int32),
        lengths=torch.tensor([4, 16], dtype=torch.int32),
        q=torch.cat([one.q[:4], one.q[12:]]),
        positions=torch.cat([one.positions[:4], one.positions[12:]]),
    )
    whole = one.paged()
    torch.testing.assert_close(twice.paged(), torch.cat([whole[:4], whole[12:]]), rtol=0, atol=1e-12)


def test_planted_faults_are_seen() -> None:
    clean = ragged([13, 14, 22], [5, 1, 4])
    required = clean.reference()
    faults = {
        "tables of two requests swapped": replace(clean, table=clean.table[[1, 0, 2]]),
        "blocks of one request swapped": replace(clean, table=clean.table[:, [0, 1, 3, 2, 4, 5]]),
        "one position late": replace(clean, positions=clean.positions + 1),
        "one key short": replace(clean, lengths=clean.lengths - 1),
        "a row given to its neighbour": replace(clean, starts=clean.starts + torch.tensor([0, 1, 0, 0])),
    }
    assert float((clean.paged() - required).abs().max()) <= 1e-12
    for name, fault in faults.items():
        found = fault.paged()
        assert not float((found - required).abs().max()) <= 1e-2, name


def test_work_of_a_window_does_not_grow_with_the_sequence() -> None:
    sizes: list[int] = []
    original = attend._heads_first

    def measured(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(len(slots))
        return original(cache, slots, dtype)

    attend._heads_first, batch = measured, ragged([200], [1])
    try:
        batch.paged(left=7)
        batch.paged()
    finally:
        attend._heads_first = original
    assert sizes == [8, 8, 200, 200]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": torch.tensor([4, 4])}, r"seq_lens is \[2\], required \[1\]"),
        ({"query_start_loc": torch.tensor([0])}, r"query_start_loc is \[1\], required \[2\]"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions is \[3\], required \[2\]"),
        ({"v_cache": torch.zeros(BLOCKS, SIZE, 1, 6)}, "v_cache"),
        ({"q": torch.zeros(1, 2, 4, 6)}, r"found q \[1, 2, 4, 6\]"),
        ({"seq_lens": torch.tensor([9])}, r"a request has 9 keys, but a row of the block table holds 8"),
    ],
)
def test_reads_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    operands = {
        "q": torch.zeros(2, 4, 6),
        "k_cache": torch.zeros(BLOCKS, SIZE, 2, 6),
        "v_cache": torch.zeros(BLOCKS, SIZE, 2, 6),
        "block_table": torch.tensor([[0, 1]]),
        "query_start_loc": torch.tensor([0, 2]),
        "seq_lens": torch.tensor([5]),
        "positions": torch.tensor([3, 4]),
    }
    with pytest.raises(ConfigError, match=message):
        paged_attend(**{**operands, **change})


def test_ops_are_registered_as_they_behave() -> None:
    rows, cache = torch.randn(3, 2, 4), torch.zeros(BLOCKS, SIZE, 2, 4)
    torch.library.opcheck(write_cache_op, (rows, rows, cache, cache.clone(), torch.tensor([2, -1, 5])))
    batch = ragged([7, 3], [2, 3])
    operands = (batch.q, batch.k_cache, batch.v_cache, batch.table, batch.starts, batch.lengths, batch.positions)
    torch.library.opcheck(paged_attend_op, operands, {"scale": 0.5, "left": 4})


def test_write_then_read_keeps_its_order_in_a_compiled_graph() -> None:
    """The read takes the cache itself, not a result of the write: functionalization must keep one before the other."""

    def step(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, *where: Any) -> torch.Tensor:
        write_cache_op(k, v, k_cache, v_cache, slots)
        result: torch.Tensor = paged_attend_op(q, k_cache, v_cache, *where, scale=0.5)
        return result

    caches: list[list[torch.Tensor]] = [[torch.zeros(BLOCKS, SIZE, 2, 4) for _ in "kv"] for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 6, 2, 4, generator=generator)
    slots = torch.tensor([8, 9, 10, 11, 0, 1])
    where = (torch.tensor([[2, 0]]), torch.tensor([0, 6]), torch.tensor([6]), torch.arange(6))
    torch._dynamo.reset()
    required = step(q, k, v, *caches[0], slots, *where)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v, *caches[1], slots, *where)
    assert torch.equal(found, required)
    assert all(torch.equal(one, other) for one, other in zip(*caches, strict=True))
    assert float(required.abs().max()) > 0
