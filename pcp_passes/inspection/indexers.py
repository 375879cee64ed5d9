# SPDX-License-Identifier: Apache-2.0
"""Indexer layers of a rewritten graph: which select keys, which reuse a selection, and what of the keys is gathered.

A layer that selects is *full*; one that attends to what another layer selected is *shared*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from pcp_passes.aten.costs import is_product
from pcp_passes.aten.decision import tensor_of
from pcp_passes.ir import meta, rules
from pcp_passes.passes.tokens.lower_restores import LowerRestores

SELECT = "pcp::select_keys"
ATTENDS = ("pcp::sparse_attend", "pcp::sparse_attend_heads")

_STORES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
           torch.uint8: "fp8"}  # fmt: skip
_RADIUS = 40

Role = Literal["full", "shared"]
Rope = Literal["interleaved", "half", "none"]


@dataclass(frozen=True)
class Indexer:
    """What one ``pcp::select_keys`` or ``pcp::index_topk`` of a graph says.

    Attributes:
        heads, dim, topk: of the index queries, and how many keys a row selects.
        rope: how positions turn queries and keys.
        store: dtype of the keys.
    """

    heads: int
    dim: int
    topk: int
    rope: Rope
    store: str


def read_indexer(node: fx.Node) -> Indexer:
    """Read a ``pcp::select_keys``, or a ``pcp::index_topk``, whose keys are part of what its layer writes."""
    q, keys = tensor_of(node.args[0]), node.args[1]
    if rules.op_name(node) != SELECT:
        written: Any = node.args[2]
        keys = written.args[0]
    dtype = tensor_of(keys).dtype
    store = _STORES.get(dtype, str(dtype).removeprefix("torch."))
    return Indexer(int(q.shape[-2]), int(q.shape[-1]), int(rules.named_argument(node, "topk")), rope_of(node), store)


def gathered_keys(node: fx.Node) -> int:
    """Bytes of a token's index key that ranks exchange for a ``pcp::select_keys``.

    0 where a rank makes the keys of all tokens itself, by repeating their projection: what is gathered then lies before
    that product, and is not a key.
    """
    waiting: list[Any] = [node.args[1]]
    seen: set[fx.Node] = set()
    total = 0
    while waiting:
        at = waiting.pop()
        if at in seen or at.op != "call_function":
            continue
        seen.add(at)
        if meta.info(at).created_by == LowerRestores.name:
            total += row_bytes(tensor_of(at))
        elif is_product(at):
            return 0
        else:
            waiting += at.all_input_nodes
    return total


def row_bytes(held: torch.Tensor) -> int:
    """Bytes of one row of a value of token rows: of all sizes that are constants."""
    return held.element_size() * math.prod(size for size in held.shape if isinstance(size, int))


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
