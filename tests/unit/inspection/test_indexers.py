# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model select keys, which reuse a selection, and what kernel they run."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from rich.console import Console

from pcp_kernels import catalog, store
from pcp_passes.cli.inspect import render_model
from pcp_passes.inspection.attention import Sight
from pcp_passes.inspection.indexers import ARCH, kernel_of
from pcp_passes.inspection.run import inspect_config
from pcp_passes.inspection.sources import load_config
from tests.unit.inspection.configs import GLM, LLAMA

pytestmark = pytest.mark.unit

V32: dict[str, Any] = {
    **{key: value for key, value in GLM.items() if key != "indexer_types"},
    "model_type": "deepseek_v32", "num_hidden_layers": 3, "first_k_dense_replace": 1, "index_n_heads": 16,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip


def test_the_shipped_glm_has_21_full_and_57_shared_layers() -> None:
    report, _ = inspect_config(load_config("glm-5.2"), pcp=4, tokens=4096)
    held = report.to_json()
    assert held["totals"]["indexers"] == {"full": 21, "shared": 57}
    assert sum(line.times for line in report.indexers) == 78
    layers = {number: line.role for line in report.indexers for number in line.layers}
    assert [number for number, role in layers.items() if role == "full"] == [0, 1, 2, *range(6, 78, 4)]
    full = next(line for line in report.indexers if line.role == "full")
    assert (full.heads, full.dim, full.topk, full.rope, full.store) == (32, 128, 2048, "interleaved", "bf16")
    assert (full.module, full.gathered, full.gathered_prompt) == ("self_attn.indexer", 256, 256 * 4096)
    spec = catalog.topk(heads=32, dim=128, topk=2048, store="bf16", layout="contiguous", arch=ARCH)
    assert (full.spec, full.file) == (spec.name, f"{store.folder(spec).name}/kernel.py")
    assert held["totals"]["index_keys"] == 21 * 256
    assert {line["sees"] for line in held["attention"]} == {"causal, the best 2,048"}
    exchanged = sum(line.count * line.times for line in report.gathers if line.module.startswith("self_attn"))
    assert exchanged == 78, "index keys travel with the latents: one collective a layer"
    console = Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_model(report))
    told = console.export_text()
    assert "21 full indexers, 57 layers that share their selection" in told and spec.name in told


def test_half_split_rope_is_told_apart() -> None:
    report, _ = inspect_config(V32, pcp=2, tokens=64, dtype="fp32")
    assert {(line.role, line.rope, line.store) for line in report.indexers} == {("full", "half", "fp32")}
    assert all(line.gathered == 4 * 32 for line in report.indexers)


def test_a_model_without_an_indexer_says_nothing() -> None:
    report, _ = inspect_config(LLAMA, pcp=2, tokens=64, dtype="fp32")
    assert report.indexers == () and report.to_json()["totals"]["indexers"] == {"full": 0, "shared": 0}
    assert report.index_keys == 0


def test_what_no_kernel_takes_is_named() -> None:
    assert "heads" in kernel_of(48, 128, 2048, "bf16").why_not
    assert kernel_of(32, 128, 2048, "bf16").why_not == ""


def test_a_row_works_for_the_keys_it_selects() -> None:
    """Rows 0 and 5 of 8 see 1 and 6 keys, of which at most 4 are selected."""
    assert Sight(right=0, topk=4).pairs(torch.tensor([[0, 5]]), 8) == [1 + 4]
    assert Sight(right=0).pairs(torch.tensor([[0, 5]]), 8) == [1 + 6]
