# SPDX-License-Identifier: Apache-2.0
"""How selections are cut into launches: which plan, its workspace, and the texts of the kernels it launches."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_kernels import aot, catalog, lint
from pcp_kernels.generate import generate
from pcp_kernels.ops.plans import KINDS, Kind, Plan, Shape, choose
from pcp_kernels.specs import KernelSpec
from tests.interpreted import Interpreted
from tests.unit.kernels import topk_cases as cases
from tests.unit.kernels.topk_cases import paged_case

MB = 1 << 20
H100 = 132


def plan(rows: int, keys: int, workspace: int, kind: Kind | None = None, *, topk: int = 2048, heads: int = 32) -> Plan:
    """The plan of an H100-sized device."""
    return choose(
        Shape(rows, keys, topk, H100),
        catalog.topk(heads=heads, topk=topk, arch=90),
        catalog.select(topk, 90),
        catalog.merge(topk, 90),
        workspace,
        longest_tiled=131072,
        kind=kind,
    )


@pytest.mark.parametrize(
    ("rows", "keys", "workspace", "wanted"),
    [
        (8192, 2048, MB, "all"),
        (8192, 8192, 512 * MB, "tiled"),
        (8192, 131072, 512 * MB, "tiled"),
        (8192, 131072, 64 * MB, "fused"),  # too few rows of logits at a time
        (8192, 262144, 4096 * MB, "fused"),  # too long for the logits to pay
        (64, 65536, 512 * MB, "split"),
        (1, 131072, 512 * MB, "split"),
        (64, 4096, 512 * MB, "tiled"),  # too short to be split
    ],
)
def test_the_plan_goes_by_rows_keys_and_workspace(rows: int, keys: int, workspace: int, wanted: str) -> None:
    found = plan(rows, keys, workspace)
    assert found.kind == wanted
    assert found.workspace_bytes <= workspace


def test_workspaces_of_a_long_prefill() -> None:
    """8,192 queries on 128K keys would be 4.3 GB of logits."""
    assert plan(8192, 131072, 512 * MB).workspace_bytes <= 512 * MB
    # 132 programs, 4 rows, 4096 candidates of 8 bytes each; 2 rows with 64 heads.
    assert plan(8192, 131072, 512 * MB, "fused").workspace_bytes == 132 * 4 * 4096 * 8
    assert plan(8192, 131072, 512 * MB, "fused", heads=64).workspace_bytes == 132 * 2 * 4096 * 8


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 20000),
    keys=st.integers(1, 1 << 20),
    workspace=st.integers(1, 1 << 30),
    kind=st.sampled_from([None, *KINDS]),
    topk=st.sampled_from([16, 512, 2048]),
    heads=st.sampled_from([8, 32, 64]),
)
def test_no_plan_exceeds_its_workspace(
    rows: int, keys: int, workspace: int, kind: Kind | None, topk: int, heads: int
) -> None:
    try:
        found = plan(rows, keys, workspace, kind, topk=topk, heads=heads)
    except ValueError:
        # The fused plan runs in what one program needs, and with as few keys as are selected nothing is needed.
        assert kind not in (None, "fused") or workspace < 128 // heads * 4096 * 8
        assert kind != "all" or keys > topk
        return
    assert found.workspace_bytes <= workspace
    assert kind in (None, found.kind)
    if found.kind == "tiled":
        assert found.rows >= 1 and found.columns >= keys
        assert found.rows in range(min(rows, 16)) or found.rows == rows or found.rows % 16 == 0
    if found.kind in ("fused", "split"):
        assert found.programs >= 1 and found.held_words > 0


def test_refusals_say_what_would_do() -> None:
    with pytest.raises(ValueError, match="plan 'fused' runs with 131072 and is fastest with 17301504"):
        plan(8192, 131072, 100_000)
    assert plan(8192, 131072, 131072).programs == 1
    with pytest.raises(ValueError, match="plan: found 'clever'; supported: all, fused, tiled, split"):
        plan(1, 4096, MB, "clever")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found up to 4096 keys; required at most topk=2048"):
        plan(1, 4096, MB, "all")


@pytest.mark.parametrize(("kind", "workspace"), [("fused", 4096), ("tiled", 6000), ("split", 24000)])
def test_what_is_allocated_is_what_was_planned(interpreted: Interpreted, kind: Kind, workspace: int) -> None:
    case = paged_case("fp32", [0] * 6, [100, 101, 102, 103, 104, 105])
    found, allocated = interpreted(cases.run_counted, case, kind, workspace)
    assert (found == case.reference()).all()
    output = found.numel() * 4
    assert output < allocated <= workspace + output


def _specs() -> list[KernelSpec]:
    sizes = {"heads": 32, "arch": 90}
    scoring = [
        spec
        for store in ("fp8", "fp32")
        for layout in ("paged", "contiguous")
        for spec in (
            catalog.topk(topk=512, store=store, layout=layout, **sizes),
            catalog.split(topk=512, store=store, layout=layout, **sizes),
            catalog.logits(store=store, layout=layout, **sizes),
        )
    ]
    return [*scoring, catalog.select(512, 90), catalog.merge(512, 90)]


@pytest.mark.parametrize("spec", _specs(), ids=lambda spec: spec.name)
def test_texts_hold_what_runs_and_nothing_else(spec: KernelSpec) -> None:
    text = generate(spec)
    assert ("scale_ptr" in text) == (getattr(spec, "store", None) == "fp8")
    assert ("table_ptr" in text) == (getattr(spec, "layout", None) == "paged")
    assert ("start_ptr" in text) == (getattr(spec, "layout", None) == "contiguous")
    assert "constexpr(True)" not in text and "constexpr(False)" not in text
    assert lint.missing_barriers(text) == []
    assert narrow_offsets(text) == []
    # A number of rows, keys or columns that is 1 or a multiple of 16 must not be compiled for.
    meta: dict[str, dict[str, str]] = {}
    exec(text[text.index("META = ") :], meta)
    plain = {name for name, kind in meta["META"]["signature"].items() if kind == "i32"}  # type: ignore[attr-defined]
    assert plain and all(f'"{name}"' in text[: text.index("def kernel")].splitlines()[-1] for name in plain)


def narrow_offsets(text: str) -> list[str]:
    """Products with a stride whose other side is not 64 bits wide, as written."""
    tree = ast.parse(text)
    meta: dict[str, Any] = {}
    exec(text[text.index("META = ") :], meta)
    wide = {name for name, kind in meta["META"]["signature"].items() if kind == "*i64"}

    def widens(node: ast.AST) -> bool:
        """Whether the value is made of a 64-bit one; what is loaded is as wide as its pointer says."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
            return any(isinstance(part, ast.Name) and part.id in wide and "_ptr" in part.id for part in ast.walk(node))
        if isinstance(node, ast.Name | ast.Attribute):
            return ast.unparse(node) in {*wide, "tl.int64"} or any(map(widens, ast.iter_child_nodes(node)))
        return any(map(widens, ast.iter_child_nodes(node)))

    found = []
    for node in _in_order(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            (wide.add if widens(node.value) else wide.discard)(node.targets[0].id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = node.left, node.right
            strided = any("_stride" in ast.unparse(side) or ast.unparse(side) == "width" for side in sides)
            if strided and not any(map(widens, sides)):
                found.append(ast.unparse(node))
    return found


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A tree as it is written, operands before what they are assigned to."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


@pytest.mark.parametrize("name", catalog.shipped())
def test_offsets_are_64_bits_wide(name: str) -> None:
    """Triton passes a stride that fits into 32 bits as an i32, whatever a text's META says."""
    assert narrow_offsets(generate(catalog.shipped()[name])) == []


def test_a_narrow_offset_is_found() -> None:
    text = generate(catalog.topk(heads=32, topk=512, arch=90))
    assert narrow_offsets(text.replace("request.to(tl.int64) * table_stride", "request * table_stride")) == [
        "request * table_stride"
    ]
    assert narrow_offsets(text.replace(".to(tl.int64)\n", "\n")) == ["page * key_stride", "page * (key_stride // 4)"]


@pytest.mark.parametrize(
    ("spec", "matrix"),
    [
        (catalog.topk(heads=32, topk=64, arch=90, store="fp32"), "none"),
        (catalog.topk(heads=8, topk=512, arch=90, store="fp16"), "wgmma"),
        (catalog.split(heads=16, topk=2048, arch=90, store="bf16", layout="contiguous"), "wgmma"),
    ],
    ids=lambda value: value.name if isinstance(value, KernelSpec) else value,
)
def test_settings_for_other_heads_and_stores_fit_the_registers(spec: KernelSpec, matrix: str) -> None:
    found = aot.compile_spec(spec, aot.TARGETS["sm_90"])
    assert found.spill_bytes == 0
    assert found.matrix_instructions == matrix
    assert found.shared_bytes <= aot.TARGETS["sm_90"].shared_limit
