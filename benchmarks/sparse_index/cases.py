# SPDX-License-Identifier: Apache-2.0
"""One checked call for each shipped kernel, on a GPU or in Triton's interpreter.

A case calls the operator that leads to the kernel, and says in words what is wrong with what came out. Kernels that
move or quantise bytes must give the reference's bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pcp_kernels import catalog
from pcp_kernels.ops import index, mla, paged, records
from pcp_kernels.ops import launch as launching
from pcp_kernels.reference import cache as cache_reference
from pcp_kernels.reference import mla as mla_reference
from pcp_kernels.reference import owner as owner_reference
from pcp_kernels.reference import pack as pack_reference
from pcp_kernels.reference import paged as paged_reference
from pcp_kernels.reference import prep as prep_reference
from pcp_kernels.reference import remap as remap_reference
from pcp_kernels.specs import KernelSpec

Outputs = tuple[torch.Tensor, ...]
NORM_CODES = 2e-3
"""Share of bytes that may differ after a LayerNorm, whose sums run in another order than PyTorch's."""


@dataclass(frozen=True)
class Case:
    """One kernel on one set of inputs."""

    spec: KernelSpec
    run: Callable[[], Outputs]
    wrong: Callable[[Outputs], str]
    """What is wrong with the outputs, in words; empty when nothing is."""


