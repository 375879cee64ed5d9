# SPDX-License-Identifier: Apache-2.0
"""All ranks in one process: a rank-free graph is interpreted over P environments, collectives exchanged in memory.

Each rank is a generator that runs its graph up to the next collective and yields what it brings to it. The driver lets
every rank run to that point, compares what the members of a group brought, exchanges the rows, and lets them go on. So
the ranks run in lockstep, a divergence is found at the collective where it happens (real ranks would hang or abort
there), and no process group is needed. Markers and lowered collectives are both understood.

Without ``groups`` all ranks are one group, on any axis. With them an axis has several, as on a mesh::

    groups={"pcp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)]}

Then ranks of different groups may be at different collectives, and it is an error when no group is complete.

Ops with side effects (a cache write, attention over the cache) must find the state of *their* rank: the caller gives a
context manager per rank, which is entered around each node of that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from pcp_passes.collectives import Collective, CollectiveLog, is_collective
from pcp_passes.collectives_ragged import (
    GATHER_RAGGED,
    REDUCE_RAGGED,
    REDUCE_ROWS,
    call_sizes,
    in_rank_order,
    require_slices,
    require_total,
)
from pcp_passes.errors import ConfigError, RankMismatch
from pcp_passes.ir import meta, rules
from pcp_passes.ir.markers import RESHARD, RESHARD_MANY, is_marker, is_packed
from pcp_passes.segments import Segments, nested_module, segments_of

RankContext = Callable[[int], AbstractContextManager[Any]]
Graphs = fx.GraphModule | Sequence[fx.GraphModule]
Groups = Mapping[str, Sequence[Sequence[int]]]
"""For each axis the groups that its ranks form: positions, in the order of the axis."""


@dataclass(frozen=True)
class _Offer:
    """What a rank brings to a collective."""

    op: str
    axis: str
    pcp: int
    operands: tuple[torch.Tensor, ...]
    node: str
    module: str
    scatter: bool = False
    sizes: tuple[int, ...] = ()
    """Rows of each rank of the group, as this one was told, where they may differ."""

    @property
    def signature(self) -> tuple[object, ...]:
        return self.op, self.axis, self.pcp, self.scatter, self.sizes, tuple(map(str, self.records()))

    def records(self) -> list[Collective]:
        """Of a gather of different numbers of rows the shape of the whole, which is equal on all ranks."""
        operands = self.operands[:1] if self.op == REDUCE_RAGGED else self.operands
        shapes = [tuple(x.shape) for x in operands]
        rows = None
        if self.op == GATHER_RAGGED:
            shapes, rows = [(sum(self.sizes), *shapes[0][1:])], shapes[0][0]
        return [Collective(self.op, self.axis, shape, x.dtype, rows) for shape, x in zip(shapes, operands, strict=True)]

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{', '.join(map(str, self.records()))} at %{self.node}{where}"


_Rank = Generator[_Offer, "tuple[torch.Tensor, ...]", Any]


def simulate(
    gm: Graphs,
    per_rank_inputs: Sequence[Sequence[Any]],
    *,
    rank_context: RankContext | None = None,
    groups: Groups | None = None,
    logs: list[CollectiveLog] | None = None,
) -> list[Any]:
    """Run a graph on all ranks in one process.

    Args:
        gm: one rank-free graph for all ranks, or one graph per rank (to show what happens when they differ).
        per_rank_inputs: for each rank, the inputs in placeholder order. Tensors are used as they are: give each rank
            its own where the graph writes an input.
        rank_context: ``rank_context(r)`` is entered around each node of rank ``r``; by default nothing is.
        groups: who meets whom on each axis; by default all ranks, on any axis.
        logs: filled with one log per rank: the collectives in order, a packed marker as one entry per operand.

    Returns:
        the outputs of each rank, as the graph's own ``forward`` returns them.

    Raises:
        RankMismatch: ranks reach different collectives, give them different shapes or dtypes, or one finishes while
            another waits; names ranks, nodes and shapes.
        ConfigError: the graph was made for another number of ranks, or an input is missing; groups that are no
            partition of the ranks, or of another axis than the graph's.
    """
    graphs = _per_rank(gm, len(per_rank_inputs))
    enter = rank_context or (lambda rank: nullcontext())
    ranks = [_run(graphs[rank], inputs, rank, enter) for rank, inputs in enumerate(per_rank_inputs)]
    return _drive(ranks, _Meetings(len(ranks), groups), logs)


def simulate_segments(
    gm: Graphs,
    per_rank_inputs: Sequence[Sequence[Any]],
    *,
    groups: Groups | None = None,
    logs: list[CollectiveLog] | None = None,
) -> list[Any]:
    """:func:`simulate` for a graph that calls bodies with collectives of their own, such as a step program.

    Ranks meet inside the bodies too. What lies between two meetings runs as generated code, several times as fast as
    node by node; so errors name a line of that code, and a pass must not change the graph afterwards. A called module
    takes part when it has ``nested(operands)``, which gives its segments, their inputs, what to enter around each, and
    what to make of the results.

    Raises:
        RankMismatch, ConfigError: as :func:`simulate`.
    """
    graphs = _per_rank(gm, len(per_rank_inputs))
    ranks = [
        _run_segments(segments_of(graph), inputs, nullcontext)
        for graph, inputs in zip(graphs, per_rank_inputs, strict=True)
    ]
    return _drive(ranks, _Meetings(len(ranks), groups), logs)


def _per_rank(gm: Graphs, count: int) -> list[fx.GraphModule]:
    graphs = [gm] * count if isinstance(gm, fx.GraphModule) else list(gm)
    if not count or len(graphs) != count:
        raise ConfigError(f"found {len(graphs)} graphs and inputs for {count} ranks; required one of each per rank")
    return graphs


class _Meetings:
    """Who meets whom: the members of a rank's group on an axis, in the order of the axis."""

    def __init__(self, count: int, groups: Groups | None) -> None:
        self.count = count
        self._groups = groups
        self._all = tuple(range(count))
        self._of: dict[tuple[str, int], tuple[int, ...]] = {}
        for axis, parts in (groups or {}).items():
            if sorted(rank for part in parts for rank in part) != list(self._all):
                raise ConfigError(f"groups of axis {axis!r} are {parts}; required each of {count} ranks in one of them")
            self._of |= {(axis, rank): tuple(part) for part in parts for rank in part}

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        if self._groups is None:
            return self._all
        if (axis, rank) not in self._of:
            raise ConfigError(f"a collective over axis {axis!r}, but groups were given for {sorted(self._groups)} only")
        return self._of[axis, rank]

    def complete(self, offers: Mapping[int, _Offer]) -> Iterable[tuple[int, ...]]:
        """Groups whose members all wait, on this axis."""
        waiting = dict.fromkeys((offer.axis, self.group(offer.axis, rank)) for rank, offer in offers.items())
        for axis, members in waiting:
            if all(rank in offers and offers[rank].axis == axis for rank in members):
                yield members


