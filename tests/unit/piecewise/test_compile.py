# SPDX-License-Identifier: Apache-2.0
"""Compiled pieces: their values, what they share, what a guard on the rows costs, and a warm start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pcp_passes.errors import ConfigError, GraphError
from pcp_passes.frontends.torch import fresh
from pcp_passes.ir import meta
from pcp_passes.passes import PassContext
from pcp_passes.piecewise.compile import PieceCompiler
from pcp_passes.piecewise.pieces import Piece, piece_key, pieces_of
from pcp_passes.piecewise.split import split_body
from tests import steps

ROOT = Path(__file__).resolve().parents[3]
WIDTH, LIMIT = 8, 16


@torch.library.custom_op("pcp_test::turn_above", mutates_args=())
def turn_above(x: torch.Tensor) -> torch.Tensor:
    """Twice ``x``; above ``LIMIT`` rows it lies transposed, so its strides depend on the number of rows."""
    return (2 * x).T.contiguous().T if x.shape[0] > LIMIT else 2 * x


@turn_above.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).T.contiguous().T if x.shape[0] > LIMIT else torch.empty_like(x)


def block(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.nn.functional.silu(x @ weight)
    return (x + y, y.mean(-1, keepdim=True))


def turned(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((turn_above(x + 1) * 3) @ weight,)


def make_piece(
    function: Callable[..., Any], index: int = 0, hint: int = 33, turn: bool = False, dtype: torch.dtype = torch.float64
) -> Piece:
    """A piece of ``function(x [rows, WIDTH], weight [WIDTH, WIDTH])``; with ``turn``, ``x`` has its rows innermost."""
    space = fresh.fresh_space(hint, hint)
    with space.fake_mode:
        x = torch.empty_strided((space.rows, WIDTH), (1, space.rows) if turn else (WIDTH, 1), dtype=dtype)
        weight = torch.empty(WIDTH, WIDTH, dtype=dtype)
    with space.ambient():
        gm = make_fx(function)(x, weight)
    return Piece(gm, piece_key(gm.graph, space.rows), index, ("held", "parameter"), (0, 0))


def arguments(piece: Piece, rows: int) -> list[torch.Tensor]:
    """Random inputs, with the strides that the piece states."""
    found = []
    for node in piece.gm.graph.find_nodes(op="placeholder"):
        fake = meta.value(node)
        size = [rows if isinstance(part, torch.SymInt) else part for part in fake.shape]
        order = sorted(range(fake.ndim), key=lambda dim: isinstance(fake.stride(dim), torch.SymInt), reverse=True)
        made = torch.randint(0, 7, size) if fake.dtype == torch.int64 else torch.randn(size, dtype=fake.dtype)
        inner = made.permute(order).contiguous()
        found.append(inner.permute(sorted(range(fake.ndim), key=lambda place: order[place])))
    return found


def check(compiler: PieceCompiler, piece: Piece, rows: int) -> float:
    """Largest difference from the piece's own graph; types, sizes and strides must be equal."""
    given = arguments(piece, rows)
    found, wanted = compiler.callable_for(piece, rows)(*given), piece.gm(*given)
    assert [(t.dtype, t.shape, t.stride()) for t in found] == [(t.dtype, t.shape, t.stride()) for t in wanted]
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PieceCompiler]]:
    """Compilers with Inductor, an empty cache, and no worker processes."""
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch(compile_threads=1):
        yield lambda **options: PieceCompiler("inductor", **options)


@pytest.mark.parametrize("variant", ["sharded", "replicated"])
def test_compiled_pieces_of_a_body_give_its_values(variant: str, inductor: Callable[..., PieceCompiler]) -> None:
    """Float64, for a range, an own size, and one row. Differences are of summation order."""
    pieces = pieces_of(split_body(steps.target(2).bodies[variant], PassContext(2)))
    assert len(pieces) >= 3
    compiler = inductor(sizes=(8,))
    worst = max(check(compiler, piece, rows) for piece in pieces for rows in (33, 8, 1, 5))
    assert worst < 1e-13
    assert set(compiler.counts.compiled.values()) == {3}, "a range, eight rows, one row; five rows are in the range"
    assert compiler.counts.distinct == len({piece.key for piece in pieces})


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_equal_pieces_share_one_artifact(backend: str, inductor: Callable[..., PieceCompiler]) -> None:
    compiler = inductor() if backend == "inductor" else PieceCompiler()
    pieces = [make_piece(block, index) for index in range(3)]
    other = make_piece(lambda x, w: block(x + 1, w), 3)
    calls = {compiler.callable_for(piece, rows) for piece in pieces for rows in (33, 12)}
    assert len(calls) == 1
    assert compiler.counts.compiled == {pieces[0].key: 1}
    assert compiler.counts.shared == {pieces[0].key: 2}
    assert compiler.callable_for(other, 12) not in calls
    assert compiler.counts.distinct == 2
    assert check(compiler, pieces[2], 9) < 1e-13


def test_pieces_whose_inputs_lie_differently_do_not_share(inductor: Callable[..., PieceCompiler]) -> None:
    rows, columns = make_piece(block), make_piece(block, turn=True)
    compiler = inductor()
    assert check(compiler, rows, 12) < 1e-13
    assert check(compiler, columns, 12) < 1e-13
    assert compiler.counts.compiled == {rows.key: 1, columns.key: 1}
    columns.key = rows.key
    with pytest.raises(AssertionError, match="stride"):
        check(compiler, columns, 13)


