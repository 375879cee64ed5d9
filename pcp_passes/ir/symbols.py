# SPDX-License-Identifier: Apache-2.0
"""Private PyTorch API that gives meaning to printed sizes and layers, in one place (checked against torch 2.13.0).

- symbols of a wanted name: ``ShapeEnv`` takes them from ``_generate_unique_id``, or from a counter when unbacked;
- expressions: the sympy functions of ``torch.utils._sympy.functions``, by name, from a fixed list;
- hoisted layer names: the registry of opaque types, to find the class that an op's schema asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch._library import opaque_object
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy import functions as sympy_functions

from pcp_passes.ir import fakes
from pcp_passes.ir.parsing.lexer import Size

_FUNCTIONS = frozenset(
    "CeilToInt CleanDiv FloatTrueDiv FloorDiv FloorToInt Identity IntTrueDiv Max Min Mod ModularIndexing PythonMod"
    " RoundToInt ToFloat TruncToFloat TruncToInt Where".split()
)
_RELATIONS = {"Eq": sympy.Eq, "Ne": sympy.Ne, "floor": sympy.floor, "ceiling": sympy.ceiling, "Abs": sympy.Abs}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "//": sympy_functions.FloorDiv, "%": sympy_functions.Mod, "unary -": lambda a: -a,
    "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge, "==": sympy.Eq, "!=": sympy.Ne,
    "&": sympy.And, "|": sympy.Or, "unary ~": sympy.Not,
}  # fmt: skip
_MAX_EXPONENT = 8
_FIRST_HINT = 61
"""Hints are 61, 67, 73, ...: no power of two, so that no size of a model equals one, and not so large that a limit of
the model (a table of positions, a window of a trace) is passed."""


class Symbols:
    """A fake mode and a shape environment of their own, whose symbols have the names that a text gives them.

    ``hints`` are sizes to assume, by symbol (see :func:`symbol_hints`); others get one of their own.
    """

    def __init__(self, hints: Mapping[str, int] | None = None) -> None:
        self._given = dict(hints or {})
        self.env = ShapeEnv()
        # A kernel without a fake would run on real, zero-filled tensors of any size the text asks for.
        self.mode = FakeTensorMode(shape_env=self.env, allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self._symbols: dict[str, Any] = {}
        self._hints: dict[Any, Any] = {}

    @classmethod
    def within(cls, mode: FakeTensorMode, hints: Mapping[str, int]) -> Symbols:
        """More symbols in the environment of ``mode``, whose own symbols have other names."""
        made = cls(hints)
        assert mode.shape_env is not None, "the fake mode has no symbols"
        made.env, made.mode = mode.shape_env, mode
        return made

    def value(self, size: Size) -> Any:
        """The int, ``SymInt``, ``SymFloat`` or ``SymBool`` that an expression stands for.

        Raises:
            ValueError: the expression is no size: an unknown name or function, a huge power, a division by zero.
        """
        try:
            expression = self._expression(size.tree)
            return self._node(expression)
        except ValueError:
            raise
        except Exception as error:  # sympy and the shape environment refuse nonsense in many ways
            raise ValueError(f"{type(error).__name__}: {error}".splitlines()[0]) from error

    def _node(self, expression: Any) -> Any:
        hint = expression.xreplace(self._hints)
        if isinstance(expression, sympy.logic.boolalg.Boolean) and not expression.is_Symbol:
            known = hint in (sympy.true, sympy.false)
            if expression in (sympy.true, sympy.false):
                return bool(expression)
            return torch.SymBool(_sym_node(expression, self.env, bool, bool(hint) if known else None))
        if self._is_integer(expression):
            known = bool(hint.is_Integer)
            return self.env.create_symintnode(expression, hint=int(hint) if known else None)
        if expression.is_Float:
            return float(expression)
        return self.env.create_symfloatnode(expression, hint=float(hint) if hint.is_number else None)

    def _is_integer(self, expression: Any) -> bool:
        """Integer unless it is known not to be: sizes such as ``s0/2`` are integers that sympy cannot prove."""
        integers = all(symbol.is_integer for symbol in expression.free_symbols)
        return bool(expression.is_integer is not False and integers and not expression.has(sympy.Float))

    def _expression(self, tree: tuple[Any, ...]) -> Any:
        head, *rest = tree
        if head == "literal":
            return sympy.sympify(rest[0]) if isinstance(rest[0], (int, float)) else self._bad(rest[0])
        if head == "name":
            return self._name(rest[0])
        if head == "call":
            function = _RELATIONS.get(rest[0]) or (rest[0] in _FUNCTIONS and getattr(sympy_functions, rest[0], None))
            if not function:
                raise ValueError(f"unknown function {rest[0]}")
            return function(*map(self._expression, rest[1:]))
        operands = [self._expression(operand) for operand in rest]
        if head == "**":
            return self._power(*operands)
        return _OPERATORS[head](*operands)

    def _power(self, base: Any, exponent: Any) -> Any:
        if not (exponent.is_Integer and abs(exponent) <= _MAX_EXPONENT) or base.has(sympy.Pow):
            raise ValueError(f"a power of {exponent}; required an integer of at most {_MAX_EXPONENT}, not nested")
        return base**exponent

    def _bad(self, found: object) -> Any:
        raise ValueError(f"{found!r} is no size")

    def _name(self, name: str) -> Any:
        if name in ("True", "False"):
            return sympy.true if name == "True" else sympy.false
        if name not in self._symbols:
            match = re.fullmatch(r"(s|u|zf)([1-9]\d{0,8}|0)|s([A-Z]\w{0,15})", name, re.ASCII)
            if match is None:
                raise ValueError(f"unknown symbol {name!r}; required a name such as s72, sT, u0 or zf1")
            made = self._make(match[1] or "s", match[3] or int(match[2]))
            assert str(made) == name, f"asked the shape environment for {name}, got {made}"
            self._symbols[name] = made
        return self._symbols[name]

    def _make(self, prefix: str, number: int | str) -> Any:
        if isinstance(number, int) and prefix == "u":
            return self._unbacked(number)
        from torch._dynamo.source import ConstantSource  # brings in the whole of Dynamo

        hint: int | float = _FIRST_HINT + 6 * len(self._symbols)
        hint = self._given.get(f"s{number}", hint) if prefix == "s" else hint + 0.5
        env: Any = self.env
        env._generate_unique_id = lambda source: number
        try:
            made = env.create_symbol(hint, ConstantSource(f"{prefix}{number}"), DimDynamic.DYNAMIC, None)
        finally:
            del env._generate_unique_id
        env.unique_ids.add(number)
        self._hints[made] = sympy.sympify(hint)
        return made

    def _unbacked(self, number: int) -> Any:
        counter = self.env.unbacked_symint_counter
        self.env.unbacked_symint_counter = number
        try:
            with self.env.ignore_fresh_unbacked_symbols():
                return self.env.create_unbacked_symint().node.expr
        finally:
            self.env.unbacked_symint_counter = max(counter, number + 1)


def symbol_hints(sizes: Iterable[object]) -> dict[str, int]:
    """The size that each bare symbol among ``sizes`` stood for when it was captured (none for unbacked ones)."""
    found: dict[str, int] = {}
    for size in sizes:
        if fakes.is_plain_symbol(size) and not fakes.has_unbacked_symbol(size):
            node: Any = size.node  # type: ignore[attr-defined]
            if isinstance(node.hint, int):
                found[str(node.expr)] = node.hint
    return found


def _sym_node(expression: Any, env: ShapeEnv, kind: type, hint: object) -> Any:
    from torch.fx.experimental.sym_node import SymNode

    return SymNode(expression, env, kind, hint)


def layer_object(target: Any, position: int | str, name: str) -> Any:
    """A layer name as the class that an op's schema asks for, or ``None`` when no class loaded here fits.

    Only registered opaque *value* types are considered: what Dynamo hoists, made from their one string.
    """
    overload = getattr(target, "default", target)
    schema = getattr(overload, "_schema", None)
    arguments = list(schema.arguments) if schema is not None else []
    wanted = [a for i, a in enumerate(arguments) if position in (i, a.name)]
    if not wanted:
        return None
    asked = str(wanted[0].type)
    types: Any = getattr(opaque_object, "_OPAQUE_TYPES", {})
    for cls, known in list(types.items()):
        if known.opaque_typ == "value" and getattr(known, "hoist", True) and asked.endswith(known.class_name):
            made = cls(name)
            return made if getattr(made, "value", None) == name else None
    return None
