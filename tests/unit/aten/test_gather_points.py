# SPDX-License-Identifier: Apache-2.0
"""Where to gather: optima worked out by hand, and every choice of small random graphs tried."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.aten import gather_points
from pcp_passes.aten.costs import bytes_of, flops_of
from pcp_passes.aten.decision import operands
from pcp_passes.aten.experts import Sorted
from pcp_passes.aten.gather_points import Choice, choose
from pcp_passes.ir import meta
from pcp_passes.ir.placements import Replicate, Shard
from pcp_passes.passes import PassContext
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.normalize import Normalize
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements
from tests.graphs import HINT_TOKENS, Given, Program, after, given, markers, traced, worst

pytestmark = pytest.mark.unit
FLOAT = torch.float32
Tensor = torch.Tensor
CTX = PassContext(4)


def widths(program: Program, balance: float) -> list[int]:
    """Bytes of each restored value; outputs stay on their ranks."""
    gm, _ = after(program, (Normalize(), PropagatePlacements(), InsertReshards(balance, outputs="local")), CTX)
    return sorted(bytes_of(node) for node in markers(gm.graph))


LATENT, HEADS, SIZE = 8, 16, 4


def mla(x: Tensor, down: Tensor, up: Tensor, query: Tensor) -> Tensor:
    """Keys and values of all heads come from a narrow latent."""
    latent = x @ down
    k, v = (latent @ up).chunk(2, dim=-1)
    k, v = (part.reshape(-1, HEADS, SIZE).transpose(0, 1) for part in (k, v))
    q = (x @ query).reshape(-1, HEADS, SIZE).transpose(0, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def gqa(x: Tensor, key: Tensor, value: Tensor, query: Tensor) -> Tensor:
    """Keys and values are narrower than what they are projected from."""
    k, v = (x @ key).reshape(-1, 1, SIZE), (x @ value).reshape(-1, 1, SIZE)
    k, v = (part.transpose(0, 1).expand(HEADS, -1, SIZE) for part in (k, v))
    q = (x @ query).reshape(-1, HEADS, SIZE).transpose(0, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def floats(*shapes: tuple[Any, ...]) -> list[Given]:
    return [given(*shape, dtype=FLOAT) for shape in shapes]


def behind_a_layer(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Tokens pass an expensive layer first, so that nothing goes back to the inputs."""

    def run(x: Tensor, wide: Tensor, back: Tensor, *weights: Tensor) -> Tensor:
        return function(torch.relu(x @ wide) @ back, *weights)

    return run


LAYER = (("T", 64), (64, 8192), (8192, 64))
WIDE = HEADS * SIZE
MLA = traced(behind_a_layer(mla), *floats(*LAYER, (64, LATENT), (LATENT, 2 * WIDE), (64, WIDE)))
GQA = traced(behind_a_layer(gqa), *floats(*LAYER, (64, SIZE), (64, SIZE), (64, WIDE)))
PER = 4 * HINT_TOKENS
"""Bytes of one number for each token."""


def test_the_latent_travels_instead_of_the_keys_and_values() -> None:
    # 2 * 64 numbers a token or 8; repeating costs 2 * 8 * 128 operations a token, 64 bytes at a balance of 32.
    assert widths(MLA, 32.0) == [LATENT * PER]


def test_the_keys_and_values_travel_where_repeating_is_too_dear() -> None:
    # At one operation per byte the same 2048 operations outweigh the 480 bytes that they save. Keys and values are
    # chunks of one value, which travels once.
    assert sum(widths(MLA, 1.0)) == 2 * WIDE * PER


def test_grouped_keys_and_values_travel_before_they_are_repeated() -> None:
    # 2 * 4 numbers a token; their source has 64, each copy for the heads 64.
    assert widths(GQA, 32.0) == [SIZE * PER, SIZE * PER]
    # Even operations that cost nothing do not make the source narrower.
    assert sum(widths(GQA, 1e4)) == 2 * SIZE * PER


def test_what_is_whole_already_is_computed_from() -> None:
    def embedded(ids: Tensor, table: Tensor, weight: Tensor) -> Tensor:
        return (torch.nn.functional.embedding(ids, table) @ weight).cumsum(0)

    ids = given("T", dtype=torch.int64, high=9)
    program = traced(embedded, ids, *floats((9, 4), (4, 64)))
    assert widths(program, 1e6) == [], "every rank can look the tokens up"
    assert widths(program, 1e-6) == [64 * PER]


@pytest.mark.parametrize("program", [MLA, GQA])
@pytest.mark.parametrize("balance", [1e-6, 1.0, 32.0, 1e6])
def test_no_choice_changes_the_result(program: Program, balance: float) -> None:
    gm, _ = after(program, (Normalize(), PropagatePlacements(), InsertReshards(balance)), PassContext(3))
    scale = float(program.gm(*program.arguments(9))[0].abs().max())
    assert worst(program, gm, 3, (9,)) < 1e-4 * max(scale, 1.0)


