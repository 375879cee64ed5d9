# SPDX-License-Identifier: Apache-2.0
"""Which specs ship, with which launch settings, and when which plan runs.

Nothing is tuned at run time: ranks that measured differently would run different kernels. Settings depend on what a
rank cannot disagree about: architecture, heads, store and layout. Those that decide in which order a score is
summed (``block_queries`` and ``warps``, with ``heads``) are the same for the fused, the split and the tiled plan, so
the plans agree bit for bit; the others never touch a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pcp_kernels.generate.text import next_power
from pcp_kernels.specs import (
    KernelSpec,
    LatentPackSpec,
    LatentScatterSpec,
    LogitsSpec,
    MergeSpec,
    MlaSpec,
    OwnerSpec,
    PackSpec,
    PagedSpec,
    PrepSpec,
    RemapSpec,
    ScatterSpec,
    SelectSpec,
    SplitSpec,
    TopKSpec,
)

INTERPRETER = 0
"""In place of an architecture: small blocks, since the interpreter's time goes by their size."""

AMD = 94
AMD_CAPABILITIES = (94, 95)
"""What PyTorch reports as compute capability on gfx942 and gfx950; no CUDA device has these."""


@dataclass(frozen=True)
class Tile:
    """Launch settings of a kernel that scores keys."""

    block_keys: int
    block_queries: int
    """Rows; times heads it is the side of the matrix product that is not keys."""
    inner: int
    warps: int
    stages: int


TILES: Mapping[tuple[int, int, str, str], Tile] = {
    # arch, heads, store, layout: 128 columns of heads feed one wgmma; blocks of keys are as large as registers allow.
    (80, 32, "bf16", "paged"): Tile(64, 4, 16, 8, 3),
    (80, 64, "bf16", "paged"): Tile(64, 2, 16, 8, 3),
    (80, 32, "bf16", "contiguous"): Tile(64, 4, 16, 8, 3),
    (80, 64, "bf16", "contiguous"): Tile(64, 2, 16, 8, 3),
    (90, 32, "fp8", "paged"): Tile(64, 4, 16, 8, 3),
    (90, 64, "fp8", "paged"): Tile(64, 2, 16, 8, 3),
    (90, 32, "fp8", "contiguous"): Tile(64, 4, 16, 8, 3),
    (90, 64, "fp8", "contiguous"): Tile(64, 2, 16, 8, 3),
    (90, 32, "bf16", "paged"): Tile(64, 4, 16, 8, 3),
    (90, 64, "bf16", "paged"): Tile(64, 2, 16, 8, 3),
    (90, 32, "bf16", "contiguous"): Tile(64, 4, 16, 8, 3),
    (90, 64, "bf16", "contiguous"): Tile(64, 2, 16, 8, 3),
}
"""Settings that the ahead-of-time table vouches for; see :func:`settings_of`."""


def settings_of(arch: int) -> int:
    """Whose settings compute capability ``arch`` (major * 10 + minor) uses: 80, 90 or :data:`AMD`.

    sm_100 has the resources of sm_90; sm_120 has the shared memory of sm_86, so it uses the careful settings.
    """
    if arch in AMD_CAPABILITIES:
        return AMD
    return 90 if 90 <= arch < 120 else 80


