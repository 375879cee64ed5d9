# SPDX-License-Identifier: Apache-2.0
"""A step program's bodies in pieces, and which static buffers its calls may share."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.ir import meta
from pcp_passes.passes.base import PassContext
from pcp_passes.piecewise.holds import SHARED
from pcp_passes.piecewise.pieces import Collectives, Piece, static_slots
from pcp_passes.piecewise.split import split_body
from pcp_passes.piecewise.static import SlotType
from pcp_passes.step import ops
from pcp_passes.step.calls import BodyCall
from pcp_passes.step.placement import body_of
from pcp_passes.step.program import StepProgram

ROLES = ("target", "drafter")
_COPIES = (ops.select_rows, ops.join_rows, ops.stack_drafts, ops.add, ops.verify, ops.sample_draft)
"""Step ops whose results are tensors of their own. Of every other one it is assumed that it gives views."""


class Compiler(Protocol):
    """What compiles pieces (:class:`pcp_passes.piecewise.compile.PieceCompiler`)."""

    def callable_for(self, piece: Piece, rows: int) -> Any:
        """The piece as a function of its inputs, for calls of ``rows`` rows."""
        ...


@dataclass(frozen=True, eq=False)
class PreparedBody:
    """One body of a program."""

    role: str
    call: BodyCall
    split: fx.GraphModule
    types: dict[str, SlotType]
    """Its slots by name."""
    operands: tuple[str, ...]
    """Slot of each row operand."""

    @property
    def results(self) -> tuple[str, ...]:
        """Slot of each result."""
        return tuple("result" if i == 0 else f"result.{i}" for i in range(len(self.call.results)))


@dataclass(frozen=True, eq=False)
class Prepared:
    """What the runners of all ranks share.

    Attributes:
        bodies: every body that the program can call.
        compiler: of the pieces; ``None`` runs their graphs as they are.
        shared: a slot that lies in the buffer of another one.
        late: roles of which a result is read after a later call of the role began: their results are copied.
    """

    program: StepProgram
    bodies: dict[BodyCall, PreparedBody]
    compiler: Compiler | None
    shared: dict[SlotType, SlotType]
    late: frozenset[str]

    def slot_types(self) -> Iterator[SlotType]:
        """Every slot of every body."""
        for body in self.bodies.values():
            yield from body.types.values()

    def body(self, role: str, variant: str) -> PreparedBody:
        """A body by name."""
        return next(one for one in self.bodies.values() if (one.role, one.call.variant) == (role, variant))


def prepare(
    program: StepProgram, *, collectives: Collectives = "outside", compiler: Compiler | None = None
) -> Prepared:
    """Split every body of ``program``. The program itself stays as it is: runners are what makes it run in pieces.

    Args:
        program: with the bodies that will run (after :meth:`~pcp_passes.step.program.StepProgram.storing`).
        collectives: ``inside`` captures gathers too, where the group's back end allows it.
        compiler: of the pieces.

    Raises:
        Refusal: a body that cannot be split.
    """
    bodies: dict[BodyCall, PreparedBody] = {}
    for gm in _graphs(program):
        for role in ROLES:
            for module in _children(gm, role):
                if isinstance(module, BodyCall) and module not in bodies:
                    bodies[module] = _prepared(role, module, program, collectives)
    graphs = [gm.graph for gm in _graphs(program)]
    late = frozenset(role for role in ROLES if any(late_results(graph, role) for graph in graphs))
    return Prepared(program, bodies, compiler, _handed_over(graphs, bodies) if not late else {}, late)


def _graphs(program: StepProgram) -> tuple[fx.GraphModule, ...]:
    return tuple(gm for gm in (program.plain, program.sharded) if gm is not None)


def _children(gm: fx.GraphModule, role: str) -> Iterator[torch.nn.Module]:
    held = dict(gm.named_children()).get(role)
    return iter(()) if held is None else held.children()


_SPLIT: WeakKeyDictionary[fx.GraphModule, dict[tuple[PassContext, Collectives], fx.GraphModule]] = WeakKeyDictionary()
"""Split forms by body: executors of one program share them."""


def _prepared(role: str, call: BodyCall, program: StepProgram, collectives: Collectives) -> PreparedBody:
    ctx = PassContext(program.pcp, program.axis, "sharded" if call.sharded else "replicated")
    known = _SPLIT.setdefault(call.body, {})
    split = known.get((ctx, collectives))
    if split is None:
        split = known[ctx, collectives] = split_body(call.body, ctx, collectives)
    types = {
        slot.name: SlotType(_owner(role, slot.name), slot.name, slot.shape, slot.dtype) for slot in static_slots(split)
    }
    operands = []
    for node in (node for node in call.body.graph.nodes if node.op == "placeholder"):
        name = str(node.target)
        operands.append(name)
        types.setdefault(name, _type(role, name, meta.tensor(node)))  # an operand that no piece reads
    body = PreparedBody(role, call, split, types, tuple(operands))
    for name, result in zip(body.results, call.results, strict=True):
        types.setdefault(name, _type(role, name, meta.tensor(result)))
    return body


def _owner(role: str, name: str) -> str:
    """Whose slot it is. What runs between pieces is read within one body call, so target and drafter share it."""
    return "" if name.startswith(SHARED) else role


def _type(role: str, name: str, held: torch.Tensor | None) -> SlotType:
    assert held is not None, f"{name} of the {role} has no example value"
    shape = tuple(None if isinstance(size, torch.SymInt) else int(size) for size in held.shape)
    return SlotType(role, name, shape, held.dtype)


def body_calls(graph: fx.Graph, role: str) -> list[fx.Node]:
    """Calls of a role's bodies, in the order they run."""
    return [
        node for node in graph.nodes
        if str(node.target).startswith(f"{role}.") and body_of(node) is not None
    ]  # fmt: skip


