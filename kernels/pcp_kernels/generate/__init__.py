# SPDX-License-Identifier: Apache-2.0
"""Source text of the kernels: one module per family, each ``generate(spec, interpret) -> str``.

The text is a self-contained module: a header with the spec and its numerics class, the helpers that the kernel uses,
``kernel`` itself with every value of the spec written out, and ``META``. What a spec does without is absent from the
text. With ``interpret`` the text suits Triton's interpreter, which cannot compute in bf16.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from pcp_kernels.specs import KernelSpec

GENERATORS: Mapping[str, str] = {
    "pack": "pack:generate",
    "latent": "pack:generate_latent",
    "scatter": "scatter:generate",
    "latent_scatter": "scatter:generate_latent",
    "prep": "prep:generate",
    "topk": "topk:generate",
    "logits": "logits:generate",
    "select": "select:generate",
    "split": "decode:generate_split",
    "merge": "decode:generate_merge",
    "remap": "remap:generate",
    "owner": "remap:generate_owner",
    "mla": "mla:generate",
    "paged": "paged:generate",
}
"""Family -> module of this package and function in it, imported when first used."""


def generate(spec: KernelSpec, interpret: bool = False) -> str:
    """The text of ``spec``: a function of its arguments and of the sources of this package alone."""
    module, _, function = GENERATORS[spec.family].partition(":")
    found: Callable[[KernelSpec, bool], str] = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return found(spec, interpret)


@functools.cache
def generator_version() -> str:
    """Hash of the sources that decide what a text says."""
    here = Path(__file__).parent
    hashed = hashlib.sha256()
    for path in sorted(here.glob("*.py")):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()
