# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcp_passes.collectives import CollectiveLog, is_collective
from pcp_passes.errors import ConfigError
from pcp_passes.ir import invariants, meta
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes import Pass, PassContext, Pipeline
from pcp_passes.passes.observers import VerifyObserver
from pcp_passes.passes.tokens.coalesce_restores import CoalesceRestores
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.lower_restores import LowerRestores
from pcp_passes.passes.tokens.normalize import Normalize
from pcp_passes.passes.tokens.pipeline import TokenOptions, rewrite_tokens, token_pipeline
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements
from pcp_passes.passes.tokens.select_early import SelectEarly
from pcp_passes.simulate import simulate
from tests.graphs import Given, Program, after, formula, given, on_ranks, rewritten, step_plan, traced, worst
from tests.unit.aten import models

pytestmark = pytest.mark.unit
Tensor = torch.Tensor
DEAR = 1e-6
X, W = given("T", 6), given(6, 6)


def decoder(kind: str) -> Program:
    if kind == "experts":
        pytest.importorskip("tests.unit.aten.moe", reason="transformers has the grouped product that runs on CPU")
    return models.decoder(kind)


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("pcp, options", [
    (1, {}), (2, {}), (3, {}), (4, {}), (3, {"positions": False}), (3, {"pack": False}), (3, {"outputs": "last"}),
])  # fmt: skip
def test_ranks_equal_the_captured_decoder(kind: str, pcp: int, options: dict[str, Any]) -> None:
    """In float64; the attention op sums keys in another order than PyTorch's, everything else row by row."""
    program = decoder(kind)
    gm = rewritten(program, pcp, balance=DEAR, **options).gm
    for tokens in (2, 5, 13):
        arguments = program.arguments(tokens)
        (wanted,) = program.gm(*arguments)
        wanted = wanted[:, -1:] if options.get("outputs") == "last" else wanted
        for (found,) in on_ranks(gm, arguments, tokens, pcp):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_row_wise_graphs_are_equal_to_the_bit() -> None:
    program = traced(lambda a, b: torch.softmax(torch.relu(a * b.sum(0)), -1).cumsum(0) * 2, X, W)
    assert worst(program, rewritten(program, 3, balance=DEAR).gm, 3) == 0.0


@pytest.mark.parametrize("kind", models.KINDS)
def test_local_outputs_are_the_ranks_own_rows(kind: str) -> None:
    program = decoder(kind)
    gm = rewritten(program, 3, balance=DEAR, outputs="local").gm
    arguments = program.arguments(10)
    (wanted,) = program.gm(*arguments)
    for rows, (found,) in zip(step_plan(10, 3)[0], on_ranks(gm, arguments, 10, 3), strict=True):
        torch.testing.assert_close(found, wanted[:, rows], rtol=0, atol=1e-12)


def test_the_last_token_alone_travels() -> None:
    gm = rewritten(decoder("dense"), 2, balance=DEAR, outputs="last").gm
    gathered = [meta.tensor(node.args[0]).shape[0] for node in gm.graph.nodes if is_collective(node)]
    assert [rows for rows in gathered if rows != 1] == [gathered[0]] * 2, "keys and values of two layers"
    assert gathered.count(1) >= 1, "and one row of what the last token is made of"
    head = [node for node in gm.graph.nodes if "matmul" in str(node.target)][-1]
    assert meta.tensor(head).shape[1] == 1, "the vocabulary is worked out for one token"


@pytest.mark.parametrize("kind", models.KINDS)
def test_all_ranks_run_the_same_collectives(kind: str) -> None:
    program = decoder(kind)
    gm = rewritten(program, 4, balance=DEAR).gm
    rows, restore = step_plan(11, 4)
    logs: list[CollectiveLog] = []
    simulate(gm, [[*program.arguments(11), own, restore] for own in rows], logs=logs)
    assert len({str(log.entries) for log in logs}) == 1
    assert len(logs[0].entries) == 3


@pytest.mark.parametrize("kind", models.KINDS)
def test_every_pass_leaves_a_graph_that_verifies(kind: str) -> None:
    program = decoder(kind)
    result = rewrite_tokens(
        program.gm,
        program.space,
        PassContext(3),
        options=TokenOptions(balance=DEAR),
        observers=(VerifyObserver("full"),),
    )
    assert [name for name, _ in result.passes.results] == [step.name for step in token_pipeline(TokenOptions()).passes]
    invariants.well_formed(result.gm.graph, PassContext(3))


