# SPDX-License-Identifier: Apache-2.0
"""Printed text back to a graph: ``print_graph(parse_graph(print_graph(g)).graph) == print_graph(g)``.

Values are fake tensors of a mode and a shape environment of their own, with symbols of the names in the text. What an
op gives on its operands' values is taken when it has the type that the text states, so strides and aliases are those
of the capture; where it has not, or cannot be computed here, the stated type is taken as it stands, contiguous.

Nothing is imported, unpickled or evaluated: targets are resolved by name as :mod:`pcp_passes.ir.targets` allows, and
only metadata functions run, on fake tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from pcp_passes.errors import DumpError
from pcp_passes.ir import fakes, meta, targets
from pcp_passes.ir.opaque import Layer, UnknownOp, UnknownValue, UnreadConstant
from pcp_passes.ir.parsing.lexer import Size
from pcp_passes.ir.parsing.syntax import Ref, Statement, read_statements
from pcp_passes.ir.parsing.types import Absent, Kind, Named, Placed, TensorType, Word
from pcp_passes.ir.placements import Partial, Placement, RankMajor, Replicate, Shard, Tied
from pcp_passes.ir.printer import DTYPES, constant_digest, type_text
from pcp_passes.ir.symbols import Symbols, layer_object

_DTYPES: dict[str, torch.dtype] = {text: dtype for dtype, text in DTYPES.items()}
_DTYPES |= {name: held for name, held in vars(torch).items() if isinstance(held, torch.dtype)}
_WORDS: dict[str, Any] = dict(_DTYPES)
_WORDS |= {f"torch.{n}": v for n, v in vars(torch).items() if isinstance(v, (torch.layout, torch.memory_format))}
_DEVICES = frozenset("cpu cuda hpu hip maia meta mps mtia npu privateuseone xla xpu".split())
_FLOATS = {"inf": float("inf"), "nan": float("nan")}
_LISTED_MODULES = ("operator.", "math.", "builtins.")


@dataclass(frozen=True)
class Parsed:
    """A graph read back from text."""

    graph: fx.Graph
    root: nn.Module
    """Holds constants (as buffers), the shapes of parameters (as meta tensors) and stand-ins for submodules."""
    unknown: tuple[str, ...]
    """What the text names and this process does not have, each with a line; empty when ``strict``."""
    stated: tuple[str, ...]
    """Nodes whose value is what the text states, because their op could not give it on example values."""

    def module(self) -> fx.GraphModule:
        """The graph as a module that runs. Its source is generated from checked names only.

        Raises:
            DumpError: the text names something that is not here.
        """
        if self.unknown:
            raise DumpError("the graph cannot run here:\n  " + "\n  ".join(self.unknown))
        return fx.GraphModule(self.root, self.graph, class_name="Parsed")


def parse_graph(
    text: str,
    constants: Mapping[str, torch.Tensor] | None = None,
    *,
    strict: bool = True,
    where: str = "graph",
    hints: Mapping[str, int] | None = None,
) -> Parsed:
    """Read a printed graph.

    Args:
        text: what ``print_graph`` gave, with node names (not ``numbered``).
        constants: ``"name#digest"`` to tensor, for small constants held as attributes; others are stand-ins.
        strict: refuse what is not loaded here; otherwise put an opaque stand-in in its place.
        where: what to call the text in an error: a file name.
        hints: sizes that passes may assume for their estimates, by symbol: ``{"sT": 4096}``.

    Raises:
        DumpError: the text is no printed graph, or (``strict``) names something that may not be called or is not
            loaded; says which line, what was found, and what to do.
    """
    reader = _Reader(constants or {}, strict, where, Symbols(hints))
    with torch.no_grad():
        for statement in read_statements(text, where):
            reader.add(statement)
    if not reader.ended:
        raise DumpError(f"{where}: found no 'return' line; the text is cut off")
    return Parsed(reader.graph, reader.root, tuple(dict.fromkeys(reader.unknown)), tuple(reader.stated))


class _Reader:
    def __init__(self, constants: Mapping[str, torch.Tensor], strict: bool, where: str, symbols: Symbols) -> None:
        self.constants, self.strict, self.where, self.symbols = constants, strict, where, symbols
        self.root = nn.Module()
        self.graph = fx.Graph(owning_module=self.root)  # type: ignore[arg-type]
        self.nodes: dict[str, fx.Node] = {}
        self.unknown: list[str] = []
        self.stated: list[str] = []
        self.ended = False

    def error(self, statement: Statement, found: str) -> DumpError:
        return DumpError(f"{self.where}, line {statement.line}: {found}\n  {statement.text[:200]!r}")

    def missing(self, statement: Statement, what: str, why: str) -> None:
        """Something that is not here: an error, or a remark when the reader is lenient."""
        if self.strict:
            raise self.error(
                statement, f"{what}: {why}. Import the library that defines it first (pcp run --import MODULE), or use "
                "a command that only looks at text (pcp diff, pcp why)."
            )  # fmt: skip
        self.unknown.append(f"{what}: {why} (line {statement.line})")

    def add(self, statement: Statement) -> None:
        if self.ended:
            raise self.error(statement, "a statement after 'return'")
        if statement.op == "output":
            self.graph.output(self.argument(statement, statement.args[0]))
            self.ended = True
            return
        if statement.name in self.nodes:
            raise self.error(statement, f"%{statement.name} is defined twice")
        target = self.target(statement)
        args = tuple(self.argument(statement, argument) for argument in statement.args)
        kwargs = {key: self.argument(statement, argument) for key, argument in statement.kwargs.items()}
        self.find_layers(target, args, kwargs)
        node = self.graph.create_node(statement.op, target, args, kwargs, name=statement.name)
        if node.name != statement.name:  # fx would number a name that it reserves
            node.name = statement.name
        self.nodes[statement.name] = node
        comment = statement.comment
        record = self.record(statement)
        meta.restore(node, self.value(node, statement), record, comment.module, comment.source)

    # -- what is called

    def target(self, statement: Statement) -> Any:
        if statement.op == "placeholder":
            return statement.name
        if statement.op in ("get_attr", "call_module"):
            self.hold(statement)
            return statement.target
        if statement.op == "call_method":
            if not targets.is_tensor_method(statement.target):
                self.missing(statement, f".{statement.target}()", "no method that a printed graph may call on a tensor")
            return statement.target
        try:
            return targets.resolve(statement.target)
        except targets.UnknownTargetError as error:
            self.missing(statement, statement.target, str(error))
            return UnknownOp(statement.target, self.build(statement, statement.kind.type, statement.kind))

    def find_layers(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give a hoisted layer name the class that the op reading it asks for."""
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for position, argument in named:
            held = meta.value(argument) if isinstance(argument, fx.Node) else None
            if isinstance(held, Layer):
                found = layer_object(target, position, held.value)
                if found is not None:
                    meta.restore(argument, found, meta.info(argument))

    def hold(self, statement: Statement) -> None:
        """Put what a ``get_attr`` or ``call_module`` node names on the root."""
        owner, path = self.root, statement.target.split(".")
        try:
            for part in path[:-1]:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
                if not isinstance(owner, nn.Module):
                    raise KeyError(f"{part} is no module")
            self.install(owner, path[-1], statement)
        except (KeyError, TypeError, AttributeError) as error:
            raise self.error(statement, f"{statement.target} cannot be an attribute: {error}") from error

    def install(self, owner: nn.Module, name: str, statement: Statement) -> None:
        present = name in owner._modules or name in owner._parameters or name in owner._buffers
        kind = statement.kind.type
        if statement.digest:
            constant = self.constants.get(f"{statement.target}#{statement.digest}")
            held = owner._buffers.get(name)
            if present:
                digest = constant_digest(held) if held is not None else getattr(owner._modules.get(name), "digest", "")
                if digest != statement.digest:
                    raise KeyError("it has two contents")
            elif constant is None:
                owner.add_module(name, UnreadConstant(statement.digest))
            else:
                owner.register_buffer(name, constant)
        elif not present and isinstance(kind, TensorType):
            sizes = [self.size(statement, size) for size in kind.sizes]
            sizes = [size if isinstance(size, int) else 0 for size in sizes]
            shape = torch.empty(sizes, dtype=self.dtype(statement, kind.dtype), device="meta")
            owner.register_parameter(name, nn.Parameter(shape, requires_grad=False))
        elif not present:
            owner.add_module(name, nn.Module())

    # -- arguments

    def argument(self, statement: Statement, held: Any) -> Any:
        if isinstance(held, Ref):
            if held.name not in self.nodes:
                raise self.error(statement, f"%{held.name} is read, but no line above defines it")
            return self.nodes[held.name]
        if isinstance(held, (list, tuple)):
            return type(held)(self.argument(statement, member) for member in held)
        if isinstance(held, dict):
            return {key: self.argument(statement, member) for key, member in held.items()}
        if isinstance(held, slice):
            return slice(*(self.argument(statement, part) for part in (held.start, held.stop, held.step)))
        if isinstance(held, Word):
            return self.word(statement, held.text)
        if isinstance(held, Named):
            return Layer(held.layer)
        if isinstance(held, Size):
            return self.size(statement, held)
        return held

    def word(self, statement: Statement, text: str) -> Any:
        if text in _WORDS:
            return _WORDS[text]
        if text in _DEVICES:
            return torch.device(text)
        self.missing(statement, text, "no dtype, device, layout or memory format that PyTorch has here")
        return UnknownValue(text)

    def size(self, statement: Statement, size: Size) -> Any:
        try:
            return self.symbols.value(size)
        except ValueError as error:
            raise self.error(statement, f"{size.text!r} is no size: {error}") from error

    def dtype(self, statement: Statement, text: str) -> torch.dtype:
        if text not in _DTYPES:
            raise self.error(statement, f"{text!r} is no dtype of this PyTorch ({torch.__version__})")
        return _DTYPES[text]

    # -- values

    def value(self, node: fx.Node, statement: Statement) -> Any:
        kind = statement.kind
        if not _holds_tensor(kind.type) or node.op not in ("call_function", "call_method"):
            return self.build(statement, kind.type, kind)
        if isinstance(node.target, UnknownOp):
            return node.target.stated
        try:
            fresh = self.compute(node)
        except Exception:  # an op may refuse its operands in any way; what the text states is then all there is
            fresh = None
        if fresh is not None and type_text(fresh) == kind.text:
            return fresh
        self.stated.append(node.name)
        return self.build(statement, kind.type, kind)

    def compute(self, node: fx.Node) -> Any:
        """The node's value on its operands' values, or ``None`` where running it is not worth the risk."""
        args: Any = fx.map_arg(node.args, meta.value)
        kwargs: Any = fx.map_arg(node.kwargs, meta.value)
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        if node.op == "call_method":
            if not isinstance(args[0], torch.Tensor) or not targets.is_tensor_method(str(node.target)):
                return None
            return fakes.call_on_fakes(self.symbols.mode, getattr(args[0], str(node.target)), args[1:], kwargs)
        if targets.target_text(node).startswith(_LISTED_MODULES) and any(
            isinstance(a, (tuple, list)) for a in args[:1]
        ):
            return None  # a tuple times a number
        return fakes.call_on_fakes(self.symbols.mode, node.target, args, kwargs)

    def build(self, statement: Statement, kind: Any, stated: Kind) -> Any:
        if isinstance(kind, TensorType):
            return self.tensor(statement, kind, stated)
        if isinstance(kind, tuple):
            return tuple(self.build(statement, member, stated) for member in kind)
        if isinstance(kind, Absent):
            return None
        if isinstance(kind, Word):
            return UnknownValue(kind.text)
        return self.argument(statement, kind)

    def tensor(self, statement: Statement, kind: TensorType, stated: Kind) -> torch.Tensor:
        sizes = [self.size(statement, size) for size in kind.sizes]
        dtype = self.dtype(statement, kind.dtype)
        if stated.device not in _DEVICES:
            raise self.error(statement, f"{stated.device!r} is no device")
        try:
            with self.symbols.mode:
                if stated.strides is None:
                    return torch.empty(sizes, dtype=dtype, device=stated.device)
                strides = [self.size(statement, stride) for stride in stated.strides]
                return torch.empty_strided(sizes, strides, dtype=dtype, device=stated.device)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise self.error(statement, f"{stated.text} is no tensor: {reason}") from error

    def record(self, statement: Statement) -> meta.NodeInfo:
        kind, comment = statement.kind, statement.comment
        placed = tuple(self.placement(statement, one) for one in kind.placement)
        return meta.NodeInfo(
            placement=placed[0] if placed else None,
            layer=comment.layer or None,
            created_by=comment.by or None,
            changed_by=comment.changed_by or None,
            results=placed if kind.several else (),
            rows=None if kind.rows is None else self.placement(statement, kind.rows),
            reason=comment.reason or None,
        )

    def placement(self, statement: Statement, placed: Placed) -> Placement:
        try:
            made: Placement | None = _placement_classes()[placed.word](*placed.values)
        except (KeyError, TypeError):
            made = None
        if made is None or str(made) not in statement.kind.placement_text:
            raise self.error(statement, f"{statement.kind.placement_text!r} is no placement of this version")
        return made


@cache
def _placement_classes() -> dict[str, Any]:
    import pcp_passes.aten.experts  # noqa: F401  (defines the tied placements)

    tied = {cls.__name__.lower(): cls for cls in Tied.__subclasses__()}
    return {"shard": Shard, "rank_major": RankMajor, "replicate": Replicate, "partial": Partial, **tied}


def _holds_tensor(kind: Any) -> bool:
    return isinstance(kind, TensorType) or (isinstance(kind, tuple) and any(map(_holds_tensor, kind)))
