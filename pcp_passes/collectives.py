# SPDX-License-Identifier: Apache-2.0
"""The collective of rows, ``pcp::all_gather_rows``, and the registry that gives each axis a process group.

A graph names an *axis* (``"pcp"``), never a group or a rank, so its text is the same on every rank. Each process binds
the axis once, before the first step::

    bind_axis("pcp", process_group)          # torch.distributed
    bind_axis("pcp", lambda x: ...)          # any callable [M, ...] -> [P * M, ...]

The op is opaque to the compiler and functional (the result never aliases the operand), so it runs in eager mode, under
Inductor and with a dynamic first dimension. Those of experts, whose rows may differ in number between ranks, are in
:mod:`pcp_passes.collectives_ragged`. Of every collective the last two arguments are the size of its axis and its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from pcp_passes.errors import ConfigError, RankMismatch
from pcp_passes.ir.library import define
from pcp_passes.ir.markers import gathered_like

ALL_GATHER_ROWS = "pcp::all_gather_rows"

#: PyTorch 2.13 renamed the first to the second, and warns at each use of the old name.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Gather = Callable[[torch.Tensor], torch.Tensor]
Group = dist.ProcessGroup | Gather


@dataclass(frozen=True)
class Collective:
    """One collective as a rank issued it: what must agree between ranks."""

    op: str
    axis: str
    shape: tuple[int, ...]
    """Of this rank's operand; where ranks bring different numbers of rows, with those of all ranks."""
    dtype: torch.dtype
    rows: int | None = field(default=None, compare=False)
    """Rows of this rank where :attr:`shape` counts those of all."""

    @property
    def bytes(self) -> int:
        """Bytes this rank contributes (the result of a gather holds ``pcp`` times as many)."""
        rows = self.shape[:1] if self.rows is None else (self.rows,)
        return math.prod((*rows, *self.shape[1:])) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.op}({self.dtype}{list(self.shape)}, axis {self.axis!r})"


@dataclass(eq=False)
class CollectiveLog:
    """Ordered collectives of one process."""

    entries: list[Collective] = field(default_factory=list)

    def add(self, entry: Collective) -> None:
        """Take note of one collective. A log that runs for ever overrides this and keeps totals."""
        self.entries.append(entry)

    @property
    def calls(self) -> int:
        """Number of collectives recorded."""
        return len(self.entries)

    @property
    def bytes(self) -> int:
        """Bytes contributed by this rank over all recorded collectives."""
        return sum(entry.bytes for entry in self.entries)


_axes: dict[str, Group] = {}
_logs: list[CollectiveLog] = []


def bind_axis(name: str, group: Group) -> None:
    """Give axis ``name`` its group. Binding again replaces the earlier group.

    Args:
        name: the axis written in the graph, ``"pcp"`` by default.
        group: a process group whose rank order is the axis order, or a callable taking contiguous ``[M, ...]`` and
            returning ``[P * M, ...]`` of the same dtype, rows of rank 0 first.
    """
    _axes[name] = group


def unbind_axis(name: str) -> None:
    """Forget the group of axis ``name`` (no error when it has none)."""
    _axes.pop(name, None)


@contextmanager
def bound_axis(name: str, group: Group) -> Iterator[None]:
    """:func:`bind_axis` for the length of a ``with`` block; an earlier binding comes back afterwards."""
    before = _axes.get(name)
    bind_axis(name, group)
    try:
        yield
    finally:
        unbind_axis(name)
        if before is not None:
            bind_axis(name, before)


@contextmanager
def record_collectives(log: CollectiveLog | None = None) -> Iterator[CollectiveLog]:
    """Record every collective this process issues inside the block, in ``log`` or a fresh one. Costs nothing outside
    of one."""
    log = CollectiveLog() if log is None else log
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def all_gather_rows(x: torch.Tensor, pcp: int, axis: str) -> torch.Tensor:
    """Rows of every rank of ``axis``, rank after rank.

    Args:
        x: contiguous ``[M, ...]``, the same shape and dtype on every rank.
        pcp: size of the axis, P.
        axis: a name given to :func:`bind_axis`.

    Returns:
        contiguous ``[P * M, ...]``, never an alias of ``x``.

    Raises:
        ConfigError: the axis has no group, or a group of another size.
        RankMismatch: a bound callable returned other rows than P * M.
    """
    result: torch.Tensor = all_gather_rows_op(x, pcp, axis)
    return result