@dataclass(frozen=True)
class Inputs:
    """Random tensors on the device, the same for the same seed."""

    device: torch.device
    rows: int
    """Query rows, and tokens that are packed."""
    keys: int
    seed: int = 0

    @functools.cached_property
    def generator(self) -> torch.Generator:
        """Draws on the device itself: a copy of the largest inputs would take longer than the kernels."""
        return torch.Generator(self.device).manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device).to(dtype)

    def order(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device).to(dtype)

    def angles(self, rope_dim: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(cos, sin) f32 ``[rows, rope_dim / 2]`` of positions 0 to rows."""
        if not rope_dim:
            return None, None
        angles = torch.arange(self.rows)[:, None] / torch.logspace(0, 4, rope_dim // 2)
        return angles.cos().to(self.device), angles.sin().to(self.device)


def small(spec: KernelSpec) -> KernelSpec:
    """The same kernel with sizes that the interpreter runs in a second."""
    rope_dim = 16 if getattr(spec, "rope_dim", 0) else 0
    # No other latent and rope part make a record of as many bytes, so the kernel that copies it has their name.
    sizes: dict[str, Any] = {"heads": 4, "dim": 32, "rope_dim": rope_dim, "latent": 256, "topk": 16, "page": 16}
    sizes["head_dim"] = 64
    names = {field.name for field in dataclasses.fields(spec)}
    given = {name: value for name, value in sizes.items() if name in names}
    made = {"topk": catalog.topk, "split": catalog.split, "logits": catalog.logits}.get(spec.family)
    if made is not None:
        kept = {name: getattr(spec, name) for name in ("store", "layout")}
        return made(**given, **kept, arch=catalog.INTERPRETER)
    if spec.family in ("select", "merge"):
        return {"select": catalog.select, "merge": catalog.merge}[spec.family](sizes["topk"], catalog.INTERPRETER)
    return dataclasses.replace(spec, **given)


def cpu(*tensors: Any) -> list[Any]:
    """Tensors moved to the CPU, where references run; the rest as it is."""
    return [value.cpu() if isinstance(value, torch.Tensor) else value for value in tensors]


def equal(found: Outputs, wanted: Outputs, share: float = 0.0) -> str:
    """Whether bytes are equal, but for a share of them."""
    for number, (one, other) in enumerate(zip(cpu(*found), cpu(*wanted), strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"output {number}: found {one.dtype} {list(one.shape)}, required {other.dtype} {list(other.shape)}"
        differs = one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)
        if differs.double().mean() > share:
            return f"output {number}: {int(differs.sum())} of {differs.numel()} bytes differ"
    return ""


def _pack(spec: Any, inputs: Inputs) -> Case:
    cos, sin = inputs.angles(spec.rope_dim)
    norm = (inputs.normal(spec.dim) + 1, inputs.normal(spec.dim)) if spec.norm else (None, None)
    given = (inputs.normal(inputs.rows, spec.dim, dtype=launching.DTYPES[spec.source]), *norm, 1e-6, cos, sin)
    named = {name: getattr(spec, name) for name in ("rope", "hadamard", "rounding", "store")}
    wanted = pack_reference.index_pack(*cpu(*given), **named)
    return Case(
        spec,
        lambda: (records.index_pack(*given, **named),),
        lambda found: equal(found, (wanted,), NORM_CODES if spec.norm else 0.0),
    )


def _latent(spec: Any, inputs: Inputs) -> Case:
    dtype = launching.DTYPES[spec.source]
    given = (
        inputs.normal(inputs.rows, spec.latent, dtype=dtype),
        inputs.normal(inputs.rows, spec.rope_dim, dtype=dtype),
    )
    wanted = pack_reference.latent_pack(*cpu(*given), store=spec.store)
    return Case(spec, lambda: (records.latent_pack(*given, store=spec.store),), lambda found: equal(found, (wanted,)))


def _scatter(spec: Any, inputs: Inputs) -> Case:
    """Index records into pages: of FP8 the values come first, then the scales."""
    if spec.store == "fp8":
        width = spec.dim + 4
        return _scattered(spec, inputs, torch.uint8, width, lambda pages: (pages, spec.page * width), spec.page)
    dtype = launching.DTYPES[spec.store]
    return _scattered(spec, inputs, dtype, spec.dim, lambda pages: (pages, spec.page, spec.dim), spec.page)


def _latent_scatter(spec: Any, inputs: Inputs) -> Case:
    """Latent records, row by row."""
    width, dtype = spec.latent + spec.rope_dim, torch.uint8
    if spec.store == "fp8":
        width = pack_reference.latent_width(spec.latent, spec.rope_dim, "fp8")
    else:
        dtype = launching.DTYPES[spec.store]
    return _scattered(spec, inputs, dtype, width, lambda pages: (pages, 64, width), 64)


def _scattered(
    spec: KernelSpec, inputs: Inputs, dtype: torch.dtype, width: int, shape: Callable[[int], tuple[int, ...]], page: int
) -> Case:
    """Records of random bytes at shuffled slots, every third of them padding, into a cache that holds something."""
    made = inputs.integers(0, 256, inputs.rows, dtype.itemsize * width, dtype=torch.uint8)
    record = made.view(dtype)
    pages = -(-2 * inputs.rows // page)
    slots = inputs.order(pages * page, torch.int64)[: inputs.rows]
    slots[::3] = -1
    before = torch.full(shape(pages), 7, dtype=dtype, device=inputs.device)
    wanted = before.cpu()
    cache_reference.scatter(wanted, *cpu(record, slots))

    def run() -> Outputs:
        cache = before.clone()
        index.index_scatter(cache, record, slots)
        return (cache,)

    return Case(spec, run, lambda found: equal(found, (wanted,)))


def _prep(spec: Any, inputs: Inputs) -> Case:
    cos, sin = inputs.angles(spec.rope_dim)
    given = (
        inputs.normal(inputs.rows, spec.heads, spec.dim, dtype=launching.DTYPES[spec.source]),
        inputs.normal(inputs.rows, spec.heads), cos, sin,
    )  # fmt: skip
    named = {name: getattr(spec, name) for name in ("rope", "hadamard", "store")}
    named["factor"] = (spec.heads * spec.dim) ** -0.5
    wanted = prep_reference.index_prep(*cpu(*given), **named)
    return Case(spec, lambda: index.index_prep(*given, **named), lambda found: equal(found, wanted))


def _selected(spec: Any, inputs: Inputs, keys: int) -> torch.Tensor:
    """i32 ``[rows, topk]``: ascending, -1 behind; of the first row nothing, of the second one key."""
    made = torch.full((inputs.rows, spec.topk), -1, dtype=torch.int32)
    for row in range(inputs.rows):
        count = row if row < 2 else spec.topk - row % 5
        made[row, :count] = inputs.order(keys)[:count].sort().values.cpu()
    return made.to(inputs.device)


def _remap(spec: Any, inputs: Inputs) -> Case:
    pages = -(-max(inputs.keys, spec.topk) // spec.page)
    table = inputs.order(3 * pages).view(3, pages)
    given = (
        _selected(spec, inputs, pages * spec.page),
        table,
        inputs.integers(0, 3, inputs.rows).sort().values,
        spec.page,
    )
    wanted = remap_reference.index_remap(*cpu(*given))
    return Case(spec, lambda: index.index_remap(*given), lambda found: equal(found, wanted))


def _owner(spec: Any, inputs: Inputs) -> Case:
    given = (
        _selected(spec, inputs, max(inputs.keys, spec.topk)),
        inputs.integers(-1, inputs.rows, 9, dtype=torch.int64),
        0,
    )
    wanted = owner_reference.select_owner_rows(*cpu(*given))
    return Case(spec, lambda: (index.select_owner_rows(*given),), lambda found: equal(found, (wanted,)))


def _mla(spec: Any, inputs: Inputs) -> Case:
    heads, topk = 16, 16 if spec.latent < 512 else 512
    dtype = torch.bfloat16 if spec.store == "fp8" else launching.DTYPES[spec.store]
    q = inputs.normal(inputs.rows, heads, spec.latent + spec.rope_dim, dtype=dtype)
    latent = inputs.normal(inputs.keys, spec.latent, dtype=dtype)
    rope_key = inputs.normal(inputs.keys, spec.rope_dim, dtype=dtype)
    slots = inputs.integers(-1, inputs.keys, inputs.rows, topk)
    slots[0] = -1
    scale = (spec.latent + spec.rope_dim) ** -0.5
    if spec.store == "fp8":
        packed = pack_reference.latent_pack(latent.cpu(), rope_key.cpu())
        latent64, rope64 = pack_reference.latent_unpack(packed, spec.latent, spec.rope_dim, torch.float64)
        held = packed.to(inputs.device)
    else:
        latent64, rope64 = latent.cpu().double(), rope_key.cpu().double()
    exact, exact_lse = mla_reference.sparse_mla(q.cpu().double(), latent64, rope64, slots.cpu(), scale)

    def run() -> Outputs:
        if spec.store == "fp8":
            return mla.sparse_mla_records(q, held, slots, scale, latent_dim=spec.latent, rope_dim=spec.rope_dim)
        return mla.sparse_mla(q, latent, rope_key, slots, scale)

    def wrong(found: Outputs) -> str:
        out, lse = (value.cpu().double() for value in found)
        # Probabilities and results are rounded to the store's 8 bits (bf16): 2**-7 of values of size 1.
        error = float((out - exact).abs().max())
        if not error <= 2**-6 or out[0].abs().max() > 0 or not bool((lse[0] == -torch.inf).all()):
            return f"output is {error:.2e} off; an empty row gives {out[0].abs().max()} and {lse[0].max()}"
        error = float((lse[1:] - exact_lse[1:]).abs().max())
        return "" if error <= 2**-6 else f"log-sum-exp is {error:.2e} off"

    return Case(spec, run, wrong)


def _paged(spec: Any, inputs: Inputs) -> Case:
    """Rows of three requests that see no key, one, all, a window of 40, or any number."""
    kv_heads, groups = (1, 20) if spec.value_dim == 0 else (2, 4)
    columns, requests, dtype = -(-inputs.keys // spec.page), 3, launching.DTYPES[spec.source]
    held = (requests * columns, spec.page, kv_heads)
    q = inputs.normal(inputs.rows, kv_heads * groups, spec.head_dim + spec.rope_dim, dtype=dtype)
    k = inputs.normal(*held, spec.head_dim, dtype=dtype)
    rope = inputs.normal(*held, spec.rope_dim, dtype=dtype) if spec.rope_dim else None
    v = inputs.normal(*held, spec.value_dim, dtype=dtype) if spec.value_dim else None
    high = inputs.integers(0, inputs.keys + 1, inputs.rows)
    high[:3] = torch.tensor([0, 1, inputs.keys], device=high.device)
    low = torch.where(torch.arange(inputs.rows, device=high.device) % 4 == 3, (high - 40).clamp(min=0), 0).int()
    where = inputs.order(requests * columns).view(requests, columns), inputs.integers(0, requests, inputs.rows)
    scale, options = (spec.head_dim + spec.rope_dim) ** -0.5, {}
    if spec.records:
        packed = pack_reference.latent_pack(k.cpu().flatten(0, 2), rope.cpu().flatten(0, 2))
        parts = pack_reference.latent_unpack(packed, spec.head_dim, spec.rope_dim, torch.float64)
        exact_caches = [part.view(*held, -1) for part in parts] + [None]
        packed = packed.view(*held[:2], -1).to(inputs.device)
    else:
        if spec.store == "fp8":
            k, v = (one.to(torch.float8_e4m3fn) for one in (k, v))
        exact_caches = [None if one is None else one.cpu().double() for one in (k, rope, v)]
        options = {"softcap": 20.0 if spec.softcap else 0.0}
        options |= {name: inputs.normal(q.shape[1]) for name in ("sinks", "slopes") if getattr(spec, name)}
    bounds = low, high, high.long() - 1
    exact = paged_reference.paged_attend_rows(
        q.cpu().double(),
        *exact_caches,
        *cpu(*where, *bounds),
        scale=scale,
        **dict(zip(options, cpu(*options.values()), strict=True)),
    )

    def run() -> Outputs:
        if spec.records:
            return (
                paged.paged_attend_records(
                    q, packed, *where, low, high, latent_dim=spec.head_dim, rope_dim=spec.rope_dim, scale=scale
                ),
            )
        return (paged.paged_attend_rows(q, k, rope, v, *where, *bounds, scale=scale, **options),)

    def wrong(found: Outputs) -> str:
        out = found[0].cpu().double()
        # As for `mla`: probabilities and results are rounded to 8 bits, of values up to 4 where a row has one key.
        error = float(((out - exact).abs() - 2**-7 * exact.abs()).max())
        empty = float(out[0].abs().max())
        return "" if error <= 2**-6 and empty == 0 else f"output is {error:.2e} off; an empty row gives {empty}"

    return Case(spec, run, wrong)


BUILDERS: Mapping[str, Callable[[Any, Inputs], Case]] = {
    "pack": _pack,
    "latent": _latent,
    "scatter": _scatter,
    "latent_scatter": _latent_scatter,
    "prep": _prep,
    "remap": _remap,
    "owner": _owner,
    "mla": _mla,
    "paged": _paged,
}
