# SPDX-License-Identifier: Apache-2.0
"""Runs the body calls of one rank on buckets, through graphs.

Before a step the executor says how its body calls run (:class:`StepDispatch`, the same on every rank). A body call asks
:meth:`BodyRunner.bind`, which pads it to its bucket and gives what to run in its place::

    caches.runner = runner                     # how a body call finds it
    runner.begin(StepDispatch(GraphMode.PIECEWISE, rows=64))
    program.run(state, inputs, plan)

The first call of a role in a step is its main one. Later calls of the drafter are draft steps, with their own mode and
a bucket by requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pcp_passes.capture_mode import capturable_only
from pcp_passes.errors import GraphError
from pcp_passes.paged.state import AttentionInputs, PagedCaches, running
from pcp_passes.piecewise.cuda import CudaReplayer
from pcp_passes.piecewise.pieces import Piece, entered
from pcp_passes.piecewise.replay_checker import ReplayChecker
from pcp_passes.piecewise.replayer import GraphKey, GraphMode, Replayer, Tensors
from pcp_passes.piecewise.static import Buffer, StaticInputs

if TYPE_CHECKING:
    from pcp_passes.piecewise.prepare import Prepared, PreparedBody
    from pcp_passes.step.calls import BodyCall

DRAFTER = "drafter"


@dataclass(frozen=True)
class StepDispatch:
    """How the body calls of the next step run. Decided once for all ranks, by the largest rank-local counts."""

    mode: GraphMode
    """Of the main calls: the target, and the drafter's first pass over all tokens."""
    rows: int = 0
    """Bucket of the main calls. A sharded call has that many rows already; a replicated one is padded."""
    requests: int = 0
    """Bucket of attention rows: of a full main call, and of draft steps."""
    decode: bool = False
    """Whether no request prefills."""
    draft_mode: GraphMode = GraphMode.NONE
    """Of the drafter's later calls."""


@dataclass(frozen=True)
class Bound:
    """A body call on its bucket: what runs in its place."""

    gm: fx.GraphModule | None
    """To run on ``operands`` inside ``enter()``; ``None`` when ``finish`` alone runs the call."""
    operands: tuple[torch.Tensor, ...]
    enter: Callable[[], AbstractContextManager[Any]]
    finish: Callable[[Any], Tensors]
    """From the results of ``gm`` to those of the body: as many rows as the call has."""


@dataclass(frozen=True)
class _Call:
    """The body call that runs now."""

    key: GraphKey
    body: PreparedBody
    rows: int
    known: bool
    """Whether it was captured before."""


