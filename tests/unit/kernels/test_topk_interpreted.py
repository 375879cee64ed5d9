# SPDX-License-Identifier: Apache-2.0
"""The generated top-k kernels, run by Triton's interpreter, against the reference: equal bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pcp_kernels.ops.launch import DTYPES
from pcp_kernels.ops.plans import Kind
from pcp_kernels.reference import score, select
from tests.comparator import compare_selected, sum_band
from tests.interpreted import ChildError, Interpreted
from tests.unit.kernels import topk_cases as cases
from tests.unit.kernels.topk_cases import DIM, TOPK, paged_case, rows_case

KINDS: tuple[Kind, ...] = ("fused", "tiled", "split")

# Rows of three requests, several of one (verification), one alone, padding in between and at the end.
REQUESTS = [0, 0, 0, 1, 1, 2, 2, 2, 0]
SEEN = [100, 101, 102, 17, 0, 300, 301, 16, 0]
# Two requests packed one after the other, an empty row, one before its start, one with as many keys as are selected.
STARTS = [0, 0, 0, 0, 0, 40, 120, 40, 40, 40]
ENDS = [0, 5, 17, 100, 299, 60, 100, 56, 200, 300]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", ["fp8", "bf16", "fp16", "fp32"])
def test_pages(interpreted: Interpreted, kept: str, kind: Kind) -> None:
    case = paged_case(kept, REQUESTS, SEEN)
    assert torch.equal(interpreted(cases.run, case, kind), case.reference())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", ["fp8", "bf16"])
def test_contiguous_keys(interpreted: Interpreted, kept: str, kind: Kind) -> None:
    case = rows_case(kept, STARTS, ENDS)
    assert torch.equal(interpreted(cases.run, case, kind), case.reference())


@pytest.mark.parametrize(("heads", "topk", "kind"), [(8, 64, "fused"), (2, 48, "split"), (8, 32, "tiled")])
def test_other_sizes(interpreted: Interpreted, heads: int, topk: int, kind: Kind) -> None:
    case = rows_case("fp32", [0] * 6, [600, 64, 65, 300, 31, 599], heads=heads, keys=600, topk=topk)
    assert torch.equal(interpreted(cases.run, case, kind), case.reference())


@pytest.mark.parametrize("kind", KINDS)
def test_hard_scores(interpreted: Interpreted, kind: Kind) -> None:
    """Rising and falling scores, plateaus of +0 and -0, NaN and infinite weights, one tie across everything."""
    keys = 400
    k = torch.zeros(keys, DIM)
    k[:, 0] = torch.arange(keys).float()
    k[:, 1] = 1.0
    q = torch.zeros(8, 2, DIM)
    q[:, :, 0] = 1.0
    w = torch.tensor([[1, 1], [-1, -1], [0, 0], [-1, 0], [math.nan, 1], [math.inf, 1], [1, 1], [1, 1]])
    q[3] = -q[3]  # relu gives 0, times -1: a plateau of -0
    q[6, :, 0], q[6, :, 1] = 0.0, 1.0  # one score for all
    q[7, :, 0] = math.nan  # relu drops it: a plateau of 0
    rows = len(w)
    case = cases.Rows(q, w, k, None, torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32))
    wanted = case.reference()
    assert wanted[0].tolist() == list(range(keys - TOPK, keys)) and wanted[2].tolist() == list(range(TOPK))
    assert torch.equal(interpreted(cases.run, case, kind), wanted)


def test_selector_alone(interpreted: Interpreted) -> None:
    """Scores that the scorer cannot make: mixed zeros, every kind of NaN and infinity, and few distinct values."""
    generator = torch.Generator().manual_seed(5)
    special = torch.tensor([0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-45, 1.0, -1.0])
    scores = special[torch.randint(len(special), (8, 304), generator=generator)]
    scores[6] = special[torch.randint(2, (304,), generator=generator)]
    scores[7] = math.nan
    valid = torch.tensor([300, 16, 17, 0, 1, 299, 300, 64], dtype=torch.int32)
    wanted = select.select_scores(scores, valid, TOPK)
    assert torch.equal(interpreted(cases.run_selector, scores, valid, TOPK), wanted)
    blind = [("score = tl.where(score == 0.0, 0.0, score)", "score = score")]
    assert not torch.equal(interpreted(cases.run_mutant_selector, blind, scores, valid, TOPK), wanted)


def test_ranges_and_tiles_leave_the_selection_alone(interpreted: Interpreted) -> None:
    case = paged_case("fp32", REQUESTS, SEEN)
    wanted = case.reference()
    for ranges in (1, 2, 3, 5):
        assert torch.equal(interpreted(cases.run_ranges, case, ranges), wanted), f"{ranges} ranges"
    for rows in (1, 4, 8):
        assert torch.equal(interpreted(cases.run, case, "tiled", rows=rows), wanted), f"{rows} rows at a time"
    assert torch.equal(interpreted(cases.run, case, "fused", programs=1), wanted), "one program"


def test_rows_in_any_order(interpreted: Interpreted) -> None:
    """Rows of one request need not be neighbours, nor those of a tile be of one request; zigzag gives such rows."""
    case = paged_case("fp32", REQUESTS, SEEN)
    order = torch.tensor([5, 0, 3, 6, 1, 4, 2, 8, 7])
    mixed = replace(case, q=case.q[order], w=case.w[order], row_request=case.row_request[order], ke=case.ke[order])
    assert torch.equal(interpreted(cases.run, mixed, "fused"), case.reference()[order])
    assert torch.equal(interpreted(cases.run, mixed, "tiled"), case.reference()[order])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_no_request_is_empty(interpreted: Interpreted, kind: Kind) -> None:
    """A negative request is never looked up, even with keys, and does not make the scan of a tile run forever."""
    case = paged_case("fp32", [0, 0, 0], [40, 60, 60])
    strange = replace(case, row_request=torch.tensor([0, -1, -5], dtype=torch.int32))
    found = interpreted(cases.run, strange, kind)
    assert torch.equal(found[0], case.reference()[0])
    assert found[1:].eq(-1).all()


def test_bounds_beyond_the_keys_read_nothing_else(interpreted: Interpreted) -> None:
    case = rows_case("fp32", [0, 0], [60, 64], keys=64)
    wide = replace(
        case, ks=torch.tensor([-9, 0], dtype=torch.int32), ke=torch.tensor([60, 2**31 - 1], dtype=torch.int32)
    )
    for kind in KINDS:
        assert torch.equal(interpreted(cases.run, wide, kind), case.reference())


def test_offsets_beyond_two_to_the_31(interpreted: Interpreted) -> None:
    found, wanted = interpreted(cases.run_far_pages)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_of_padding_beside_rows_of_many_keys(interpreted: Interpreted, kind: Kind) -> None:
    """More keys than one program of the scorer covers: the programs after it must see that the tile has none."""
    case = rows_case("fp32", [0] * 8, [0, 0, 0, 0, 1100, 1200, 50, 1200], keys=1200)
    assert torch.equal(interpreted(cases.run, case, kind), case.reference())


def test_fp32_scores_are_those_of_the_reference_up_to_rounding(interpreted: Interpreted) -> None:
    generator = torch.Generator().manual_seed(11)
    q, w = torch.randn(8, 8, DIM, generator=generator), torch.randn(8, 8, generator=generator)
    k = torch.randn(600, DIM, generator=generator)
    ends = torch.tensor([600, 599, 100, 17, 3, 0, 450, 333], dtype=torch.int32)
    case = cases.Rows(q, w, k, None, torch.zeros(8, dtype=torch.int32), ends)
    found = interpreted(cases.run, case, "fused")
    scores = score.score(q, w, k)
    compare_selected(found, case.reference(), scores, ends, TOPK, sum_band(q, w, k))
    other = replace(case, w=case.w.roll(1, 1)).reference()
    with pytest.raises(AssertionError, match="k-th score"):
        compare_selected(other, case.reference(), scores, ends, TOPK, sum_band(q, w, k))


def test_the_operator_takes_the_interpreter(interpreted: Interpreted) -> None:
    for case in (rows_case("fp8", STARTS, ENDS), paged_case("fp8", REQUESTS, SEEN)):
        assert torch.equal(interpreted(cases.run_op, case), case.reference())


MUTANTS = {
    "no relu": ("topk", "tl.maximum(dots, 0.0) * w", "dots * w"),
    "relu after the sum over heads": (
        "topk",
        "heads = tl.maximum(dots, 0.0) * w[None, :]\n",
        "heads = dots * w[None, :]\n",
    ),
    "no scale of the key": ("topk", "score = score * scale[:, None]", "score = score"),
    "the last of equal keys": ("topk", "(seen >> 16) <= room", "(seen >> 16) > tl.max(seen >> 16) - room"),
    "pruning keeps the first, not the best": (
        "topk",
        "keep, place, cut = best(key)",
        "_, _, cut = best(key)\n    keep = slot < TOPK\n    place = slot",
    ),
    "scores of the first head alone": ("logits", "* w[None, :]", "* tl.where(head == 0, w, 0.0)[None, :]"),
    "columns shifted": ("logits", "* out_stride + n[:, None]", "* out_stride + (n[:, None] + 1) % 304"),
    "a range forgotten": ("split", "low += tl.program_id(1) * span", "low += (tl.program_id(1) + 1) * span"),
    "ranges not merged": ("merge", "mask=column < width", "mask=column < TOPK"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(interpreted: Interpreted, mutant: str) -> None:
    family, old, new = MUTANTS[mutant]
    edits = [(old, new)]
    if mutant == "relu after the sum over heads":
        edits.append(("score = score * scale[:, None]", "score = tl.maximum(score, 0.0) * scale[:, None]"))
    case = paged_case("fp8", [0, 0, 1], [300, 290, 301], seed=3)
    kind: Kind = "fused" if family == "topk" else "tiled" if family == "logits" else "split"
    assert torch.equal(interpreted(cases.run, case, kind), case.reference())
    assert not torch.equal(interpreted(cases.run_mutant, family, edits, case, kind), case.reference())


@pytest.mark.parametrize("end", ["end - 1", "end + 1"])
@pytest.mark.parametrize(("family", "kind"), [("topk", "fused"), ("logits", "tiled")])
def test_one_key_too_few_or_too_many_is_caught(interpreted: Interpreted, family: str, kind: Kind, end: str) -> None:
    case = rows_case("fp32", [0, 3], [300, 290], keys=301)
    k, q = torch.zeros_like(case.k), torch.zeros_like(case.q)
    k[:, 0], q[:, :, 0] = torch.arange(301), 1.0
    rising = replace(case, k=k, q=q, w=torch.ones_like(case.w))
    edits = [("until = tl.where(live, end, 0)", f"until = tl.where(live, {end}, 0)")]
    assert torch.equal(interpreted(cases.run, rising, kind), rising.reference())
    if (family, end) == ("logits", "end + 1"):
        # The selector never looks at a column past the last key.
        assert torch.equal(interpreted(cases.run_mutant, family, edits, rising, kind), rising.reference())
    else:
        assert not torch.equal(interpreted(cases.run_mutant, family, edits, rising, kind), rising.reference())


def test_a_gate_that_lets_equal_keys_in_is_exact_still(interpreted: Interpreted) -> None:
    """It only costs: on a plateau every key enters, and pruning, which takes the first of equals, drops it again."""
    case = paged_case("fp32", [0, 0], [300, 301])
    flat = replace(case, w=torch.zeros_like(case.w))
    edits = [("key > floor[None, :]", "key >= floor[None, :]")]
    for each in (case, flat):
        assert torch.equal(interpreted(cases.run_mutant, "topk", edits, each, "fused"), each.reference())


def test_an_edit_that_finds_no_place_is_an_error(interpreted: Interpreted) -> None:
    case = paged_case("fp32", [0], [60])
    with pytest.raises(ChildError, match="has no 'nowhere'"):
        interpreted(cases.run_mutant, "topk", [("nowhere", "")], case, "fused")


def test_every_store_is_covered() -> None:
    assert {"fp8", "bf16", "fp16", "fp32"} == set(DTYPES) - {"fp64"}
