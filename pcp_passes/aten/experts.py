# SPDX-License-Identifier: Apache-2.0
"""Dropless experts: rows sorted by expert, multiplied group by group, and put back.

Each step mixes tokens, yet the whole does not: a row's result depends on the row and its expert alone. So the sort of
the *local* routing keys may stand for the sort of all of them, as long as every value made with it is only used with
it. These values have placements of their own, tied to their sort:

======================  ==================================================================================
``Sorted(by, inner)``   rows of ``Shard(0, 1, inner)`` in the order of the sort
``Order(by, inner)``    the sort's indices: places among the local ``M * inner`` rows
``Owner(by, inner)``    ``Order // inner``: places among the local ``M`` tokens
``Inverse(by, inner)``  the inverse permutation of ``Order``
``Blank(by, inner)``    a buffer shaped like ``Order`` that holds nothing yet
``Groups(by, kind)``    counts or offsets of the groups among the local rows
======================  ==================================================================================

None of them is a selection of its global value, so none can be restored. Where one meets an op that is not listed here,
the sort itself falls back: its keys are restored and everything after it runs replicated.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from pcp_passes.aten.decision import REPLICATE, Call, Decision, Local, Mixes, Rule, tensor_of
from pcp_passes.ir import meta, rules
from pcp_passes.ir.placements import Shard, Tied


class Sorted(Tied):
    """Local rows in the order of the sort."""


class Order(Tied):
    """The sort's indices among local rows."""


class Owner(Tied):
    """The token each sorted row belongs to, among local tokens."""


class Inverse(Tied):
    """The inverse of the order."""


class Blank(Tied):
    """An uninitialised buffer shaped like the order."""


class Counts(Tied):
    """Local rows per group."""


class Offsets(Tied):
    """Running sum of the counts: where each group of local rows ends."""


class LocalIota(Tied):
    """Only ever required of an operand: ``arange(M * inner)``, the numbers of the local rows."""


def tie_of(where: object) -> Tied | None:
    """The tied placement, or ``None``."""
    return where if isinstance(where, Tied) else None


_SORTS = ("aten::sort", "aten::argsort")


def start(call: Call, pinned: Container[str]) -> Decision | None:
    """A 1-D sort of routing keys, or a count of keys that a sort sorts, starts a region; ``None`` for anything else.

    ``pinned`` names sorts whose region was found not to hold.
    """
    name = rules.op_name(call.node)
    if name in _SORTS:
        return None if call.node.name in pinned else _sort(call)
    return _count_unsorted(call, pinned) if name in ("aten::histc", "aten::bincount") else None


def _sort(call: Call) -> Decision | None:
    keys = call.operands[0]
    where = call.at(keys)
    if not _routes(keys, where) or call.arg("descending"):
        return None
    assert isinstance(where, Shard)
    by, inner = call.node.name, where.inner
    needs = call.needs({keys: where})
    if rules.op_name(call.node) == "aten::argsort":
        return Local(Order(by, inner), needs)
    return Local((Sorted(by, inner), Order(by, inner)), needs)


def _routes(keys: fx.Node, where: object) -> bool:
    """Whether a value is one expert's number for each of the local rows."""
    held = tensor_of(keys)
    whole = held.dtype in (torch.int32, torch.int64)
    return held.dim() == 1 and isinstance(where, Shard) and where.outer == 1 and whole and _counts_from_zero(keys)


def _count_unsorted(call: Call, pinned: Container[str]) -> Decision | None:
    """Counts do not depend on the order of the keys, so they may be taken before the sort they belong to."""
    keys = call.operands[0]
    where = call.at(keys)
    if not isinstance(where, Shard) or not _fixed_bins(call) or tensor_of(keys).dim() != 1:
        return None
    source = _same_values(keys)
    sorts = [user for user in source.users if rules.op_name(user) in _SORTS and user.name not in pinned]
    if len(sorts) != 1 or not _routes(source, where):
        return None
    sort = sorts[0]
    return Local(Counts(sort.name, where.inner), call.placed)


def _same_values(node: fx.Node) -> fx.Node:
    """What a value was before copies and conversions that keep every expert's number apart."""
    while rules.op_name(node) in _SAME_VALUES and (held := meta.tensor(node)) is not None:
        if held.dtype not in (torch.int32, torch.int64, torch.float32, torch.float64):
            break
        node = node.all_input_nodes[0]
    return node


def _counts_from_zero(keys: fx.Node) -> bool:
    """Whether keys are never negative, as places found by ``topk`` are not.

    A negative key would be sorted in front of all groups and counted in none, and shift every group by one row.
    """
    while True:
        name = rules.op_name(keys)
        if name == "operator::getitem":
            return bool(keys.args[1] == 1 and rules.op_name(keys.all_input_nodes[0]) in _PLACES)
        if name == "aten::argmax" or (name == "aten::clamp" and len(keys.args) > 1 and _at_least_zero(keys.args[1])):
            return True
        if name not in _SAME_VALUES and name not in _MOVES:
            return False
        keys = keys.all_input_nodes[0]


