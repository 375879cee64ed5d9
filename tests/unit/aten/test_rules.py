# SPDX-License-Identifier: Apache-2.0
"""Every rule of the table keeps its promise, and a rule that does not is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from pcp_passes.aten import indexing, matmuls, pointwise, reductions, table, views
from pcp_passes.aten.decision import REPLICATE, Call, Decision, Local, Mixes, tensor_of, wrap
from pcp_passes.errors import ConfigError
from pcp_passes.ir.placements import Shard
from tests.graphs import ATEN, Dim, Given, Sample, Size, built, given, sample, times
from tests.unit.aten import calls, schema_calls
from tests.unit.aten.checker import Outcome, check, second_look

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore")]

ELEMENTWISE = tuple(n for n, rule in table.TABLE.items() if getattr(rule, "__module__", "") == pointwise.__name__)
PARTS = 6

NEVER_LOCAL = {
    "aten::native_dropout": "returns its mask as well",
    "aten::take_along_dim": "PyTorch 2.13 broadcasts it by comparing sizes with numbers, which turns T into a constant",
}
"""Entries that no sample gets to run on rows here, and why."""


@cache
def outcomes(family: str) -> dict[str, Outcome]:
    """What checking the calls of a family gave, by op."""
    return gathered(calls.FAMILIES[family]())


@cache
def elementwise(part: int) -> dict[str, Outcome]:
    """The same for a part of the element-wise entries."""
    targets = (target for name in ELEMENTWISE[part::PARTS] for target in schema_calls.overloads(name))
    return gathered(entry for target in targets for entry in schema_calls.calls_of(target))


def gathered(entries: Iterator[Sample]) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for entry in entries:
        one, total = check(entry), found.setdefault(entry.name, Outcome())
        total.local += one.local
        total.mixes += one.mixes
        total.faults += one.faults
    return found


def faults(found: dict[str, Outcome]) -> list[str]:
    return [fault for outcome in found.values() for fault in outcome.faults]


@pytest.mark.parametrize("family", calls.FAMILIES)
def test_what_a_rule_calls_local_is_the_selection_of_the_global_result(family: str) -> None:
    found = outcomes(family)
    assert not faults(found), "\n".join(faults(found)[:20])
    assert sum(outcome.local for outcome in found.values()) > 20


@pytest.mark.parametrize("part", range(PARTS))
def test_element_wise_ops(part: int) -> None:
    found = elementwise(part)
    assert not faults(found), "\n".join(faults(found)[:20])
    assert sum(outcome.local for outcome in found.values()) > 50


def test_ops_that_get_a_rule_by_their_tag() -> None:
    """PyTorch's ``pointwise`` tag is a promise too."""
    checked = 0
    for name in dir(ATEN):
        for target in schema_calls.overloads(name):
            full = target._schema.name
            if torch.Tag.pointwise not in target.tags or full in table.TABLE or full in table._RANDOM:
                continue
            for entry in list(schema_calls.calls_of(target))[::3]:
                if full == "aten::equal":
                    continue  # one number for all rows; it has no value that could be captured
                outcome = check(entry)
                assert not outcome.faults, outcome.faults[0]
                checked += outcome.local
    assert checked > 200


def test_every_entry_is_exercised() -> None:
    found: Counter[str] = Counter()
    for checked in (*map(outcomes, calls.FAMILIES), *map(elementwise, range(PARTS))):
        for name, outcome in checked.items():
            found[name] += outcome.local
    here = {name for name in table.TABLE if name == "pcp::attend" or any(True for _ in schema_calls.overloads(name))}
    absent = set(table.TABLE) - here
    assert here - set(found) == set(), "no sample call"
    assert len(absent) < 12, f"not in this build of PyTorch: {sorted(absent)}"
    assert {name for name in here if not found[name]} <= set(NEVER_LOCAL)


def test_a_random_op_is_known_as_one() -> None:
    def random(entry: Sample) -> bool:
        return table.is_random(built(entry).node)

    x = given("T", 3)
    assert random(sample(ATEN.rand_like.default, x))
    assert random(sample(ATEN.bernoulli.default, given("T", 3, low=0, high=1)))
    assert random(sample(ATEN.dropout.default, x, 0.5, True))
    assert not random(sample(ATEN.dropout.default, x, 0.5, False))
    assert not random(sample(ATEN.dropout.default, x, 0.0, True))
    assert not random(sample(ATEN.relu.default, x))


def test_a_rule_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = sample(ATEN.tril.default, given("T", 3))
    assert not check(entry).local
    monkeypatch.setattr(table, "TABLE", dict(table.TABLE))
    table.register_token_rule("aten::tril", pointwise.pointwise)
    outcome = check(entry)
    assert outcome.local and outcome.faults, "tril reads row numbers, so this rule is wrong, and that is seen"
    with pytest.raises(ConfigError, match="unqualified"):
        table.register_token_rule("tril", pointwise.pointwise)


