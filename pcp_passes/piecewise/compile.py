# SPDX-License-Identifier: Apache-2.0
"""One compiled artifact per distinct piece, shared by all layers and bodies whose pieces are equal.

A piece is compiled once for a range of rows, and once more for each size that asks for its own. Whatever PyTorch then
assumes about the rows is kept and looked at for every new row count: one that breaks an assumption gets an artifact of
its own. Uses ``torch._inductor.standalone_compile`` (private, checked against torch 2.13.0).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pcp_passes.errors import ConfigError, GraphError
from pcp_passes.frontends.torch import fresh
from pcp_passes.ir import fakes, meta
from pcp_passes.ir.copies import copy_graph_module
from pcp_passes.piecewise.pieces import Piece

log = logging.getLogger(__name__)

Backend = Literal["eager", "inductor"]
BACKENDS: tuple[Backend, ...] = ("eager", "inductor")
Call = Callable[..., tuple[torch.Tensor, ...]]


@dataclass
class CompileCounts:
    """What a :class:`PieceCompiler` did, by :attr:`Piece.key`."""

    compiled: Counter[str] = field(default_factory=Counter)
    """Artifacts made from nothing."""
    from_cache: Counter[str] = field(default_factory=Counter)
    """Artifacts that Inductor's caches on disk held."""
    shared: Counter[str] = field(default_factory=Counter)
    """Pieces that took the artifact of an equal piece, beyond the one it was made for."""

    @property
    def distinct(self) -> int:
        """Number of distinct pieces with an artifact."""
        return len(self.compiled | self.from_cache)


@dataclass(frozen=True, eq=False)
class _Artifact:
    """Runs every piece of one key, at ``only`` rows, or at any count that keeps the guards of ``space``."""

    run: Call
    space: fresh.FreshSpace | None = None
    only: int | None = None

    def serves(self, rows: int) -> bool:
        if self.only is not None:
            return rows == self.only
        return self.space is None or not self.space.broken_guards(rows, rows)


class PieceCompiler:
    """Compiles pieces.

    Args:
        backend: ``"eager"`` runs a piece's own graph, ``"inductor"`` what Inductor makes of it.
        sizes: row counts that get an artifact for exactly that size; all others share one for a range. One row is
            always on its own, since PyTorch compiles sizes 0 and 1 as constants.

    Raises:
        ConfigError: an unknown backend, or a size below 1.
    """

    def __init__(self, backend: Backend = "eager", sizes: tuple[int, ...] = ()) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"graph_compile is {backend!r}; required one of {', '.join(BACKENDS)}")
        if any(size < 1 for size in sizes):
            raise ConfigError(f"compile sizes {sizes} hold a row count below 1; required: positive row counts")
        self.backend = backend
        self.sizes = frozenset(sizes)
        self.counts = CompileCounts()
        self.frozen = False
        self._artifacts: dict[str, list[_Artifact]] = {}
        self._served: dict[str, set[Piece]] = {}
        self._chosen: dict[tuple[Piece, int], Call] = {}

    def freeze(self) -> None:
        """From now on, a piece that has no artifact for its rows is an error."""
        self.frozen = True

    def callable_for(self, piece: Piece, rows: int) -> Call:
        """What computes ``piece`` on ``rows`` rows: called with its inputs, gives its flat tuple of results.

        Raises:
            GraphError: the piece does not compile; or nothing compiled serves it at this size, and the compiler is
                frozen.
        """
        call = self._chosen.get((piece, rows))
        if call is None:
            call = self._chosen[piece, rows] = self._choose(piece, rows)
        return call

    def _choose(self, piece: Piece, rows: int) -> Call:
        assert rows >= 1, f"piece {piece.index} was asked to run on {rows} rows"
        if piece.key not in self._artifacts:
            strangers = [n.name for n in piece.gm.graph.nodes if n.op in ("get_attr", "call_module")]
            assert not strangers, (
                f"piece {piece.index} holds {', '.join(strangers)}: equal pieces would share their values"
            )
        own_size = self.backend == "inductor" and (rows == 1 or rows in self.sizes)
        artifacts = self._artifacts.setdefault(piece.key, [])
        artifact = next((a for a in artifacts if a.serves(rows) and (a.only is not None) == own_size), None)
        served = self._served.setdefault(piece.key, set())
        if artifact is None:
            if self.frozen:
                raise GraphError(self._after_freeze(piece, rows, artifacts))
            artifact = self._make(piece, rows, own_size)
            assert artifact.serves(rows), f"piece {piece.index} compiled for {rows} rows does not serve {rows} rows"
            artifacts.append(artifact)
        elif piece not in served and served:
            self.counts.shared[piece.key] += 1
        served.add(piece)
        return artifact.run

    def _make(self, piece: Piece, rows: int, own_size: bool) -> _Artifact:
        if self.backend == "eager":
            self.counts.compiled[piece.key] += 1
            return _Artifact(piece.gm)
        space = fresh.fresh_space(max(rows, 2), max(rows, 2))
        before = _cache_counters()
        try:
            run = compile_piece(piece, space, rows if own_size else space.rows)
        except Exception as error:
            raise GraphError(
                f"piece {piece.index} does not compile for {rows} rows: {(str(error) or repr(error)).splitlines()[0]}; "
                "run it with graph_compile=eager, or keep the op that fails outside the pieces"
            ) from error
        misses, hits = (after - seen for after, seen in zip(_cache_counters(), before, strict=True))
        known = hits > 0 and misses == 0
        (self.counts.from_cache if known else self.counts.compiled)[piece.key] += 1
        log.debug(
            "piece %d, %s: %s", piece.index, f"{rows} rows" if own_size else "a range", "cached" if known else "new"
        )
        return _Artifact(run, None if own_size else space, rows if own_size else None)

    def _after_freeze(self, piece: Piece, rows: int, artifacts: list[_Artifact]) -> str:
        known = [str(a.only) if a.only is not None else "a range" for a in artifacts]
        broken = sorted({text for a in artifacts if a.space is not None for text in a.space.broken_guards(rows, rows)})
        return (
            f"piece {piece.index} ({piece.key[:12]}) would compile for {rows} rows after warm-up"
            + (f", since {' and '.join(broken)} does not hold" if broken else "")
            + f"; compiled are {', '.join(known) or 'no sizes'}; nothing compiles after warm-up: "
            f"warm up a bucket of {rows} rows, or run this step without graphs"
        )


