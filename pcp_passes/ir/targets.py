# SPDX-License-Identifier: Apache-2.0
"""Names of what a graph may call, both ways: target to text for the printer, text to target for the parser.

====================================  ========================================================================
text                                  target
====================================  ========================================================================
``aten.add.Tensor``                   an overload; ``default`` is left out: ``aten.linear``, ``pcp.all_gather_rows``
``aten.sum.*``                        an op of several overloads that chooses by its arguments (Dynamo graphs only)
``operator.getitem``                  a function of ``operator``, ``math`` or ``builtins`` on the lists below
``torch.nn.functional.silu``          a tensor function of PyTorch under its public path
``higher_order.flex_attention``       a higher-order operator
====================================  ========================================================================

Reading never imports, and never takes an attribute that is not on a list or registered with the dispatcher, so text of
a stranger names nothing but tensor functions.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import rules
from pcp_passes.ir.opaque import UnknownOp

NAMESPACES = frozenset({"aten", "pcp", "pcp_kernels", "prims", "transformers", "vllm", "_c10d_functional"})
"""Namespaces of the dispatcher that may be read, beside those of ops with a rule."""

_LISTED: tuple[tuple[ModuleType, str], ...] = (
    (operator, "add and_ contains eq floordiv ge getitem gt iadd iand ifloordiv imod imul index invert ior isub"
               " itruediv lshift le lt matmul mod mul ne neg not_ or_ pos pow rshift setitem sub truediv xor"),
    (math, "ceil floor sqrt trunc"),
    (builtins, "abs max min round"),
)  # fmt: skip
_FACTORIES = (
    "Size arange as_tensor empty empty_like empty_strided eye full full_like linspace logspace ones"
    " ones_like scalar_tensor sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum tensor tril_indices"
    " triu_indices zeros zeros_like"
).split()
_FORBIDDEN = frozenset({"from_file", "save", "load"})
"""Ops that touch files, whatever the dispatcher says."""

_NOT_TENSOR_METHODS = frozenset(
    "apply_ backward data_ptr map2_ map_ module_load numpy pin_memory register_hook register_post_accumulate_grad_hook"
    " reinforce retain_grad set_ share_memory_ storage tolist to_dense tofile untyped_storage".split()
)
_NAME = re.compile(r"[A-Za-z_]\w*\Z")


class UnknownTargetError(LookupError):
    """Text that names nothing callable here; its message says what is missing."""


def target_text(node: fx.Node) -> str:
    """What a ``call_function`` node calls, as the table above writes it."""
    target: Any = node.target
    if isinstance(target, UnknownOp):
        return target.text
    if isinstance(target, torch._ops.OpOverload):
        name = str(target._schema.name).replace("::", ".")
        return name if target._overloadname == "default" else f"{name}.{target._overloadname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = str(target._qualified_op_name).replace("::", ".")
        return name if target.overloads() == ["default"] else f"{name}.*"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    return _paths().get(id(target)) or rules.op_name(node).replace("::", ".")


def resolve(text: str) -> Callable[..., Any]:
    """The target behind a text of :func:`target_text`.

    Raises:
        UnknownTargetError: nothing of that name may be called, or it is not loaded in this process.
    """
    if text in _functions():
        return _functions()[text]
    namespace, _, rest = text.partition(".")
    name, _, overload = rest.partition(".")
    if not (_NAME.match(namespace) and _NAME.match(name)) or name in _FORBIDDEN:
        raise UnknownTargetError("no op of that name may be called from a printed graph")
    if namespace == "higher_order":
        return _higher_order(name)
    if namespace not in NAMESPACES and namespace not in {op.partition("::")[0] for op in rules.RULES}:
        raise UnknownTargetError(f"the namespace {namespace} may not be read from a printed graph")
    return _registered(namespace, name, overload)


def is_tensor_method(name: str) -> bool:
    """Whether a printed graph may call this method on a tensor: public, and about values."""
    return (
        _NAME.match(name) is not None
        and not name.startswith("_")
        and name not in _NOT_TENSOR_METHODS
        and callable(getattr(torch.Tensor, name, None))
    )


def _registered(namespace: str, name: str, overload: str) -> Callable[..., Any]:
    if namespace in ("pcp", "pcp_kernels"):
        _register_own_ops()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise UnknownTargetError("not registered with PyTorch in this process")
    known = packet.overloads()
    if overload == "*":
        return packet
    if (overload or "default") not in known:
        raise UnknownTargetError(f"no such overload; there are {', '.join(known)}")
    found: Callable[..., Any] = getattr(packet, overload or "default")
    return found


@cache
def _register_own_ops() -> None:
    """Ops of this package are there whatever the caller has imported."""
    import pcp_passes.attention
    import pcp_passes.collectives
    import pcp_passes.collectives_ragged
    import pcp_passes.ir.markers
    import pcp_passes.ir.token_markers
    import pcp_passes.paged.experts
    import pcp_passes.paged.explicit
    import pcp_passes.paged.ops
    import pcp_passes.paged.routed
    import pcp_passes.sparse.ops  # noqa: F401


def _higher_order(name: str) -> Callable[..., Any]:
    found = getattr(torch.ops.higher_order, name, None)
    if not isinstance(found, torch._ops.HigherOrderOperator):
        raise UnknownTargetError("no such higher-order operator")
    return found


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Every listed function by its public path; where one object has two, the first is its text."""
    found: dict[str, Callable[..., Any]] = {}
    for module, names in _LISTED:
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in names.split()}
    found["torch._log_api_usage_once"] = torch._C._log_api_usage_once  # nn.functional calls it where it is captured
    overridable = {id(f) for functions in torch.overrides.get_overridable_functions().values() for f in functions}
    for module in (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special):
        for name in sorted(dir(module)):
            function = getattr(module, name)
            wanted = id(function) in overridable or (module is torch and name in _FACTORIES)
            if wanted and callable(function) and not name.startswith("__") and name not in _FORBIDDEN:
                found[f"{module.__name__}.{name}"] = function
    return found


@cache
def _paths() -> dict[int, str]:
    paths: dict[int, str] = {}
    for path, function in _functions().items():
        own_name = path.rpartition(".")[2] == getattr(function, "__name__", "")
        if id(function) not in paths or (own_name and paths[id(function)].rpartition(".")[2] != function.__name__):
            paths[id(function)] = path
    return paths