# Random shapes

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def _spread(draw: Any, factors: list[int], place: int) -> tuple[Dim, ...]:
    """Factors in some order, merged into dimensions, with the tokens merged into one of them."""
    order = draw(st.permutations(factors))
    entries: list[list[int]] = [[]]
    for factor in order:
        if draw(st.booleans()):
            entries.append([])
        entries[-1].append(factor)
    at = place % len(entries)
    sizes: list[Dim] = []
    for index, entry in enumerate(entries):
        size = 1
        for factor in entry:
            size *= factor
        sizes.append((f"{size}T" if size > 1 else "T") if index == at else size)
    return tuple(sizes)


@st.composite
def reshapes(draw: Any) -> Sample:
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=4))
    before = _spread(draw, factors, draw(st.integers(0, 4)))
    after = _spread(draw, factors, draw(st.integers(0, 4)))
    sizes = [size if isinstance(size, int) else Size(times(size) or 1) for size in after]
    unknown = draw(st.integers(0, len(sizes)))
    if unknown < len(sizes):
        sizes[unknown] = -1
    return sample(ATEN.reshape.default, given(*before), sizes)


@SETTINGS
@drawn(reshapes())
def test_reshapes_of_any_shape(entry: Sample) -> None:
    assert not check(entry).faults


@st.composite
def reads(draw: Any) -> Sample:
    rank = draw(st.integers(1, 4))
    tokens = draw(st.integers(0, rank))
    shape: list[Dim] = [draw(st.sampled_from([1, 2, 3])) for _ in range(rank)]
    if tokens < rank:
        shape[tokens] = draw(st.sampled_from(["T", "T", "2T"]))
    spread: list[Dim] = [draw(st.sampled_from([1, 2, "T"])) for _ in range(draw(st.integers(1, 2)))]
    indices: list[Given | None] = []
    for size in shape:
        if draw(st.booleans()) and (indices or len(shape) > 1):
            indices.append(None)
            continue
        own = [1 if draw(st.booleans()) else entry for entry in spread]
        indices.append(calls.ints(*own[draw(st.integers(0, len(own) - 1)) :], high=size))
    if all(entry is None for entry in indices):
        indices[0] = calls.ints(*spread, high=shape[0])
    return sample(ATEN.index.Tensor, given(*shape), indices)


@SETTINGS
@drawn(reads())
def test_reads_at_any_index(entry: Sample) -> None:
    assert not check(entry).faults


@st.composite
def products(draw: Any) -> Sample:
    batch: list[Dim] = [draw(st.sampled_from([2, "T"])) for _ in range(draw(st.integers(0, 2)))]
    n, c, m = (draw(st.sampled_from([1, 3, "T", "2T"])) for _ in range(3))
    a, b = ([1 if draw(st.booleans()) else size for size in batch] for _ in range(2))
    return sample(ATEN.matmul.default, given(*a, n, c), given(*b[draw(st.integers(0, len(b))) :], c, m))


@SETTINGS
@drawn(products())
def test_products_of_any_shape(entry: Sample) -> None:
    assert not check(entry).faults


# Wrong rules


def _along_anything(call: Call) -> Decision:
    """Forgets that the op works along a dimension."""
    where = call.at(call.operands[0])
    several = isinstance(call.node.meta["val"], (tuple, list))
    return Local((where,) * len(call.node.meta["val"]) if several else where, call.placed)


def _without_sizes(rule: Callable[[Call], Decision]) -> Callable[[Call], Decision]:
    def forgetful(call: Call) -> Decision:
        found = rule(call)
        return Local(found.out, found.needs) if isinstance(found, Local) else found

    return forgetful


def _shifted(by: int, rule: Callable[[Call], Decision]) -> Callable[[Call], Decision]:
    def shifted(call: Call) -> Decision:
        found = rule(call)
        if not isinstance(found, Local) or not isinstance(found.out, Shard):
            return found
        dim = (found.out.dim + by) % tensor_of(call.node).dim()
        return Local(Shard(dim, found.out.outer, found.out.inner), found.needs, found.sizes)

    return shifted


def _turned_inside_out(call: Call) -> Decision:
    """Takes the merged dimension for the other order."""
    found = views.reshape(call)
    if not isinstance(found, Local) or not isinstance(found.out, Shard):
        return found
    return Local(Shard(found.out.dim, found.out.inner, found.out.outer), found.needs, found.sizes)


def _joins_tokens(call: Call) -> Decision:
    where = call.at(call.operands[0])
    return Local(where, (where,) * len(call.operands)) if isinstance(where, Shard) else Mixes("")


def _from_the_front(call: Call) -> Decision:
    """Broadcasts counting dimensions from the first."""
    where = next(w for w in call.placed if isinstance(w, Shard))
    needs = tuple(where if tensor_of(n).dim() > where.dim else REPLICATE for n in call.operands)
    return Local(where, needs)


def _whole_operands_stay(call: Call) -> Decision:
    """Does not say that a replicated operand with rows must be taken as rows."""
    found = pointwise.pointwise(call)
    return Local(found.out, call.placed) if isinstance(found, Local) else found