def test_the_captured_graph_is_left_alone() -> None:
    program = decoder("dense")
    before = formula(program.gm)
    rewritten(program, 2, balance=DEAR)
    assert formula(program.gm) == before


def test_the_graph_of_every_rank_count_differs_only_in_that_count() -> None:
    text = [print_graph(rewritten(decoder("dense"), pcp, balance=DEAR).gm, comments=False) for pcp in (2, 3)]
    assert text[0] != text[1]
    assert text[0].replace("2*sM", "P*sM").replace(", 2, 'pcp')", ", P, 'pcp')") == text[1].replace(
        "3*sM", "P*sM"
    ).replace(", 3, 'pcp')", ", P, 'pcp')")


def test_rewriting_twice_gives_the_same_graph() -> None:
    one, two = (print_graph(rewritten(decoder("dense"), 2, balance=DEAR).gm) for _ in range(2))
    assert one == two


def test_reshards_need_placements() -> None:
    with pytest.raises(ConfigError, match="insert-reshards requires PLACED"):
        Pipeline((Normalize(), InsertReshards()))


# Docstrings

F32 = torch.float32
Q = given(1, "T", 64, dtype=F32)


def spells(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(-1, 64), x.new_ones(x.shape[0], x.shape[0], dtype=torch.bool)


def scans(input_ids: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.embedding(input_ids, weight).cumsum(1)


def projects(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight).view(x.shape[1], 64).cumsum(0)


def attends(x: Tensor) -> Tensor:
    heads = x.view(1, -1, 4, 16).transpose(1, 2)
    k, v = torch.relu(heads), torch.tanh(heads)
    return k.cumsum(2).sum() + v.cumsum(2).sum()


def keys_alone(x: Tensor) -> Tensor:
    return torch.relu(x.view(1, -1, 4, 16).transpose(1, 2))


def picks(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)[:, -1:]


PLACED: tuple[Pass, ...] = (Normalize(), PropagatePlacements())
MARKED: tuple[Pass, ...] = (*PLACED, InsertReshards(DEAR))
EXAMPLES: dict[str, tuple[Callable[..., Any], tuple[Given, ...], tuple[str, ...], tuple[Pass, ...], Pass]] = {
    "normalize": (spells, (given("T", 64, dtype=F32),), ("x",), (), Normalize()),
    "propagate-placements": (
        scans, (given(1, "T", dtype=torch.int64, high=9), given(9, 64, dtype=F32)), ("input_ids", "weight"),
        (Normalize(),), PropagatePlacements(),
    ),
    "select-early": (
        picks, (Q, given(256, 64, dtype=F32)), ("x", "weight"), (Normalize(),), SelectEarly(),
    ),
    "insert-reshards": (projects, (Q, given(64, 64, dtype=F32)), ("x", "weight"), PLACED, InsertReshards(DEAR)),
    "coalesce-restores": (attends, (Q,), ("x",), MARKED, CoalesceRestores()),
    "lower-restores": (keys_alone, (Q,), ("x",), MARKED, LowerRestores()),
}  # fmt: skip
"""Programs whose nodes the docstrings of the passes show: with what ran before, and the pass."""

RENAMED = {r"   # .*$": "", r"%relu": "%k", r"%tanh": "%v"}


def _printed(gm: Any) -> list[str]:
    lines = print_graph(gm).splitlines()
    for pattern, name in RENAMED.items():
        lines = [re.sub(pattern, name, line) for line in lines]
    return lines


def _matches(shown: str, printed: str) -> bool:
    """A docstring may leave out the type and placement of a node."""
    return shown == printed or shown == re.sub(r"^(%\w+) : .*? = ", r"\1 = ", printed)


@pytest.mark.parametrize("name", EXAMPLES)
def test_before_and_after_of_a_docstring_are_what_the_printer_prints(name: str) -> None:
    function, inputs, names, before, step = EXAMPLES[name]
    doc = inspect.cleandoc(type(step).__doc__ or "")
    blocks = re.findall(r"(?:Before|After)::\n\n(.*?)(?:\n\n(?=\S)|\Z)", doc, re.DOTALL)
    assert len(blocks) == 2
    for steps, block in zip((before, (*before, step)), blocks, strict=True):
        gm, _ = after(traced(function, *inputs, names=names), steps, PassContext(4))
        for line in map(str.strip, block.splitlines()):
            assert any(_matches(line, found) for found in _printed(gm)), f"{line}\nnot in\n" + "\n".join(_printed(gm))
