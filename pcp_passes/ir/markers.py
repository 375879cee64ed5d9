# SPDX-License-Identifier: Apache-2.0
"""Reshard markers: a change of placement, explicit in the graph until ``lower-reshards``.

``pcp::reshard(x, src, dst, pcp, axis)`` and its packed form ``pcp::reshard_many(xs, ...)`` (several row operands in one
collective) have shapes but no body: they are a statement for the passes between insertion and lowering. The lockstep
simulator gives them their meaning; anything else that runs one gets a :class:`~pcp_passes.errors.PcpError`.

Shapes: ``x`` is ``[M, ...]`` on every rank; the result is ``[pcp * M, ...]``, contiguous, rows of rank 0 first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pcp_passes.errors import PcpError
from pcp_passes.ir.library import define
from pcp_passes.ir.placements import RANK_MAJOR, SHARD

RESHARD = "pcp::reshard"
RESHARD_MANY = "pcp::reshard_many"

_TAIL = "str src, str dst, int pcp, str axis"


def gathered_like(x: torch.Tensor, pcp: int) -> torch.Tensor:
    """Uninitialised ``[pcp * M, ...]``, contiguous, for an operand ``[M, ...]``: an expression of the same symbol."""
    return x.new_empty((pcp * x.shape[0], *x.shape[1:]))


def _not_lowered(name: str) -> PcpError:
    return PcpError(
        f"{name} is a marker and cannot run: found it in a graph that is being executed, but markers must be turned "
        "into collectives first. Run the pass lower-reshards, or execute the graph with pcp_passes.simulate."
    )


def _check(src: str, dst: str) -> None:
    if (src, dst) != (SHARD, RANK_MAJOR):
        raise ValueError(f"reshard from {src!r} to {dst!r} is not defined; the only one is {SHARD!r} to {RANK_MAJOR!r}")


def _reshard(x: torch.Tensor, src: str, dst: str, pcp: int, axis: str) -> torch.Tensor:
    raise _not_lowered(RESHARD)


def _reshard_many(xs: list[torch.Tensor], src: str, dst: str, pcp: int, axis: str) -> list[torch.Tensor]:
    raise _not_lowered(RESHARD_MANY)


def _reshard_fake(x: torch.Tensor, src: str, dst: str, pcp: int, axis: str) -> torch.Tensor:
    _check(src, dst)
    return gathered_like(x, pcp)


def _reshard_many_fake(xs: list[torch.Tensor], src: str, dst: str, pcp: int, axis: str) -> list[torch.Tensor]:
    _check(src, dst)
    return [gathered_like(x, pcp) for x in xs]


reshard_op: Any = define(f"reshard(Tensor x, {_TAIL}) -> Tensor", _reshard, _reshard_fake)
reshard_many_op: Any = define(f"reshard_many(Tensor[] xs, {_TAIL}) -> Tensor[]", _reshard_many, _reshard_many_fake)


_ONE = (reshard_op, reshard_op.overloadpacket)
_MANY = (reshard_many_op, reshard_many_op.overloadpacket)


def is_marker(node: fx.Node) -> bool:
    """Whether the node is an un-lowered reshard, packed or not."""
    return node.op == "call_function" and node.target in (*_ONE, *_MANY)


def is_packed(node: fx.Node) -> bool:
    """Whether the node is the packed form of a reshard."""
    return node.op == "call_function" and node.target in _MANY


def marker_rows(node: fx.Node) -> tuple[fx.Node, ...]:
    """The row operands of a marker: one for ``reshard``, all for ``reshard_many``."""
    rows = node.args[0]
    return tuple(rows) if isinstance(rows, (list, tuple)) else (rows,)  # type: ignore[return-value, arg-type]