def readers(value: fx.Node) -> list[fx.Node]:
    """Nodes that read a value, also through views of it and containers that only hold it."""
    found: list[fx.Node] = []
    for user in value.users:
        found.append(user)
        fresh = user.op in ("call_module", "output") or is_collective(user) or ops.is_op(user, *_COPIES)
        if not fresh:
            found += readers(user)
    return found


def late_results(graph: fx.Graph, role: str) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """``(value, later call, reader)``: a result that is read after a later call of the role wrote over its slot."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    calls = body_calls(graph, role)
    found = []
    for index, call in enumerate(calls):
        for value, result in results_of(call):
            later = next((other for other in calls[index + 1 :] if result < len(_body(other).results)), None)
            if later is not None:
                found += [(value, later, reader) for reader in readers(value) if position[reader] > position[later]]
    return found


def results_of(call: fx.Node) -> list[tuple[fx.Node, int]]:
    """``(node, index)`` of each result of a body call that something reads."""
    if len(_body(call).results) == 1:
        return [(call, 0)]
    return [(user, user.args[1]) for user in call.users if user.target is operator.getitem]  # type: ignore[misc]


def _handed_over(graphs: list[fx.Graph], bodies: dict[BodyCall, PreparedBody]) -> dict[SlotType, SlotType]:
    """Operand slots of the drafter that may be the buffer of the target's result that they are given.

    Safe when in every program the drafter's first call takes the target's own result, and nothing reads that result
    after the drafter's second call began, which writes over the slot.
    """
    found: dict[SlotType, SlotType] | None = None
    for graph in graphs:
        position = {node: index for index, node in enumerate(graph.nodes)}
        targets, drafters = body_calls(graph, "target"), body_calls(graph, "drafter")
        if len(targets) != 1 or not drafters:
            return {}
        first, given = bodies[_body(drafters[0])], bodies[_body(targets[0])]
        mine: dict[SlotType, SlotType] = {}
        for value, result in results_of(targets[0]):
            again = position[drafters[1]] if len(drafters) > 1 else len(position)
            if value not in drafters[0].args or any(position[reader] > again for reader in readers(value)):
                continue
            slot = first.types[first.operands[drafters[0].args.index(value)]]
            base = given.types[given.results[result]]
            if (slot.shape, slot.dtype) == (base.shape, base.dtype):
                mine[slot] = base
        found = mine if found is None else {slot: base for slot, base in found.items() if mine.get(slot) == base}
    return found or {}


def _body(call: fx.Node) -> BodyCall:
    module = body_of(call)
    assert module is not None, f"%{call.name} calls no body"
    return module
