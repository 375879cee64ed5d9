# SPDX-License-Identifier: Apache-2.0
"""The slot expansion: reference against its definition, Triton's interpreter against the reference, ahead of time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pcp_kernels
from pcp_kernels import PAD_SLOT_ID, expand_slots, expand_slots_reference

pytestmark = pytest.mark.unit

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(groups: int, tokens: int, rows: int, capacity: int, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, 1 << 40, (groups, tokens), generator=generator)
    index = torch.randint(0, tokens, (rows,), generator=generator)
    mask = torch.rand(rows, generator=generator) < 0.7
    return slots, index, mask, torch.full((groups, capacity), 7)


def by_definition(slots: torch.Tensor, index: torch.Tensor, mask: torch.Tensor, out: torch.Tensor) -> list[list[int]]:
    rows = index.shape[0]
    return [
        [int(slots[g, index[i]]) if i < rows and mask[i] else -1 for i in range(out.shape[1])]
        for g in range(out.shape[0])
    ]


def test_worked_example() -> None:
    out = torch.full((1, 10), 7)
    expand_slots(
        torch.tensor([[10, 11, 12, 13, 14, 15, 16]]),
        torch.tensor([0, 1, 6, 0, 2, 3, 4, 5]),
        torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool),
        out,
    )
    assert out.tolist() == [[10, 11, 16, -1, 12, 13, 14, 15, -1, -1]]


@given(
    groups=st.integers(1, 3),
    tokens=st.integers(1, 40),
    rows=st.integers(0, 40),
    spare=st.integers(0, 9),
    seed=st.integers(0, 999),
)
@settings(max_examples=100, deadline=None)
def test_the_operator_is_its_definition(groups: int, tokens: int, rows: int, spare: int, seed: int) -> None:
    slots, index, mask, out = case(groups, tokens, rows, rows + spare, seed)
    expand_slots(slots, index, mask, out)
    assert out.tolist() == by_definition(slots, index, mask, out)


def test_the_index_of_a_masked_row_is_not_read() -> None:
    slots, index, mask, out = case(2, 5, 8, 8, 0)
    index[~mask] = 10**9
    expand_slots(slots, index, mask, out)
    assert (out[:, ~mask] == PAD_SLOT_ID).all()


@pytest.mark.parametrize("broken", ["mask ignored", "tail left", "index shifted"])
def test_a_broken_expansion_differs(broken: str) -> None:
    slots, index, mask, out = case(2, 16, 12, 15, 1)
    expand_slots(slots, index, mask, out)
    wrong = torch.full_like(out, 7)
    if broken == "mask ignored":
        expand_slots_reference(slots, index, torch.ones_like(mask), wrong)
    elif broken == "tail left":
        expand_slots_reference(slots, index, mask, wrong[:, :12])
    else:
        expand_slots_reference(slots, (index + 1) % 16, mask, wrong)
    assert not torch.equal(out, wrong)


@pytest.mark.parametrize(
    "spoil, named",
    [
        (lambda a: (a[0].int(), *a[1:]), "slot_mapping: found torch.int32"),
        (lambda a: (a[0], a[1][:-1], *a[2:]), "write_mask: found 12 rows; required 11"),
        (lambda a: (*a[:3], a[3][:1]), "out: found 1 cache groups; required 2"),
        (lambda a: (*a[:3], a[3][:, :5]), "out: found room for 5 rows; required 12"),
        (lambda a: (a[0].T.contiguous().T, *a[1:]), r"slot_mapping: found .* strides \(1, 2\)"),
        (lambda a: (a[0], a[1].float(), a[2].int(), a[3]), r"(?s)gather_index: .*write_mask: "),
    ],
)
def test_refusals_name_every_fault(spoil: Callable[[Arguments], Arguments], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        expand_slots(*spoil(case(2, 16, 12, 15, 0)))


def test_schema_and_compilation() -> None:
    torch.library.opcheck(torch.ops.pcp_kernels.expand_slots.default, case(2, 16, 12, 15, 0))

    def body(slots: torch.Tensor, index: torch.Tensor, mask: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        expand_slots(slots, index, mask, out)
        return out + 0

    compiled = torch.compile(body, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (12, 9, 30):
        *inputs, out = case(2, 16, rows, rows + 3, rows)
        assert compiled(*inputs, out.clone()).tolist() == by_definition(*inputs, out)


INTERPRETED = """
import torch
from pcp_kernels import expand_slots_reference
from pcp_kernels.expand_slots_triton import BLOCK, launch
torch.manual_seed(0)
for groups, tokens, rows, capacity in [(1, 1, 1, 1), (2, 7, 8, 10), (3, 50, 0, 5), (2, 900, BLOCK + 3, 2 * BLOCK + 1)]:
    slots = torch.randint(0, 1 << 40, (groups, tokens + 5))[:, :tokens]
    index = torch.randint(0, tokens, (rows,))
    mask = torch.rand(rows) < 0.7
    index[~mask] = 1 << 50
    got, want = torch.full((groups, capacity + 2), 7), torch.full((groups, capacity + 2), 7)
    launch(slots, index, mask, got[:, :capacity])
    expand_slots_reference(slots, index, mask, want[:, :capacity])
    assert torch.equal(got, want), (groups, tokens, rows, capacity)
    print("equal", groups, capacity)
"""


def run_interpreted(source: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: ``TRITON_INTERPRET`` counts when the kernel is decorated."""
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(pcp_kernels.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@needs_triton
def test_interpreted_kernel_equals_the_reference() -> None:
    run = run_interpreted(INTERPRETED)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("equal") == 4


@needs_triton
def test_the_interpreter_comparison_can_fail() -> None:
    run = run_interpreted(INTERPRETED.replace("index, mask, got", "index, ~mask & (index < tokens), got"))
    assert run.returncode != 0
    assert "AssertionError" in run.stderr


SIGNATURE = {
    "slots_ptr": "*i64",
    "slots_stride": "i64",
    "index_ptr": "*i64",
    "mask_ptr": "*i1",
    "out_ptr": "*i64",
    "out_stride": "i64",
    "rows": "i32",
    "capacity": "i32",
}


@needs_triton
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_compiles_without_spills(sm: int) -> None:
    from pcp_kernels import aot
    from pcp_kernels.expand_slots_triton import BLOCK, NUM_WARPS, expand_slots_kernel

    constants = {"PAD": PAD_SLOT_ID, "BLOCK": BLOCK}
    found = aot.compile_for(expand_slots_kernel, SIGNATURE, constants, sm=sm, num_warps=NUM_WARPS)
    assert found.spill_bytes == 0
    assert 0 < found.registers <= 64
    assert f".target sm_{sm}" in found.ptx


@needs_triton
def test_the_spill_count_can_be_positive() -> None:
    from pcp_kernels import aot
    from pcp_kernels.expand_slots_triton import expand_slots_kernel

    crowded = {"PAD": PAD_SLOT_ID, "BLOCK": 1 << 12}
    assert aot.compile_for(expand_slots_kernel, SIGNATURE, crowded, sm=90, num_warps=1).spill_bytes > 0


def test_the_package_imports_without_triton() -> None:
    source = "import sys; sys.modules['triton'] = None; import pcp_kernels, pcp_kernels.aot; print('imported')"
    assert "imported" in run_interpreted(source).stdout
