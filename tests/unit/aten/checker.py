# SPDX-License-Identifier: Apache-2.0
"""Does a rule keep its promise? What it answers is run, on selections of random values, and compared.

``Local(out, needs, sizes)`` says: with operands ``needs`` and size arguments ``sizes``, the op gives the selection
``out`` of its global result, for every vector of rows. Here they repeat, permute, are longer than T and shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pcp_passes.aten import table
from pcp_passes.aten.decision import REPLICATE, Call, Decision, Local, Mixes, Rows
from pcp_passes.aten.experts import Tied
from pcp_passes.ir.placements import Placement, Shard
from pcp_passes.ir.token_markers import take_rows
from tests.graphs import Built, Given, Sample, Size, built, mapped, times

Decide = Callable[[Call], Decision]
LENGTHS = (3, 7)
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-5, torch.complex64: 1e-5}
"""With values near 1: other kernels for other numbers of rows, nothing else. Every mutant differs by over 1e-2."""

UNINITIALISED = frozenset({"aten::empty_like"})


def plain_decide(call: Call) -> Decision:
    """The table, without regions of sorted rows: those are not selections."""
    return table.decide(call, pinned=(call.node.name,))


def second_look(rule: Decide) -> Decide:
    """A rule in place of the table's, with the table's look at the sizes of what it answers."""

    def decide(call: Call) -> Decision:
        found = rule(call)
        return found if not isinstance(found, Local) or table._sizes_agree(call, found) else Mixes("sizes")

    return decide


@dataclass
class Outcome:
    """What checking a sample gave."""

    local: int = 0
    """Answers that the op runs on rows, each run and compared."""
    mixes: int = 0
    fixed: bool = False
    """PyTorch itself turned T into a constant: such a capture is refused, and no rule is asked."""
    faults: list[str] = field(default_factory=list)


def choices(entry: Given) -> Iterator[Shard]:
    """Every way in which a tensor could be sharded."""
    for dim, size in enumerate(entry.shape):
        count = times(size)
        for outer in range(1, (count or 0) + 1):
            assert count is not None
            if count % outer == 0:
                yield Shard(dim, outer, count // outer)


def hypotheses(sample: Sample) -> Iterator[dict[Given, Placement]]:
    """Each operand sharded alone, each pair of them, and all together."""
    options = {entry: list(choices(entry)) for entry in sample.givens()}
    able = [entry for entry, found in options.items() if found]
    groups = [(one,) for one in able] + list(itertools.combinations(able, 2))
    if len(able) > 2:
        groups.append(tuple(able))
    for group in groups:
        for picked in itertools.islice(itertools.product(*(options[entry] for entry in group)), 64):
            yield dict(zip(group, picked, strict=True))


def check(sample: Sample, decide: Decide = plain_decide, seed: int = 0) -> Outcome:
    """Ask for every placement of the operands; run and compare every answer ``Local``."""
    graph = built(sample)
    outcome = Outcome()
    if graph.fixed:
        outcome.fixed = True
        return outcome
    for where in hypotheses(sample):
        try:
            found = decide(graph.call(where, REPLICATE))
        except Exception as error:
            outcome.faults.append(f"{_text(sample, where)}: the rule raises {type(error).__name__}: {error}")
            continue
        if not isinstance(found, Local):
            outcome.mixes += 1
            continue
        outs = found.out if isinstance(found.out, tuple) else (found.out,)
        if any(isinstance(out, Tied) for out in outs):
            continue
        outcome.local += 1
        fault = _compare(graph, found, seed)
        if fault:
            outcome.faults.append(f"{_text(sample, where)} -> {_answer(found)}: {fault}")
    return outcome


def _text(sample: Sample, where: Mapping[Given, Placement]) -> str:
    return f"{sample} with {[str(where.get(entry, REPLICATE)) for entry in sample.givens()]}"


def _answer(found: Local) -> str:
    outs = found.out if isinstance(found.out, tuple) else (found.out,)
    return f"out {[str(o) for o in outs]} needs {[str(n) for n in found.needs]} sizes {dict(found.sizes)}"


def _compare(graph: Built, found: Local, seed: int) -> str | None:
    """``None``, or how the local result differs from the selection of the global one."""
    for tokens in LENGTHS:
        generator = torch.Generator().manual_seed(seed + tokens)
        values = {entry: entry.real(tokens, generator) for entry in graph.sample.givens()}
        try:
            wanted = _run(graph, values, tokens)
        except Exception:
            return f"the sample itself cannot run with T = {tokens}"
        for rows in _vectors(tokens, generator):
            try:
                local = _run_local(graph, found, values, tokens, rows)
                fault = _differ(graph, found, local, wanted, rows)
            except Exception as error:
                fault = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if fault:
                return f"T = {tokens}, rows {rows.tolist()}: {fault}"
    return None


def _vectors(tokens: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    yield torch.randperm(tokens, generator=generator)
    yield torch.randint(0, tokens, (2,), generator=generator)
    yield torch.randint(0, tokens, (2 * tokens - 1,), generator=generator)
    yield torch.arange(tokens - 1, 0, -1).repeat(2)


def _run(graph: Built, values: Mapping[Given, torch.Tensor], tokens: int) -> Any:
    def real(leaf: Any) -> Any:
        return leaf.count * tokens if isinstance(leaf, Size) else values[leaf] if isinstance(leaf, Given) else leaf

    sample = graph.sample
    with torch.no_grad():
        return sample.target(*mapped(sample.args, real), **mapped(dict(sample.kwargs), real))


def _run_local(
    graph: Built, found: Local, values: Mapping[Given, torch.Tensor], tokens: int, rows: torch.Tensor
) -> Any:
    """The call as ``insert-reshards`` writes it: operands as needed, sizes replaced."""
    of = {node: entry for entry, node in graph.inputs.items()}
    needs = iter(found.needs)

    def version(node: fx.Node) -> Any:
        need = next(needs)
        if node not in of:
            count = int(node.name.removeprefix("size"))
            assert need == REPLICATE, f"a size was to be {need}"
            return count * tokens
        value = values[of[node]]
        return taken(value, need, rows)

    args: Any = list(fx.node.map_arg(graph.node.args, version))
    kwargs: Any = dict(fx.node.map_arg(graph.node.kwargs, version))
    assert next(needs, None) is None, "more needs than operands"
    for position, sizes in found.sizes.items():
        args[position] = _sized(sizes, args[position], len(rows))
    with torch.no_grad():
        return graph.sample.target(*args, **kwargs)


def _sized(sizes: Any, written: Any, rows: int) -> Any:
    if not isinstance(sizes, (list, tuple)):
        return sizes
    return [
        size.outer * rows * size.inner if isinstance(size, Rows) else before
        for size, before in zip(sizes, written, strict=True)
    ]


def taken(value: torch.Tensor, where: Any, rows: torch.Tensor) -> torch.Tensor:
    """The selection that a placement means."""
    return take_rows(value, rows, where.dim, where.outer, where.inner) if isinstance(where, Shard) else value


def _differ(graph: Built, found: Local, local: Any, wanted: Any, rows: torch.Tensor) -> str | None:
    several = isinstance(found.out, tuple)
    outs = found.out if isinstance(found.out, tuple) else (found.out,)
    pairs = zip(outs, local if several else (local,), wanted if several else (wanted,), strict=True)
    for out, one, whole in pairs:
        if isinstance(out, Shard) and not 0 <= out.dim < whole.dim():
            return f"{out} is no dimension of {tuple(whole.shape)}"
        other = taken(whole, out, rows)
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"found {one.dtype}{tuple(one.shape)}, required {other.dtype}{tuple(other.shape)}"
        if graph.sample.name in UNINITIALISED:
            continue
        if one.is_floating_point() or one.is_complex():
            bound = TOLERANCE[one.dtype]
            if not torch.allclose(one, other, rtol=bound, atol=bound, equal_nan=True):
                return f"differs by {float((one - other).abs().max()):.1e}"
        elif not torch.equal(one, other):
            return "differs"
    return None
