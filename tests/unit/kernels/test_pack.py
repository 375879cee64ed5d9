# SPDX-License-Identifier: Apache-2.0
"""Packing kernels in the interpreter against the reference, byte for byte; the operators; spoilt kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcp_kernels import ops
from pcp_kernels.reference import pack as reference
from tests.interpreted import Interpreted
from tests.kernel_calls import call, call_spoilt

pytestmark = pytest.mark.unit

SOURCES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def keys(rows: int, dim: int, source: str, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, one of them zero, strided as a slice of a wider projection is."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator).float())
    wide = torch.randn(rows, dim + 32, generator=generator) * size
    wide[rows // 2 : rows // 2 + 1] = 0
    return wide.to(SOURCES[source])[:, 16 : 16 + dim]


def angles(rows: int, rope_dim: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of random angles, as halves of one table."""
    angle = torch.rand(rows, rope_dim // 2, generator=torch.Generator().manual_seed(seed)) * 7
    table = torch.cat([angle.cos(), angle.sin()], dim=1)
    return table[:, : rope_dim // 2], table[:, rope_dim // 2 :]


CASES: list[dict[str, Any]] = [
    # rows, dim, rope_dim, source, then what the operator is told
    {"rows": 19, "dim": 128, "rope_dim": 64, "source": "bf16", "rope": "interleaved"},
    {"rows": 33, "dim": 64, "rope_dim": 32, "source": "fp32", "rope": "half", "hadamard": True, "rounding": "fp32"},
    {"rows": 1, "dim": 128, "rope_dim": 64, "source": "fp32", "rope": "half", "hadamard": True},
    {"rows": 7, "dim": 32, "rope_dim": 0, "source": "fp16", "rope": "none", "hadamard": True, "rounding": "fp32"},
    {"rows": 16, "dim": 32, "rope_dim": 32, "source": "fp32", "rope": "interleaved", "rounding": "fp32"},
    {"rows": 5, "dim": 64, "rope_dim": 4, "source": "fp32", "rope": "half", "store": "bf16"},
    {"rows": 5, "dim": 64, "rope_dim": 8, "source": "bf16", "rope": "interleaved", "store": "fp32", "hadamard": True},
    {"rows": 5, "dim": 32, "rope_dim": 16, "source": "fp32", "rope": "interleaved", "store": "fp16"},
    {"rows": 3, "dim": 64, "rope_dim": 0, "source": "bf16", "rope": "none", "store": "bf16"},
    {"rows": 0, "dim": 64, "rope_dim": 0, "source": "bf16", "rope": "none"},
]


def prepared(case: dict[str, Any], norm: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = dict(case)
    rows, dim, rope_dim, source = (options.pop(name) for name in ("rows", "dim", "rope_dim", "source"))
    generator = torch.Generator().manual_seed(2)
    weights = (torch.randn(dim, generator=generator), torch.randn(dim, generator=generator)) if norm else (None, None)
    tables = angles(rows, rope_dim) if rope_dim else (None, None)
    return (keys(rows, dim, source), *weights, 1e-6, *tables), options


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(value) for value in c.values()))
def test_the_kernel_is_the_reference_to_the_byte(interpreted: Interpreted, case: dict[str, Any]) -> None:
    args, options = prepared(case, norm=False)
    found = interpreted(call, "index_pack", args, options)
    wanted = reference.index_pack(*args, **options)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[6]], ids=["bf16-first", "fp32-first", "unquantised"])
def test_layernorm_differs_by_the_order_of_its_sums_alone(interpreted: Interpreted, case: dict[str, Any]) -> None:
    args, options = prepared(case, norm=True)
    found = interpreted(call, "index_pack", args, options)
    wanted = reference.index_pack(*args, **options)
    if options.get("store"):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)
        return
    dim = args[0].shape[1]
    scales = [record[:, dim:].contiguous().view(torch.float32) for record in (found, wanted)]
    assert torch.equal(*scales)
    # An fp32 sum in another order moves a value across a rounding boundary now and then, never by more than a step.
    step = (found[:, :dim].int() - wanted[:, :dim].int()).abs()
    assert step.max() <= 1 and (step != 0).float().mean() < 0.01


def test_every_rounding_boundary_of_e4m3(interpreted: Interpreted) -> None:
    codes = torch.arange(0x7E + 1, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middle, middle.nextafter(torch.tensor(1e9)), middle.nextafter(torch.tensor(0.0))])
    values = torch.cat([values, -values])
    values = torch.cat([values, values.new_zeros(-len(values) % 127)]).view(-1, 127)
    k = torch.cat([torch.full((len(values), 1), 448.0), values], dim=1)
    found = interpreted(call, "index_pack", (k,), {"rounding": "fp32"})
    assert (found[:, 128:].contiguous().view(torch.float32) == 1).all()
    assert torch.equal(found[:, :128].contiguous().view(torch.float8_e4m3fn).float(), k.to(torch.float8_e4m3fn).float())


