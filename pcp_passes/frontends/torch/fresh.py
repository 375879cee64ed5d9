# SPDX-License-Identifier: Apache-2.0
"""A shape environment of our own, with two symbols (private PyTorch names, checked against torch 2.13.0).

A rewritten graph has inputs that Dynamo has never seen, one of them with a size of its own, so it cannot live in
Dynamo's shape environment. Here it gets a fresh one that knows just two sizes:

- ``sT``, the number of global tokens, T;
- ``sM``, the rows of a rank, M, padded to the same count on all ranks.

Every other size is the constant it had at capture. Nobody enforces the guards of a fresh environment: whoever runs the
graph evaluates :meth:`FreshSpace.broken_guards` for each new (T, M) and captures again where one is broken.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

import pcp_kernels
from pcp_passes.frontends.torch.inputs import Expression, GraphInput
from pcp_passes.ir import fakes, meta
from pcp_passes.ir.copies import copy_graph_module
from pcp_passes.passes.pipeline import hash_sources

_SOURCES = {"pcp_tokens": "T", "pcp_rows": "M"}


class _NamedShapeEnv(ShapeEnv):
    """Calls the two symbols ``sT`` and ``sM``, so that printed graphs read the same on every machine and version.

    PyTorch numbers a symbol by a hash of its source. The prefix ``s`` stays: Inductor tells sizes by it.
    """

    def _generate_unique_id(self, source_name: str) -> Any:
        text = next((letter for name, letter in _SOURCES.items() if name in source_name), None)
        return text if text is not None else super()._generate_unique_id(source_name)


@dataclass(frozen=True, eq=False)
class FreshSpace:
    """Where the values of one capture live.

    Attributes:
        fake_mode: of every value of the graph.
        shape_env: of that mode; collects the guards of capture, rewrite and compilation.
        tokens: T as a ``SymInt``.
        rows: M as a ``SymInt``.
    """

    fake_mode: FakeTensorMode
    shape_env: ShapeEnv
    tokens: torch.SymInt
    rows: torch.SymInt

    @contextmanager
    def ambient(self) -> Iterator[None]:
        """Make this space the one that tracing functions of PyTorch find, also inside a ``torch.compile`` backend."""
        with tracing(TracingContext(self.fake_mode)), torch.no_grad():
            yield

    def specialised(self) -> tuple[str, ...]:
        """Which of ``T`` and ``M`` something turned into a constant, with the place that did: ``T = 48 (model.py:7)``.

        Empty for a graph that holds for more than one length.
        """
        found = []
        for name, symbol in (("T", self.tokens), ("M", self.rows)):
            expression = symbol.node.expr
            if expression.is_number:
                found.append(f"{name} = {expression}{self._reason(symbol.node._expr)}")
        return tuple(found)

    def _reason(self, symbol: Expression) -> str:
        for guard in self.shape_env.guards:
            if isinstance(guard.expr, sympy.Eq) and symbol in guard.expr.free_symbols:
                place = str(guard.sloc).strip().splitlines()
                return f" ({place[-1].strip()})" if place else ""
        return ""

    def size_at(self, size: int | torch.SymInt, tokens: int, rows: int) -> int:
        """A size of this space for ``tokens`` global tokens in ``rows`` rows a rank. Adds no guard."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        return int(size.node.expr.xreplace({self.tokens.node._expr: tokens, self.rows.node._expr: rows}))

    def broken_guards(self, tokens: int, rows: int) -> tuple[str, ...]:
        """Assumptions of the graph that do not hold for ``tokens`` global tokens in ``rows`` rows a rank."""
        values = {self.tokens.node._expr: sympy.Integer(tokens), self.rows.node._expr: sympy.Integer(rows)}
        names = {symbol: sympy.Symbol(str(symbol).removeprefix("s")) for symbol in values}
        broken = [
            str(guard.expr.xreplace(names)) for guard in self.shape_env.guards if not bool(guard.expr.xreplace(values))
        ]
        if broken:
            return tuple(broken)
        # A range says what a guard says, except for the one that PyTorch assumes from the start.
        ranges = [(symbol, value, self.shape_env.var_to_range.get(symbol)) for symbol, value in values.items()]
        return tuple(
            f"{held.lower} <= {names[symbol]} <= {held.upper}"
            for symbol, value, held in ranges
            if held is not None and not bool(held.lower <= value <= held.upper)
        )


