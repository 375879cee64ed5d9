# SPDX-License-Identifier: Apache-2.0
"""Buffers of one rank at fixed addresses: what captured graphs read and did not make.

A buffer is allocated once, for the largest bucket; a smaller bucket is a prefix of it, contiguous and at the same
address. Filling one copies on the device and writes the pad value over the rest of the bucket every time, so that no
row of an earlier, larger call is left in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch

from pcp_passes.errors import GraphError
from pcp_passes.paged.state import AttentionInputs
from pcp_passes.plan import PAD_SLOT_ID

Filled = Callable[[str, torch.Tensor, torch.Tensor | int], None]
"""Told after each fill: the buffer, its tail, and what the tail must hold (one value, broadcast)."""


class Buffer:
    """One fixed address: ``shape`` with ``None`` where the rows stand, which is at most once.

    Args:
        name: for messages.
        shape: sizes.
        rows: the largest bucket.
        pad: value of rows behind the real ones.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int | None, ...],
        dtype: torch.dtype,
        rows: int,
        *,
        pad: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name, self.shape, self.rows, self.pad = name, shape, rows, pad
        self.dim = shape.index(None) if None in shape else None
        self.flat = torch.zeros(prod(self._sizes(rows)), dtype=dtype, device=device)

    def _sizes(self, rows: int) -> tuple[int, ...]:
        return tuple(rows if size is None else size for size in self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that the buffer takes."""
        return self.flat.numel() * self.flat.element_size()

    def view(self, rows: int) -> torch.Tensor:
        """The first ``rows`` rows, contiguous.

        Raises:
            GraphError: more rows than the largest bucket has.
        """
        if self.dim is not None and rows > self.rows:
            raise GraphError(
                f"{self.name} was allocated for {self.rows} rows and is asked for {rows}; its address must stay.\n"
                "  next  give the runner the largest bucket as rows_max"
            )
        sizes = self._sizes(rows)
        return self.flat[: prod(sizes)].view(sizes)

    def fill(self, value: torch.Tensor, rows: int, filled: Filled | None = None) -> torch.Tensor:
        """``value`` and then pads, as a bucket of ``rows`` rows. Nothing is copied when it lies here already.

        Raises:
            GraphError: a value that does not fit the buffer or the bucket.
        """
        bucket = self.view(rows)
        count = rows if self.dim is None else value.shape[self.dim]
        mine = bucket if self.dim is None else bucket.narrow(self.dim, 0, min(count, rows))
        if count > rows or value.shape != mine.shape or not _casts(value.dtype, mine.dtype):
            raise GraphError(
                f"{self.name} takes {bucket.dtype}{list(bucket.shape)}, found {value.dtype}{list(value.shape)}.\n"
                "  next  choose a bucket that holds the largest rank's rows, and prepare the bodies that run"
            )
        if value.data_ptr() != mine.data_ptr() or value.stride() != mine.stride():
            shares = value.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()
            mine.copy_(value.clone() if shares else value, non_blocking=True)
        if self.dim is not None and count < rows:
            tail = bucket.narrow(self.dim, count, rows - count)
            self._pad(tail)
            if filled is not None:
                filled(self.name, tail, self.pad)
        return bucket

    def _pad(self, tail: torch.Tensor) -> None:
        tail.fill_(self.pad)


def _casts(found: torch.dtype, held: torch.dtype) -> bool:
    """Index tensors may come in either width; nothing else is converted."""
    return found == held or {found, held} <= {torch.int32, torch.int64}


@dataclass(frozen=True, eq=False)
class StaticAttention(AttentionInputs):
    """Attention inputs in a rank's static set: valid until the set is written again."""

    owner: str = field(kw_only=True)
    generation: int = field(kw_only=True)
    source: AttentionSet = field(kw_only=True)

    def require_current(self, reader: str) -> None:
        if self.generation != self.source.generation:
            raise GraphError(
                f"{reader} runs under the attention inputs of {self.owner}, but {self.source.owner} has written over "
                "them since.\n  next  fill the set right before the call that reads it, once for each draft step"
            )


class AttentionSet:
    """The static attention inputs of one rank, shared by all its replicated calls, one after another.

    Args:
        rows, requests: of the largest bucket.
        columns: of a block table.
    """

    def __init__(self, rows: int, requests: int, columns: int, device: torch.device | str = "cpu") -> None:
        def made(name: str, count: int, dtype: torch.dtype, pad: int = 0, *more: int) -> Buffer:
            return Buffer(name, (None, *more), dtype, count, pad=pad, device=device)

        self.slots = made("slots", rows, torch.int64, PAD_SLOT_ID)
        self.positions = made("attention positions", rows, torch.int64)
        self.seq_lens = made("seq_lens", requests, torch.int64)
        self.query_start_loc = made("query_start_loc", requests + 1, torch.int64)
        self.block_tables = made("block_tables", requests, torch.int32, 0, columns)
        self.generation = 0
        self.owner = "nobody"

    def buffers(self) -> tuple[Buffer, ...]:
        """All of them."""
        return self.slots, self.positions, self.seq_lens, self.query_start_loc, self.block_tables

    def fill(
        self, inputs: AttentionInputs, owner: str, rows: int, requests: int, filled: Filled | None = None
    ) -> StaticAttention:
        """``inputs`` of a replicated call on a bucket; whatever the set held before is stale from now on.

        Rows behind the real ones have slot -1 and position 0; attention rows behind them have no rows and no keys.

        Raises:
            GraphError: rank-major slots, or a bucket that is too small.
        """
        if inputs.slot_layout != "replicated":
            raise GraphError(f"{owner} has rank-major slots; required replicated ones, as a static set holds them")
        self.generation += 1
        self.owner = owner
        starts = self.query_start_loc.view(requests + 1)
        count = inputs.query_start_loc.shape[0]
        if count > requests + 1:
            raise GraphError(
                f"{owner} has {count - 1} attention rows, its bucket {requests}.\n"
                "  next  choose the bucket by the requests of the call"
            )
        starts[:count].copy_(inputs.query_start_loc, non_blocking=True)
        if count < requests + 1:
            starts[count:] = starts[count - 1]
            if filled is not None:
                filled(self.query_start_loc.name, starts[count:], starts[count - 1])
        return StaticAttention(
            slots=self.slots.fill(inputs.slots, rows, filled),
            slot_layout="replicated",
            block_tables=self.block_tables.fill(inputs.block_tables, requests, filled),
            query_start_loc=starts,
            seq_lens=self.seq_lens.fill(inputs.seq_lens, requests, filled),
            positions=self.positions.fill(inputs.positions, rows, filled),
            owner=owner,
            generation=self.generation,
            source=self,
        )


@dataclass(frozen=True)
class SlotType:
    """What decides whether two holds may share a buffer: the role (none: any role), its slot, shape and dtype."""

    role: str
    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype


class StaticInputs:
    """All static buffers of one rank.

    Args:
        rows_max, requests_max: of the largest buckets.
        columns: of a block table.
        device: of the buffers.
        types: every slot that a body of the rank holds.
        shared: slots that lie in another one's buffer, when nothing reads that after it is written over.
    """

    def __init__(
        self,
        rows_max: int,
        requests_max: int,
        columns: int,
        device: torch.device | str,
        types: Iterator[SlotType],
        shared: dict[SlotType, SlotType],
    ) -> None:
        self.rows_max, self.requests_max = rows_max, requests_max
        self.attention = AttentionSet(rows_max, requests_max, columns, device)
        self.slots: dict[SlotType, Buffer] = {}
        for one in types:
            base = shared.get(one, one)
            for kind in (base, one):
                if kind not in self.slots:
                    self.slots[kind] = (
                        self.slots[base] if kind is not base
                        else Buffer(f"{kind.role} {kind.name}".strip(), kind.shape, kind.dtype, rows_max, device=device)
                    )  # fmt: skip

    def buffers(self) -> tuple[Buffer, ...]:
        """Each buffer once."""
        return tuple(dict.fromkeys((*self.slots.values(), *self.attention.buffers())))

    @property
    def bytes(self) -> int:
        """Bytes of all static buffers."""
        return sum(buffer.bytes for buffer in self.buffers())