def _all_gather_rows(x: torch.Tensor, pcp: int, axis: str) -> torch.Tensor:
    assert x.is_contiguous(), f"{ALL_GATHER_ROWS} needs a contiguous operand, found strides {x.stride()}"
    group = group_of(axis, pcp)
    record(Collective(ALL_GATHER_ROWS, axis, tuple(x.shape), x.dtype))
    return gather_over(group, x, pcp, axis)


def group_of(axis: str, ranks: int) -> Group:
    """The group bound to an axis.

    Raises:
        ConfigError: there is none, or one of another size.
    """
    group = _axes.get(axis)
    if group is None:
        raise ConfigError(
            f"collective on axis {axis!r}, but no group is bound to it (bound: {sorted(_axes) or 'none'}). "
            f"Call pcp_passes.collectives.bind_axis({axis!r}, group) before running the graph."
        )
    if isinstance(group, dist.ProcessGroup) and group.size() != ranks:
        raise ConfigError(
            f"the graph was rewritten for {ranks} ranks of axis {axis!r}, but its group has {group.size()}. "
            "Rewrite the graph for the group that runs it."
        )
    return group


def record(entry: Collective) -> None:
    """Note a collective, as it is about to be issued, in every log that records."""
    for log in _logs:
        log.add(entry)


def gather_over(group: Group, x: torch.Tensor, ranks: int, axis: str) -> torch.Tensor:
    """Contiguous ``[M, ...]`` of every rank, rank after rank; not recorded."""
    if not isinstance(group, dist.ProcessGroup):
        return _call(group, x, ranks, axis)
    out = gathered_like(x, ranks)
    _gather_into(_as_bytes(out), _as_bytes(x), group=group)
    return out


def _call(gather: Gather, x: torch.Tensor, pcp: int, axis: str) -> torch.Tensor:
    out = gather(x)
    required = (pcp * x.shape[0], *x.shape[1:])
    if tuple(out.shape) != required or out.dtype != x.dtype:
        raise RankMismatch(
            f"the gather bound to axis {axis!r} returned {out.dtype}{list(out.shape)} for {x.dtype}{list(x.shape)}; "
            f"required {x.dtype}{list(required)}. Bind a gather over {pcp} ranks."
        )
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        out = out.clone()
    return out.contiguous()


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats travel as bytes: not every back end knows them, and a gather only copies."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _all_gather_rows_fake(x: torch.Tensor, pcp: int, axis: str) -> torch.Tensor:
    return gathered_like(x, pcp)


all_gather_rows_op: Any = define(
    "all_gather_rows(Tensor x, int pcp, str axis) -> Tensor",
    _all_gather_rows,
    _all_gather_rows_fake,
    tags=(torch.Tag.needs_exact_strides,),
)


_GATHERS: set[Any] = {all_gather_rows_op, all_gather_rows_op.overloadpacket}
_REDUCTIONS: set[Any] = set()


def register_collective(op: Any, *, gathers: bool) -> Any:
    """Make an op known to :func:`is_collective`; its last two arguments are ``(ranks, axis)``."""
    (_GATHERS if gathers else _REDUCTIONS).update((op, op.overloadpacket))
    return op


def is_collective(node: fx.Node) -> bool:
    """Whether the node is a lowered collective of ours."""
    return node.op == "call_function" and (node.target in _GATHERS or node.target in _REDUCTIONS)


def is_gather(node: fx.Node) -> bool:
    """Whether the node is a collective that gives the rows of all ranks, rank after rank."""
    return node.op == "call_function" and node.target in _GATHERS
