# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a mesh exchange, from a configuration alone: wires between stages, and collectives by group.

Nothing is run and no weight is read. Of each stage its first and its last layer are captured, and one of each kind in
it: so every border has the layers that the model has there, and what the others exchange is counted as often as their
kinds occur.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.errors import ConfigError
from pcp_passes.inspection.layers import LayerStack, find_stack, keep_layers
from pcp_passes.inspection.run import DTYPES
from pcp_passes.inspection.step import DRAFTERS, capture_mtp, model_on_meta
from pcp_passes.ir import meta, rules
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.combinations import require_allowed
from pcp_passes.options import unknown_choice
from pcp_passes.passes.base import PassContext
from pcp_passes.passes.bodies.stage_cut import decoder_layers, even_layers, require_layers
from pcp_passes.speculative.mtp import MTP
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step import ops
from pcp_passes.step.placement import body_of, row_operands
from pcp_passes.step.program import StepProgram
from pcp_passes.step.stages import StageProgram, Wire, split_program

_Line = tuple[str, str, str, str, int]
"""Call, group, op, what is carried, bytes a row."""


@dataclass(frozen=True)
class WireLine:
    """What crosses from a stage to the next: ``hidden state``, ``top-k of layer 38``, ``output of layer 3``."""

    name: str
    bytes_per_row: int


@dataclass(frozen=True)
class ExchangeLine:
    """Collectives of one kind in a body call, or between calls."""

    call: str
    """The body, ``target.sharded``; empty for those of the step itself."""
    group: str
    """Whose ranks take part: ``pcp`` or ``dp``."""
    op: str
    carries: str
    """What travels: ``cache rows``, ``routed rows`` (to experts), ``expert outputs``, ``rows of`` a body call."""
    times: int
    bytes_per_row: int
    """Of the operand of one rank, for each row that it has in the call; replicas have equal rows."""


@dataclass(frozen=True)
class RestoreLine:
    """Rows that all PCP ranks of a stage get in global order."""

    source: str
    bytes_per_row: int


@dataclass(frozen=True)
class StageLine:
    """One stage. ``exchanges`` and ``restores`` are of each program of a step: ``sharded`` and ``replicated``."""

    index: int
    first_layer: int
    end_layer: int
    """First layer of the next stage."""
    drafter: bool
    wires_in: tuple[WireLine, ...]
    wires_out: tuple[WireLine, ...]
    exchanges: Mapping[str, tuple[ExchangeLine, ...]]
    restores: Mapping[str, tuple[RestoreLine, ...]]


@dataclass(frozen=True)
class ModelStages:
    """A model on a mesh."""

    model: str
    mesh: Mesh
    drafter: str
    expert_parallel: bool
    dtype: str
    layers: int
    captured: int
    stages: tuple[StageLine, ...]
    has_experts: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "world_size": self.mesh.world_size}


def inspect_stages_config(
    config: Mapping[str, Any],
    *,
    name: str = "",
    mesh: Mesh,
    expert_parallel: bool = False,
    layers: Sequence[int] | None = None,
    drafter: str = "none",
    steps: int = 3,
    dtype: str = "bf16",
    full: bool = False,
) -> ModelStages:
    """Cut the step program of a configuration into stages and list what their ranks exchange.

    Args:
        config: in the format of transformers, with ``model_type``.
        name: what the report calls the model; its type by default.
        mesh: whose axes are looked at.
        expert_parallel: experts are spread over the ``dp`` and ``pcp`` ranks of a stage.
        layers: of each stage; as even as can be by default.
        drafter: ``none``, or ``mtp``.
        steps: K, with a drafter.
        dtype: of weights and activations.
        full: capture every layer.

    Raises:
        ConfigError: an option, the configuration or the mesh is wrong.
        Refusal: the model cannot be captured or cut.
    """
    if drafter not in ("none", *DRAFTERS):
        raise ConfigError(unknown_choice("drafter", drafter, ("none", *DRAFTERS)))
    if dtype not in DTYPES:
        raise ConfigError(unknown_choice("dtype", dtype, tuple(DTYPES)))
    model = model_on_meta(config, DTYPES[dtype])
    stack, count = find_stack(model, model.config), int(model.config.num_hidden_layers)
    asked: dict[str, Any] = {"frontend": "embedded", "expert_parallel": expert_parallel}
    require_allowed(mesh, layers=count, **asked)
    if layers is not None and len(layers) != mesh.pp:
        raise ConfigError(f"{len(layers)} numbers of layers are given; required one for each of pp={mesh.pp} stages.")
    each = even_layers(count, mesh.pp) if layers is None else require_layers(layers, count)
    kept = kept_layers(stack, each) if stack.path and not full else tuple((number, 1) for number in range(count))
    if len(kept) < count:
        keep_layers(model, model.config, stack, [number for number, _ in kept])
    program = _program(model, mesh, drafter, steps)
    if expert_parallel:
        require_allowed(mesh, experts=None if program.target.has_experts else 0, **asked)  # type: ignore[attr-defined]
        program = program.dispatching(mesh.dp)
    paths = decoder_layers(program.target.bodies["replicated"].graph)
    times = {path: weight for path, (_, weight) in zip(paths, kept, strict=True)} if paths else {}
    numbers = {path: number for path, (number, _) in zip(paths, kept, strict=True)} if paths else {}
    ends = [sum(each[: stage + 1]) for stage in range(mesh.pp)]
    cut = [sum(begin <= number < end for number, _ in kept) for begin, end in zip([0, *ends], ends, strict=False)]
    stages = split_program(program, mesh.pp, cut, allow_shared_weights=True)
    lines = [stage_line(one, end - size, end, mesh, times) for one, end, size in zip(stages, ends, each, strict=True)]
    named = _name_wires(lines, stages, numbers)
    return ModelStages(
        name or str(config["model_type"]), mesh, drafter, expert_parallel, dtype, count, len(kept), named,
        program.target.has_experts,  # type: ignore[attr-defined]
    )  # fmt: skip


