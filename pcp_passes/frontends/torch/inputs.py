# SPDX-License-Identifier: Apache-2.0
"""What goes into a Dynamo graph, read from its placeholders (private PyTorch names, checked against torch 2.13.0).

- ``placeholder.meta["example_value"]``: the fake tensor or ``SymInt`` of the input;
- ``placeholder._dynamo_source`` and ``meta["grapharg"].source``: where the value comes from in the user's program. A
  source spells itself ``L['self']._modules['embed']._parameters['weight']``; ``name`` was a method before it became a
  property.

Dynamo gives every size it kept symbolic a symbol of its own shape environment. Which of those symbols is *the* number
of tokens is decided here; no other size stays symbolic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from pcp_passes.errors import ConfigError
from pcp_passes.ir import meta

Kind = Literal["tensor", "size", "float", "other"]
Expression = Any
"""A ``sympy`` expression of Dynamo's symbols, or an ``int``: sympy's own classes are untyped."""

_INDEX = re.compile(r"\[['\"]?([^'\"\]]*)['\"]?\]")
_STORES = re.compile(r"\b_(?:modules|parameters|buffers)\.")


@dataclass(frozen=True)
class GraphInput:
    """One placeholder of a Dynamo graph.

    Attributes:
        index: position among the placeholders, and in the argument list of a call.
        node: name of the placeholder.
        source: where the value comes from, as a dotted name: ``input_ids``, ``layers.0.weight``.
        kind: a plain ``tensor``; ``size``, an integer that is (part of) a tensor's shape; ``float``, a Python float
            that Dynamo passes as a tensor of no dimensions; or ``other``, which includes subclasses of tensors.
        size, stride: of a tensor, as expressions of Dynamo's symbols; empty otherwise.
        value: of a ``size``, its expression.
        is_parameter: a parameter or buffer of a module.
    """

    index: int
    node: str
    source: str
    kind: Kind
    size: tuple[Expression, ...] = ()
    stride: tuple[Expression, ...] = ()
    value: Expression = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    is_parameter: bool = False

    @property
    def last_name(self) -> str:
        """The last component of the source: the argument's name, whoever holds the arguments."""
        return self.source.rpartition(".")[2]

    def places(self) -> list[tuple[Expression, int | None]]:
        """The symbols that this input gives a value, with the dimension; ``None`` for a size itself."""
        if self.kind == "size":
            return [(self.value, None)] if isinstance(self.value, sympy.Symbol) else []
        return [(size, dim) for dim, size in enumerate(self.size) if isinstance(size, sympy.Symbol)]

    def symbols(self) -> set[Expression]:
        """Symbols of the input's sizes."""
        parts = self.size if self.kind == "tensor" else (self.value,)
        return {symbol for part in parts for symbol in _symbols(part)}


def read_inputs(gm: fx.GraphModule) -> tuple[GraphInput, ...]:
    """Describe every placeholder of a Dynamo graph, in order. Never changes the graph."""
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return tuple(_read(index, node) for index, node in enumerate(nodes))


def _read(index: int, node: fx.Node) -> GraphInput:
    found = meta.value(node)
    source = _source_name(node)
    if isinstance(found, FakeTensor):
        is_parameter = "_parameters" in source or "_buffers" in source or isinstance(found, torch.nn.Parameter)
        return GraphInput(
            index, node.name, _dotted(source), "float" if _is_python_float(node, found) else "tensor",
            tuple(map(expression, found.shape)), tuple(map(expression, found.stride())),
            dtype=found.dtype, device=found.device, is_parameter=is_parameter,
        )  # fmt: skip
    if isinstance(found, (int, torch.SymInt)) and not isinstance(found, bool):
        return GraphInput(index, node.name, _dotted(source), "size", value=expression(found))
    return GraphInput(index, node.name, _dotted(source), "other")


def _is_python_float(node: fx.Node, found: torch.Tensor) -> bool:
    """``torch.compile(dynamic=True)`` hands floats over as ``f64[]`` and reads them back with ``item()``."""
    if found.dtype != torch.float64 or found.dim() or not node.users:
        return False
    return all(
        user.op == "call_method" and user.target == "item" and isinstance(meta.value(user), (float, torch.SymFloat))
        for user in node.users
    )


def expression(size: object) -> Expression:
    """The ``sympy`` expression of a ``SymInt``, simplified by what its shape environment learned; an ``int`` as is."""
    if not isinstance(size, torch.SymInt):
        return size
    found = size.node.expr
    return int(found) if found.is_number else found


def _symbols(part: Expression) -> set[Expression]:
    return set(part.free_symbols) if isinstance(part, sympy.Basic) else set()


def _source_name(node: fx.Node) -> str:
    argument = node.meta.get("grapharg")
    source = getattr(node, "_dynamo_source", None) or getattr(argument, "source", None)
    if source is None:
        return str(node.target)
    name = source.name
    return str(name() if callable(name) else name)


def _dotted(source: str) -> str:
    """``L['self']._modules['embed']._parameters['weight']`` as ``embed.weight``, ``L['kwargs']['ids']`` as ``ids``."""
    text = _STORES.sub("", _INDEX.sub(r".\1", source.removeprefix("L"))).strip(".")
    return text.removeprefix("self.").removeprefix("kwargs.")


