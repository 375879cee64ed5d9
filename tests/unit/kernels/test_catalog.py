# SPDX-License-Identifier: Apache-2.0
"""What ships, with which launch settings: the models that are named, and the settings that decide a score's bits."""

from __future__ import annotations

import ast
import itertools
from typing import Any

import pytest

from pcp_kernels import catalog
from pcp_kernels.generate import generate
from pcp_kernels.ops import plans
from pcp_kernels.specs import (
    DIMS,
    FAMILIES,
    HEADS,
    STORES,
    KernelSpec,
    LogitsSpec,
    PackSpec,
    PrepSpec,
    ScoreSpec,
    TopKSpec,
)

pytestmark = pytest.mark.unit

SHIPPED = catalog.shipped()
ARCHITECTURES = (80, 86, 89, 90, 94, 95, 100, 120, catalog.INTERPRETER)


def test_at_most_28_and_every_family() -> None:
    assert len(SHIPPED) <= 28
    assert {spec.family for spec in SHIPPED.values()} == set(FAMILIES)
    assert all(name == spec.name for name, spec in SHIPPED.items())


@pytest.mark.parametrize("heads, rope", [(32, "interleaved"), (64, "half")], ids=["GLM-5.2", "DeepSeek-V3.2"])
def test_the_named_models_find_their_kernels(heads: int, rope: str) -> None:
    specs = list(SHIPPED.values())
    assert any(isinstance(s, PackSpec) and s.rope == rope and s.store == "fp8" for s in specs)
    assert any(isinstance(s, PrepSpec) and s.rope == rope and s.heads == heads for s in specs)
    for family in ("topk", "logits", "split"):
        name = f"{family}_h{heads}_d128_fp8_paged64" + ("" if family == "logits" else "_k2048")
        assert isinstance(SHIPPED[name], ScoreSpec)


@pytest.mark.parametrize("heads", [32, 64])
def test_token_graphs_of_the_named_models_find_theirs(heads: int) -> None:
    """bf16 keys of a whole sequence, contiguous: what 8192 rows run over 32768 keys, tiled, and over 262144, fused."""
    sizes: dict[str, Any] = {"heads": heads, "store": "bf16", "layout": "contiguous", "arch": 90}
    fused, tiled = catalog.topk(topk=2048, **sizes), [catalog.logits(**sizes), catalog.select(2048, 90)]
    for spec in (fused, *tiled):
        assert SHIPPED[spec.name] == spec
    common = {"longest_tiled": catalog.CROSSOVER["bf16"].keys}
    merger, room = catalog.merge(2048, 90), 256 << 20
    shapes = plans.Shape(8192, 32768, 2048, 132), plans.Shape(8192, 262144, 2048, 132)
    chosen = [plans.choose(shape, fused, catalog.select(2048, 90), merger, room, **common).kind for shape in shapes]
    assert chosen == ["tiled", "fused"]


def test_paged_and_contiguous_bf16_keys() -> None:
    kinds = {(s.store, s.layout) for s in SHIPPED.values() if isinstance(s, TopKSpec | LogitsSpec)}
    assert kinds >= {("fp8", "paged"), ("bf16", "paged"), ("bf16", "contiguous")}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("store", STORES)
def test_plans_agree_on_what_decides_the_bits_of_a_score(arch: int, store: str) -> None:
    """Fused, split and tiled, paged and contiguous: the same heads by rows in a tile, the same warps."""
    for heads, dim in itertools.product(HEADS, DIMS):
        classes = set()
        for layout in ("paged", "contiguous"):
            common = {"heads": heads, "arch": arch, "dim": dim, "store": store, "layout": layout}
            made: list[ScoreSpec] = [
                catalog.topk(topk=64, **common),  # type: ignore[arg-type]
                catalog.split(topk=64, **common),  # type: ignore[arg-type]
                catalog.logits(**common),  # type: ignore[arg-type]
            ]
            classes |= {(spec.heads, spec.dim, spec.store, spec.block_queries, spec.warps) for spec in made}
        assert len(classes) == 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("topk", [16, 48, 512, 1024, 2000, 2048])
def test_every_selection_has_room(arch: int, topk: int) -> None:
    """The specs refuse a capacity that is too small, so making them is the test."""
    for heads in HEADS:
        assert catalog.topk(heads=heads, topk=topk, arch=arch).capacity >= 2 * topk or arch == catalog.INTERPRETER
    assert catalog.select(topk, arch).capacity >= topk + catalog.select(topk, arch).block
    assert catalog.merge(topk, arch).capacity >= topk + catalog.merge(topk, arch).block


def test_another_architecture_changes_the_launch_and_not_the_name() -> None:
    for spec, arch in itertools.product(SHIPPED.values(), (80, 90, 94, 100)):
        assert catalog.for_arch(spec, arch).name == spec.name
    for spec in SHIPPED.values():
        assert catalog.for_arch(spec, 90) == spec, "what ships has the settings of sm_90"


def test_cards_with_little_shared_memory_get_the_careful_settings() -> None:
    assert [catalog.settings_of(arch) for arch in (80, 86, 89, 90, 94, 95, 100, 103, 120)] == [
        80, 80, 80, 90, catalog.AMD, catalog.AMD, 90, 90, 80,
    ]  # fmt: skip


def test_the_crossover_names_every_store_and_says_why() -> None:
    assert set(catalog.CROSSOVER) == set(STORES)
    assert all(entry.keys > 0 and len(entry.reason) > 5 for entry in catalog.CROSSOVER.values())


@pytest.mark.parametrize("spec", SHIPPED.values(), ids=SHIPPED)
def test_texts_are_whole_and_readable(spec: KernelSpec) -> None:
    text = generate(spec)
    assert text == generate(spec)
    tree = ast.parse(text)
    kernel = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "kernel")
    meta = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    assert [argument.arg for argument in kernel.args.args] == list(meta["signature"])
    assert set(meta["aligned"]) | set(meta["scratch"]) <= set(meta["signature"])
    assert ast.get_docstring(kernel)
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.splitlines()) <= 200
    # Every function is called, so a text holds nothing that it does not use.
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} - {"kernel"}
    assert functions <= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