def _name_wires(
    lines: Sequence[StageLine], stages: Sequence[StageProgram], numbers: Mapping[str, int]
) -> tuple[StageLine, ...]:
    """With wires named by what they hold; ``numbers``: of the decoder layers, by module path."""
    made: dict[str, fx.Node] = {}
    found, arriving = [], lines[0].wires_in
    for line, stage in zip(lines, stages, strict=True):
        body = stage.target.bodies["replicated"].graph
        made |= {node.name: node for node in body.nodes if node.op != "placeholder"}
        names = _distinct([_content(made.get(wire.name), numbers, line.end_layer - 1) for wire in line.wires_out])
        leaving = tuple(replace(wire, name=name) for wire, name in zip(line.wires_out, names, strict=True))
        found.append(replace(line, wires_in=arriving, wires_out=leaving))
        arriving = leaving
    return tuple(found)


def _content(node: fx.Node | None, numbers: Mapping[str, int], last: int) -> str:
    """What a wire out of a stage holds, whose last layer is ``last``."""
    if node is None:
        return "rows"
    path = f"{meta.module_path(node)}."
    layer = next((number for prefix, number in numbers.items() if path.startswith(f"{prefix}.")), None)
    if "topk" in (rules.op_name(node) or ""):
        return "top-k" if layer is None else f"top-k of layer {layer}"
    if layer == last:
        return "hidden state"
    return "input of the first layer" if layer is None else f"output of layer {layer}"


def _distinct(names: Sequence[str]) -> list[str]:
    """``[a, b, a]`` is ``[a, b, a (2)]``."""
    return [f"{name} ({names[:i].count(name) + 1})" if name in names[:i] else name for i, name in enumerate(names)]


