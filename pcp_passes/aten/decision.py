# SPDX-License-Identifier: Apache-2.0
"""What a rule is asked, and what it may answer.

A rule is given one call whose operands have placements, and says whether the op can run on this rank's rows:

* :class:`Local`: yes; what each operand must be, and what the result then is;
* :class:`Mixes`: no, for this reason. The caller then restores the operands and runs the op replicated.

The statement behind ``Local`` is exact. For operands that are selections ``x.index_select(dim, rows)`` of their global
values, the op's result is the selection of its global result, for *every* vector ``rows``: repeated, permuted, padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from pcp_passes.ir import meta
from pcp_passes.ir.placements import Placement, Replicate, Shard

REPLICATE = Replicate()


@dataclass(frozen=True)
class Rows:
    """A size argument of a local call: ``outer * M * inner``."""

    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Local:
    """The op runs on local rows.

    Attributes:
        out: placement of the result; a tuple for an op with several.
        needs: placement each operand must have, in the order of :func:`operands`.
        sizes: size arguments to replace, by argument position; an entry is a :class:`Rows`, or what was there.
    """

    out: Placement | tuple[Placement, ...]
    needs: tuple[Placement, ...]
    sizes: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixes:
    """The op mixes tokens, as far as the rule can tell."""

    reason: str


Decision = Local | Mixes


class CannotTell(Exception):
    """Raised inside a rule that was asked what it has no answer for; the table answers ``Mixes`` with the reason."""


@dataclass(frozen=True)
class Call:
    """One call, its operands' placements, and the token symbol of the graph."""

    node: fx.Node
    operands: tuple[fx.Node, ...]
    """Every node in ``args`` and ``kwargs``, in order; a node used twice is there twice."""
    placed: tuple[Placement, ...]
    tokens: sympy.Symbol

    def arg(self, name: str) -> Any:
        """Argument ``name``, given or default. Raises ``KeyError`` when the schema has none of that name."""
        return argument(self.node, name)

    @property
    def names(self) -> tuple[str, ...]:
        """Argument names of the op's schema, in order."""
        return argument_names(self.node)

    def at(self, node: object) -> Placement:
        """Placement of an argument; ``Replicate`` for one that is not a node."""
        return self.placed[self.operands.index(node)] if isinstance(node, fx.Node) else REPLICATE

    def count(self, size: object) -> int | None:
        """``c`` where ``size`` is ``c`` times the number of tokens, else ``None``."""
        return multiple(size, self.tokens)

    def as_rows(self, node: fx.Node, back: int, like: Shard) -> Placement | None:
        """What a broadcast operand must be where the result is sharded like ``like``, ``back`` dimensions from the end.

        Replicated where it has one value for all rows, rows where it has as many as ``like``, ``None`` for anything
        else: a size that is not known to be either is not assumed to be one of them.
        """
        held = tensor_of(node)
        if held.dim() < -back or (isinstance(held.shape[back], int) and held.shape[back] == 1):
            return REPLICATE
        same = self.count(held.shape[back]) == like.outer * like.inner
        return Shard(held.dim() + back, like.outer, like.inner) if same else None

    def needs(self, wanted: Mapping[fx.Node, Placement], *, one_role: bool = False) -> tuple[Placement, ...]:
        """Requirements in operand order; what is not named must be replicated.

        ``one_role``: every use of a node among the operands means the same, as in ``x * x``.

        Raises:
            CannotTell: a named node is used twice, and its uses may mean different things, as in ``x.gather(1, x)``.
        """
        if not one_role and any(self.operands.count(node) > 1 for node in wanted):
            raise CannotTell("uses one tensor in two roles")
        return tuple(wanted.get(operand, REPLICATE) for operand in self.operands)


Rule = Callable[[Call], Decision]


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Every node in ``args`` and ``kwargs``, in order, with repetitions."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return tuple(found)


def argument(node: fx.Node, name: str) -> Any:
    """Argument ``name`` of an ATen call: by keyword, by position, or the schema's default."""
    if name in node.kwargs:
        return node.kwargs[name]
    target: Any = node.target
    for position, declared in enumerate(target._schema.arguments):
        if declared.name == name:
            return node.args[position] if position < len(node.args) else declared.default_value
    raise KeyError(f"{target} has no argument {name!r}")


def position_of(node: fx.Node, name: str) -> int:
    """Position of argument ``name`` in the schema."""
    return argument_names(node).index(name)


def argument_names(node: fx.Node) -> tuple[str, ...]:
    """Argument names of an op's schema, in order."""
    target: Any = node.target
    return tuple(declared.name for declared in target._schema.arguments)


def expression(size: object) -> sympy.Expr:
    """A size as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def multiple(size: object, tokens: sympy.Symbol) -> int | None:
    """``c`` where ``size == c * tokens`` as expressions, with a positive constant ``c``; else ``None``."""
    if not isinstance(size, torch.SymInt):
        return None
    factor, rest = size.node.expr.as_coeff_Mul()
    return int(factor) if rest == tokens and factor.is_Integer and factor > 0 else None


def tensor_of(node: object) -> torch.Tensor:
    """The single tensor a node holds."""
    held = meta.tensor(node)
    assert held is not None, f"%{node} holds no single tensor"
    return held


def wrap(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim % rank if rank else 0
