# SPDX-License-Identifier: Apache-2.0
"""Specifications of the generated kernels: everything that the source text of a kernel depends on, and nothing else.

A spec holds no number of ranks, tokens, keys or requests and no chunk offset: where a row may look is data
(``ke[i] = positions[i] + 1``), so the text is the same at every size of the prefill-context-parallel group.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

STORES = ("fp8", "bf16", "fp16", "fp32")
"""How keys and queries are kept; fp8 is e4m3 with one power-of-two scale per row."""
SOURCES = ("bf16", "fp16", "fp32")
"""What arrives from the model."""
HEADS = (2, 4, 8, 16, 32, 64)
DIMS = (32, 64, 128)
PAGES = (16, 32, 64, 128)
LAYOUTS = ("paged", "contiguous")
LATENTS = (16, 32, 64, 128, 256, 512)
ROPE_DIMS = (0, 4, 8, 16, 32, 64, 128)
ROPES = ("interleaved", "half", "none")
ROUNDINGS = ("bf16", "fp32")
TOP_K = (16, 2048)
"""Smallest and largest; between them every multiple of 16."""

_POWERS = tuple(2**n for n in range(17))
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "store": STORES,
    "source": SOURCES,
    "heads": HEADS,
    "dim": DIMS,
    "page": PAGES,
    "layout": LAYOUTS,
    "rope": ROPES,
    "rounding": ROUNDINGS,
    "latent": LATENTS,
    "rope_dim": ROPE_DIMS,
    "block_heads": (16,),
    "block_keys": (16, 32, 64, 128, 256),
    "block_queries": _POWERS[:8],
    "block": _POWERS[4:14],
    "inner": _POWERS[:7],
    "capacity": _POWERS[5:14],
    "warps": _POWERS[:5],
    "stages": (1, 2, 3, 4, 5),
}


class UnsupportedSpec(ValueError):
    """A kernel that the generator does not write; the message names every fault with the supported values."""


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """What the text of one kernel depends on."""

    family: ClassVar[str]
    summary: ClassVar[str]
    """What the kernel does, in one line."""
    k_loop: ClassVar[bool] = False
    """Whether it scans keys with matrix products: then matrix instructions and asynchronous copies are demanded."""
    tuning: ClassVar[frozenset[str]] = frozenset(
        {"block_keys", "block_queries", "block_heads", "block", "inner", "capacity", "warps", "stages"}
    )
    """Fields that shape the launch and leave the result alone."""

    warps: int = 4
    stages: int = 1

    def __post_init__(self) -> None:
        faults = [*self._outside(), *self._conflicts()]
        if faults:
            raise UnsupportedSpec("\n  ".join([f"no {self.family} kernel is generated for this spec:", *faults]))

    def _outside(self) -> Iterator[str]:
        heads = getattr(self, "heads", None)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "block_queries" and heads not in (None, *HEADS):
                continue  # follows from the heads, which are named
            if field.name == "topk":
                low, high = TOP_K
                if type(value) is not int or not low <= value <= high or value % 16:
                    yield f"topk: found {value!r}; supported: multiples of 16 from {low} to {high}"
            elif isinstance(value, bool):
                continue
            elif field.name not in _ALLOWED:
                yield f"{field.name}: found {value!r}; supported: True, False"
            elif value not in _ALLOWED[field.name]:
                yield f"{field.name}: found {value!r}; supported: {', '.join(map(str, _ALLOWED[field.name]))}"

    def _conflicts(self) -> Iterator[str]:
        """Faults that concern several fields; only those that can be told whatever :meth:`_outside` found."""
        return iter(())

    @property
    def name(self) -> str:
        """Short and stable; two specs that differ in launch settings alone share it."""
        return "_".join([self.family, *filter(None, self._parts())])

    def _parts(self) -> Iterator[str]:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in self.tuning:
                continue
            if isinstance(value, bool):
                yield field.name if value else ""
            elif field.name == "layout":
                yield f"paged{getattr(self, 'page', '')}" if value == "paged" else value
            elif field.name == "page":
                yield "" if hasattr(self, "layout") else f"page{value}"
            elif field.name == "source":
                yield f"from_{value}" if value != "bf16" else ""
            elif field.name == "rounding":
                yield f"round_{value}" if value != "bf16" else ""
            elif field.name == "rope":
                yield "norope" if value == "none" else value
            elif field.name == "rope_dim":
                yield f"r{value}" if value else ""
            else:
                yield _SHORT.get(field.name, "") + str(value)

    def to_json(self) -> dict[str, Any]:
        """Plain data from which :func:`from_json` makes the same spec."""
        return {"family": self.family, **asdict(self)}

    def digest(self, triton_version: str, generator_version: str, *, interpret: bool = False) -> str:
        """Name of the folder in the cache: changes with the spec, the generator, Triton and the mode."""
        data = {
            "spec": self.to_json(),
            "triton": triton_version,
            "generator": generator_version,
            "interpret": interpret,
        }
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


_SHORT = {"heads": "h", "dim": "d", "topk": "k", "latent": "l"}


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


FAMILIES: Mapping[str, type[KernelSpec]] = {
    cls.family: cls
    for cls in (
        PackSpec, LatentPackSpec, ScatterSpec, LatentScatterSpec, PrepSpec, TopKSpec, SplitSpec, LogitsSpec, SelectSpec,
        MergeSpec, RemapSpec, OwnerSpec, MlaSpec,
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
