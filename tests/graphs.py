# SPDX-License-Identifier: Apache-2.0
"""Functional ATen graphs of T tokens for tests: single calls, and captures of short programs, in a fresh space."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_module

from pcp_passes.aten.decision import Call, operands
from pcp_passes.aten.plan_inputs import RESTORE, ROWS, add_plan_inputs
from pcp_passes.frontends.torch.fresh import FreshSpace, fake_plan, fresh_space
from pcp_passes.ir import fakes, meta
from pcp_passes.ir.copies import copy_graph, module_like
from pcp_passes.ir.placements import Placement
from pcp_passes.ir.printer import type_text
from pcp_passes.ir.token_markers import is_restore, is_restore_many, restore_many_op, restore_op
from pcp_passes.passes import Pass, PassContext, PassResult
from pcp_passes.passes.tokens.lower_restores import lower_restores
from pcp_passes.passes.tokens.normalize import normalize
from pcp_passes.passes.tokens.pipeline import Rewritten, TokenOptions, rewrite_tokens
from pcp_passes.simulate import simulate

ATEN: Any = torch.ops.aten
Dim = int | str
"""A size: a number, or a multiple of the token count, ``"T"`` or ``"2T"``."""

HINT_TOKENS, HINT_ROWS = 12, 5
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def times(dim: Dim) -> int | None:
    """``c`` of ``"cT"``; ``None`` for a number."""
    if isinstance(dim, int):
        return None
    found = re.fullmatch(r"(\d*)T", dim)
    assert found is not None, dim
    return int(found[1] or 1)


def at(dim: Dim, tokens: Any) -> Any:
    """The size for a number of tokens, which may be symbolic."""
    count = times(dim)
    return dim if count is None else tokens if count == 1 else count * tokens


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor argument; the same object twice is the same node twice. Values lie in ``[low, high)``."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype = torch.float64
    low: float = 0.0
    high: Dim | float | None = None

    def fake(self, space: FreshSpace) -> torch.Tensor:
        """In the fake mode of ``space``."""
        with space.fake_mode:
            return torch.empty([at(dim, space.tokens) for dim in self.shape], dtype=self.dtype)

    def real(self, tokens: int, generator: torch.Generator) -> torch.Tensor:
        """Random values."""
        shape = [at(dim, tokens) for dim in self.shape]
        high = at(self.high, tokens) if isinstance(self.high, str) else self.high
        if self.dtype is torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return torch.randint(int(self.low), int(high or 8), shape, generator=generator).to(self.dtype)
        if high is None:
            return torch.randn(shape, generator=generator, dtype=self.dtype)
        found: torch.Tensor = self.low + (float(high) - self.low) * torch.rand(
            shape, generator=generator, dtype=self.dtype
        )
        return found


def given(*shape: Dim, dtype: torch.dtype = torch.float64, low: float = 0.0, high: Any = None) -> Given:
    """A tensor argument of this shape."""
    return Given(shape, dtype, low, high)


@dataclass(frozen=True)
class Size:
    """A symbolic size argument, ``count * T``."""

    count: int = 1


@dataclass(frozen=True, eq=False)
class Sample:
    """A call: arguments are plain values, :class:`Given` and :class:`Size`, also inside lists."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``aten::softmax``."""
        found: str = self.target._schema.name
        return found

    def givens(self) -> list[Given]:
        """Tensor arguments in order, each once."""
        found: list[Given] = []
        mapped((self.args, dict(self.kwargs)), lambda entry: found.append(entry) if isinstance(entry, Given) else None)
        return list(dict.fromkeys(found))

    def __str__(self) -> str:
        def text(entry: Any) -> str:
            if isinstance(entry, Given):
                return f"{str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}"
            if isinstance(entry, (list, tuple)):
                return "[" + ", ".join(map(text, entry)) + "]"
            return f"{entry.count}*T" if isinstance(entry, Size) else repr(entry)

        named = [f"{key}={text(value)}" for key, value in self.kwargs.items()]
        return f"{self.target}({', '.join([*map(text, self.args), *named])})"


def sample(target: Any, *args: Any, **kwargs: Any) -> Sample:
    """A call of ``target``."""
    return Sample(target, args, kwargs)


