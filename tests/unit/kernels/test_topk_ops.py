# SPDX-License-Identifier: Apache-2.0
"""The operators ``index_topk_rows`` and ``index_topk_paged`` on CPU: schema, shapes, refusals, compilation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pcp_kernels import catalog
from pcp_kernels.ops import launch
from pcp_kernels.ops.topk import index_topk_paged, index_topk_rows
from pcp_kernels.reference.select import DEFAULT_WORKSPACE_BYTES
from pcp_kernels.specs import UnsupportedSpec
from tests.interpreted import ChildError, Interpreted
from tests.unit.kernels import topk_cases as cases
from tests.unit.kernels.topk_cases import AMPLE, PAGE, Paged, Rows, paged_case, rows_case

ROWS = rows_case("fp8", [0, 0, 40], [5, 60, 90], keys=90)
PAGED = paged_case("fp8", [0, 0, 1], [40, 41, 0])


@pytest.mark.parametrize("kept", ["fp8", "bf16"])
def test_opcheck(kept: str) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if kept != "fp8":  # PyTorch cannot compare FP8 arguments before and after
        checks.append("test_schema")
    rows = rows_case(kept, [0, 0, 40], [5, 60, 90], keys=90)
    pages = paged_case(kept, [0, 0, 1], [40, 41, 0])
    torch.library.opcheck(index_topk_rows, (*rows.arguments(), AMPLE), test_utils=checks)
    torch.library.opcheck(index_topk_paged, (*pages.arguments(), AMPLE), test_utils=checks)


def test_results_are_those_of_the_reference() -> None:
    assert torch.equal(index_topk_rows(*ROWS.arguments(), AMPLE), ROWS.reference())
    assert torch.equal(index_topk_paged(*PAGED.arguments(), AMPLE), PAGED.reference())


def test_fp64_is_scored_in_fp64() -> None:
    """Two scores that fp32 cannot tell apart."""
    k = torch.ones(17, 32, dtype=torch.float64)
    k[16, 0] += 2.0**-40
    bounds = torch.tensor([0], dtype=torch.int32), torch.tensor([17], dtype=torch.int32)
    q, w = torch.ones(1, 2, 32, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    assert index_topk_rows(q, w, k, None, *bounds, 16, AMPLE)[0, -1] == 16
    assert index_topk_rows(q.float(), w, k.float(), None, *bounds, 16, AMPLE)[0, -1] == 15


def test_no_rows(interpreted: Interpreted) -> None:
    none = replace(ROWS, q=ROWS.q[:0], w=ROWS.w[:0], ks=ROWS.ks[:0], ke=ROWS.ke[:0])
    assert index_topk_rows(*none.arguments(), AMPLE).shape == (0, 16)
    assert interpreted(cases.run_op, none).shape == (0, 16)


def test_queries_and_weights_of_a_wider_product(interpreted: Interpreted) -> None:
    """Slices: rows further apart than they are wide, and weights that are converted before the kernel reads them."""
    case = rows_case("fp32", [0, 0, 0], [90, 60, 17], keys=90)
    wide = torch.cat([case.q.flatten(1), case.w], dim=1)
    half = wide.to(torch.bfloat16)
    sliced = replace(case, q=wide[:, :128].unflatten(1, (4, 32)), w=half[:, 128:])
    assert torch.equal(interpreted(cases.run_slices, wide, half, case), case.reference())
    assert torch.equal(index_topk_rows(*sliced.arguments(), AMPLE), case.reference())


def test_as_few_keys_as_are_selected(interpreted: Interpreted) -> None:
    """No kernel runs: room for 16 keys, of which 16 are selected."""
    few = rows_case("fp32", [0, 4, 9], [16, 9, 9], keys=16)
    found = interpreted(cases.run_op, few)
    assert torch.equal(found, few.reference())
    assert found[:, :6].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, -1], [-1] * 6]


def test_compiles_with_any_number_of_rows() -> None:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def select(q: torch.Tensor, w: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = index_topk_rows(q, w, ROWS.k, ROWS.k_scale, ks, ke, 16, AMPLE)
        return found + 1

    compiled = torch.compile(select, backend=backend, fullgraph=True, dynamic=True)
    for count in (3, 2):
        part = [tensor[:count].clone() for tensor in (ROWS.q, ROWS.w, ROWS.ks, ROWS.ke)]
        assert torch.equal(compiled(*part), ROWS.reference()[:count] + 1)
    assert graphs == 1


def _rows(**change: Any) -> Callable[[], torch.Tensor]:
    return lambda: index_topk_rows(*replace(ROWS, **change).arguments(), AMPLE)


def _paged(**change: Any) -> Callable[[], torch.Tensor]:
    return lambda: index_topk_paged(*replace(PAGED, **change).arguments(), AMPLE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_rows(q=ROWS.q.float()), r"q: found torch.float32 \[3, 4, 32\].*required float8_e4m3fn \[T, H, D\]"),
        (_rows(q=ROWS.q.transpose(0, 1).contiguous().transpose(0, 1)), "required heads next to each other"),
        (_rows(w=ROWS.w[:2]), r"w: found torch.float32 \[2, 4\].*required .* \[3, 4\]"),
        (_rows(k=ROWS.k[:, :16]), r"k: found .*\[90, 16\].*\[N, 32\]"),
        (_rows(k_scale=None), "k_scale: required with e4m3 keys"),
        (_rows(k_scale=torch.ones(7)), r"k_scale: found torch.float32 \[7\].*required float32 \[90\]"),
        (_rows(ke=ROWS.ke.long()), r"ke: found torch.int64 \[3\].*required int32 \[3\]"),
        (_rows(ks=ROWS.ks[:1]), r"ks: found torch.int32 \[1\].*required int32 \[3\]"),
        (_paged(page=-64), r"page: found -64; required at least 1$"),
        (_paged(page=0), r"page: found 0; required at least 1$"),
        (_paged(page=32), r"cache: found torch.uint8 \[\d+, 576\].*required uint8 \[pages, 1152\]"),
        (_paged(block_table=PAGED.block_table[0]), r"block_table: found torch.int32 .*required int32 \[R, nb\]"),
        (_paged(row_request=PAGED.row_request.long()), "row_request: found torch.int64"),
        (_paged(q=PAGED.q.to(torch.bfloat16)), "q: found torch.bfloat16"),
    ],
)
def test_refusals(call: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_pages_that_begin_between_words_are_refused() -> None:
    cache = torch.zeros(4, PAGE * 36 + 2, dtype=torch.uint8)[:, : PAGE * 36]
    with pytest.raises(ValueError, match="cache: found a page stride of 578 bytes; required pages that begin on 4"):
        _paged(cache=cache)()


@pytest.mark.parametrize("capability, fits", [(80, False), (86, False), (89, True), (90, True)])
def test_fp8_is_refused_where_a_card_has_none(monkeypatch: pytest.MonkeyPatch, capability: int, fits: bool) -> None:
    monkeypatch.setattr(launch, "capability", lambda tensor: capability)
    faults = launch.Faults("index_topk_rows", torch.empty(1))
    launch.fp8_fault(faults, SimpleNamespace(is_cuda=True), "keep bf16 keys")  # type: ignore[arg-type]
    assert (faults.found == []) == fits
    assert fits or f"compute capability {capability / 10}; required 8.9" in faults.found[0]


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="w: found") as error:
        index_topk_rows(ROWS.q, ROWS.w[:2], ROWS.k, None, ROWS.ks.long(), ROWS.ke, 16, AMPLE)
    assert all(name in str(error.value) for name in ("w: found", "k_scale: required", "ks: found"))


def _on(interpreted: Interpreted, kept: str) -> Callable[..., torch.Tensor]:
    """The operator by the reference, or by the kernels in the interpreter."""
    return cases.run_op if kept == "reference" else lambda *args: interpreted(cases.run_op, *args)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BOTH = pytest.mark.parametrize("kept", ["reference", "interpreter"])


@BOTH
def test_bounds_outside_the_keys_are_clamped(interpreted: Interpreted, kept: str) -> None:
    """By every implementation to the same: the selection of the bounds that are left."""
    run = _on(interpreted, kept)
    wild = replace(ROWS, ks=ints(-5, 60, 2**31 - 1), ke=ints(1000, 2**31 - 1, 2**31 - 1))
    tame = replace(ROWS, ks=ints(0, 60, 0), ke=ints(90, 90, 0))
    assert torch.equal(run(wild), tame.reference())
    none = replace(ROWS, ks=ints(-(2**31), 95, 0), ke=ints(-1, 5, -(2**31)))
    assert (run(none) == -1).all()
    room = PAGED.block_table.shape[1] * PAGE
    full = torch.zeros_like(PAGED.block_table)
    wild_pages = replace(PAGED, block_table=full, ke=ints(room + 1, 2**31 - 1, -7))
    tame_pages = replace(PAGED, block_table=full, ke=ints(room, room, 0))
    assert torch.equal(run(wild_pages), tame_pages.reference())


@BOTH
def test_a_row_of_no_request_selects_nothing(interpreted: Interpreted, kept: str) -> None:
    run = _on(interpreted, kept)
    found = run(replace(PAGED, row_request=ints(-1, 0, -(2**31)), ke=ints(40, 41, 5)))
    assert (found[[0, 2]] == -1).all()
    assert torch.equal(found[1], PAGED.reference()[1])


@BOTH
def test_requests_and_pages_that_are_not_there_are_refused_on_a_cpu(interpreted: Interpreted, kept: str) -> None:
    run = _on(interpreted, kept)
    with pytest.raises((ValueError, AssertionError), match="row_request: found 5 in row 1; required below 2, the requ"):
        run(replace(PAGED, row_request=ints(0, 5, 1)))
    assert torch.equal(run(replace(PAGED, row_request=ints(0, 0, 5))), PAGED.reference()), "row 2 is padding"
    for wrong in (-100, 100):
        with pytest.raises(
            (ValueError, AssertionError), match=r"block_table: found page -?\d+ among the keys of reque"
        ):
            run(replace(PAGED, block_table=PAGED.block_table + wrong))


def run_past_the_table(case: Paged) -> torch.Tensor:
    """As on a GPU, where nobody looks at the requests before the kernels run."""
    return cases.run(case, "fused")


def test_kernels_take_a_request_past_the_table_for_none(interpreted: Interpreted) -> None:
    found = interpreted(run_past_the_table, replace(PAGED, row_request=ints(0, 2**31 - 1, 2), ke=ints(40, 41, 5)))
    assert torch.equal(found[0], PAGED.reference()[0])
    assert (found[1:] == -1).all()


@BOTH
@pytest.mark.parametrize("case", [ROWS, PAGED, replace(ROWS, ke=ROWS.ks)], ids=["rows", "paged", "nothing to score"])
def test_a_negative_workspace_is_refused_whatever_is_scored(
    interpreted: Interpreted, kept: str, case: Rows | Paged
) -> None:
    with pytest.raises((ValueError, AssertionError), match="workspace_bytes: found -1; required at least 0"):
        _on(interpreted, kept)(case, -1)


def test_the_workspace_has_a_default() -> None:
    assert torch.equal(index_topk_rows(*ROWS.arguments()), ROWS.reference())
    assert torch.equal(index_topk_paged(*PAGED.arguments()), PAGED.reference())
    assert torch.equal(index_topk_rows(*ROWS.arguments(), workspace_bytes=AMPLE), ROWS.reference())
    assert "64 MiB unless told otherwise" in (index_topk_rows._init_fn.__doc__ or "")
    assert DEFAULT_WORKSPACE_BYTES == 64 << 20


@pytest.mark.parametrize("named, runs", [("", True), ("reference", True), ("refrence", False)])
def test_what_the_environment_names(monkeypatch: pytest.MonkeyPatch, named: str, runs: bool) -> None:
    monkeypatch.setenv("PCP_KERNELS", named)
    with nullcontext() if runs else pytest.raises(ValueError, match="PCP_KERNELS: found 'refrence'; supported: refer"):
        assert torch.equal(index_topk_rows(*ROWS.arguments()), ROWS.reference())


def test_what_follows_from_a_wrong_argument_is_not_held_against_the_caller() -> None:
    with pytest.raises(UnsupportedSpec, match="heads: found 3") as error:
        catalog.topk(heads=3, topk=16, arch=catalog.INTERPRETER)
    assert "block_queries" not in str(error.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (replace(ROWS, topk=20), "topk: found 20; supported: multiples of 16 from 16 to 2048"),
        (
            replace(ROWS, q=ROWS.q[:, :3].contiguous(), w=ROWS.w[:, :3]),
            "heads: found 3; supported: 2, 4, 8, 16, 32, 64",
        ),
    ],
)
def test_kernels_refuse_what_is_not_generated(interpreted: Interpreted, case: Rows | Paged, message: str) -> None:
    with pytest.raises(ChildError, match=message):
        interpreted(cases.run_op, case)
