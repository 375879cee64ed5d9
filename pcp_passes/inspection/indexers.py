# SPDX-License-Identifier: Apache-2.0
"""Indexer layers of a rewritten graph: which select keys, which reuse a selection, and by what kernel.

A layer that selects is *full*; one that attends to what another layer selected is *shared*. The kernel is the fused one
of ``pcp_kernels`` for compute capability 9.0, in the layout of token graphs: all keys of the sequence, contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from pcp_passes.aten.decision import tensor_of
from pcp_passes.ir import meta, rules

SELECT = "pcp::select_keys"
ATTENDS = ("pcp::sparse_attend", "pcp::sparse_attend_heads")
ARCH = 90

_STORES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_RADIUS = 40

Role = Literal["full", "shared"]
Rope = Literal["interleaved", "half", "none"]


@dataclass(frozen=True)
class Kernel:
    """The generated kernel of a selection.

    Attributes:
        spec: its name; empty where no kernel takes such an indexer, which the reference then serves.
        file: path under the root of the kernel store, ``<digest>/kernel.py``.
        why_not: what no kernel takes.
    """

    spec: str = ""
    file: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class Indexer:
    """What one ``pcp::select_keys`` of a graph says.

    Attributes:
        heads, dim, topk: of the index queries, and how many keys a row selects.
        rope: how positions turn queries and keys.
        store: dtype of the keys.
        gathered: bytes of a token's key, which all ranks need.
    """

    heads: int
    dim: int
    topk: int
    rope: Rope
    store: str
    gathered: int
    kernel: Kernel


def read_indexer(node: fx.Node) -> Indexer:
    """Read a ``pcp::select_keys``."""
    q, k = (tensor_of(one) for one in node.all_input_nodes[:2])
    heads, dim, topk = int(q.shape[2]), int(q.shape[3]), int(rules.named_argument(node, "topk"))
    store = _STORES.get(k.dtype, str(k.dtype).removeprefix("torch."))
    kernel = kernel_of(heads, dim, topk, store)
    return Indexer(heads, dim, topk, rope_of(node), store, dim * k.element_size(), kernel)


def kernel_of(heads: int, dim: int, topk: int, store: str) -> Kernel:
    """The kernel for keys that lie contiguous."""
    from pcp_kernels import catalog
    from pcp_kernels import store as kernels
    from pcp_kernels.specs import UnsupportedSpec

    try:
        spec = catalog.topk(heads=heads, dim=dim, topk=topk, store=store, layout="contiguous", arch=ARCH)
    except UnsupportedSpec as error:
        return Kernel(why_not=str(error))
    return Kernel(spec.name, f"{kernels.folder(spec).name}/kernel.py")


def selection_of(node: fx.Node) -> fx.Node | None:
    """The ``pcp::select_keys`` whose indices a sparse attention reads."""
    found = rules.named_argument(node, "indices")
    while isinstance(found, fx.Node) and rules.op_name(found) != SELECT:
        found = next(iter(found.all_input_nodes), None)
    return found if isinstance(found, fx.Node) else None


def rope_of(node: fx.Node) -> Rope:
    """How the queries in front of a selection were turned, read from the ops of the indexer's own module.

    Interleaved pairs are every other channel (slices of step 2); halves are joined in exchanged order, one negated.
    """
    module = meta.module_path(node)
    seen: set[fx.Node] = set()
    waiting: list[Any] = [node.args[0]]
    halves = False
    while waiting and len(seen) < _RADIUS:
        at = waiting.pop(0)
        if at in seen or at.op != "call_function" or meta.module_path(at) != module:
            continue
        seen.add(at)
        name = rules.op_name(at)
        if name == "aten::slice" and rules.named_argument(at, "step") == 2:
            return "interleaved"
        halves |= name == "aten::neg"
        waiting += at.all_input_nodes
    return "half" if halves else "none"