def test_rows_that_break_a_guard_get_an_artifact_of_their_own(
    inductor: Callable[..., PieceCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = make_piece(turned)
    compiler = inductor()
    assert check(compiler, piece, 33) == 0
    assert check(compiler, piece, 20) == 0
    assert compiler.counts.compiled == {piece.key: 1}
    assert check(compiler, piece, 9) == 0
    assert check(compiler, piece, 12) == 0
    assert compiler.counts.compiled == {piece.key: 2}, "up to 16 rows and above"

    monkeypatch.setattr(fresh.FreshSpace, "broken_guards", lambda self, tokens, rows: ())
    heedless = inductor()
    check(heedless, piece, 33)
    with pytest.raises(AssertionError, match="stride"):
        check(heedless, piece, 9)


def test_nothing_compiles_after_warm_up(inductor: Callable[..., PieceCompiler]) -> None:
    piece, never = make_piece(turned, 4), make_piece(block, 5)
    compiler = inductor()
    check(compiler, piece, 33)
    compiler.freeze()
    check(compiler, piece, 20)  # no new size is needed
    counts = dict(compiler.counts.compiled)
    wanted = (
        rf"piece 4 \({piece.key[:12]}\) would compile for 9 rows .*since M > 16 does not hold; compiled are a range"
    )
    with pytest.raises(GraphError, match=wanted):
        compiler.callable_for(piece, 9)
    with pytest.raises(GraphError, match=r"piece 5 .* compiled are no sizes; nothing compiles after warm-up"):
        compiler.callable_for(never, 33)
    assert compiler.counts.compiled == counts
    eager = PieceCompiler()
    eager.freeze()
    with pytest.raises(GraphError, match="warm up a bucket of 33 rows"):
        eager.callable_for(never, 33)


def test_kernels_of_this_project_stay_calls_in_a_piece(inductor: Callable[..., PieceCompiler]) -> None:
    """Float32: a latent and its rope key packed into one record of bytes."""
    from pcp_kernels.ops.records import latent_pack

    piece = make_piece(lambda x, w: (latent_pack(x @ w + 1, x * 2, store="fp8"), x + 1), dtype=torch.float32)
    assert [n.target for n in piece.gm.graph.nodes if "pcp_kernels" in str(n.target)]
    compiler = inductor()
    given = arguments(piece, 12)
    for found, wanted in zip(compiler.callable_for(piece, 12)(*given), piece.gm(*given), strict=True):
        assert torch.equal(found, wanted)
    record = compiler.callable_for(piece, 12)(*given)[0]
    assert (record.dtype, record.shape[0]) == (torch.uint8, 12)


def test_piece_that_cannot_compile_is_named(inductor: Callable[..., PieceCompiler]) -> None:
    piece = make_piece(lambda x, w: (x.topk(5, 0).values.sum() + x @ w,), 2)
    compiler = inductor()
    check(compiler, piece, 33)
    with pytest.raises(
        GraphError,
        match="piece 2 does not compile for 3 rows: k not in range for dimension; run it with graph_compile=eager",
    ):
        compiler.callable_for(piece, 3)


def test_piece_with_values_of_its_own_is_no_piece(inductor: Callable[..., PieceCompiler]) -> None:
    piece = make_piece(block)
    (weight,) = [node for node in piece.gm.graph.find_nodes(op="placeholder") if node.name.startswith("weight")]
    piece.gm.register_buffer("own", torch.ones(WIDTH, WIDTH, dtype=torch.float64))
    with piece.gm.graph.inserting_after(weight):
        own = piece.gm.graph.get_attr("own")
    weight.replace_all_uses_with(own)
    with pytest.raises(AssertionError, match="holds own: equal pieces would share"):
        inductor().callable_for(piece, 33)


@pytest.mark.parametrize("options, text", [({"backend": "cuda"}, "eager, inductor"), ({"sizes": (4, 0)}, "below 1")])
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PieceCompiler(**options)


def start(folder: Path, change: bool) -> dict[str, list[int]]:
    """Counts of artifacts, ``[compiled, from cache]``, of a process of its own; ``change``: and with other sources."""
    code = f"from tests.unit.piecewise import test_compile; test_compile.in_process({change})"
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # spares the compilation of programs that ask what the CPU can do
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


def in_process(change: bool) -> None:
    """What :func:`start` runs. The hash is a name here: a test may run while someone edits the sources."""
    found = {}
    for name in ("same", "changed") if change else ("same",):
        fresh.source_hash = lambda name=name: name  # type: ignore[assignment]
        compiler = PieceCompiler("inductor", sizes=(4,))
        piece = make_piece(turned)
        for rows in (33, 9, 4):
            check(compiler, piece, rows)
        found[name] = [compiler.counts.compiled.total(), compiler.counts.from_cache.total()]
    sys.stdout.write(json.dumps(found))


def test_warm_start_compiles_nothing(tmp_path: Path) -> None:
    """A piece with a guard, so two ranges, and an own size.

    A range from the cache still carries its guard, or nine rows would not ask for the other. Other sources of this
    package miss.
    """
    assert start(tmp_path, change=False) == {"same": [3, 0]}
    assert start(tmp_path, change=True) == {"same": [0, 3], "changed": [3, 0]}
