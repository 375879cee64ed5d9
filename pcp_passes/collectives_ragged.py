# SPDX-License-Identifier: Apache-2.0
"""Collectives of experts: a gather of rows whose number differs between ranks, and the sums that bring them home.

======================  ================================================  ==============================================
op                      operand of a rank                                 result
======================  ================================================  ==============================================
``pcp::gather_ragged``  ``[n_r, ...]``                                    ``[n_0 + n_1 + ..., ...]``, rank after rank
``pcp::reduce_rows``    ``[R * n, ...]`` or ``[n, ...]``, equal on all    the sum over ranks: its own ``n`` rows
                                                                          (``scatter``), or all of them
``pcp::reduce_ragged``  ``[n_0 + n_1 + ..., ...]``                        the sum over ranks of its own ``n_r`` rows
======================  ================================================  ==============================================

The counts ``n_r`` come from the peer rows of the running call (:mod:`pcp_passes.mesh.peer_rows`): host values
that all ranks hold before the step, so no size is exchanged here and the host waits for no device.

Every sum is taken in rank order, from what the ranks sent, on every back end: it is the same to the last bit on all
ranks that hold it, and in the simulator. A rank sends a slice to its owner and each owner adds, so a sum that scatters
sends as many bytes as a reduce-scatter; one that does not (the few rows of a decode step) sends its operand to all.
Counts, slices and buffers are host values and the calls are those that NCCL takes into a capture; no test here runs
NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from pcp_passes.collectives import Collective, Group, gather_over, group_of, record, register_collective
from pcp_passes.errors import ConfigError, RankMismatch
from pcp_passes.ir.library import define
from pcp_passes.mesh.peer_rows import rows_of_call
from pcp_passes.paged.state import current

GATHER_RAGGED = "pcp::gather_ragged"
REDUCE_ROWS = "pcp::reduce_rows"
REDUCE_RAGGED = "pcp::reduce_ragged"


def call_sizes(op: str, ranks: int, axis: str, rows: int | None = None) -> tuple[int, ...]:
    """Rows that each rank of ``axis`` brings to the running call.

    Args:
        op: who asks, for messages.
        ranks: size of the axis.
        axis: its name.
        rows: what this rank does bring, to be compared.

    Raises:
        PcpError: no call is running.
        ConfigError: nobody said how many rows the replicas have, or they are of another number of replicas.
        RankMismatch: this rank brings other rows than it told its peers.
    """
    caches, inputs = current(op)
    peers = caches.peers
    if peers is None:
        raise ConfigError(
            f"{op} over axis {axis!r}, but the step has no peer rows. Set PagedCaches.peers (PeerRows) before the step."
        )
    sizes = rows_of_call(peers, inputs.per_request)
    if len(sizes) != ranks:
        raise ConfigError(
            f"{op} runs over {ranks} ranks of axis {axis!r}, but the peer rows are of {len(sizes)} replicas {sizes}. "
            "Make the bodies for the mesh that runs them."
        )
    if rows is not None and rows != sizes[peers.replica]:
        told = f"{inputs.per_request} rows per request" if inputs.per_request else "rows of the step's tokens"
        raise RankMismatch(
            f"{op} over axis {axis!r}: replica {peers.replica} brings {rows} rows and told its peers "
            f"{sizes[peers.replica]} ({told}, all replicas {sizes}). Peer rows are the rank-local padded counts of the "
            "call, taken after the layout."
        )
    return sizes


def in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``((parts[0] + parts[1]) + ...)``, in float32 where they are narrower, then as they were; no alias of any."""
    kind = parts[0].dtype
    total = parts[0].to(torch.float32 if kind.itemsize < 4 else kind, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(kind)


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``x`` with zero rows up to ``rows``."""
    return x if x.shape[0] == rows else torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def unpadded(gathered: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """From ``[R * max, ...]`` the ``n_r`` rows of each rank, one after another."""
    most = max(sizes)
    if all(size == most for size in sizes):
        return gathered
    return torch.cat([gathered[rank * most : rank * most + size] for rank, size in enumerate(sizes)])


def _gather_ragged(x: torch.Tensor, ranks: int, axis: str) -> torch.Tensor:
    assert x.is_contiguous(), f"{GATHER_RAGGED} needs a contiguous operand, found strides {x.stride()}"
    sizes = call_sizes(GATHER_RAGGED, ranks, axis, x.shape[0])
    group = group_of(axis, ranks)
    record(Collective(GATHER_RAGGED, axis, (sum(sizes), *x.shape[1:]), x.dtype, rows=x.shape[0]))
    return unpadded(gather_over(group, padded(x, max(sizes)), ranks, axis), sizes)


def require_slices(x: torch.Tensor, ranks: int, axis: str) -> None:
    """Raises ``RankMismatch`` where rows cannot be dealt to the ranks in equal slices."""
    if x.shape[0] % ranks:
        raise RankMismatch(
            f"{REDUCE_ROWS} over axis {axis!r}: {x.shape[0]} rows cannot be dealt to {ranks} ranks; required as many "
            "rows as a gather over that axis gave."
        )


def require_total(x: torch.Tensor, sizes: Sequence[int], axis: str) -> None:
    """Raises ``RankMismatch`` unless there is a row for every row of every rank."""
    if x.shape[0] != sum(sizes):
        raise RankMismatch(
            f"{REDUCE_RAGGED} over axis {axis!r}: found {x.shape[0]} rows; the replicas brought {sum(sizes)} "
            f"({', '.join(map(str, sizes))}). Combine in the reverse order of the dispatch."
        )


def _reduce_rows(x: torch.Tensor, scatter: bool, ranks: int, axis: str) -> torch.Tensor:
    if scatter:
        require_slices(x, ranks, axis)
    group = group_of(axis, ranks)
    record(Collective(REDUCE_ROWS, axis, tuple(x.shape), x.dtype))
    if not scatter:
        return in_rank_order(gather_over(group, x.contiguous(), ranks, axis).chunk(ranks))
    return in_rank_order(_to_owners(group, x, [x.shape[0] // ranks] * ranks, axis))


def _reduce_ragged(x: torch.Tensor, like: torch.Tensor, ranks: int, axis: str) -> torch.Tensor:
    sizes = call_sizes(REDUCE_RAGGED, ranks, axis, like.shape[0])
    require_total(x, sizes, axis)
    group = group_of(axis, ranks)
    record(Collective(REDUCE_RAGGED, axis, tuple(x.shape), x.dtype))
    return in_rank_order(_to_owners(group, x, sizes, axis))


def _to_owners(group: Group, x: torch.Tensor, sizes: Sequence[int], axis: str) -> list[torch.Tensor]:
    """What each rank holds of the rows of this one, in rank order; ``x`` lists the rows of all, rank after rank."""
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"axis {axis!r} is bound to a callable that gathers; a sum by owner needs a process group. Bind one, or "
            "simulate the ranks with pcp_passes.simulate."
        )
    own = sizes[group.rank()]
    received = x.new_empty((len(sizes) * own, *x.shape[1:]))
    given, taken = _bytes(x.contiguous()), _bytes(received)
    dist.all_to_all_single(taken, given, [own] * len(sizes), list(sizes), group=group)
    return list(received.split(own))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Rows as bytes: what only moves must not depend on the types that a back end knows."""
    return x.view(torch.uint8)


_totals: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""The size that stands for the rows of all ranks, by the space of its symbols and what it is made of."""


def _all_rows(x: torch.Tensor, ranks: int, axis: str) -> Any:
    """The rows of all ranks: one symbol for all gathers of so many rows, since the layers of a call have the same."""
    rows: Any = x.shape[0]
    key = (str(rows), ranks, axis)
    known = _totals.setdefault(rows.node.shape_env, {}) if isinstance(rows, torch.SymInt) else {}
    if key not in known:
        known[key] = torch.library.get_ctx().new_dynamic_size()
    return known[key]


def _gather_ragged_fake(x: torch.Tensor, ranks: int, axis: str) -> torch.Tensor:
    return x.new_empty((_all_rows(x, ranks, axis), *x.shape[1:]))


def _reduce_rows_fake(x: torch.Tensor, scatter: bool, ranks: int, axis: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] // ranks if scatter else x.shape[0], *x.shape[1:]))


def _reduce_ragged_fake(x: torch.Tensor, like: torch.Tensor, ranks: int, axis: str) -> torch.Tensor:
    return x.new_empty((like.shape[0], *x.shape[1:]))


gather_ragged_op: Any = register_collective(
    define("gather_ragged(Tensor x, int ranks, str axis) -> Tensor", _gather_ragged, _gather_ragged_fake,
           tags=(torch.Tag.needs_exact_strides,)),
    gathers=True,
)  # fmt: skip
reduce_rows_op: Any = register_collective(
    define("reduce_rows(Tensor x, bool scatter, int ranks, str axis) -> Tensor", _reduce_rows, _reduce_rows_fake),
    gathers=False,
)
reduce_ragged_op: Any = register_collective(
    define("reduce_ragged(Tensor x, Tensor like, int ranks, str axis) -> Tensor", _reduce_ragged, _reduce_ragged_fake),
    gathers=False,
)