class BodyRunner:
    """Static buffers and graphs of one rank, for the target and the drafter.

    Attributes:
        hits: body calls that replayed, by bucket; of steps that count, see :meth:`begin`.
        captured: body calls that captured, by bucket.
        plain: body calls that ran without a graph while the step had one, by role and variant: of a block drafter whose
            context pass is not sharded, and of buckets beyond the bound on bytes. Of steps that count.
        dropped: calls of the step that began last that the bound on bytes leaves without a graph.
        static: the buffers.
        replayer: captures and replays.

    Args:
        prepared: the program's bodies in pieces.
        caches: of the rank.
        rows_max: the largest bucket of rows, of main calls and of draft steps.
        requests_max: the largest bucket of attention rows.
        columns: of a block table.
        replayer: by default CUDA graphs for caches on CUDA, else the replay checker.
        max_bytes: bound on what captured graphs keep, for the default replayer.
    """

    def __init__(
        self,
        prepared: Prepared,
        caches: PagedCaches,
        *,
        rows_max: int,
        requests_max: int,
        columns: int,
        replayer: Replayer[Any] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.prepared, self.caches = prepared, caches
        compiled = getattr(prepared.compiler, "backend", "eager") != "eager"
        self.replayer: Replayer[Any] = replayer or (
            CudaReplayer(max_bytes, caches.device)
            if caches.device.type == "cuda"
            else ReplayChecker(max_bytes, looks_inside=not compiled)
        )
        self.static = StaticInputs(
            rows_max, requests_max, columns, caches.device, prepared.slot_types(), prepared.shared
        )
        self.hits: Counter[GraphKey] = Counter()
        self.captured: Counter[GraphKey] = Counter()
        self.plain: Counter[str] = Counter()
        self.dropped: list[GraphKey] = []
        self.dispatch = StepDispatch(GraphMode.NONE)
        self._buffers: dict[PreparedBody, dict[str, Buffer]] = {
            body: {name: self.static.slots[kind] for name, kind in body.types.items()}
            for body in prepared.bodies.values()
        }
        self._names: dict[Piece, tuple[str, ...]] = {}
        self._calls: Counter[str] = Counter()
        self._sharded, self._counts = False, True
        self._now: _Call | None = None
        self.replayer.own([buffer.flat for buffer in self.static.buffers()])

    @property
    def uncaptured(self) -> set[GraphKey]:
        """Body calls that the bound on bytes leaves without a graph."""
        return self.replayer.uncaptured

    @property
    def captured_bytes(self) -> int:
        """Bytes that captured graphs keep."""
        return self.replayer.captured_bytes

    @property
    def static_bytes(self) -> int:
        """Bytes of the static buffers."""
        return self.static.bytes

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Captured body calls."""
        return tuple(key for key in self.captured if key not in self.uncaptured)

    def begin(self, dispatch: StepDispatch, *, counts: bool = True) -> None:
        """A step begins; its body calls run as ``dispatch`` says. A dummy step does not count as a real one's do."""
        self.dispatch, self._counts = dispatch, counts
        self._calls.clear()
        self.dropped.clear()
        self._sharded = False
        self._now = None

    def freeze(self) -> None:
        """The warm-up is over: nothing is captured any more, and a bucket that was not captured is an error."""
        self.replayer.freeze()

    def bind(self, call: BodyCall, rows: Sequence[torch.Tensor], inputs: AttentionInputs) -> Bound | None:
        """What to run in the place of a body call; ``None`` to run it as it is.

        Raises:
            GraphError: no bucket for the call, a bucket that was not captured, or a full graph of a sharded body.
        """
        body = self.prepared.bodies.get(call)
        if body is None:
            if self.dispatch.mode == self.dispatch.draft_mode == GraphMode.NONE:
                return None
            raise GraphError(
                f"a {call.variant} body of {', '.join(call.layers) or 'no layers'} was not prepared for graphs.\n"
                "  next  run prepare() on the program that runs, and give its result to the runner"
            )
        key = self._key(body, inputs)
        if key is None:
            return None
        known = key in self.captured or key in self.uncaptured
        if self.replayer.frozen and not known:
            raise GraphError(
                f"{key} runs after the warm-up but was never captured; captured are "
                f"{', '.join(map(str, self.keys)) or 'none'}.\n"
                "  next  capture it in the warm-up, or let the dispatcher choose one of the captured buckets"
            )
        self.replayer.begin_call(key)
        if not known:
            self.replayer.forget(key)  # pieces of a capture that an error cut short
        self._now = _Call(key, body, key.rows, known)
        return self._full(rows, inputs) if key.mode == GraphMode.FULL else self._piecewise(rows, inputs)

    def _key(self, body: PreparedBody, inputs: AttentionInputs) -> GraphKey | None:
        """The bucket of a call; ``None`` without one."""
        dispatch, call = self.dispatch, body.call
        draft = body.role == DRAFTER and self._calls[body.role] > 0
        self._calls[body.role] += 1
        self._sharded |= call.sharded
        mode = dispatch.draft_mode if draft else dispatch.mode
        if mode == GraphMode.NONE:
            return None
        named = f"{body.role}.{call.variant}"
        count, requests = inputs.rows, inputs.seq_lens.shape[0]
        if self._sharded and not call.sharded and not draft:
            # A block drafter's context pass over all ranks' tokens has no rank-local bucket.
            if self._counts:
                self.plain[named] += 1
            return None
        rows = dispatch.requests * (count // max(requests, 1)) if draft else dispatch.rows
        if call.sharded and mode == GraphMode.FULL:
            raise GraphError(
                f"{named} is sharded: it meets other ranks, which no whole graph holds.\n"
                "  next  dispatch it as piecewise, or in a step without prefill"
            )
        if count > rows or (call.sharded and count != rows):
            raise GraphError(
                f"{named} has {count} rows on this rank and a bucket of {rows}; required "
                f"{'exactly the bucket, padded by the layout' if call.sharded else 'at most the bucket'}.\n"
                "  next  choose the bucket by the largest rank's rows, not by the tokens of all ranks, and pad the "
                "layout to it"
            )
        full = mode == GraphMode.FULL
        if full and requests > dispatch.requests:
            raise GraphError(
                f"{named} has {requests} requests and a bucket of {dispatch.requests}.\n"
                "  next  choose the bucket by the requests of the step"
            )
        return GraphKey(body.role, call.variant, mode, rows, dispatch.requests if full else 0)

    def _piecewise(self, given: Sequence[torch.Tensor], inputs: AttentionInputs) -> Bound:
        now = self._now
        assert now is not None, "bound by bind()"
        count = inputs.rows
        if not now.body.call.sharded:
            requests = inputs.seq_lens.shape[0]
            inputs = self.static.attention.fill(inputs, str(now.key), now.rows, requests, self.replayer.filled)
        held = inputs

        @contextmanager
        def enter() -> Iterator[None]:
            with running(self.caches, held), entered(self):
                yield

        return Bound(now.body.split, tuple(given), enter, lambda found: self._finish(now, found, count))

    def _full(self, given: Sequence[torch.Tensor], inputs: AttentionInputs) -> Bound:
        now = self._now
        assert now is not None, "bound by bind()"
        filled, buffers, caches = self.replayer.filled, self._buffers[now.body], self.caches
        held = tuple(
            buffers[name].fill(value, now.rows, filled)
            for name, value in zip(now.body.operands, given, strict=True)
        )  # fmt: skip
        results = tuple(buffers[name].view(now.rows) for name in now.body.results)
        attention = self.static.attention.fill(inputs, str(now.key), now.rows, now.key.requests, filled)
        count = inputs.rows
        metadata = (
            attention.slots, attention.block_tables, attention.query_start_loc, attention.seq_lens, attention.positions
        )  # fmt: skip

        def whole(*read: torch.Tensor) -> Tensors:
            """All of the call on the device: what attention derives from its inputs is derived at every replay."""
            slots, tables, starts, lengths, positions = read[len(held) : len(held) + len(metadata)]
            derived = AttentionInputs(slots, "replicated", tables, starts, lengths, positions)
            with capturable_only(), running(caches, derived), entered(_Inside(self)):
                found = now.body.split(*read[: len(held)])
            for into, value in zip(results, found if isinstance(found, tuple) else (found,), strict=True):
                into.copy_(value)
            return ()

        def finish(_: Any) -> Tensors:
            attention.require_current(str(now.key))
            inputs, names = (*held, *metadata), (*now.body.operands, *_METADATA)
            if self.replayer.watches:
                if not now.known:
                    whole(*inputs)  # makes the caches, as a warm-up does
                watched, labels = self._watched(now.body)
                inputs, names = (*inputs, *watched), (*names, *labels)
                if not now.known:
                    self.replayer.own(watched)
            self.replayer.run(now.key, whole, inputs, names)
            return self._finish(now, results, count)

        return Bound(None, (), nullcontext, finish)

    def _watched(self, body: PreparedBody) -> tuple[Tensors, tuple[str, ...]]:
        """What a whole graph reads besides its inputs: the caches of its layers, and parameters."""
        layers = body.call.layers
        found = {name: held for name, held in sorted(self.caches.tensors.items()) if name.rpartition(".")[0] in layers}
        found |= dict(body.call.body.named_parameters()) | dict(body.call.body.named_buffers())
        return tuple(found.values()), tuple(found)

    def _finish(self, now: _Call, found: Any, count: int) -> Tensors:
        results = found if isinstance(found, (tuple, list)) else (found,)
        self.replayer.end_call(now.key)
        if now.key in self.uncaptured:
            self.dropped.append(now.key)
            if self._counts:
                self.plain[str(now.key)] += 1
        elif not now.known:
            self.captured[now.key] += 1
        elif self._counts:
            self.hits[now.key] += 1
        self._now = None
        cut = tuple(value[:count] for value in results)
        return tuple(value.clone() for value in cut) if now.body.role in self.prepared.late else cut

    def hold(self, value: torch.Tensor, slot: str, dim: int | None) -> torch.Tensor:
        """See :class:`~pcp_passes.piecewise.pieces.PieceRunner`: rows behind those of ``value`` become 0."""
        now = self._running("a hold")
        return self._buffers[now.body][slot].fill(value, now.rows, self.replayer.filled)

    def run_piece(self, piece: Piece, args: Tensors) -> Tensors:
        """See :class:`~pcp_passes.piecewise.pieces.PieceRunner`: captures or replays the piece."""
        now = self._running("a piece")
        key = replace(now.key, piece=piece.index)
        names = self._names.get(piece)
        if names is None:
            names = self._names[piece] = self._input_names(piece, args)
        if self.replayer.has(key):  # what the piece runs is asked for at a capture alone
            return self.replayer.replay(key, args, names)
        self.replayer.own([args[i] for i in piece.parameter_inputs])
        return self.replayer.run(key, self.function(piece, now.rows), args, names)

    def _input_names(self, piece: Piece, args: Tensors) -> tuple[str, ...]:
        """Inputs of a piece as a person knows them: the slot of a held one, the name of a parameter."""
        now = self._running("a piece")
        known = {held.data_ptr(): f"parameter {name}" for name, held in now.body.call.body.named_parameters()}
        known |= {buffer.flat.data_ptr(): buffer.name for buffer in self._buffers[now.body].values()}
        return tuple(known.get(held.data_ptr(), f"input {index}") for index, held in enumerate(args))

    def function(self, piece: Piece, rows: int) -> Callable[..., Tensors]:
        """What the piece runs on ``rows`` rows; compiled when it is first asked for, not inside a capture."""
        compiler = self.prepared.compiler
        if compiler is None:
            return piece.gm
        made: Callable[..., Tensors] = compiler.callable_for(piece, rows)
        return made

    def _running(self, what: str) -> _Call:
        if self._now is None:
            raise GraphError(f"{what} of a split body runs outside a body call; required one that bind() began")
        return self._now


_METADATA = ("slots", "block_tables", "query_start_loc", "seq_lens", "attention positions")


class _Inside:
    """Runs pieces inside a whole graph: nothing is held, since nothing leaves the graph between them."""

    def __init__(self, runner: BodyRunner) -> None:
        self.runner = runner

    def hold(self, value: torch.Tensor, slot: str, dim: int | None) -> torch.Tensor:
        return value

    def run_piece(self, piece: Piece, args: Tensors) -> Tensors:
        return self.runner.function(piece, piece.row_count(args))(*args)