def tile(arch: int, heads: int, store: str, layout: str) -> Tile:
    """Settings for a compute capability (80, 90, ...), or for :data:`INTERPRETER`.

    What is not in :data:`TILES` gets 128 columns of heads (64 below 8 heads, where rows cost registers) and blocks of
    64 keys, the most careful of its entries. fp32 is multiplied in registers, so it gets a quarter of both.
    """
    if arch == INTERPRETER:
        return Tile(block_keys=32, block_queries=max(1, 16 // heads), inner=2, warps=4, stages=1)
    if store == "fp32":
        return Tile(block_keys=16, block_queries=max(1, 32 // heads), inner=32, warps=8, stages=2)
    known = TILES.get((settings_of(arch), heads, store, layout))
    if known is not None:
        return known
    return Tile(block_keys=64, block_queries=(128 if heads >= 8 else 64) // heads, inner=16, warps=8, stages=2)


def topk(
    *, heads: int, topk: int, arch: int, dim: int = 128, store: str = "fp8", layout: str = "paged", page: int = 64
) -> TopKSpec:
    """The fused kernel."""
    chosen = tile(arch, heads, store, layout)
    return TopKSpec(
        heads=heads, dim=dim, store=store, layout=layout, page=page, topk=topk,
        block_keys=chosen.block_keys, block_queries=chosen.block_queries, inner=chosen.inner, warps=chosen.warps,
        stages=chosen.stages, capacity=_capacity(topk, chosen.block_keys * chosen.inner),
    )  # fmt: skip


_fused = topk  # whose name is an argument below


def split(
    *, heads: int, topk: int, arch: int, dim: int = 128, store: str = "fp8", layout: str = "paged", page: int = 64
) -> SplitSpec:
    """The decode kernel for one range of keys."""
    fused = _fused(heads=heads, topk=topk, arch=arch, dim=dim, store=store, layout=layout, page=page)
    return SplitSpec(**asdict(fused))  # the same tile, so that both score to the same bit


def logits(
    *, heads: int, arch: int, dim: int = 128, store: str = "fp8", layout: str = "paged", page: int = 64
) -> LogitsSpec:
    """The scorer of the tiled plan."""
    chosen = tile(arch, heads, store, layout)
    return LogitsSpec(
        heads=heads, dim=dim, store=store, layout=layout, page=page,
        block_keys=chosen.block_keys, block_queries=chosen.block_queries, warps=chosen.warps, stages=chosen.stages,
    )  # fmt: skip


def for_arch(spec: KernelSpec, arch: int) -> KernelSpec:
    """``spec`` with the launch settings of compute capability ``arch``; only kernels that score keys have such."""
    if isinstance(spec, TopKSpec | SplitSpec):
        make = topk if isinstance(spec, TopKSpec) else split
        return make(
            heads=spec.heads, topk=spec.topk, arch=arch, dim=spec.dim, store=spec.store, layout=spec.layout,
            page=spec.page,
        )  # fmt: skip
    if isinstance(spec, MlaSpec):
        return mla(latent=spec.latent, rope_dim=spec.rope_dim, store=spec.store, arch=arch)
    if isinstance(spec, PagedSpec):
        given = {key: value for key, value in asdict(spec).items() if key not in PagedSpec.tuning}
        return paged(arch=arch, **given)
    if isinstance(spec, LogitsSpec):
        return logits(heads=spec.heads, arch=arch, dim=spec.dim, store=spec.store, layout=spec.layout, page=spec.page)
    return spec


def select(topk: int, arch: int) -> SelectSpec:
    """The selector over rows of scores."""
    block = _block(topk, arch)
    return SelectSpec(topk=topk, block=block, capacity=_capacity(topk, block), warps=4 if arch == INTERPRETER else 8)


def merge(topk: int, arch: int) -> MergeSpec:
    """The selector over candidates of several ranges."""
    block = _block(topk, arch)
    return MergeSpec(topk=topk, block=block, capacity=_capacity(topk, block), warps=4 if arch == INTERPRETER else 8)


def mla(*, arch: int, latent: int = 512, rope_dim: int = 64, store: str = "bf16") -> MlaSpec:
    """The sparse attention; more than 16 heads a program spill."""
    # Neither fit 32 keys of fp32, nor, on AMD, 32 of fp8 that are widened, into the registers.
    amd_fp8 = settings_of(arch) == AMD and store == "fp8"
    narrow = store == "fp32" or amd_fp8 or arch == INTERPRETER
    return MlaSpec(
        latent=latent, rope_dim=rope_dim, store=store, block_keys=16 if narrow else 32, warps=4 if amd_fp8 else 8
    )


def paged(
    *,
    arch: int,
    head_dim: int = 128,
    value_dim: int = 128,
    rope_dim: int = 0,
    store: str = "bf16",
    source: str = "bf16",
    records: bool = False,
    page: int = 16,
    sinks: bool = False,
    slopes: bool = False,
    softcap: bool = False,
) -> PagedSpec:
    """Attention over a paged cache; wide heads and fp32 leave room for fewer keys, as in :func:`mla`."""
    if max(head_dim, value_dim) > 256:
        like = mla(arch=arch, store="fp32" if source == "fp32" else store)
        keys, warps = like.block_keys, like.warps
    else:
        wide = max(head_dim, value_dim) > 128
        keys, warps = 32 if wide or source == "fp32" or arch == INTERPRETER else 64, 8 if wide else 4
    return PagedSpec(
        head_dim=head_dim, value_dim=value_dim, rope_dim=rope_dim, store=store, source=source, records=records,
        page=page, sinks=sinks, slopes=slopes, softcap=softcap, block_keys=keys, warps=warps,
    )  # fmt: skip


def _block(topk: int, arch: int) -> int:
    return 64 if arch == INTERPRETER else max(256, min(2048, next_power(topk)))


def _capacity(topk: int, step: int) -> int:
    """Twice the selection, so that half of the scratch is free after a compaction, and room for one step."""
    return max(2 * next_power(topk), next_power(topk + step))


@dataclass(frozen=True)
class Crossover:
    """When the fused plan runs in place of the tiled one; both give the same indices."""

    keys: int
    """Longest request, in keys, that the tiled plan takes."""
    reason: str


CROSSOVER: Mapping[str, Crossover] = {
    "fp8": Crossover(131072, "one scan by the fused kernel costs more issue slots per key than scoring and selecting "
                     "apart; beyond this length writing and reading the logits outweighs them (estimate, not timed)"),
    "bf16": Crossover(131072, "as fp8"),
    "fp16": Crossover(131072, "as fp8"),
    "fp32": Crossover(32768, "fp32 products run without tensor cores, so the logits are the smaller part of the time"),
}  # fmt: skip


@functools.cache
def shipped() -> Mapping[str, KernelSpec]:
    """Name -> spec of the kernels that are checked ahead of time; GLM-5.2 has 32 heads, DeepSeek-V3.2 has 64.

    Both have FP8 records in pages, and bf16 keys that lie contiguous, as token graphs have them: fused and tiled.
    """
    specs: list[KernelSpec] = [
        PackSpec(rope="interleaved"),
        PackSpec(rope="half"),
        LatentPackSpec(),
        ScatterSpec(),
        LatentScatterSpec(),
        PrepSpec(heads=32, rope="interleaved"),
        PrepSpec(heads=64, rope="half"),
        topk(heads=32, topk=2048, arch=90),
        topk(heads=64, topk=2048, arch=90),
        topk(heads=32, topk=2048, arch=90, store="bf16"),
        topk(heads=32, topk=2048, arch=90, store="bf16", layout="contiguous"),
        topk(heads=64, topk=2048, arch=90, store="bf16", layout="contiguous"),
        logits(heads=32, arch=90),
        logits(heads=64, arch=90),
        logits(heads=32, arch=90, store="bf16", layout="contiguous"),
        logits(heads=64, arch=90, store="bf16", layout="contiguous"),
        select(2048, 90),
        split(heads=32, topk=2048, arch=90),
        split(heads=64, topk=2048, arch=90),
        merge(2048, 90),
        RemapSpec(),
        OwnerSpec(),
        mla(arch=90),
        mla(arch=90, store="fp8"),
        paged(arch=90),
        paged(arch=90, store="fp8"),
        paged(arch=90, head_dim=512, value_dim=0, rope_dim=64, page=64),
        paged(arch=90, head_dim=512, value_dim=0, rope_dim=64, page=64, store="fp8", records=True),
    ]
    return {spec.name: spec for spec in specs}
