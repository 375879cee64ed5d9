# SPDX-License-Identifier: Apache-2.0
"""All ranks in one process: a rank-free graph is interpreted over P environments, collectives exchanged in memory.

Each rank is a generator that runs its graph up to the next collective and yields what it brings to it. The driver lets
every rank run to that point, compares what they brought, exchanges the rows, and lets them go on. So the ranks run in
lockstep, a divergence is found at the collective where it happens (real ranks would hang or abort there), and no
process group is needed. Markers and lowered collectives are both understood.

Ops with side effects (a cache write, attention over the cache) must find the state of *their* rank: the caller gives a
context manager per rank, which is entered around each node of that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pcp_passes.collectives import ALL_GATHER_ROWS, Collective, CollectiveLog, is_collective
from pcp_passes.errors import ConfigError, RankMismatch
from pcp_passes.ir import meta
from pcp_passes.ir.markers import RESHARD, RESHARD_MANY, is_marker, is_packed
from pcp_passes.segments import Segments, nested_module, segments_of

RankContext = Callable[[int], AbstractContextManager[Any]]
Graphs = fx.GraphModule | Sequence[fx.GraphModule]


@dataclass(frozen=True)
class _Offer:
    """What a rank brings to a collective."""

    op: str
    axis: str
    pcp: int
    operands: tuple[torch.Tensor, ...]
    node: str
    module: str

    @property
    def signature(self) -> tuple[object, ...]:
        return self.op, self.axis, self.pcp, tuple((tuple(x.shape), x.dtype) for x in self.operands)

    def records(self) -> list[Collective]:
        return [Collective(self.op, self.axis, tuple(x.shape), x.dtype) for x in self.operands]

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{', '.join(map(str, self.records()))} at %{self.node}{where}"


_Rank = Generator[_Offer, "tuple[torch.Tensor, ...]", Any]


def simulate(
    gm: Graphs,
    per_rank_inputs: Sequence[Sequence[Any]],
    *,
    rank_context: RankContext | None = None,
    logs: list[CollectiveLog] | None = None,
) -> list[Any]:
    """Run a graph on all ranks of its axis in one process.

    Args:
        gm: one rank-free graph for all ranks, or one graph per rank (to show what happens when they differ).
        per_rank_inputs: for each rank, the inputs in placeholder order. Tensors are used as they are: give each rank
            its own where the graph writes an input.
        rank_context: ``rank_context(r)`` is entered around each node of rank ``r``; by default nothing is.
        logs: filled with one log per rank: the collectives in order, a packed marker as one entry per operand.

    Returns:
        the outputs of each rank, as the graph's own ``forward`` returns them.

    Raises:
        RankMismatch: ranks reach different collectives, give them different shapes or dtypes, or one finishes while
            another waits; names ranks, nodes and shapes.
        ConfigError: the graph was made for another number of ranks, or an input is missing.
    """
    count = len(per_rank_inputs)
    graphs = [gm] * count if isinstance(gm, fx.GraphModule) else list(gm)
    if not count or len(graphs) != count:
        raise ConfigError(f"found {len(graphs)} graphs and inputs for {count} ranks; required one of each per rank")
    enter = rank_context or (lambda rank: nullcontext())
    ranks = [_run(graphs[rank], per_rank_inputs[rank], rank, enter) for rank in range(count)]
    return _drive(ranks, logs)


def simulate_segments(
    gm: fx.GraphModule, per_rank_inputs: Sequence[Sequence[Any]], *, logs: list[CollectiveLog] | None = None
) -> list[Any]:
    """:func:`simulate` for a graph that calls bodies with collectives of their own, such as a step program.

    Ranks meet inside the bodies too. What lies between two meetings runs as generated code, several times as fast as
    node by node; so errors name a line of that code, and a pass must not change the graph afterwards. A called module
    takes part when it has ``nested(operands)``, which gives its segments, their inputs, what to enter around each, and
    what to make of the results.

    Raises:
        RankMismatch, ConfigError: as :func:`simulate`.
    """
    parts = segments_of(gm)
    return _drive([_run_segments(parts, inputs, nullcontext) for inputs in per_rank_inputs], logs)


def _drive(ranks: Sequence[_Rank], logs: list[CollectiveLog] | None) -> list[Any]:
    """Run all ranks from meeting to meeting; their outputs."""
    count = len(ranks)
    if logs is not None:
        logs[:] = [CollectiveLog() for _ in ranks]
    outputs: list[Any] = [None] * count
    replies: list[Any] = [None] * count
    while True:
        offers: dict[int, _Offer] = {}
        for rank, running in enumerate(ranks):
            try:
                offers[rank] = running.send(replies[rank])
            except StopIteration as finished:
                outputs[rank] = finished.value
        if not offers:
            return outputs
        _require_equal(offers, count)
        for rank, offer in offers.items():
            if logs is not None:
                logs[rank].entries += offer.records()
        replies = _exchange([offers[rank] for rank in range(count)])


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
            gathered = yield _offer(node, _operands(node, interpreter))
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
            gathered = yield _offer(node, args)
            env[node] = list(gathered) if is_packed(node) else gathered[0]
        for dead in part.dead:
            env.pop(dead, None)
    raise AssertionError("a graph without an output node")


def _run_nested(call: Any) -> _Rank:
    """One rank through a called module, as its ``nested`` describes the call."""
    found = () if call.segments is None else (yield from _run_segments(call.segments, call.inputs, call.enter))
    return call.finish(found)


def _offer(node: fx.Node, args: Sequence[Any]) -> _Offer:
    pcp, axis = args[-2:]
    packed = is_packed(node)
    op = ALL_GATHER_ROWS if is_collective(node) else RESHARD_MANY if packed else RESHARD
    operands = tuple(args[0]) if packed else (args[0],)
    return _Offer(op, axis, pcp, operands, node.name, meta.info(node).layer or meta.module_path(node))


def _require_equal(offers: dict[int, _Offer], count: int) -> None:
    first = min(offers)
    if offers[first].pcp != count:
        raise ConfigError(
            f"%{offers[first].node} gathers over {offers[first].pcp} ranks, but inputs were given for {count}; "
            "rewrite the graph with that pcp, or give inputs for every rank"
        )
    absent = [rank for rank in range(count) if rank not in offers]
    differing = [rank for rank in offers if offers[rank].signature != offers[first].signature]
    if not absent and not differing:
        return
    lines = [f"rank {rank}  {offers.get(rank, 'has finished')}" for rank in range(count)]
    raise RankMismatch(
        f"rank {', '.join(map(str, sorted({*absent, *differing})))} diverges from rank {first}: required the same "
        "collective with the same shape and dtype on all ranks, found\n  " + "\n  ".join(lines) + "\n"
        "Real ranks would hang or abort here. Pad every rank to the same row count, and give all ranks one graph."
    )


def _exchange(offers: Sequence[_Offer]) -> list[tuple[torch.Tensor, ...]]:
    """Concatenate each operand over the ranks; every rank gets a copy of its own, as from a real gather."""
    gathered = [torch.cat([offer.operands[i] for offer in offers]) for i in range(len(offers[0].operands))]
    return [tuple(rows.clone() for rows in gathered) for _ in offers]
