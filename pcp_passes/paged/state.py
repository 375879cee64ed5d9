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
from typing import TYPE_CHECKING, Literal

import torch

from pcp_passes.attention.tiles import intervals
from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.host_reads import allowed
from pcp_passes.paged.rows import Kept, kept_rows
from pcp_passes.sparse.backends import AUTO, DEFAULT_WORKSPACE_BYTES

if TYPE_CHECKING:
    from pcp_passes.mesh.peer_rows import PeerRows
    from pcp_passes.paged.routed import ExpertShard
    from pcp_passes.piecewise.runner import BodyRunner

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
    per_request: int = 0
    """Which of the two row counts that replicas tell each other this call has: 0 for rows of the step's tokens, ``w``
    for ``w`` rows per request of the step. Only a call with experts on several replicas reads it."""

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
        if self.per_request < 0:
            wrong.append(f"per_request is {self.per_request}, required 0 or the rows of each request")
        if wrong:
            raise ConfigError(f"attention inputs: {'; '.join(wrong)}. Give N rows and R attention rows throughout.")

    @property
    def rows(self) -> int:
        """Token rows of the call, padding included."""
        return self.positions.shape[0]

    def require_current(self, reader: str) -> None:
        """Nothing to check: these tensors belong to this object. Those of a static set may be written over."""

    @cached_property
    @allowed("for the references of a CPU")
    def segments(self) -> tuple[tuple[int, int, int, int], ...]:
        """``(attention row, first row, end row, keys)`` of those that have rows and keys. Read on the host once."""
        starts, lengths = self.query_start_loc.tolist(), self.seq_lens.tolist()
        if starts and (starts[0] != 0 or starts != sorted(starts) or starts[-1] > self.rows):
            raise ConfigError(f"query_start_loc is {starts}; required a rise from 0 to at most {self.rows} rows")
        found = [(r, starts[r], starts[r + 1], int(length)) for r, length in enumerate(lengths)]
        return tuple(one for one in found if one[1] < one[2] and one[3] > 0)

    @cached_property
    def row_request(self) -> torch.Tensor:
        """i32 ``[N]``: attention row of each row, made on the device; any valid one on padding rows."""
        ends = self.query_start_loc[1:].to(torch.int64).contiguous()
        found = torch.searchsorted(ends, torch.arange(self.rows, device=ends.device), right=True)
        return found.clamp_(max=max(self.seq_lens.shape[0] - 1, 0)).to(torch.int32)

    @cached_property
    def padding(self) -> torch.Tensor:
        """bool ``[N]``: rows past the last request, made on the device."""
        return torch.arange(self.rows, device=self.positions.device) >= self.query_start_loc[-1]

    @cached_property
    def visible(self) -> torch.Tensor:
        """i32 ``[N]``: how many keys of its request each row sees, made on the device; 0 on padding rows.

        One more than its position, and never more than the request has.
        """
        if not self.seq_lens.shape[0]:
            return torch.zeros(self.rows, dtype=torch.int32, device=self.positions.device)
        held = torch.minimum(self.positions + 1, self.seq_lens.long()[self.row_request.long()])
        return held.masked_fill_(self.padding, 0).to(torch.int32)

    def interval(self, left: int, right: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[low, high)`` of its request that each row sees, i32 ``[N]`` each, made on the device once per window.

        ``left``, ``right`` and ``chunk`` as :func:`pcp_passes.attention.attend` takes them; padding rows see nothing.
        """
        known = self._intervals.get((left, right, chunk))
        if known is None:
            low, high = intervals(self.positions, torch.iinfo(torch.int32).max, left, right, chunk)
            if self.seq_lens.shape[0]:
                high = torch.minimum(high, self.seq_lens.long()[self.row_request.long()])
                high = high.masked_fill(self.padding, 0)
            else:
                high = torch.zeros_like(high)
            known = self._intervals[left, right, chunk] = low.clamp_(min=0).to(torch.int32), high.to(torch.int32)
        return known

    @cached_property
    def _intervals(self) -> dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]]:
        return {}

    @cached_property
    def tables(self) -> torch.Tensor:
        """:attr:`block_tables` as kernels take them, i32."""
        return self.block_tables.to(torch.int32)

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

    def require_columns(self, block_size: int) -> None:
        """Whether the block table can hold the longest request. Read on the host once: asked on CPU only.

        Raises:
            ConfigError: it cannot.
        """
        longest = max((keys for _, _, _, keys in self.segments), default=0)
        if -(-longest // block_size) > self.block_tables.shape[1]:
            raise ConfigError(
                f"a request has {longest} keys, but a row of the block table holds "
                f"{self.block_tables.shape[1] * block_size}. Give the block table more columns."
            )

    def _slots_of(self, row: int, keys: int, block_size: int) -> torch.Tensor:
        self.require_columns(block_size)
        blocks = -(-keys // block_size)
        first = self.block_tables[row, :blocks].long() * block_size
        return (first[:, None] + torch.arange(block_size, device=first.device)).flatten()[:keys]


LEAST_WORKSPACE_BYTES = 64 << 20
"""Enough for one row of 2048 keys, 128 heads and 576 columns in float64: of published models none takes more."""


@dataclass(frozen=True)
class SparseOptions:
    """How sparse attention and its indexer run.

    Raises:
        ConfigError: a workspace below 64 MiB.
    """

    attention: str = AUTO
    """A back end of :mod:`pcp_passes.sparse.backends`."""
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    """Bound on the temporaries of one selection, or of one attention by the reference."""

    def __post_init__(self) -> None:
        if self.workspace_bytes < LEAST_WORKSPACE_BYTES:
            raise ConfigError(
                f"workspace_bytes must be at least 64 MiB ({LEAST_WORKSPACE_BYTES}), found {self.workspace_bytes}."
            )


class PagedCaches:
    """Cache tensors of one rank by name, ``[num_blocks, block_size, heads, dim]`` each.

    ``"<layer>.k"`` and ``"<layer>.v"`` hold keys and values, ``"<layer>.latent"`` MLA's latent and rope key side by
    side, ``"<layer>.index"`` index keys. Where the caches are FP8 the last two hold records with scales, as bytes:
    latents ``u8[num_blocks, block_size, 1, W]``, and index keys ``u8[num_blocks, block_size * (dim + 4)]``, a page of
    values before a page of scales. A tensor is allocated, as zeros, when it is first written, and keeps its address
    from then on.

    Raises:
        ConfigError: a size below 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        sparse: SparseOptions | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"found {num_blocks} blocks of {block_size} rows; required at least one of each")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.sparse = sparse or SparseOptions()
        self.tensors: dict[str, torch.Tensor] = {}
        self.runner: BodyRunner | None = None
        """What runs the body calls of this rank through graphs; ``None`` runs them as they are."""
        self.experts: dict[str, ExpertShard] = {}
        """Experts of this rank by layer name, for bodies that dispatch their rows to experts of other ranks."""
        self.peers: PeerRows | None = None
        """Rows that each replica has in the step that runs; set before a step with experts on several replicas."""

    @property
    def holds_records(self) -> bool:
        """Whether latents and index keys are FP8 records with scales."""
        return self.dtype == torch.float8_e4m3fn

    def written(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The tensor to write ``rows`` ``[n, heads, dim]`` into; made when it is not there yet. Bytes stay bytes."""
        dtype = torch.uint8 if rows.dtype == torch.uint8 else self.dtype
        return self._made(name, (self.num_blocks, self.block_size, *rows.shape[1:]), dtype)

    def pages(self, name: str, width: int) -> torch.Tensor:
        """The tensor of index records of ``width`` bytes, ``u8[num_blocks, block_size * width]``; made when missing."""
        return self._made(name, (self.num_blocks, self.block_size * width), torch.uint8)

    def _made(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        held = self.tensors.get(name)
        if held is None:
            held = self.tensors[name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return held

    def by_slot(self, name: str) -> torch.Tensor:
        """A tensor as one row per slot, ``[num_blocks * block_size, ...]``: a view, or a copy of index records."""
        held = self.read(name)
        if held.dim() > 2:
            return held.flatten(0, 1)
        values = held.shape[1] // self.block_size - 4
        parts = held.split([self.block_size * values, self.block_size * 4], dim=1)
        return torch.cat([part.unflatten(1, (self.block_size, -1)) for part in parts], dim=2).flatten(0, 1)

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
    _Current.call[1].require_current(op)
    return _Current.call


def require_layout(op: str, layer: str, layout: str, rows: torch.Tensor, inputs: AttentionInputs) -> None:
    """Whether rows come in the layout that the slots were made in; their counts never decide.

    Raises:
        ConfigError: they do not.
    """
    if layout == inputs.slot_layout and rows.shape[0] == inputs.slots.shape[0]:
        return
    raise ConfigError(
        f"{op} of {layer}: found {rows.shape[0]} {layout} rows and {inputs.slots.shape[0]} {inputs.slot_layout} slots; "
        "required one slot per row in one layout. Run the sharded body with rank-major slots, and the replicated one "
        "with replicated slots."
    )


def _vector(held: torch.Tensor) -> bool:
    return held.dim() == 1 and held.dtype in _INTEGERS