def kept_layers(stack: LayerStack, each: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Layers to capture, ascending, each with the number of layers that it stands for.

    Of each stage these are the first, the last and the first of each kind; what is left out counts with the first of
    its kind in its stage. With kinds ``a b b b b b`` and stages of 3: layers 0, 1, 2, then 3, 5, where 3 counts twice.
    """
    kind = {number: held.label for held in stack.kinds for number in held.layers}
    found: list[tuple[int, int]] = []
    for end, size in zip((sum(each[: stage + 1]) for stage in range(len(each))), each, strict=True):
        own = range(end - size, end)
        firsts = {label: number for number in reversed(own) for label in [kind[number]]}
        kept = sorted({own[0], own[-1], *firsts.values()})
        left = [kind[number] for number in own if number not in kept]
        found += [(n, 1 + (left.count(kind[n]) if firsts[kind[n]] == n else 0)) for n in kept]
    return tuple(found)


def _program(model: Any, mesh: Mesh, drafter: str, steps: int) -> StepProgram:
    from pcp_passes.frontends.transformers.target import load_target

    ctx = PassContext(mesh.pcp)
    target = load_target(model, ctx=ctx)
    return StepProgram(
        target, NoDrafter() if drafter == "none" else MTP(capture_mtp(model, ctx), steps), pcp=mesh.pcp
    )  # fmt: skip


def stage_line(
    stage: StageProgram, begin: int, end: int, mesh: Mesh, times: Mapping[str, int] | None = None
) -> StageLine:
    """Read a stage off its programs.

    Args:
        begin, end: its layers, in the numbers of the whole model.
        mesh: of how many replicas rows come together.
        times: by module path of a decoder layer, how many layers it stands for; once by default.
    """
    programs = {"replicated": stage.plain, **({} if stage.sharded is None else {"sharded": stage.sharded})}
    return StageLine(
        stage.index, begin, end, stage.drafter is not None and stage.steps > 0,
        tuple(map(_wire, stage.wires_in)), tuple(map(_wire, stage.wires_out)),
        {name: tuple(_exchanges(gm, mesh, times or {})) for name, gm in programs.items()},
        {name: tuple(_restores(gm)) for name, gm in programs.items()},
    )  # fmt: skip


def _wire(wire: Wire) -> WireLine:
    return WireLine(wire.name, math.prod(wire.shape) * wire.dtype.itemsize)


def _exchanges(gm: fx.GraphModule, mesh: Mesh, times: Mapping[str, int]) -> Iterator[ExchangeLine]:
    """Lines of equal call, group, op and size, each once, in the order of their first."""
    found: dict[_Line, int] = {}
    for node in gm.graph.nodes:
        if is_collective(node):
            found[_line("", node, node, mesh)] = found.get(_line("", node, node, mesh), 0) + 1
        if (call := body_of(node)) is None:
            continue
        first = next(inner for inner in call.body.graph.nodes if inner.op == "placeholder")
        for inner in filter(is_collective, call.body.graph.nodes):
            line = _line(str(node.target), inner, first, mesh)
            found[line] = found.get(line, 0) + _times(inner, times if str(node.target).startswith("target.") else {})
    return (
        ExchangeLine(call, group, op, carries, count, size) for (call, group, op, carries, size), count in found.items()
    )


def _line(call: str, node: fx.Node, rows: fx.Node, mesh: Mesh) -> _Line:
    op = (rules.op_name(node) or str(node.target)).removeprefix("pcp::")
    return call, str(node.args[-1]), op, _carried(call, node), _bytes_per_row(node.args[0], rows, mesh)


def _carried(call: str, node: fx.Node) -> str:
    if not call:
        return f"rows of {source}" if (source := _source(node)) else "rows"
    operand = node.args[0]
    made_by = rules.op_name(operand) if isinstance(operand, fx.Node) else ""
    if made_by in ("pcp::pack_routed", "pcp::gather_ragged"):
        return "routed rows"
    if made_by in ("pcp::local_experts", "pcp::reduce_rows"):
        return "expert outputs"
    return "cache rows" if _is_cached(node) else "rows"


def _is_cached(node: fx.Node) -> bool:
    """Whether what a collective gives is written to a cache, as it is or after views and conversions."""
    reached, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if isinstance(rules.rule_of(user), rules.CacheWrite):
                return True
            if user not in reached and not is_collective(user) and len(reached) < 16:
                reached.add(user)
                waiting.append(user)
    return False


def _times(node: fx.Node, times: Mapping[str, int]) -> int:
    path = f"{meta.module_path(node)}."
    return next((count for layer, count in times.items() if path.startswith(f"{layer}.")), 1)


def _bytes_per_row(node: Any, rows: fx.Node, mesh: Mesh) -> int:
    """Bytes of a value where the call has one row: its own row count is 1, that of all replicas together is ``dp``."""
    held, first = meta.tensor(node), meta.tensor(rows)
    assert held is not None and first is not None, f"%{node} holds no tensor"
    own = _symbols(first.shape[0])
    values = {symbol: 1 if symbol in own or not str(symbol).startswith("u") else mesh.dp for symbol in _symbols(held)}
    count = held.element_size()
    for size in held.shape:
        count *= int(size.node.expr.subs(values)) if isinstance(size, torch.SymInt) else int(size)
    return count


def _symbols(held: Any) -> set[Any]:
    sizes = held.shape if isinstance(held, torch.Tensor) else (held,)
    return {symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols}


def _restores(gm: fx.GraphModule) -> Iterator[RestoreLine]:
    """A gather of the step whose rows are then put into global order."""
    for node in gm.graph.nodes:
        if is_collective(node) and any(ops.is_op(user, ops.select_rows) for user in node.users):
            yield RestoreLine(_source(node), _bytes_per_row(node.args[0], node, Mesh()))


def _source(node: fx.Node) -> str:
    """The body call whose result a node is made of, the nearest one; empty when there is none."""
    waiting = list(node.all_input_nodes)
    while waiting:
        found = waiting.pop(0)
        if body_of(found) is not None and row_operands(found):
            return str(found.target)
        waiting += found.all_input_nodes
    return ""