# Every choice of small graphs, tried


def random_graph(seed: int) -> tuple[list[fx.Node], set[fx.Node], list[fx.Node]]:
    """Nodes in order, those on rows, and those wanted whole; values have random widths, calls random costs.

    Some rows are in the order of a sort, which cannot be restored.
    """
    source = random.Random(seed)
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    local: set[fx.Node] = set()
    for number in range(source.randint(4, 9)):
        if number == 0:
            node = graph.placeholder("whole")
        elif number < 3:
            target = source.choice([torch.ops.aten.embedding.default, torch.ops.aten.mm.default])
            node = graph.call_function(target, (nodes[0],))
            local.add(node)
        else:
            picked = source.sample(nodes, k=source.randint(1, min(2, len(nodes))))
            target = source.choice(
                [torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.reshape.default]
            )
            node = graph.call_function(target, tuple(picked))
            if any(operand in local for operand in picked):
                local.add(node)
        node.meta["val"] = torch.empty(4, source.choice([1, 2, 4, 8, 16]), device="meta")
        meta.set_placement(node, Shard(0) if node in local else Replicate())
        nodes.append(node)
    able = [node for node in nodes if node in local]
    for node in able[:-1]:
        if source.random() < 0.2:
            meta.set_placement(node, Sorted("sort", 1))
    able = [node for node in able if gather_points.can_restore(node)]
    wanted = [node for node in able if source.random() < 0.4] or able[-1:]
    return nodes, local, wanted


def cost_of(restored: Iterable[fx.Node], wanted: list[fx.Node], local: set[fx.Node], balance: float) -> float:
    """Of having ``wanted`` whole when these are restored and everything else that is needed is computed."""
    restored = set(restored)
    total, waiting, seen = 0.0, list(wanted), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in restored:
            total += bytes_of(node)
            continue
        total += flops_of(node) / balance + gather_points._OVERHEAD * bytes_of(node) + 1.0
        waiting += [operand for operand in operands(node) if operand in local]
    return total


def best(wanted: list[fx.Node], local: set[fx.Node], balance: float) -> float:
    """The cheapest of all sets of restored values."""
    able = list(filter(gather_points.can_restore, local))
    every = itertools.chain.from_iterable(itertools.combinations(able, n) for n in range(len(able) + 1))
    return min(cost_of(restored, wanted, local, balance) for restored in every)


def total(choices: list[Choice], wanted: list[fx.Node], local: set[fx.Node], balance: float) -> float:
    """Of all choices together, as the graph is then written: what one of them computes is not restored for another."""
    computed = {node for choice in choices for node in choice.recomputed}
    restored = {node for choice in choices for node in choice.gathered} - computed
    return cost_of(restored, wanted, local, balance)


SLACK = 1.05
"""The one miss is by 2.5 %; restoring what is wanted, without looking further, costs over half as much again."""


@pytest.mark.parametrize("balance", [0.5, 4.0, 64.0])
@pytest.mark.parametrize("part", range(4))
def test_the_cut_is_the_cheapest_choice(part: int, balance: float) -> None:
    """Of 480 graphs one misses the optimum: what two wanted values share is charged to the cone of each."""
    differ = missed = 0
    for seed in range(part * 40, part * 40 + 40):
        _, local, wanted = random_graph(seed)
        choices = choose(wanted, local.__contains__, balance)
        assert all(map(gather_points.can_restore, (node for c in choices for node in c.gathered)))
        assert sorted(node.name for c in choices for node in c.wanted) == sorted(node.name for node in wanted)
        found, least = total(choices, wanted, local, balance), best(wanted, local, balance)
        assert least - 1e-6 <= found <= SLACK * least, f"seed {seed}: {[str(c) for c in choices]}"
        assert found <= cost_of(wanted, wanted, local, balance) + 1e-6
        missed += found > least + 1e-6
        differ += sum(bytes_of(node) for node in wanted) > least + 1e-6
    assert missed <= 1
    assert differ > 5 or balance < 1, "in many of these graphs restoring what is wanted is not the cheapest"


def test_a_worse_choice_is_seen() -> None:
    """Restoring what is wanted, without looking further, loses somewhere."""
    assert any(
        cost_of(wanted, wanted, local, 64.0) > 1.5 * best(wanted, local, 64.0)
        for _, local, wanted in map(random_graph, range(40))
    )


def test_a_choice_says_what_it_costs() -> None:
    nodes, local, wanted = random_graph(3)
    (choice,) = choose(wanted[-1:], local.__contains__, 1e-9)
    assert str(choice) == f"gathers %{wanted[-1].name}: {bytes_of(wanted[-1]):,} bytes"
    cheap = Choice((nodes[-1],), (nodes[0],), (nodes[-1],))
    assert f"{bytes_of(nodes[0]):,} bytes instead of {bytes_of(nodes[-1]):,} for %{nodes[-1].name}" in str(cheap)
    assert cheap.repeated == flops_of(nodes[-1])
