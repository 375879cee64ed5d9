# SPDX-License-Identifier: Apache-2.0
"""Specifications of the generated kernels: everything that the source text of a kernel depends on, and nothing else.

A spec holds no number of ranks, tokens, keys or requests and no chunk offset: where a row may look is data
(``ke[i] = positions[i] + 1``), so the text is the same at every size of the prefill-context-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pcp_kernels.spec_base import DIMS as DIMS
from pcp_kernels.spec_base import HEADS as HEADS
from pcp_kernels.spec_base import LATENTS as LATENTS
from pcp_kernels.spec_base import ROPE_DIMS as ROPE_DIMS
from pcp_kernels.spec_base import SOURCES as SOURCES
from pcp_kernels.spec_base import STORES as STORES
from pcp_kernels.spec_base import KernelSpec as KernelSpec
from pcp_kernels.spec_base import UnsupportedSpec as UnsupportedSpec


@dataclass(frozen=True, kw_only=True)
class PackSpec(KernelSpec):
    """Index key of each token: LayerNorm, RoPE, Hadamard, rounding, quantisation; writes a record."""

    family: ClassVar[str] = "pack"
    summary: ClassVar[str] = "index key -> record: LayerNorm, RoPE, rounding point, power-of-two fp8"

    dim: int = 128
    rope: str = "interleaved"
    rope_dim: int = 64
    norm: bool = True
    hadamard: bool = False
    rounding: str = "bf16"
    store: str = "fp8"
    source: str = "bf16"

    def _conflicts(self) -> Iterator[str]:
        return _rope_conflicts(self.rope, self.rope_dim, self.dim)


@dataclass(frozen=True, kw_only=True)
class LatentPackSpec(KernelSpec):
    """Latent and its rope part -> one packed row (656 B at 512 + 64 and fp8)."""

    family: ClassVar[str] = "latent"
    summary: ClassVar[str] = "latent and rope part -> packed row: fp8 values, power-of-two scales, bf16 rope"

    latent: int = 512
    rope_dim: int = 64
    store: str = "fp8"
    source: str = "bf16"


@dataclass(frozen=True, kw_only=True)
class ScatterSpec(KernelSpec):
    """Records -> paged index cache; slot -1 is skipped."""

    family: ClassVar[str] = "scatter"
    summary: ClassVar[str] = "records -> paged index cache (values, then scales, per page); slot -1 skipped"

    dim: int = 128
    store: str = "fp8"
    page: int = 64


@dataclass(frozen=True, kw_only=True)
class LatentScatterSpec(KernelSpec):
    """Packed latent rows -> cache whose rows follow one another, whatever its page; slot -1 is skipped."""

    family: ClassVar[str] = "latent_scatter"
    summary: ClassVar[str] = "packed latent rows -> cache, row by row; slot -1 skipped"

    latent: int = 512
    rope_dim: int = 64
    store: str = "fp8"


@dataclass(frozen=True, kw_only=True)
class PrepSpec(KernelSpec):
    """Index queries: RoPE, Hadamard, quantisation per (token, head); scales folded into the head weights."""

    family: ClassVar[str] = "prep"
    summary: ClassVar[str] = "index queries -> RoPE, fp8 per (token, head), scales folded into the weights"

    heads: int
    dim: int = 128
    rope: str = "interleaved"
    rope_dim: int = 64
    hadamard: bool = False
    store: str = "fp8"
    source: str = "bf16"

    def _conflicts(self) -> Iterator[str]:
        return _rope_conflicts(self.rope, self.rope_dim, self.dim)


@dataclass(frozen=True, kw_only=True)
class ScoreSpec(KernelSpec):
    """What kernels that score keys have in common; a tile is ``block_queries`` rows against ``block_keys`` keys."""

    k_loop: ClassVar[bool] = True

    heads: int
    dim: int = 128
    store: str = "fp8"
    layout: str = "paged"
    page: int = 64
    block_keys: int = 128
    block_queries: int = 1
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True, kw_only=True)
class TopKSpec(ScoreSpec):
    """Fused streaming scorer and selector: no matrix of logits, scratch of ``capacity`` candidates per row."""

    family: ClassVar[str] = "topk"
    summary: ClassVar[str] = "scores and selects while it streams the keys: no logits in memory"

    topk: int = 2048
    inner: int = 8
    """Key blocks between two looks at the candidate count; within them nothing hinders pipelining."""
    capacity: int = 4096

    def _conflicts(self) -> Iterator[str]:
        return _room(self.capacity, self.topk, self.block_keys * self.inner)


@dataclass(frozen=True, kw_only=True)
class SplitSpec(ScoreSpec):
    """As :class:`TopKSpec`, for one of several ranges of keys; emits candidates with their order keys."""

    family: ClassVar[str] = "split"
    summary: ClassVar[str] = "decode: exact top-k of one range of keys, with order keys for the merge"

    topk: int = 2048
    inner: int = 8
    capacity: int = 4096

    def _conflicts(self) -> Iterator[str]:
        return _room(self.capacity, self.topk, self.block_keys * self.inner)


@dataclass(frozen=True, kw_only=True)
class LogitsSpec(ScoreSpec):
    """Scores of a tile of rows into a bounded workspace."""

    family: ClassVar[str] = "logits"
    summary: ClassVar[str] = "scores of a tile of rows -> workspace"


@dataclass(frozen=True, kw_only=True)
class SelectSpec(KernelSpec):
    """Rows of fp32 scores -> ascending indices of the top-k under the total order."""

    family: ClassVar[str] = "select"
    summary: ClassVar[str] = "rows of scores -> ascending indices of the top-k"

    topk: int = 2048
    block: int = 2048
    """Scores that are read at a time."""
    capacity: int = 4096
    warps: int = 8

    def _conflicts(self) -> Iterator[str]:
        return _room(self.capacity, self.topk, self.block)


@dataclass(frozen=True, kw_only=True)
class MergeSpec(KernelSpec):
    """Candidates of all ranges of a row -> its top-k."""

    family: ClassVar[str] = "merge"
    summary: ClassVar[str] = "candidates of every range of keys -> ascending indices of the top-k"

    topk: int = 2048
    block: int = 2048
    capacity: int = 4096
    warps: int = 8

    def _conflicts(self) -> Iterator[str]:
        return _room(self.capacity, self.topk, self.block)


@dataclass(frozen=True, kw_only=True)
class RemapSpec(KernelSpec):
    """Request-local indices -> slots through the block table; with ``count``, how many are valid."""

    family: ClassVar[str] = "remap"
    summary: ClassVar[str] = "request-local indices -> slots through the block table, with the valid count"

    topk: int = 2048
    page: int = 64
    count: bool = True


@dataclass(frozen=True, kw_only=True)
class OwnerSpec(KernelSpec):
    """Rows that this rank owns -> a zero-filled block, so that a sum over ranks delivers every row."""

    family: ClassVar[str] = "owner"
    summary: ClassVar[str] = "rows of indices that this rank owns -> block to be summed over ranks"

    topk: int = 2048


@dataclass(frozen=True, kw_only=True)
class MlaSpec(KernelSpec):
    """Absorbed sparse MLA over selected rows: output and log-sum-exp."""

    family: ClassVar[str] = "mla"
    summary: ClassVar[str] = "absorbed attention over the selected rows: output and log-sum-exp"
    k_loop: ClassVar[bool] = True

    latent: int = 512
    rope_dim: int = 64
    store: str = "bf16"
    block_heads: int = 16
    block_keys: int = 32
    warps: int = 8
    stages: int = 2


@dataclass(frozen=True, kw_only=True)
class PagedSpec(KernelSpec):
    """Attention over every key that a row may see in a paged cache; grouped heads, or absorbed MLA."""

    family: ClassVar[str] = "paged"
    summary: ClassVar[str] = "attention of rows over their keys in a paged cache, bounds read on the device"
    k_loop: ClassVar[bool] = True

    head_dim: int = 128
    """Of keys; of absorbed MLA the latent."""
    value_dim: int = 128
    """Of values; 0: the key is the value, as the latent is in absorbed MLA."""
    rope_dim: int = 0
    """Of the part of a key that lies apart, after :attr:`head_dim` in the queries."""
    store: str = "bf16"
    source: str = "bf16"
    """Of queries and results; the dtype of the products."""
    records: bool = False
    """Whether the cache holds FP8 latent records with scales; FP8 without them is a plain cast."""
    page: int = 16
    sinks: bool = False
    slopes: bool = False
    softcap: bool = False
    block_heads: int = 16
    block_keys: int = 64
    warps: int = 4
    stages: int = 2

    def _conflicts(self) -> Iterator[str]:
        if self.store not in ("fp8", self.source):
            yield f"store: found {self.store!r} with source={self.source!r}; supported: 'fp8', or the source"
        if self.rope_dim and self.value_dim:
            yield f"value_dim: found {self.value_dim!r} with rope_dim={self.rope_dim!r}; supported: 0"
        if self.records and (self.store != "fp8" or self.value_dim or self.source != "bf16"):
            yield "records: found True; supported with store='fp8', source='bf16' and value_dim=0 alone"
        if self.records and self.head_dim not in LATENTS:
            yield f"head_dim: found {self.head_dim!r}; supported with records: {', '.join(map(str, LATENTS))}"


FAMILIES: Mapping[str, type[KernelSpec]] = {
    cls.family: cls
    for cls in (
        PackSpec, LatentPackSpec, ScatterSpec, LatentScatterSpec, PrepSpec, TopKSpec, SplitSpec, LogitsSpec, SelectSpec,
        MergeSpec, RemapSpec, OwnerSpec, MlaSpec, PagedSpec,
    )
}  # fmt: skip


def from_json(data: Mapping[str, Any]) -> KernelSpec:
    """The spec of which ``data`` is the :meth:`KernelSpec.to_json`.

    Raises:
        UnsupportedSpec: unknown family, a field too many or too few, or a value outside its supported set.
    """
    values = dict(data)
    family = values.pop("family", None)
    if family not in FAMILIES:
        raise UnsupportedSpec(f"no kernel family {family!r}; supported: {', '.join(FAMILIES)}")
    try:
        return FAMILIES[family](**values)
    except TypeError as error:
        raise UnsupportedSpec(f"not a spec of family {family}: {error}") from error


def _rope_conflicts(rope: str, rope_dim: int, dim: int) -> Iterator[str]:
    if (rope == "none") != (rope_dim == 0):
        yield f"rope_dim: found {rope_dim!r} with rope={rope!r}; supported: 0 with 'none', and no other"
    elif isinstance(rope_dim, int) and isinstance(dim, int) and rope_dim > dim:
        yield f"rope_dim: found {rope_dim}; supported: at most dim={dim}"


def _room(capacity: int, topk: int, step: int) -> Iterator[str]:
    if all(isinstance(value, int) for value in (capacity, topk, step)) and capacity < topk + step:
        yield f"capacity: found {capacity}; supported: at least {topk + step}, topk and the candidates of one step"
