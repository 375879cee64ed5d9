# SPDX-License-Identifier: Apache-2.0
"""Reshard markers of token rows: from every rank's full value to its rows, and back in global order.

Both name the plan tensor they use, so a graph says where its rows come from and holds no rank:

* ``pcp::shard(x, rows, dim, outer, inner)`` takes this rank's rows of a replicated value: no communication;
* ``pcp::restore(x, index, dim, outer, inner, pcp, axis)`` gives every rank the rows of all ranks in global order.

``rows`` is ``i64[M]``, the global token of each local row (padded rows repeat a real token, so that a sharded value is
exactly ``global.index_select(dim, rows)``); ``index`` is ``i64[n]``, the places of the wanted tokens among the
rank-major rows (``n = T``: all of them; fewer: only those rows travel). A dimension merged with others (see
:class:`~pcp_passes.ir.placements.Shard`) is ``outer * tokens * inner`` long.

``shard`` has a body, for it is only a selection. ``restore`` has none: the simulator and ``lower-restores`` know it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pcp_passes.errors import PcpError
from pcp_passes.ir.library import define
from pcp_passes.ir.placements import Shard

RESTORE_ROWS = "pcp::restore"


def _resized(x: torch.Tensor, dim: int, size: Any) -> torch.Tensor:
    resized: torch.Tensor = x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])
    return resized


def take_rows(x: torch.Tensor, rows: torch.Tensor, dim: int, outer: int, inner: int) -> torch.Tensor:
    """Tokens ``rows`` of ``x`` along ``dim``; contiguous."""
    if outer == inner == 1:
        return x.index_select(dim, rows)
    apart: torch.Tensor = x.unflatten(dim, (outer, x.shape[dim] // (outer * inner), inner))
    return apart.index_select(dim + 1, rows).flatten(dim, dim + 2)


def _shard_fake(x: torch.Tensor, rows: torch.Tensor, dim: int, outer: int, inner: int) -> torch.Tensor:
    return _resized(x, dim, outer * rows.shape[0] * inner)


def _restore(x: torch.Tensor, index: torch.Tensor, dim: int, outer: int, inner: int, pcp: int, axis: str) -> Any:
    raise PcpError(
        f"{RESTORE_ROWS} is a marker and cannot run: found it in a graph that is being executed, but markers must be "
        "turned into collectives first. Run the pass lower-restores."
    )


def _restore_fake(
    x: torch.Tensor, index: torch.Tensor, dim: int, outer: int, inner: int, pcp: int, axis: str
) -> torch.Tensor:
    return _resized(x, dim, outer * index.shape[0] * inner)


shard_op: Any = define("shard(Tensor x, Tensor rows, int dim, int outer, int inner) -> Tensor", take_rows, _shard_fake)
restore_op: Any = define(
    "restore(Tensor x, Tensor index, int dim, int outer, int inner, int pcp, str axis) -> Tensor",
    _restore,
    _restore_fake,
)


_Ints = list[int]


def _restore_many(
    xs: list[torch.Tensor], index: torch.Tensor, dims: _Ints, outers: _Ints, inners: _Ints, pcp: int, axis: str
) -> Any:
    return _restore(xs[0], index, dims[0], outers[0], inners[0], pcp, axis)


def _restore_many_fake(
    xs: list[torch.Tensor], index: torch.Tensor, dims: _Ints, outers: _Ints, inners: _Ints, pcp: int, axis: str
) -> list[torch.Tensor]:
    places = zip(xs, dims, outers, inners, strict=True)
    return [_restore_fake(x, index, dim, outer, inner, pcp, axis) for x, dim, outer, inner in places]


restore_many_op: Any = define(
    "restore_many(Tensor[] xs, Tensor index, int[] dims, int[] outers, int[] inners, int pcp, str axis) -> Tensor[]",
    _restore_many,
    _restore_many_fake,
)


def is_shard(node: fx.Node) -> bool:
    """Whether the node takes a rank's rows of a replicated value."""
    return node.op == "call_function" and node.target is shard_op


def is_restore(node: fx.Node) -> bool:
    """Whether the node is an un-lowered restore."""
    return node.op == "call_function" and node.target is restore_op


def is_restore_many(node: fx.Node) -> bool:
    """Whether the node is an un-lowered restore of several operands."""
    return node.op == "call_function" and node.target is restore_many_op


def shard_of(node: fx.Node) -> Shard:
    """The sharded placement that a ``shard`` makes, or that a ``restore`` reads."""
    dim, outer, inner = node.args[2:5]
    return Shard(dim, outer, inner)  # type: ignore[arg-type]