def _keys_on_rows(call: Call) -> Decision:
    where = call.at(call.operands[0])
    rest = (REPLICATE,) * (len(call.operands) - 3)
    return Local(where, (where,) * 3 + rest) if isinstance(where, Shard) else Mixes("")


def _columns_are_rows(call: Call) -> Decision:
    """Takes the tokens of the second operand for rows of the result."""
    found = matmuls.matmul(call)
    if not isinstance(found, Local) or call.at(call.operands[1]) == REPLICATE:
        return found
    return Local(Shard(tensor_of(call.node).dim() - 2), found.needs)


def _ignores_is_causal(call: Call) -> Decision:
    q = call.operands[0]
    where = call.at(q)
    return Local(where, call.needs({q: where})) if isinstance(where, Shard) else Mixes("")


def _selects_anything(call: Call) -> Decision:
    where = call.at(call.operands[0])
    assert isinstance(where, Shard)
    dim = wrap(call.arg("dim"), tensor_of(call.operands[0]).dim())
    return Local(Shard(where.dim - (dim <= where.dim and where.dim > 0)), call.placed)


def _index_and_rows(call: Call) -> Decision:
    """Reads rows by an index that holds global numbers."""
    found = indexing.index(call)
    first = call.at(call.operands[0])
    return found if isinstance(found, Local) else Local(first, (first,) * len(call.operands))


def _blocks_for_repeats(call: Call) -> Decision:
    """Takes ``repeat_interleave`` for ``repeat``."""
    found = views.repeat_interleave(call)
    if not isinstance(found, Local) or not isinstance(found.out, Shard):
        return found
    return Local(Shard(found.out.dim, found.out.inner, found.out.outer), found.needs)


MUTANTS: dict[str, tuple[Callable[[Call], Decision], str, tuple[str, ...]]] = {
    "softmax along anything": (_along_anything, "along", ("aten::softmax",)),
    "cumsum along anything": (_along_anything, "along", ("aten::cumsum",)),
    "sort along anything": (_along_anything, "along", ("aten::sort",)),
    "sums shift no dimension": (_shifted(1, reductions.along), "along", ("aten::sum", "aten::amax")),
    "normalises over tokens": (_along_anything, "norms", ("aten::layer_norm",)),
    "convolves over neighbours": (_along_anything, "norms", ("aten::conv1d", "aten::conv2d")),
    "expand forgets sizes": (_without_sizes(views.expand), "views", ("aten::expand",)),
    "reshape forgets sizes": (_without_sizes(views.reshape), "reshape", ("aten::reshape",)),
    "reshape inside out": (_turned_inside_out, "reshape", ("aten::reshape",)),
    "unsqueeze by one": (_shifted(1, views.unsqueeze), "views", ("aten::unsqueeze",)),
    "select anything": (_selects_anything, "views", ("aten::select",)),
    "slice some tokens": (_along_anything, "views", ("aten::slice",)),
    "repeat_interleave as repeat": (_blocks_for_repeats, "views", ("aten::repeat_interleave",)),
    "index by one": (_shifted(1, indexing.index), "indexing", ("aten::index",)),
    "index reads local rows": (_index_and_rows, "indexing", ("aten::index",)),
    "cat along tokens": (_joins_tokens, "joining", ("aten::cat",)),
    "stack by one": (_shifted(1, indexing.stack), "joining", ("aten::stack",)),
    "pads tokens": (_along_anything, "joining", ("aten::constant_pad_nd",)),
    "matmul columns are rows": (_columns_are_rows, "products", ("aten::matmul", "aten::mm")),
    "keys on rows": (_keys_on_rows, "attention", ("aten::scaled_dot_product_attention",)),
    "causal by row number": (_ignores_is_causal, "attention", ("aten::scaled_dot_product_attention",)),
    "attend without positions": (_ignores_is_causal, "attend", ("pcp::attend",)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_seen(name: str) -> None:
    rule, family, ops = MUTANTS[name]
    entries = [entry for entry in calls.FAMILIES[family]() if entry.name in ops]
    assert not [fault for entry in entries for fault in check(entry).faults]
    assert any(check(entry, rule).faults for entry in entries)


@pytest.mark.parametrize("rule", [_from_the_front, _whole_operands_stay])
def test_wrong_broadcasting_is_seen(rule: Callable[[Call], Decision]) -> None:
    entries = list(schema_calls.calls_of(ATEN.add.Tensor))
    assert any(check(entry, rule).faults for entry in entries)


@pytest.mark.parametrize("name", ["cat along tokens", "pads tokens", "stack by one"])
def test_sizes_are_looked_at_again(name: str) -> None:
    """Where a wrong answer shows in the sizes, the table takes it for "mixes"."""
    rule, family, ops = MUTANTS[name]
    for entry in calls.FAMILIES[family]():
        if entry.name in ops:
            assert not check(entry, second_look(rule)).faults