def test_scales_at_and_beside_every_power_of_two(interpreted: Interpreted) -> None:
    edges = 448 * torch.exp2(torch.arange(-24.0, 24.0))
    edges = torch.cat([edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(1e30))])
    k = torch.linspace(-1, 1, 32) * edges[:, None]
    found = interpreted(call, "index_pack", (k,), {"rounding": "fp32"})
    assert torch.equal(found, reference.index_pack(k, rounding="fp32"))


SPOILT: dict[str, tuple[int, dict[str, str]]] = {
    "interleaved pairs instead of halves": (1, {"column ^ 16": "column ^ 1"}),
    "halves instead of interleaved pairs": (0, {"column ^ 1": "column ^ 32"}),
    "the other sign": (0, {"column % 2 == 0": "column % 2 == 1"}),
    "the last dimensions rotated": (
        0,
        {"(column < 64)[None, :]": "(column >= 64)[None, :]", "(column // 2)": "(column // 2 % 32)"},
    ),
    "another row's angle": (0, {"angle = row": "angle = (row // 2)"}),
    "no Hadamard": (1, {"x = hadamard(x)": "x = x"}),
    "Hadamard without its norm": (1, {"return x * NORM": "return x"}),
    "quantised from fp32": (0, {"x = round_bf16(x)": "x = x"}),
    "truncated to bf16": (0, {"bits + 0x7FFF + ((bits >> 16) & 1)": "bits"}),
    "ties away from even": (4, {"size + 0x7FFFF + ((size >> 20) & 1)": "size + 0x7FFFF"}),
    "scale of the row before": (0, {"scale_ptr + row * out_words": "scale_ptr + row // 2 * out_words"}),
    "scale rounded down": (4, {"+ 0x1FFFFF)": "+ 0)"}),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_kernel_differs(interpreted: Interpreted, name: str) -> None:
    number, edits = SPOILT[name]
    args, options = prepared(CASES[number], norm=False)
    if number == 4:
        # On ties, and with a largest magnitude of 1.75 * 2^8 + 1: what random values do not show.
        args = (torch.arange(-62.0, 450.0).view(16, 32), *args[1:4], None, None)
        options["rope"] = "none"
    found = interpreted(call_spoilt, edits, "index_pack", args, options)
    assert not torch.equal(found, reference.index_pack(*args, **options))


def test_rounding_twice_moves_three_percent_of_the_codes(interpreted: Interpreted) -> None:
    k = torch.randn(96, 128, generator=torch.Generator().manual_seed(5))
    once, twice = (interpreted(call, "index_pack", (k,), {"rounding": rounding}) for rounding in ("fp32", "bf16"))
    share = (once[:, :128] != twice[:, :128]).float().mean()
    # A bf16 copy sits on a midpoint of e4m3 once in 16; half of these then round the other way.
    assert 0.02 < share < 0.045


LATENTS = [(512, 64, "bf16", "fp8"), (32, 8, "fp32", "fp8"), (128, 0, "fp32", "fp8"), (64, 16, "fp32", "bf16")]
LATENTS += [(256, 16, "fp16", "fp32"), (16, 4, "fp32", "fp16")]


def latents(rows: int, latent: int, rope_dim: int, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = torch.exp2(torch.randint(-14, 10, (rows, 1), generator=generator).float())
    both = (torch.randn(rows, latent + rope_dim, generator=generator) * size).to(SOURCES[source])
    both[0] = 0
    return both[:, :latent], both[:, latent:]


@pytest.mark.parametrize("latent, rope_dim, source, store", LATENTS)
def test_latent_records_are_the_reference_to_the_byte(
    interpreted: Interpreted, latent: int, rope_dim: int, source: str, store: str
) -> None:
    args = latents(6, latent, rope_dim, source)
    found = interpreted(call, "latent_pack", args, {"store": store})
    assert torch.equal(found, reference.latent_pack(*args, store=store))


def test_latent_scales_below_the_floor_and_at_every_edge(interpreted: Interpreted) -> None:
    edges = 448 * torch.exp2(torch.arange(-40.0, 20.0))
    edges = torch.cat([edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(1e30)), torch.zeros(1)])
    latent = torch.linspace(-1, 1, 16) * edges[:, None]
    args = (latent, latent[:, :4])
    assert torch.equal(interpreted(call, "latent_pack", args), reference.latent_pack(*args))


@pytest.mark.parametrize(
    "edits",
    [
        {", 0x39000000)": ", 0)"},
        {"axis=2)": "axis=2) * 0 + 3.0"},
        {"(out_words * 2) + part": "(out_words * 2) + (part ^ 1)"},
        {"round_bf16(key)": "key"},
    ],
    ids=["no floor", "one scale for all", "rope dimensions swapped", "rope truncated"],
)
def test_a_spoilt_latent_kernel_differs(interpreted: Interpreted, edits: dict[str, str]) -> None:
    args = latents(6, 256, 16, "fp32")
    found = interpreted(call_spoilt, edits, "latent_pack", args)
    assert not torch.equal(found, reference.latent_pack(*args))


@pytest.mark.parametrize("store, width", [("fp8", 788), ("bf16", 704)])
def test_one_record_holds_both(interpreted: Interpreted, store: str, width: int) -> None:
    cos, sin = angles(6, 64)
    args = (*latents(6, 512, 64, "bf16"), keys(6, 128, "bf16"), None, None, 1e-6, cos, sin)
    options = {"rope": "interleaved", "store": store}
    found = interpreted(call, "dsa_pack", args, options)
    assert found.shape == (6, width)
    parts = ops.latent_pack(*args[:2], store=store), ops.index_pack(*args[2:], **options)
    assert torch.equal(found, torch.cat(parts, dim=1))
    assert torch.equal(found, ops.dsa_pack(*args, **options))


REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.index_pack(torch.zeros(2, 3, 4)), r"k: found torch.float32 \[2, 3, 4\].*required .* \[T, D\]"),
    (lambda: ops.index_pack(torch.zeros(2, 8).int()), "k: found torch.int32"),
    (lambda: ops.index_pack(torch.zeros(8, 2).T), "k: found .* strides .*its last dimension contiguous"),
    (lambda: ops.index_pack(torch.zeros(2, 8), torch.ones(7)), r"ln_weight: found torch.float32 \[7\].* \[8\]"),
    (lambda: ops.index_pack(torch.zeros(2, 8), None, torch.ones(8)), "ln_bias: found without ln_weight"),
    (lambda: ops.index_pack(torch.zeros(2, 8), rope="half"), "cos, sin: found none and none with rope='half'"),
    (lambda: ops.index_pack(torch.zeros(2, 8), cos=torch.ones(2, 2), sin=torch.ones(2, 2)), "neither with 'none'"),
    (
        lambda: ops.index_pack(
            torch.zeros(2, 8), cos=torch.ones(3, 8), sin=torch.ones(3, 8), rope="half", store="int4"
        ),
        r"(?s)store: found 'int4'.*cos: found torch.float32 \[3, 8\].*sin: .*angles for 16 dimensions",
    ),
    (lambda: ops.index_pack(torch.zeros(2, 8), rounding="fp16"), "rounding: found 'fp16'; required one of bf16, fp32"),
    (lambda: ops.latent_pack(torch.zeros(2, 8), torch.zeros(3, 4)), r"rope_key: found .*\[3, 4\].* \[2, R\]"),
    (lambda: ops.latent_pack(torch.zeros(2, 8), torch.zeros(2, 4).half()), "rope_key: found torch.float16"),
    (lambda: ops.dsa_pack(torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(3, 8)), "required as many rows as latent"),
]