def _drive(ranks: Sequence[_Rank], meetings: _Meetings, logs: list[CollectiveLog] | None) -> list[Any]:
    """Run all ranks from meeting to meeting; their outputs."""
    if logs is not None:
        logs[:] = [CollectiveLog() for _ in ranks]
    outputs: list[Any] = [None] * len(ranks)
    offers: dict[int, _Offer] = {}
    replies: dict[int, Any] = dict.fromkeys(range(len(ranks)))
    while True:
        for rank, reply in sorted(replies.items()):
            try:
                offers[rank] = ranks[rank].send(reply)
            except StopIteration as finished:
                outputs[rank] = finished.value
        if not offers:
            return outputs
        replies = {}
        for members in list(meetings.complete(offers)):
            _require_equal(offers, members)
            met = [offers.pop(rank) for rank in members]
            if logs is not None:
                for rank, offer in zip(members, met, strict=True):
                    logs[rank].entries += offer.records()
            replies |= zip(members, _exchange(met), strict=True)
        if not replies:
            _refuse_deadlock(offers, meetings)


def _run(gm: fx.GraphModule, inputs: Sequence[Any], rank: int, enter: RankContext) -> _Rank:
    """One rank: yields at each collective, returns the outputs."""
    interpreter = fx.Interpreter(gm, garbage_collect_values=True)
    waiting = iter(inputs)
    env = interpreter.env
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            try:
                env[node] = next(waiting)
            except StopIteration:
                raise ConfigError(f"rank {rank} has {len(inputs)} inputs; required one for %{node.name} too") from None
        elif is_marker(node) or is_collective(node):
            gathered = yield _offer(node, _operands(node, interpreter), partial(enter, rank))
            env[node] = list(gathered) if is_packed(node) else gathered[0]
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], env.__getitem__)
        elif (module := nested_module(gm, node)) is not None:
            env[node] = yield from _run_nested(module.nested(_operands(node, interpreter)))
        else:
            with enter(rank):
                env[node] = interpreter.run_node(node)
        for dead in interpreter.user_to_last_uses.get(node, ()):
            env.pop(dead, None)
    raise AssertionError("a graph without an output node")


def _operands(node: fx.Node, interpreter: fx.Interpreter) -> Sequence[Any]:
    return interpreter.fetch_args_kwargs_from_env(node)[0]


