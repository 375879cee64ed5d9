# SPDX-License-Identifier: Apache-2.0
"""Sample calls of element-wise ops, made from their schemas: every overload, several ways to broadcast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.graphs import ATEN, HINT_TOKENS, Dim, Given, Sample, mapped

Shape = tuple[Dim, ...]
_T = torch.float64, torch.int64, torch.bool, torch.complex128

SHAPES: tuple[tuple[Shape, ...], ...] = (
    (("T", 3), ("T", 3), ("T", 3)),
    (("T", 3), (3,), (1, 3)),
    ((3,), ("T", 3), ("T", 1)),
    (("T", "T"), ("T", 1), ("T",)),
    ((2, "T", 1), ("T", 3), ()),
    (("2T", 1), ("2T", 3), (3,)),
    ((), ("T",), ("T",)),
)
"""Shapes of the first, second and third tensor argument."""


def overloads(name: str) -> Iterator[Any]:
    """Functional overloads of ``aten::name``; nothing where this build of PyTorch has no such op."""
    packet = getattr(ATEN, name.removeprefix("aten::"), None)
    for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
        target = getattr(packet, overload)
        arguments = target._schema.arguments
        if target._schema.is_mutable or any(a.name == "out" or "Dimname" in str(a.type) for a in arguments):
            continue
        yield target


def calls_of(target: Any) -> Iterator[Sample]:
    """Calls of an element-wise overload that run: for each broadcast, with the first types that it takes."""
    wanted = [a for a in target._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
    count = sum(str(a.type) == "Tensor" for a in wanted)
    for shapes in SHAPES if count else ():
        if count == 1 and shapes is not SHAPES[0] and not any(shapes[0]):
            continue
        for dtypes in _types(count):
            tensors = [_given(shape, dtype) for shape, dtype in zip((*shapes, shapes[0]), dtypes, strict=False)]
            found = _call(target, tensors)
            if found is not None:
                yield found
                break


def _types(count: int) -> Iterator[tuple[torch.dtype, ...]]:
    real, integer, truth, pair = _T
    for dtype in (real, integer, truth, pair):
        yield (dtype,) * count
    yield (truth, *(real,) * (count - 1))
    if count > 1:
        yield (real, truth, *(real,) * (count - 2))
        yield (real, *(integer,) * (count - 1))


def _given(shape: Shape, dtype: torch.dtype) -> Given:
    return Given(shape, dtype, 0.1 if dtype.is_floating_point else 1, 0.9 if dtype.is_floating_point else 4)


def _call(target: Any, tensors: list[Given]) -> Sample | None:
    """A call with values for everything that has no default; ``None`` where it does not run."""
    waiting = list(tensors)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for declared in target._schema.arguments:
        if str(declared.type) == "Tensor":
            value: Any = waiting.pop(0)
        elif declared.has_default_value():
            continue
        else:
            value = {"number": 2, "Scalar": 2, "int": 1, "SymInt": 1, "float": 0.5, "bool": False}.get(
                str(declared.type)
            )
            if value is None:
                return None
        if declared.kwarg_only:
            kwargs[declared.name] = value
        else:
            args.append(value)
    if len(args) < sum(not a.kwarg_only and not a.has_default_value() for a in target._schema.arguments):
        return None
    found = Sample(target, tuple(args), kwargs)
    generator = torch.Generator().manual_seed(0)
    real: dict[Given, torch.Tensor] = {entry: entry.real(HINT_TOKENS, generator) for entry in tensors}
    try:
        target(*mapped(tuple(args), lambda leaf: real.get(leaf, leaf) if isinstance(leaf, Given) else leaf),
               **mapped(kwargs, lambda leaf: real.get(leaf, leaf) if isinstance(leaf, Given) else leaf))  # fmt: skip
    except Exception:
        return None
    return found
