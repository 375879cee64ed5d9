# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model select keys, which reuse a selection, what of the keys is gathered, and what kernels run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from rich.console import Console, Group, RenderableType

from pcp_kernels import catalog, store
from pcp_kernels.ops import plans
from pcp_passes.cli.inspect import render_model
from pcp_passes.cli.inspect_indexers import ranges, render_indexers
from pcp_passes.inspection import indexers
from pcp_passes.inspection.attention import Sight
from pcp_passes.inspection.kernels import ARCH, UNITS, select_on_card
from pcp_passes.inspection.run import inspect_config
from pcp_passes.inspection.sources import load_config
from tests.unit.inspection.configs import GLM, LLAMA

pytestmark = pytest.mark.unit

TINY = Path(__file__).parents[3] / "examples" / "checkpoints" / "tiny-glm-dsa"

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
    scorer = catalog.logits(heads=32, dim=128, store="bf16", layout="contiguous", arch=ARCH)
    assert full.selection is not None and (full.selection.plan, full.selection.rows) == ("tiled", 1024)
    assert [(one.spec, one.file) for one in full.selection.kernels] == [
        (spec.name, f"{store.folder(spec).name}/kernel.py") for spec in (scorer, catalog.select(2048, ARCH))
    ]
    assert all(line.selection is None for line in report.indexers if line.role == "shared")
    assert not any(line.repeated for line in report.indexers)
    assert held["totals"]["index_keys"] == 21 * 256
    assert {line["sees"] for line in held["attention"]} == {"causal, the best 2,048"}
    exchanged = sum(line.count * line.times for line in report.gathers if line.module.startswith("self_attn"))
    assert exchanged == 78, "index keys travel with the latents: one collective a layer"
    told = _shown(render_model(report), 240)
    assert "21 full indexers, 57 layers that share their selection" in told
    assert scorer.name in told and "select_k2048" in told and "topk_h32" not in told
    lines = _shown(Group(*render_indexers(report)), 80).splitlines()
    assert any("shared sparse: 3-5, 7-9, 11-13" in line for line in lines)
    assert sum("│ shared sparse " in line for line in lines) == 1, "one line for a kind, not folded"
    assert max(map(len, lines)) <= 80


def _shown(what: RenderableType, width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text()


SMALL = {**GLM, "num_hidden_layers": 2, "indexer_types": ["full", "full"], "first_k_dense_replace": 2}


@pytest.mark.parametrize("balance, repeated", [(1e9, True), (1e-9, False)])
def test_bytes_of_keys_are_those_of_the_collectives(balance: float, repeated: bool) -> None:
    """Where bytes are dear, key and latent of the first layer are projected on every rank and not gathered.

    Else the record of a layer, one collective, is latent 32, rope key 16 and index key 32, of 4 bytes.
    """
    report, _ = inspect_config(SMALL, pcp=4, tokens=64, dtype="fp32", balance=balance)
    first = report.indexers[0]
    assert first.role == "full" and first.repeated is repeated
    assert first.gathered == (0 if repeated else 4 * 32) and first.gathered_prompt == 64 * first.gathered
    sent = sum(line.sent for line in report.gathers if line.kind == first.kind and line.module.startswith("self_attn"))
    assert sent == (0 if repeated else report.rows * (4 * 48 + first.gathered))
    told = _shown(Group(*render_indexers(report)), 80)
    assert ("repeated, 0 B" in told and "repeats the projection" in told) is repeated


@pytest.mark.parametrize("sabotaged", [False, True])
def test_what_a_repeated_projection_reads_is_no_key(sabotaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange the factors of the norm in front, 4 bytes a token; a walk past the product would count them."""
    if sabotaged:
        monkeypatch.setattr(indexers, "is_product", lambda node: False)
    report, _ = inspect_config(load_config(str(TINY)), pcp=4, tokens=1024)
    first, second = report.indexers[:2]
    assert any(line.kind == first.kind and line.module == "input_layernorm" for line in report.gathers)
    assert (first.gathered, first.repeated) == ((4, False) if sabotaged else (0, True))
    assert (second.gathered, second.repeated, report.index_keys) == (64, False, 68 if sabotaged else 64)


def test_one_rank_gathers_and_repeats_nothing() -> None:
    report, _ = inspect_config(SMALL, pcp=1, tokens=64, dtype="fp32")
    assert {(line.gathered, line.repeated) for line in report.indexers} == {(0, False)}


def test_half_split_rope_is_told_apart() -> None:
    report, _ = inspect_config(V32, pcp=2, tokens=64, dtype="fp32", balance=1e-9)
    assert {(line.role, line.rope, line.store) for line in report.indexers} == {("full", "half", "fp32")}
    assert all(line.gathered == 4 * 32 for line in report.indexers)


def test_a_model_without_an_indexer_says_nothing() -> None:
    report, _ = inspect_config(LLAMA, pcp=2, tokens=64, dtype="fp32")
    assert report.indexers == () and report.to_json()["totals"]["indexers"] == {"full": 0, "shared": 0}
    assert report.index_keys == 0


def _select(rows: int, keys: int, store: str = "bf16", heads: int = 32) -> Any:
    return select_on_card(rows, keys, topk=2048, heads=heads, dim=128, store=store, layout="contiguous")


def test_what_no_kernel_takes_is_named() -> None:
    assert "heads" in _select(8192, 32768, heads=48).why_not
    assert "fp64" in _select(8192, 32768, "fp64").why_not
    assert _select(8192, 32768).why_not == ""
    assert [one.shipped for one in _select(8192, 32768, heads=8).kernels] == [False, True]


@pytest.mark.parametrize(
    "rows, keys, plan, kernels",
    [
        (8192, 32768, "tiled", ["logits_h32_d128_bf16_contiguous", "select_k2048"]),
        (8192, 262144, "fused", ["topk_h32_d128_bf16_contiguous_k2048"]),
        (2, 32768, "split", ["split_h32_d128_bf16_contiguous_k2048", "merge_k2048"]),
        (1024, 2048, "all", []),
    ],
)
def test_all_kernels_of_the_plan_are_named(rows: int, keys: int, plan: str, kernels: list[str]) -> None:
    found = _select(rows, keys)
    assert (found.plan, [one.spec for one in found.kernels]) == (plan, kernels)
    sizes: dict[str, Any] = {"heads": 32, "dim": 128, "store": "bf16", "layout": "contiguous"}
    chosen = plans.choose(
        plans.Shape(rows, keys, 2048, UNITS), catalog.topk(topk=2048, arch=ARCH, **sizes), catalog.select(2048, ARCH),
        catalog.merge(2048, ARCH), 256 << 20, longest_tiled=catalog.CROSSOVER["bf16"].keys,
    )  # fmt: skip
    assert chosen.kind == plan
    assert [one.shipped for one in found.kernels] == [one.spec in catalog.shipped() for one in found.kernels]


def test_runs_of_layers_are_joined() -> None:
    assert ranges((3, 4, 5, 7, 8, 9)) == "3-5, 7-9" and ranges((0, 2)) == "0, 2" and ranges(()) == ""


def test_a_row_works_for_the_keys_it_selects() -> None:
    """Rows 0 and 5 of 8 see 1 and 6 keys, of which at most 4 are selected."""
    assert Sight(right=0, topk=4).pairs(torch.tensor([[0, 5]]), 8) == [1 + 4]
    assert Sight(right=0).pairs(torch.tensor([[0, 5]]), 8) == [1 + 6]
