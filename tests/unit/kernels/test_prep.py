# SPDX-License-Identifier: Apache-2.0
"""The kernel that prepares queries, in the interpreter against the reference; its operator; spoilt kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcp_kernels import ops
from pcp_kernels.reference import prep as reference
from tests.interpreted import Interpreted
from tests.kernel_calls import call, call_spoilt

pytestmark = pytest.mark.unit

SOURCES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

CASES: list[dict[str, Any]] = [
    # tokens, heads, dim, rope_dim, source, then what the operator is told
    {"shape": (5, 8, 128), "rope_dim": 64, "source": "bf16", "rope": "interleaved"},
    {"shape": (3, 4, 64), "rope_dim": 32, "source": "fp32", "rope": "half", "hadamard": True},
    {"shape": (9, 2, 32), "rope_dim": 0, "source": "fp16", "rope": "none"},
    {"shape": (1, 16, 32), "rope_dim": 16, "source": "bf16", "rope": "half", "hadamard": True},
    {"shape": (4, 4, 64), "rope_dim": 8, "source": "fp32", "rope": "interleaved", "store": "bf16"},
    {"shape": (4, 4, 32), "rope_dim": 4, "source": "bf16", "rope": "half", "store": "fp32", "hadamard": True},
    {"shape": (4, 4, 32), "rope_dim": 32, "source": "fp32", "rope": "interleaved", "store": "fp16"},
    {"shape": (0, 4, 32), "rope_dim": 0, "source": "bf16", "rope": "none"},
]


def prepared(case: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Queries as a slice of a fused projection, weights in the queries' dtype and strided as well."""
    options = {"factor": 0.37, **case}
    (tokens, heads, dim), rope_dim, source = (options.pop(name) for name in ("shape", "rope_dim", "source"))
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-12, 10, (tokens, heads, 1), generator=generator).float())
    q = (torch.randn(tokens, heads, dim, generator=generator) * size).to(SOURCES[source])
    wide = torch.zeros(tokens, heads + 1, dim + 16, dtype=q.dtype)
    wide[:, 1:, 16:] = q
    w = torch.randn(tokens, 3 * heads, generator=generator).to(q.dtype)[:, heads : 2 * heads]
    angle = torch.rand(tokens, rope_dim // 2, generator=generator) * 7
    return (wide[:, 1:, 16:], w, *((angle.cos(), angle.sin()) if rope_dim else (None, None))), options


def equal(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether queries and weights are the same bytes."""
    return all(
        a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(value) for value in c.values()))
def test_the_kernel_is_the_reference_to_the_byte(interpreted: Interpreted, case: dict[str, Any]) -> None:
    args, options = prepared(case)
    assert equal(interpreted(call, "index_prep", args, options), reference.index_prep(*args, **options))


SPOILT: dict[str, tuple[int, dict[str, str]]] = {
    "interleaved pairs instead of halves": (1, {"column ^ 16": "column ^ 1"}),
    "halves instead of interleaved pairs": (0, {"column ^ 1": "column ^ 32"}),
    "the last dimensions rotated": (
        0,
        {"(column < 64)[None, :]": "(column >= 64)[None, :]", "(column // 2)": "(column // 2 % 32)"},
    ),
    "angles of the head, not of the token": (0, {"angle = token": "angle = (head % 5)"}),
    "no Hadamard": (1, {"x = hadamard(x)": "x = x"}),
    "weights without the scale": (0, {"weight = weight * bits.to(tl.float32, bitcast=True)": "weight = weight"}),
    "weights without the factor": (4, {"* factor": "* 1.0"}),
    "weights of another head": (4, {"w_step + head": "w_step + (head ^ 1)"}),
    "quantised from fp32": (0, {"x = round_bf16(x)": "x = x"}),
    "truncated to bf16": (4, {"round_bf16(x).to": "x.to"}),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_kernel_differs(interpreted: Interpreted, name: str) -> None:
    number, edits = SPOILT[name]
    args, options = prepared(CASES[number])
    assert not equal(
        interpreted(call_spoilt, edits, "index_prep", args, options), reference.index_prep(*args, **options)
    )


def test_folding_the_scale_leaves_the_scores() -> None:
    args, options = prepared({"shape": (5, 8, 32), "rope_dim": 0, "source": "fp32", "rope": "none", "factor": 1.0})
    q, w, *_ = args
    values, weights = ops.index_prep(q, w, **options)
    keys = torch.randn(11, 32, generator=torch.Generator().manual_seed(1)).double()
    scale = weights.double() / w.double()
    unfolded = ((values.double() * scale[..., None]) @ keys.T).relu() * w.double()[..., None]
    folded = (values.double() @ keys.T).relu() * weights.double()[..., None]
    torch.testing.assert_close(folded.sum(1), unfolded.sum(1), rtol=1e-12, atol=1e-9)


REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.index_prep(torch.zeros(2, 8), torch.zeros(2, 8)), r"q: found torch.float32 \[2, 8\].*\[T, H, D\]"),
    (lambda: ops.index_prep(torch.zeros(2, 4, 8), torch.zeros(2, 3)), r"w: found torch.float32 \[2, 3\].*\[2, 4\]"),
    (lambda: ops.index_prep(torch.zeros(2, 4, 8), torch.zeros(2, 4), store="fp4"), "store: found 'fp4'"),
    (lambda: ops.index_prep(torch.zeros(2, 4, 8), torch.zeros(2, 4), rope="half"), "cos, sin: found none and none"),
    (lambda: ops.index_prep(torch.zeros(2, 4, 8).int(), torch.zeros(2, 4)), "q: found torch.int32"),
]


@pytest.mark.parametrize("make, message", REFUSALS)
def test_arguments_that_do_not_fit_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_heads_without_a_kernel_are_refused_where_kernels_run(interpreted: Interpreted) -> None:
    with pytest.raises(AssertionError, match="heads: found 5; supported: 2, 4, 8, 16, 32, 64"):
        interpreted(call, "index_prep", (torch.zeros(2, 5, 32), torch.zeros(2, 5)))


def checked(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    torch.library.opcheck(torch.ops.pcp_kernels.index_prep.default, args, options)


def test_what_is_stored_as_it_came_is_copied() -> None:
    q, w = torch.ones(2, 4, 8), torch.ones(2, 4)
    checked((q, w, None, None), {"rope": "none", "hadamard": False, "store": "fp32", "factor": 1.0})
    out, _ = ops.index_prep(q, w, store="fp32")
    assert out.data_ptr() != q.data_ptr()


@pytest.mark.parametrize("number", [1, 4])
def test_schema_and_shapes(interpreted: Interpreted, number: int) -> None:
    args, options = prepared(CASES[number])
    options = {"store": "fp8", "hadamard": False, **options}
    checked(args, options)
    interpreted(checked, args, options)
