# SPDX-License-Identifier: Apache-2.0
"""Private PyTorch API used to read and extend captured graphs, in one place (checked against torch 2.13.0).

- ``FakeTensorMode`` and ``enable_python_dispatcher``: running one node on the graph's own fake values;
- ``FakeScriptObject``: an opaque object hoisted to a graph input, such as a layer name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import Max

OpaqueObject = FakeScriptObject

_MISSING = object()


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor of a node's value: itself, or the members of a tuple or list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from tensors_in(member)


def fake_mode_of(values: object) -> FakeTensorMode | None:
    """The mode that made the first fake tensor found in ``values``."""
    for tensor in tensors_in(values):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return None


def call_on_fakes(mode: FakeTensorMode, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` under ``mode``; symbolic sizes flow through composite ops."""
    with mode, enable_python_dispatcher():
        return function(*args, **kwargs)


def has_token_symbol(size: object) -> bool:
    """Whether a size (or ``SymInt``) is symbolic. In a captured body only token counts are."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def token_dim(tensor: torch.Tensor) -> int | None:
    """The first dimension whose size is symbolic; ``None`` for a tensor without token rows."""
    return next((dim for dim, size in enumerate(tensor.shape) if has_token_symbol(size)), None)


def has_unbacked_symbol(size: object) -> bool:
    """Whether a size depends on data, so that ranks could disagree about it."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def is_plain_symbol(size: object) -> bool:
    """Whether a size is one bare symbol (``s72``), not an expression (``4*s72``)."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


def same_size(left: object, right: object) -> bool:
    """Equality of sizes as expressions: never adds a guard."""
    return bool(_expression(left) == _expression(right))


def is_multiple(size: object, factor: int, of: object) -> bool:
    """Whether ``size == factor * of`` as expressions."""
    return bool(_expression(size) == factor * _expression(of))


def is_row_major(tensor: torch.Tensor) -> bool:
    """Whether strides are those of a contiguous tensor, as expressions (never adds a guard); size-1 dims may differ."""
    wanted: Any = 1
    padded: Any = 1  # PyTorch's own strides count an empty dimension as one element
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        count = _expression(size)
        if count == 1:
            continue
        if _expression(stride) not in (wanted, padded):
            return False
        wanted, padded = wanted * count, padded * Max(1, count)
    return True


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identity of the storage behind a (fake) tensor; equal for a tensor and its views."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def opaque_text(value: object) -> str | None:
    """The string inside a hoisted opaque layer name, or ``None`` when ``value`` is something else."""
    if isinstance(value, FakeScriptObject):
        value = value.real_obj
    inner = getattr(value, "value", _MISSING)
    return inner if isinstance(inner, str) and not isinstance(value, torch.Tensor) else None


def _expression(size: object) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
