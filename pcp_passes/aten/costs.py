# SPDX-License-Identifier: Apache-2.0
"""What a node costs: bytes of its value, and floating-point operations of its call, with symbols at their hints.

Matrix products are counted as multiply and add, two operations each; attention as its two products over all keys,
whatever its mask lets it skip. Everything else counts one operation per element of its result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from pcp_passes.aten.decision import operands, tensor_of
from pcp_passes.ir import meta, rules

_PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::matmul", "aten::addmm", "aten::baddbmm"})
_GROUPED = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
_ATTENTION = frozenset({"aten::scaled_dot_product_attention", "pcp::attend"})
_SELECT = "pcp::select_keys"
_SPARSE = frozenset({"pcp::sparse_attend", "pcp::sparse_attend_heads"})
_FREE = frozenset(
    "view reshape transpose permute unsqueeze squeeze expand select slice split split_with_sizes chunk unbind t alias"
    " detach flatten unflatten empty empty_like narrow".split()
)


def hint(size: Any) -> int:
    """A size as a number."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def elements(value: torch.Tensor) -> int:
    """Number of elements."""
    return math.prod(map(hint, value.shape))


def bytes_of(node: fx.Node) -> int:
    """Bytes of all tensors of the node's value."""
    return sum(elements(t) * t.element_size() for t in meta.tensors(node))


def is_product(node: fx.Node) -> bool:
    """Whether PyTorch's own counter would count the node."""
    name = rules.op_name(node)
    known = name in _PRODUCTS or name in _GROUPED or name in _ATTENTION or name in _SPARSE or name == _SELECT
    return known or name in ("aten::linear", "aten::einsum") or "conv" in name


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of one call on global rows."""
    if node.op != "call_function" or rules.op_name(node).startswith(("operator::", "pcp::shard", "pcp::restore")):
        return 0
    name = rules.op_name(node)
    results = list(meta.tensors(node))
    if not results or name.removeprefix("aten::") in _FREE:
        return 0
    out = elements(results[0])
    if name in _PRODUCTS:
        first = operands(node)[1 if name in ("aten::addmm", "aten::baddbmm") else 0]
        return 2 * out * hint(tensor_of(first).shape[-1])
    if name == "aten::linear":
        return 2 * out * hint(tensor_of(operands(node)[0]).shape[-1])
    if name in _GROUPED:
        return 2 * out * hint(tensor_of(operands(node)[0]).shape[-1])
    if name in _ATTENTION:
        q, k, v = (tensor_of(n).shape for n in operands(node)[:3])
        pairs = math.prod(map(hint, q[:-1])) * hint(k[-2])
        return 2 * pairs * (hint(q[-1]) + hint(v[-1]))
    if name in _SPARSE:
        q, k, v, indices = (tensor_of(n).shape for n in operands(node)[:4])
        kept = min(hint(indices[-1]), hint(k[-2]))
        return 2 * math.prod(map(hint, q)) * kept + 2 * math.prod(map(hint, q[:-1])) * kept * _width(name, k, v)
    if name == _SELECT:
        q, k = (tensor_of(n).shape for n in operands(node)[:2])
        return 2 * math.prod(map(hint, q[:-1])) * hint(k[-2]) * (hint(q[-1]) + 1)
    if name == "aten::einsum":
        return _einsum(node)
    if "conv" in name:
        weight = tensor_of(operands(node)[1]).shape
        return 2 * out * math.prod(map(hint, weight[1:]))
    return sum(map(elements, results))


def _width(name: str, k: Any, v: Any) -> int:
    """Channels of the values: those of the latent, or of ``v``."""
    return hint(k[-1] if name == "pcp::sparse_attend" else v[-1])


def _einsum(node: fx.Node) -> int:
    terms = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, member in zip(terms, operands(node), strict=False):
        sizes.update(zip(term, map(hint, tensor_of(member).shape), strict=False))
    return 2 * math.prod(sizes.values())