def fresh_space(tokens: int, rows: int) -> FreshSpace:
    """A new environment whose hints are ``tokens`` for T and ``rows`` for M; both at least 2.

    PyTorch compiles sizes 0 and 1 as constants, so a graph for any length can only be made from a length above that.
    """
    assert tokens >= 2 and rows >= 2, f"T = {tokens}, M = {rows}: sizes below 2 are constants"
    shape_env = _NamedShapeEnv()
    sizes = [_symbol(shape_env, source, hint) for source, hint in zip(_SOURCES, (tokens, rows), strict=True)]
    return FreshSpace(FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True), shape_env, *sizes)


def _symbol(shape_env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    source = LocalSource(name)
    symbol = shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    size = shape_env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt), f"{name} is the constant {size}"
    return size


def fake_inputs(
    space: FreshSpace, inputs: Sequence[GraphInput], values: Mapping[Expression, int | torch.SymInt]
) -> list[Any]:
    """A fake for each input of a Dynamo graph, in the fresh environment.

    Args:
        space: where the fakes live.
        inputs: as :func:`~pcp_passes.frontends.torch.inputs.read_inputs` gives them.
        values: what Dynamo's symbols become: ``space.tokens`` for the token count, a constant for any other.
    """
    return [_fake(space, given, values) for given in inputs]


def _fake(space: FreshSpace, given: GraphInput, values: Mapping[Expression, int | torch.SymInt]) -> Any:
    if given.kind == "size":
        return substitute(given.value, values)
    assert given.dtype is not None, f"{given.source} is neither a tensor nor a size"
    size = [substitute(part, values) for part in given.size]
    stride = [substitute(part, values) for part in given.stride]
    with space.fake_mode:
        return torch.empty_strided(size, stride, dtype=given.dtype, device=given.device)


def substitute(expression: Expression, values: Mapping[Expression, int | torch.SymInt]) -> int | torch.SymInt:
    """The value of an expression of Dynamo's symbols."""
    if not isinstance(expression, sympy.Basic):
        return int(expression)
    found: int | torch.SymInt = sympy_interp(PythonReferenceAnalysis, dict(values), expression)
    return found


def fake_plan(space: FreshSpace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Fakes of the plan inputs that a rewrite adds: ``pcp_rows`` i64[M] and ``pcp_restore`` i64[T]."""
    with space.fake_mode:
        rows = torch.empty(space.rows, dtype=torch.int64, device=device)
        restore = torch.empty(space.tokens, dtype=torch.int64, device=device)
    return rows, restore


def propagate(space: FreshSpace, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Run ``gm`` on fakes and state every node's value anew. About a millisecond a node."""
    with space.ambient():
        _Propagate(gm, space.fake_mode).run(*inputs)


class _Propagate(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.mode = mode

    def run_node(self, n: fx.Node) -> Any:
        found = fakes.call_on_fakes(self.mode, super().run_node, (n,), {})
        if isinstance(found, torch.Tensor) and n.op == "get_attr":
            found = self.mode.from_tensor(found, static_shapes=True)
        if n.op != "output":
            meta.set_aten_value(n, found)
        return found


def compile_in(space: FreshSpace, gm: fx.GraphModule) -> Callable[..., Any]:
    """Compile a graph of this space with Inductor; the guards it adds are the space's.

    ``gm`` is left as it is. The result is called with T, M, and then the inputs of ``gm``, sizes as plain integers.

    T and M are inputs of what is compiled because Inductor's caches save the guards of a compilation, and replay them
    into the environment of a later one, only as far as they are about sizes that are inputs themselves.
    """
    from torch._inductor.compile_fx import compile_fx

    whole = copy_graph_module(gm)
    first = next(iter(whole.graph.nodes))
    for name, size in (("num_tokens", space.tokens), ("num_rows", space.rows)):
        with whole.graph.inserting_before(first):
            meta.set_aten_value(whole.graph.placeholder(name), size)
    whole.recompile()
    inputs = [meta.value(node) for node in whole.graph.find_nodes(op="placeholder")]
    with space.ambient():
        compiled: Any = compile_fx(whole, inputs, config_patches=cache_key())
    return compiled  # type: ignore[no-any-return]


def cache_key() -> dict[str, Any]:
    """Inductor's caches do not look into our ops: a pass that does nothing puts the package's sources in their key.

    Where the user has a pass of their own in that place, theirs stays.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Sources(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            """Leave the graph."""

        def uuid(self) -> str:
            return source_hash()

    return {} if config.post_grad_custom_post_pass is not None else {"post_grad_custom_post_pass": Sources()}


@functools.lru_cache(maxsize=1)
def source_hash() -> str:
    """SHA-256 (hex) of this package's sources and of those of ``pcp_kernels``, whose ops compiled graphs call."""
    folders = (Path(__file__).resolve().parents[2], Path(pcp_kernels.__file__).resolve().parent)
    return hashlib.sha256("".join(map(hash_sources, folders)).encode()).hexdigest()
