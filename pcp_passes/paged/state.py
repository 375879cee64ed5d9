# SPDX-License-Identifier: Apache-2.0
"""Side state of a running body: where its rows go, what they read, and the caches themselves.

A captured body takes token rows and nothing of the sequence. Slots, block tables, lengths and caches reach the paged
ops through :func:`running`, as a forward context does in vLLM, so a body's graph holds neither a rank nor an address::

    caches = PagedCaches(num_blocks=64, block_size=16, dtype=torch.float64)
    with running(caches, inputs):
        hidden = body(ids, positions)

Position ``j`` of attention row ``r`` lives in slot ``block_tables[r, j // block_size] * block_size + j % block_size``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.paged.rows import Kept, kept_rows

SlotLayout = Literal["replicated", "rank_major"]
REPLICATED_SLOTS: SlotLayout = "replicated"
RANK_MAJOR_SLOTS: SlotLayout = "rank_major"

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """What the attention family needs of one call: N rows of R attention rows.

    A request whose rows on a rank are two chunks has two attention rows. The tensors must keep their values for as long
    as the object is used: what the reference needs on the host is read once and remembered. Make a new object per call.

    Raises:
        ConfigError: shapes, dtypes or a slot layout that do not fit together.
    """

    slots: torch.Tensor
    """i64 ``[N]``, or ``[P * N]`` when rank-major: the slot of each new cache row; -1 is not written."""
    slot_layout: SlotLayout
    """``"replicated"``: slots of the rows of this call. ``"rank_major"``: slots of the rows of all ranks, rank after
    rank, as a gather delivers them."""
    block_tables: torch.Tensor
    """i32 or i64 ``[R, B]``: blocks in position order; not read past the last one needed."""
    query_start_loc: torch.Tensor
    """i32 or i64 ``[R + 1]``: first row of each attention row; rows after its last entry are padding."""
    seq_lens: torch.Tensor
    """i32 or i64 ``[R]``: keys that exist once this step's rows are written."""
    positions: torch.Tensor
    """i64 ``[N]``: position of each row within its request."""

    def __post_init__(self) -> None:
        requests = self.seq_lens.shape[0] if self.seq_lens.dim() == 1 else -1
        wrong = [
            f"{name} is {held.dtype}{list(held.shape)}, required {required}"
            for name, held, fits, required in (
                ("slots", self.slots, self.slots.dim() == 1 and self.slots.dtype == torch.int64, "int64 [N]"),
                ("positions", self.positions, _vector(self.positions) and self.positions.dtype == torch.int64,
                 "int64 [N]"),
                ("seq_lens", self.seq_lens, _vector(self.seq_lens), "integer [R]"),
                ("query_start_loc", self.query_start_loc,
                 _vector(self.query_start_loc) and self.query_start_loc.shape[0] == requests + 1,
                 f"integer [{requests + 1}]"),
                ("block_tables", self.block_tables,
                 self.block_tables.dim() == 2 and self.block_tables.shape[0] == requests
                 and self.block_tables.dtype in _INTEGERS, f"integer [{requests}, B]"),
            )
            if not fits
        ]  # fmt: skip
        if self.slot_layout not in (REPLICATED_SLOTS, RANK_MAJOR_SLOTS):
            wrong.append(f"slot_layout is {self.slot_layout!r}, required 'replicated' or 'rank_major'")
        if wrong:
            raise ConfigError(f"attention inputs: {'; '.join(wrong)}. Give N rows and R attention rows throughout.")

    @property
    def rows(self) -> int:
        """Token rows of the call, padding included."""
        return self.positions.shape[0]

    @cached_property
    def segments(self) -> tuple[tuple[int, int, int, int], ...]:
        """``(attention row, first row, end row, keys)`` of those that have rows and keys. Read on the host once."""
        starts, lengths = self.query_start_loc.tolist(), self.seq_lens.tolist()
        if starts and (starts[0] != 0 or starts != sorted(starts) or starts[-1] > self.rows):
            raise ConfigError(f"query_start_loc is {starts}; required a rise from 0 to at most {self.rows} rows")
        found = [(r, starts[r], starts[r + 1], int(length)) for r, length in enumerate(lengths)]
        return tuple(one for one in found if one[1] < one[2] and one[3] > 0)

    @cached_property
    def kept(self) -> Kept:
        """:func:`~pcp_passes.paged.rows.kept_rows` of the call."""
        return kept_rows(self.slots)

    def key_slots(self, block_size: int) -> tuple[torch.Tensor, ...]:
        """Slots of the keys of each of :attr:`segments`, in position order: i64 ``[keys]`` each."""
        known = self._key_slots.get(block_size)
        if known is None:
            known = self._key_slots[block_size] = tuple(self._slots_of(r, keys, block_size)
                                                        for r, _, _, keys in self.segments)  # fmt: skip
        return known

    @cached_property
    def _key_slots(self) -> dict[int, tuple[torch.Tensor, ...]]:
        return {}

    def _slots_of(self, row: int, keys: int, block_size: int) -> torch.Tensor:
        blocks = -(-keys // block_size)
        if blocks > self.block_tables.shape[1]:
            raise ConfigError(
                f"a request has {keys} keys, but a row of the block table holds "
                f"{self.block_tables.shape[1] * block_size}. Give the block table more columns."
            )
        first = self.block_tables[row, :blocks].long() * block_size
        return (first[:, None] + torch.arange(block_size, device=first.device)).flatten()[:keys]


class PagedCaches:
    """Cache tensors of one rank by name, ``[num_blocks, block_size, heads, dim]`` each.

    ``"<layer>.k"`` and ``"<layer>.v"`` hold keys and values, or MLA's latent and rope key; ``"<layer>.index"`` holds
    index keys. A tensor is allocated, as zeros, when it is first written, and keeps its address from then on.

    Raises:
        ConfigError: a size below 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"found {num_blocks} blocks of {block_size} rows; required at least one of each")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.tensors: dict[str, torch.Tensor] = {}

    def written(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The tensor to write ``rows`` ``[n, heads, dim]`` into; made when it is not there yet."""
        held = self.tensors.get(name)
        if held is None:
            shape = (self.num_blocks, self.block_size, *rows.shape[1:])
            held = self.tensors[name] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return held

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name.

        Raises:
            PcpError: nothing has written it.
        """
        held = self.tensors.get(name)
        if held is None:
            raise PcpError(f"the cache {name!r} is read before it was written; written are {sorted(self.tensors)}")
        return held

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all tensors written so far."""
        return sum(held[0].numel() * held.element_size() for held in self.tensors.values())


class _Current:
    """The call that runs now; one attribute access is all a paged op pays for it."""

    call: tuple[PagedCaches, AttentionInputs] | None = None


@contextmanager
def running(caches: PagedCaches, inputs: AttentionInputs) -> Iterator[None]:
    """Let the paged ops inside the block work on ``caches`` as ``inputs`` says. Nests; not for several threads."""
    before = _Current.call
    _Current.call = (caches, inputs)
    try:
        yield
    finally:
        _Current.call = before


def current(op: str) -> tuple[PagedCaches, AttentionInputs]:
    """Caches and inputs of the running call.

    Raises:
        PcpError: no call is running.
    """
    if _Current.call is None:
        raise PcpError(f"{op} was called outside a step: run the body inside `with running(caches, inputs):`")
    return _Current.call


def _vector(held: torch.Tensor) -> bool:
    return held.dim() == 1 and held.dtype in _INTEGERS