@dataclass(frozen=True)
class TokenChoice:
    """Which symbols of Dynamo are the number of tokens.

    Attributes:
        symbols: all of them; two that are never compared by the model stay two symbols.
        why_static: when ``symbols`` is empty, why no size of this graph is a token count.
    """

    symbols: frozenset[Expression]
    why_static: str = ""


def choose_tokens(inputs: Sequence[GraphInput], named: Mapping[str, int] | None = None) -> TokenChoice:
    """Find the symbol of the token count.

    Args:
        inputs: of one Dynamo graph.
        named: argument name to token dimension (``{"input_ids": 1}``); negative dimensions count from the end. An
            argument that this graph does not read is ignored, since a graph break can hand it to another graph.

    Raises:
        ConfigError: a named dimension is outside its tensor, named sizes are not one symbol, or nothing is named and
            several symbols could be the token count.
    """
    dims = _named_dims(inputs, named or {})
    if dims:
        return _from_names(dims)
    candidates = _candidates(inputs)
    if not candidates:
        return TokenChoice(frozenset(), "no input of this graph has a dynamic size")
    if len(candidates) == 1:
        return TokenChoice(frozenset(candidates))
    shown = "\n".join(f"  {symbol}  {', '.join(places[:4])}" for symbol, places in candidates.items())
    raise ConfigError(
        f"{len(candidates)} sizes of this graph are dynamic, required one: the number of tokens. Found\n{shown}\n"
        "Name the token dimension of the inputs that have one, as in "
        f'tokens={{"{_example(candidates)}": 1}}; every other size is then compiled as a constant.'
    )


def choose_resumed(inputs: Sequence[GraphInput], sizes: Mapping[Expression, int]) -> TokenChoice:
    """Find the token symbols of a graph that follows a graph break, whose inputs have no names to go by.

    Args:
        inputs: of one Dynamo graph.
        sizes: what the symbols are in the call at hand. Several are the token count when all are equal.
    """
    candidates = _candidates(inputs)
    if not candidates:
        return TokenChoice(frozenset(), "a graph after a graph break whose inputs have no dynamic size")
    if len(candidates) > 1 and len({sizes.get(symbol) for symbol in candidates}) != 1:
        return TokenChoice(frozenset(), f"a graph after a graph break with {len(candidates)} unrelated sizes")
    return TokenChoice(frozenset(candidates))


def _candidates(inputs: Sequence[GraphInput]) -> dict[Expression, list[str]]:
    """Symbols of the inputs' sizes, each with the places that have it."""
    candidates: dict[Expression, list[str]] = {}
    for given in inputs:
        for dim, size in enumerate(given.size):
            for symbol in sorted(_symbols(size), key=str):
                candidates.setdefault(symbol, []).append(f"{given.source} dim {dim}")
    if not candidates:
        for given in inputs:
            for symbol in sorted(given.symbols(), key=str):
                candidates.setdefault(symbol, []).append(given.source)
    return candidates


def _example(candidates: Mapping[Expression, Sequence[str]]) -> str:
    return next(iter(candidates.values()))[0].split(" dim ")[0].rpartition(".")[2]


def _named_dims(inputs: Sequence[GraphInput], named: Mapping[str, int]) -> list[tuple[GraphInput, int]]:
    found: list[tuple[GraphInput, int]] = []
    for name, dim in named.items():
        for given in inputs:
            if given.kind != "tensor" or given.is_parameter or name not in (given.source, given.last_name):
                continue
            count = len(given.size)
            if not -count <= dim < count:
                raise ConfigError(f"tokens names dimension {dim} of {name!r}, which has {count}: {list(given.size)}.")
            found.append((given, dim % count))
    return found


def _from_names(dims: Sequence[tuple[GraphInput, int]]) -> TokenChoice:
    symbols: set[Expression] = set()
    static: list[str] = []
    for given, dim in dims:
        size = given.size[dim]
        if isinstance(size, sympy.Symbol):
            symbols.add(size)
        elif isinstance(size, sympy.Basic):
            raise ConfigError(
                f"tokens names dimension {dim} of {given.source!r}, whose size is the expression {size}; required a "
                "plain token count. Name an input that has one row per token."
            )
        else:
            static.append(f"{given.source} dim {dim} is the constant {size}")
    if symbols and static:
        raise ConfigError(
            f"named token dimensions differ: {'; '.join(static)}, and others are dynamic. Give every named input the "
            "same number of tokens; if they have it, the model compares this size with a constant."
        )
    return TokenChoice(frozenset(symbols), "; ".join(static))


def unknown_names(named: Mapping[str, int], inputs: Sequence[GraphInput]) -> ConfigError | None:
    """The error for names that no input of a graph has, with the names there are; ``None`` when one matches."""
    known = [given for given in inputs if given.kind == "tensor" and not given.is_parameter]
    if any(name in (given.source, given.last_name) for name in named for given in known):
        return None
    names = sorted({given.last_name for given in known})
    near = [match for name in named for match in get_close_matches(name, names, n=1)]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"tokens names {', '.join(map(repr, named))}, but the graph reads {', '.join(names)}.{hint}")