def mapped(entry: Any, change: Callable[[Any], Any]) -> Any:
    """``entry`` with every leaf changed."""
    if isinstance(entry, (list, tuple)):
        return type(entry)([mapped(part, change) for part in entry])
    if isinstance(entry, Mapping):
        return {key: mapped(part, change) for key, part in entry.items()}
    return change(entry)


@dataclass(frozen=True, eq=False)
class Built:
    """A sample as the only call of a graph."""

    sample: Sample
    node: fx.Node
    inputs: Mapping[Given, fx.Node]
    space: FreshSpace
    fixed: bool
    """Whether PyTorch's own function turns T into a constant, so that no rule can be asked about the call."""

    def call(self, where: Mapping[Given, Placement], otherwise: Placement) -> Call:
        """The question that ``propagate-placements`` asks when these operands have these placements."""
        placed = {node: where.get(entry, otherwise) for entry, node in self.inputs.items()}
        members = operands(self.node)
        return Call(self.node, members, tuple(placed.get(n, otherwise) for n in members), self.space.tokens.node.expr)


_shared: list[FreshSpace] = []


def shared_space() -> FreshSpace:
    """One space for many calls: PyTorch remembers what it worked out. One that fixes T spoils it; the next is new."""
    if not _shared or _shared[0].specialised():
        _shared[:] = [fresh_space(HINT_TOKENS, HINT_ROWS)]
    return _shared[0]


def built(entry: Sample) -> Built:
    """The graph of one call, with values."""
    space = shared_space()
    graph = fx.Graph()
    inputs: dict[Given, fx.Node] = {}
    for number, argument in enumerate(entry.givens()):
        inputs[argument] = graph.placeholder(f"x{number}")
        inputs[argument].meta["val"] = argument.fake(space)
    sizes: dict[int, fx.Node] = {}

    def node_of(leaf: Any) -> Any:
        if isinstance(leaf, Size):
            if leaf.count not in sizes:
                sizes[leaf.count] = graph.placeholder(f"size{leaf.count}")
                sizes[leaf.count].meta["val"] = leaf.count * space.tokens
            return sizes[leaf.count]
        return inputs[leaf] if isinstance(leaf, Given) else leaf

    args, kwargs = mapped(entry.args, node_of), mapped(dict(entry.kwargs), node_of)
    node = graph.call_function(entry.target, args, kwargs)
    graph.output((node,))
    real: Any = fx.node.map_arg((args, kwargs), meta.value)
    with torch.no_grad():
        node.meta["val"] = fakes.call_on_fakes(space.fake_mode, entry.target, *real)
    return Built(entry, node, inputs, space, bool(space.specialised()))


# Programs


@dataclass(frozen=True, eq=False)
class Program:
    """A captured program, and what its inputs are."""

    gm: fx.GraphModule
    space: FreshSpace
    inputs: tuple[Given, ...]

    def arguments(self, tokens: int, seed: int = 0) -> list[torch.Tensor]:
        """Random inputs for this many tokens."""
        generator = torch.Generator().manual_seed(seed + tokens)
        return [entry.real(tokens, generator) for entry in self.inputs]


def traced(function: Callable[..., Any], *inputs: Given, names: Sequence[str] = LETTERS) -> Program:
    """Capture a function of tensors as the front end does: functional pre-dispatch ATen. Inputs are called a, b, ..."""
    space = fresh_space(HINT_TOKENS, HINT_ROWS)
    gm = _exported(function, [entry.fake(space) for entry in inputs], space, names[: len(inputs)])
    return Program(gm, space, inputs)


def _exported(
    function: Callable[..., Any], fakes: list[Any], space: FreshSpace, names: Sequence[str]
) -> fx.GraphModule:
    class Whole(nn.Module):
        def forward(self, *arguments: torch.Tensor) -> Any:
            found = function(*arguments)
            return found if isinstance(found, tuple) else (found,)

    with space.ambient():
        gm, _ = aot_export_module(Whole(), fakes, trace_joint=False, pre_dispatch=True, decompositions={})
    for name, node in zip(names, gm.graph.find_nodes(op="placeholder"), strict=True):
        node._rename(name)
        node.target = name
    gm.recompile()
    return gm  # type: ignore[no-any-return]