def _run_segments(parts: Segments, inputs: Sequence[Any], enter: Callable[[], AbstractContextManager[Any]]) -> _Rank:
    """One rank, segment by segment; yields at each collective, also of the bodies it calls."""
    if len(inputs) != len(parts.inputs):
        raise ConfigError(f"found {len(inputs)} inputs; required {', '.join(str(n.target) for n in parts.inputs)}")
    env: dict[fx.Node, Any] = dict(zip(parts.inputs, inputs, strict=True))
    for part in parts.parts:
        if part.run is not None:
            with enter():
                found = part.run(*(env[node] for node in part.reads))
            env.update(zip(part.writes, found, strict=True))
        node = part.stop
        if node is None:
            return fx.node.map_arg(parts.output, env.__getitem__)
        args: Any = fx.node.map_arg(node.args, env.__getitem__)
        if node.op == "call_module":
            module = nested_module(parts.gm, node)
            env[node] = yield from _run_nested(module.nested(args))
        else:
            gathered = yield _offer(node, args, enter)
            env[node] = list(gathered) if is_packed(node) else gathered[0]
        for dead in part.dead:
            env.pop(dead, None)
    raise AssertionError("a graph without an output node")


def _run_nested(call: Any) -> _Rank:
    """One rank through a called module, as its ``nested`` describes the call."""
    found = () if call.segments is None else (yield from _run_segments(call.segments, call.inputs, call.enter))
    return call.finish(found)


def _offer(node: fx.Node, args: Sequence[Any], enter: Callable[[], AbstractContextManager[Any]]) -> _Offer:
    pcp, axis = args[-2:]
    packed = is_packed(node)
    op = RESHARD_MANY if packed else RESHARD if is_marker(node) else rules.op_name(node)
    operands = tuple(args[0]) if packed else (args[0],)
    scatter = False
    sizes: tuple[int, ...] = ()
    if op == REDUCE_ROWS:
        scatter = bool(args[1])
    elif op in (GATHER_RAGGED, REDUCE_RAGGED):
        own = args[1] if op == REDUCE_RAGGED else args[0]
        with enter():
            sizes = call_sizes(op, pcp, axis, own.shape[0])
        operands = (*operands, own) if op == REDUCE_RAGGED else operands
    where = meta.info(node).layer or meta.module_path(node)
    return _Offer(op, axis, pcp, operands, node.name, where, scatter, sizes)


def _require_equal(offers: Mapping[int, _Offer], members: Sequence[int]) -> None:
    """Whether the members of a group offer the same, at a collective over as many ranks as they are."""
    first = next(rank for rank in members if rank in offers)
    if offers[first].pcp != len(members):
        raise ConfigError(
            f"%{offers[first].node} gathers over {offers[first].pcp} ranks, but inputs were given for {len(members)}; "
            "rewrite the graph with that pcp, or give inputs for every rank"
        )
    absent = [rank for rank in members if rank not in offers]
    differing = [rank for rank in members if rank in offers and offers[rank].signature != offers[first].signature]
    if not absent and not differing:
        return
    lines = [f"rank {rank}  {offers.get(rank, 'has finished')}" for rank in members]
    raise RankMismatch(
        f"rank {', '.join(map(str, sorted({*absent, *differing})))} diverges from rank {first}: required the same "
        "collective with the same shape and dtype on all ranks, found\n  " + "\n  ".join(lines) + "\n"
        "Real ranks would hang or abort here. Pad every rank to the same row count, and give all ranks one graph."
    )


def _refuse_deadlock(offers: Mapping[int, _Offer], meetings: _Meetings) -> None:
    """Raises: every rank waits for one that has finished, or that waits on another axis."""
    together = {meetings.group(offer.axis, rank) for rank, offer in offers.items()}
    if len(together) == 1:
        _require_equal(offers, together.pop())
    lines = []
    for rank, offer in sorted(offers.items()):
        members = meetings.group(offer.axis, rank)
        late = [other for other in members if other not in offers or offers[other].axis != offer.axis]
        lines.append(f"rank {rank}  {offer}, group {members}, waits for rank {', '.join(map(str, late))}")
    done = [str(rank) for rank in range(meetings.count) if rank not in offers]
    lines += [f"rank {', '.join(done)}  has finished"] if done else []
    raise RankMismatch(
        "no group of ranks can go on: required that all members of a group reach the same collective, found\n  "
        + "\n  ".join(lines) + "\nReal ranks would hang here. Give all ranks of a group one graph."
    )  # fmt: skip


def _exchange(offers: Sequence[_Offer]) -> list[tuple[torch.Tensor, ...]]:
    """What each member gets; every rank a copy of its own, as from a real collective."""
    kind, axis, ranks = offers[0], offers[0].axis, len(offers)
    rows = [offer.operands[0] for offer in offers]
    if kind.op == REDUCE_RAGGED:
        require_total(rows[0], kind.sizes, axis)
        slices = [x.split(list(kind.sizes)) for x in rows]
    elif kind.op == REDUCE_ROWS and kind.scatter:
        require_slices(rows[0], ranks, axis)
        slices = [x.split(x.shape[0] // ranks) for x in rows]
    elif kind.op == REDUCE_ROWS:
        return [(in_rank_order(rows),) for _ in offers]
    else:
        gathered = [torch.cat([offer.operands[i] for offer in offers]) for i in range(len(kind.operands))]
        return [tuple(held.clone() for held in gathered) for _ in offers]
    return [(in_rank_order([part[own] for part in slices]),) for own in range(ranks)]
