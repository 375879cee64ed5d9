# SPDX-License-Identifier: Apache-2.0
"""What all specs of generated kernels share: values that are supported, faults that are named, names and digests."""

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
HEAD_DIMS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512)
"""Of dense attention; what is no power of two is computed as the next one."""
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
    "head_dim": HEAD_DIMS,
    "value_dim": (0, *HEAD_DIMS),
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
            elif field.name == "value_dim":
                yield f"v{value}" if value else ""
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


_SHORT = {"heads": "h", "dim": "d", "topk": "k", "latent": "l", "head_dim": "d"}
