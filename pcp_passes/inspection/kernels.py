# SPDX-License-Identifier: Apache-2.0
"""Which generated kernels a selection would run on the card that is stated here, by the plan that the ops choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcp_passes.sparse.backends import DEFAULT_WORKSPACE_BYTES

ARCH = 90
UNITS = 132
"""Compute capability and multiprocessors of the card: H100 and H200 in their SXM form."""

CARD = f"compute capability {ARCH / 10}, {UNITS} multiprocessors"


@dataclass(frozen=True)
class Kernel:
    """A generated kernel.

    Attributes:
        spec: its name.
        file: path under the root of the kernel store, ``<digest>/kernel.py``.
        shipped: it is in the table of ``pcp kernels``; others are generated alike, when they are first needed.
    """

    spec: str
    file: str
    shipped: bool

    @property
    def digest(self) -> str:
        """Of spec, generator and Triton."""
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class Selection:
    """How the keys of some rows are selected, in one call.

    Attributes:
        plan: ``all``, ``split``, ``tiled`` or ``fused``; empty where no kernel takes such an indexer.
        rows: of the call.
        keys: that a row may have, at most.
        kernels: in the order in which they run; none for ``all``, which selects every key unscored.
        why_not: why no kernel takes it; the reference then serves it, on a CPU.
    """

    plan: str
    rows: int
    keys: int
    kernels: tuple[Kernel, ...] = ()
    why_not: str = ""


def select_on_card(
    rows: int,
    keys: int,
    *,
    topk: int,
    heads: int,
    dim: int,
    store: str,
    layout: str,
    page: int = 64,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> Selection:
    """The plan and the kernels of a selection, as ``pcp_kernels.ops.topk`` chooses them.

    Args:
        rows, keys, topk: of the call.
        heads, dim, store, layout, page: of the indexer and its keys.
        workspace_bytes: bound on the temporaries.
    """
    from pcp_kernels import catalog
    from pcp_kernels.ops import plans
    from pcp_kernels.specs import UnsupportedSpec

    sizes: Mapping[str, Any] = {"heads": heads, "dim": dim, "store": store, "layout": layout, "page": page}
    try:
        streaming = catalog.topk(topk=topk, arch=ARCH, **sizes)
        selector, merger = catalog.select(topk, ARCH), catalog.merge(topk, ARCH)
    except UnsupportedSpec as error:
        return Selection("", rows, keys, why_not=" ".join(str(error).split()))
    plan = plans.choose(
        plans.Shape(rows, keys, topk, UNITS), streaming, selector, merger, workspace_bytes,
        longest_tiled=catalog.CROSSOVER[store].keys,
    )  # fmt: skip
    specs = {
        "all": (),
        "fused": (streaming,),
        "split": (catalog.split(topk=topk, arch=ARCH, **sizes), merger),
        "tiled": (catalog.logits(arch=ARCH, **sizes), selector),
    }[plan.kind]
    return Selection(plan.kind, rows, keys, tuple(_kernel(spec) for spec in specs))


def _kernel(spec: Any) -> Kernel:
    from pcp_kernels import catalog, store

    return Kernel(spec.name, f"{store.folder(spec).name}/kernel.py", spec.name in catalog.shipped())