def _at_least_zero(bound: object) -> bool:
    return isinstance(bound, int) and bound >= 0


_PLACES = ("aten::topk", "aten::sort")
_MOVES = frozenset(
    f"aten::{name}" for name in "reshape view flatten squeeze unsqueeze transpose permute expand".split()
)


def _fixed_bins(call: Call) -> bool:
    """Whether the bins are given, not found from the keys, and begin with expert 0."""
    histogram = rules.op_name(call.node) == "aten::histc"
    named = not histogram or (call.arg("min") == 0 and call.arg("max") > 0)
    return named and len(call.operands) == 1 and not any(map(_symbolic, tensor_of(call.node).shape))


def tied(call: Call, row_rule: Rule | None) -> Decision:
    """A call with at least one tied operand. ``row_rule`` is the op's ordinary rule."""
    ties = {where.by for where in call.placed if isinstance(where, Tied)}
    if len(ties) > 1:
        return Mixes("mixes rows of two sorts")
    special = _SPECIAL.get(rules.op_name(call.node))
    found = special(call) if special else None
    return found or _rowwise(call, row_rule)


def _rowwise(call: Call, row_rule: Rule | None) -> Decision:
    """Ops that treat rows alone hold for rows in any order, provided no operand brings rows in another."""
    kinds = {where for where in call.placed if isinstance(where, Tied)}
    where = next(iter(kinds))
    if row_rule is None or len(kinds) != 1 or any(isinstance(w, Shard) for w in call.placed):
        return Mixes("has no rule for sorted rows")
    if isinstance(where, (Counts, Offsets)):
        same = call.node.target in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
        return Local(where, call.placed) if same else Mixes("changes group sizes in a way that has no rule")
    if not isinstance(where, Sorted):
        same = rules.op_name(call.node) in _SAME_VALUES
        return Local(where, call.placed) if same else Mixes("computes with places of local rows")
    plain = Shard(0, 1, where.inner)
    stood = Call(call.node, call.operands, tuple(plain if isinstance(w, Tied) else w for w in call.placed), call.tokens)
    found = row_rule(stood)
    if not isinstance(found, Local):
        return found
    outs = found.out if isinstance(found.out, tuple) else (found.out,)
    kept = all(out == plain for out in outs)
    alike = all(need == was for need, was in zip(found.needs, stood.placed, strict=True))
    if not kept or not alike:
        return Mixes("moves sorted rows, or reads others with them")
    out = tuple(where for _ in outs) if isinstance(found.out, tuple) else where
    return Local(out, call.placed, found.sizes)


_SAME_VALUES = frozenset({"aten::_to_copy", "aten::clone", "aten::alias", "aten::detach", "aten::contiguous"})


def _owner(call: Call) -> Decision | None:
    """``order // inner``."""
    where = call.placed[0]
    if isinstance(where, Order) and len(call.operands) == 1 and call.node.args[1] == where.inner:
        return Local(Owner(where.by, where.inner), call.placed)
    return None


def _read(call: Call) -> Decision | None:
    """``index(x, [places])``."""
    indices = call.arg("indices")
    return _reordered(call, call.arg("self"), indices[0]) if len(indices) == 1 and len(call.operands) == 2 else None


def _select(call: Call) -> Decision | None:
    """``index_select`` along dimension 0 says the same as ``index``."""
    return _reordered(call, *call.operands[:2]) if call.arg("dim") == 0 else None


def _reordered(call: Call, x: fx.Node, places: object) -> Decision | None:
    """Rows taken in sorted order, or put back by the inverse."""
    at_x, at_i = call.at(x), call.at(places)
    if x is places or not isinstance(at_i, Tied):
        return None
    ordered = Sorted(at_i.by, at_i.inner)
    if isinstance(at_i, Owner) and at_x == Shard(0):
        return Local(ordered, call.placed)
    if isinstance(at_i, Order) and at_x == Shard(0, 1, at_i.inner):
        return Local(ordered, call.placed)
    if isinstance(at_i, Inverse) and at_x == ordered:
        return Local(Shard(0, 1, at_i.inner), call.placed)
    return None


def _blank(call: Call) -> Decision | None:
    where = call.placed[0]
    return Local(Blank(where.by, where.inner), call.placed) if isinstance(where, Order) else None