def expected(function: Callable[..., Any], *inputs: Given) -> str:
    """Formula of the graph of one rank, written by hand: a function of the inputs, ``pcp_rows`` and ``pcp_restore``."""
    space = fresh_space(HINT_TOKENS, HINT_ROWS)
    fakes = [*(entry.fake(space) for entry in inputs), *fake_plan(space, torch.device("cpu"))]
    names = [*LETTERS[: len(inputs)], ROWS, RESTORE]
    gm = _exported(function, fakes, space, names)
    normalize(gm.graph)
    return formula(gm)


def with_plan(program: Program) -> fx.GraphModule:
    """A copy with the two plan inputs."""
    gm = module_like(program.gm, copy_graph(program.gm))
    add_plan_inputs(gm.graph, program.space.fake_mode, program.space.tokens, program.space.rows)
    return gm


def after(program: Program, steps: Sequence[Pass], ctx: PassContext) -> tuple[fx.GraphModule, list[PassResult]]:
    """A copy with the plan inputs, after these passes."""
    gm = with_plan(program)
    results = [step.run(gm.graph, ctx) for step in steps]
    gm.recompile()
    return gm, results


def rewritten(program: Program, pcp: int = 2, **options: Any) -> Rewritten:
    """Through the whole pipeline."""
    return rewrite_tokens(program.gm, program.space, PassContext(pcp), options=TokenOptions(**options))


def formula(gm: fx.GraphModule) -> str:
    """Text of what a graph computes: the same for all orders in which its nodes may stand, and without their names."""
    lines: list[str] = []
    known: dict[fx.Node, str] = {}

    def text(node: fx.Node) -> str:
        if node not in known:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _Word(text(n)))
            named = [f"{key}={kwargs[key]}" for key in sorted(kwargs)]
            line = f"{type_text(meta.value(node))} = {node.target}({', '.join([*map(str, args), *named])})"
            known[node] = f"%{node.name}" if node.op == "placeholder" else f"%{len(lines)}"
            if node.op != "placeholder":
                lines.append(f"{known[node]} : {line}")
        return known[node]

    (end,) = gm.graph.find_nodes(op="output")
    results = fx.node.map_arg(end.args[0], lambda n: _Word(text(n)))
    return "\n".join([*lines, f"return {results}"])


class _Word(str):
    """A string that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def step_plan(tokens: int, pcp: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """``pcp_rows`` of each rank and ``pcp_restore``: tokens dealt out like cards, padded rows repeat token 0."""
    rows = max(2, math.ceil(tokens / pcp))
    dealt = [list(range(rank, tokens, pcp)) for rank in range(pcp)]
    place = {token: rank * rows + row for rank, own in enumerate(dealt) for row, token in enumerate(own)}
    padded = [torch.tensor(own + [0] * (rows - len(own))) for own in dealt]
    return padded, torch.tensor([place[token] for token in range(tokens)])


def on_ranks(gm: fx.GraphModule, arguments: Sequence[torch.Tensor], tokens: int, pcp: int) -> list[Any]:
    """Outputs of each simulated rank; markers are lowered in a copy first."""
    if any(is_restore(node) or is_restore_many(node) for node in gm.graph.nodes):
        gm = module_like(gm, copy_graph(gm))
        lower_restores(gm.graph)
        gm.recompile()
    rows, restore = step_plan(tokens, pcp)
    return simulate(gm, [[*arguments, rows[rank], restore] for rank in range(pcp)])


def worst(program: Program, gm: fx.GraphModule, pcp: int, lengths: Sequence[int] = (4, 9, 13)) -> float:
    """Largest difference between an output of any rank and of the captured program, over a few lengths."""
    found = 0.0
    for tokens in lengths:
        arguments = program.arguments(tokens)
        wanted = program.gm(*arguments)
        for outputs in on_ranks(gm, arguments, tokens, pcp):
            for one, other in zip(outputs, wanted, strict=True):
                assert one.shape == other.shape, f"found {tuple(one.shape)}, required {tuple(other.shape)}"
                found = max(found, float((one.double() - other.double()).abs().nan_to_num(9e9).max()))
    return found


def markers(graph: fx.Graph) -> list[fx.Node]:
    """Restores, packed or not."""
    return [node for node in graph.nodes if node.target in (restore_op, restore_many_op)]