@pytest.mark.parametrize("make, message", REFUSALS)
def test_arguments_that_do_not_fit_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_spec_without_a_kernel_is_refused_where_kernels_run(interpreted: Interpreted) -> None:
    with pytest.raises(AssertionError, match=r"(?s)dim: found 48; supported: 32, 64, 128"):
        interpreted(call, "index_pack", (torch.zeros(2, 48),))


def test_fp64_is_the_reference_everywhere(interpreted: Interpreted) -> None:
    k = keys(3, 48, "fp32").double()
    assert torch.equal(interpreted(call, "index_pack", (k,), {"store": "fp64"}), k)


def checked(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    torch.library.opcheck(getattr(torch.ops.pcp_kernels, name).default, args, options)


def packing() -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    args, options = prepared(CASES[1], norm=True)
    options = {"store": "fp8", **options}
    pair = latents(33, 32, 8, "bf16")
    return [
        ("index_pack", args, options),
        ("latent_pack", pair, {"store": "fp8"}),
        ("latent_pack", pair, {"store": "bf16"}),
        ("dsa_pack", (*pair, *args), options),
    ]


def test_schemas_and_shapes(interpreted: Interpreted) -> None:
    for example in packing():
        checked(*example)
        interpreted(checked, *example)


def test_one_compiled_program_serves_every_length() -> None:
    compiled = torch.compile(
        lambda k: ops.index_pack(k * 2, store="fp8").int() + 1, backend="aot_eager", fullgraph=True
    )
    for rows in (4, 9, 30):
        k = keys(rows, 64, "fp32")
        torch._dynamo.mark_dynamic(k, 0)
        assert torch.equal(compiled(k), reference.index_pack(k * 2).int() + 1)
