# SPDX-License-Identifier: Apache-2.0
"""The texts of six kernels, kept to be read: a change of the generator shows in review as what it changes.

``PCP_WRITE_GOLDEN=1 pytest tests/unit/kernels/test_golden.py`` writes them anew.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from pcp_kernels import catalog, specs
from pcp_kernels.generate import generate

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parents[2] / "data" / "kernels"
# One of each kind of kernel; the interpreter's text of a bf16 one is the sixth.
KEPT: dict[str, tuple[specs.KernelSpec, bool]] = {
    "pack": (catalog.shipped()["pack_d128_half_r64_norm_fp8"], False),
    "scatter": (catalog.shipped()["scatter_d128_fp8_page64"], False),
    "topk": (catalog.shipped()["topk_h32_d128_fp8_paged64_k2048"], False),
    "select": (catalog.shipped()["select_k2048"], False),
    "remap": (catalog.shipped()["remap_k2048_page64_count"], False),
    "logits_interpreted": (catalog.logits(heads=8, arch=0, dim=32, store="bf16", layout="contiguous"), True),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_text_is_what_was_reviewed(name: str) -> None:
    text, path = generate(*KEPT[name]), GOLDEN / f"{name}.py.txt"
    if os.environ.get("PCP_WRITE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    kept = path.read_text()
    difference = "\n".join(difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "generated", lineterm=""))
    assert not difference, f"{difference}\nPCP_WRITE_GOLDEN=1 writes the new text; read it before you commit it."


def test_a_changed_text_is_seen() -> None:
    """Texts hold every value of their spec: none of these neighbours is taken for what was kept."""
    kept = (GOLDEN / "topk.py.txt").read_text()
    common = {"heads": 32, "topk": 2048, "arch": 90}
    for change in ({"topk": 1024}, {"heads": 64}, {"page": 32}, {"store": "bf16"}, {"layout": "contiguous"}):
        assert generate(catalog.topk(**{**common, **change})) != kept  # type: ignore[arg-type]


def test_nothing_else_is_kept() -> None:
    assert sorted(path.name for path in GOLDEN.glob("*.py.txt")) == sorted(f"{name}.py.txt" for name in KEPT)