def _invert(call: Call) -> Decision | None:
    """``blank[order] = arange(M * inner)``."""
    x, indices, values = call.arg("self"), call.arg("indices"), call.arg("values")
    if len(indices) != 1 or len(call.operands) != 3 or call.arg("accumulate"):
        return None
    at_x, at_i = call.at(x), call.at(indices[0])
    if not isinstance(at_x, Blank) or not isinstance(at_i, Order) or at_x.by != at_i.by:
        return None
    if not _counts_rows(call, values) or tensor_of(x).dtype != torch.int64:
        return None
    needs = (at_x, at_i, LocalIota(at_i.by, at_i.inner))
    return Local(Inverse(at_i.by, at_i.inner), needs)


def _counts_rows(call: Call, values: object) -> bool:
    """Whether an operand is ``arange(T * inner)`` from 0 by 1."""
    if not isinstance(values, fx.Node) or values.target not in _ARANGES:
        return False
    start = values.args[0] if len(values.args) > 1 else 0
    step = values.args[2] if len(values.args) > 2 else 1
    inner = next(where.inner for where in call.placed if isinstance(where, Tied))
    return bool(start == 0 and step == 1 and call.count(tensor_of(values).shape[0]) == inner)


_ARANGES = (torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step)


def _argsort(call: Call) -> Decision | None:
    """Sorting the order inverts it."""
    where = call.placed[0]
    if not isinstance(where, Order) or rules.op_name(call.node) != "aten::argsort" or call.arg("descending"):
        return None
    return Local(Inverse(where.by, where.inner), call.placed)


def _count(call: Call) -> Decision | None:
    """``histc(sorted keys, bins, 0, bins - 1)`` and ``bincount``: rows per group."""
    where = call.placed[0]
    if not isinstance(where, Sorted) or not _fixed_bins(call) or not _is_keys(call.operands[0], where.by):
        return None
    return Local(Counts(where.by, where.inner), call.placed)


def _is_keys(node: fx.Node, by: str) -> bool:
    """Whether sorted rows are the keys of their sort: its own result, or its operand read in its order."""
    found = _same_values(node)
    name = rules.op_name(found)
    if name == "operator::getitem":
        return bool(found.args[1] == 0 and found.all_input_nodes[0].name == by)
    if name not in ("aten::index", "aten::index_select"):
        return False
    sort = next((n for n in node.graph.nodes if n.name == by), None)
    return bool(sort is not None and found.args[0] is sort.args[0])


def _symbolic(size: object) -> bool:
    return isinstance(size, torch.SymInt)


def _offsets(call: Call) -> Decision | None:
    where = call.placed[0]
    return Local(Offsets(where.by, where.inner), call.placed) if isinstance(where, Counts) else None


def _grouped(call: Call) -> Decision | None:
    """Rows of group ``g`` times weight ``g``."""
    x, weight, offsets = call.operands[:3]
    at_x, at_o = call.at(x), call.at(offsets)
    if len(call.operands) != 3 or call.at(weight) != REPLICATE or not isinstance(at_x, Sorted):
        return None
    if not isinstance(at_o, Offsets) or at_o.by != at_x.by or tensor_of(x).dim() != 2 or tensor_of(weight).dim() != 3:
        return None
    return Local(at_x, call.placed)


def _add_back(call: Call) -> Decision | None:
    """``index_add(zeros, 0, owner, rows)``: each token sums its own rows."""
    x, index, source = call.operands[:3]
    at_i, at_s = call.at(index), call.at(source)
    if not isinstance(at_i, Owner) or at_s != Sorted(at_i.by, at_i.inner) or call.arg("dim") != 0:
        return None
    if call.count(tensor_of(x).shape[0]) != 1 or isinstance(call.at(x), Tied):
        return None
    return Local(Shard(0), (Shard(0), at_i, at_s))


def _weights_of(call: Call) -> Decision | None:
    """A table read by sorted keys (``bias[expert]``): one row of it per sorted row."""
    table, indices = call.arg("self"), call.arg("indices")
    if len(indices) != 1 or call.at(table) != REPLICATE or not isinstance(call.at(indices[0]), Sorted):
        return None
    if any(map(_symbolic, tensor_of(table).shape)) or tensor_of(indices[0]).dim() != 1:
        return None
    return Local(call.at(indices[0]), call.placed)


def _read_any(call: Call) -> Decision | None:
    return _read(call) or _weights_of(call)


_SPECIAL: dict[str, Any] = {
    "aten::floor_divide": _owner,
    "aten::index": _read_any,
    "aten::index_select": _select,
    "aten::empty_like": _blank,
    "aten::zeros_like": _blank,
    "aten::index_put": _invert,
    "aten::argsort": _argsort,
    "aten::histc": _count,
    "aten::bincount": _count,
    "aten::cumsum": _offsets,
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "aten::index_add": _add_back,
}