def compile_piece(piece: Piece, space: fresh.FreshSpace, rows: int | torch.SymInt) -> Call:
    """Compile ``piece`` with Inductor for ``rows`` rows: ``space.rows``, or a constant. ``piece`` is left as it is.

    A row count that is no constant is an input of what is compiled, in front of the piece's own, because Inductor's
    caches replay the guards of an earlier compilation only as far as they are about sizes that are inputs themselves.
    """
    from torch._inductor import standalone_compile

    whole = copy_graph_module(piece.gm)
    inputs: list[Any] = [_fake_input(space, types, rows) for types in _input_types(piece)]
    position, dim = piece.rows
    symbolic = isinstance(rows, torch.SymInt)
    if symbolic:
        with whole.graph.inserting_before(next(iter(whole.graph.nodes))):
            meta.set_aten_value(whole.graph.placeholder("num_rows"), rows)
        whole.recompile()
        inputs.insert(0, rows)
    patches = {"triton.cudagraphs": False, **fresh.cache_key()}  # what runs the pieces captures them
    with space.ambient():
        compiled: Any = standalone_compile(
            whole, inputs, dynamic_shapes="from_tracing_context", options={"config_patches": patches}
        )

    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = (args[position].shape[dim],) if symbolic else ()
        with torch.no_grad():
            return tuple(compiled(*sizes, *args))

    return run


@dataclass(frozen=True)
class _InputType:
    """Sizes and strides are expressions of the row symbol ``rows``."""

    rows: Any
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


def _input_types(piece: Piece) -> list[_InputType]:
    """What the inputs of ``piece`` look like, in its own shape environment; no value is kept."""
    values = [meta.value(node) for node in piece.gm.graph.find_nodes(op="placeholder")]
    wrong = [i for i, value in enumerate(values) if not isinstance(value, torch.Tensor)]
    assert not wrong, f"piece {piece.index}: inputs {wrong} are no tensors"
    rows = values[piece.rows[0]].shape[piece.rows[1]]
    assert fakes.is_plain_symbol(rows), f"piece {piece.index}: its rows are {rows}, not a symbol"
    return [
        _InputType(
            _expression(rows), _expressions(value.shape), _expressions(value.stride()), value.dtype, value.device
        )
        for value in values
    ]


def _expressions(sizes: Iterable[int | torch.SymInt]) -> tuple[Any, ...]:
    return tuple(map(_expression, sizes))


def _expression(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _fake_input(space: fresh.FreshSpace, types: _InputType, rows: int | torch.SymInt) -> torch.Tensor:
    size, stride = (
        [fresh.substitute(part, {types.rows: rows}) for part in parts] for parts in (types.size, types.stride)
    )
    with space.fake_mode:
        return torch.empty_strided(size, stride, dtype=types.dtype, device=types.device)


def _cache_counters() -> tuple[int, int]:
    """Misses (compilations that no cache may keep included) and hits of Inductor's cache of compiled graphs."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"], found["fxgraph_cache_hit"]
