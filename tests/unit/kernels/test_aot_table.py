# SPDX-License-Identifier: Apache-2.0
"""Shipped kernels, compiled for GPUs that are not there: what they occupy, and the table that must not get worse.

``docs/kernels.json`` holds the table; ``pcp kernels --write docs/kernels.md`` renews it. Here every kernel is compiled
for one target, in the soak tier for all. Nothing is taken from Triton's cache.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pcp_kernels import aot, aot_table, catalog, inspect_aot, specs, store
from pcp_kernels.aot import TARGETS, Unsupported, compile_spec
from pcp_kernels.aot_table import Row, measure, measure_pairs, rows_of, table_json, violations, worse
from pcp_passes.cli.kernels import BEGIN, END, kernels_app, markdown, write_table
from pcp_passes.errors import ConfigError

pytest.importorskip("triton")

DOCS = Path(__file__).parents[3] / "docs"
RECORDED = json.loads((DOCS / "kernels.json").read_text())
SHIPPED = catalog.shipped()
# fp8 values reach these kernels as e4m3, which Triton does not have on sm_80; the others hold them as bytes.
NO_FP8 = {(name, "sm_80") for name, spec in SHIPPED.items() if spec.k_loop and getattr(spec, "store", "") == "fp8"}


@pytest.fixture(autouse=True, scope="module")
def compile_in_earnest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Triton cache that is empty at first, also for the processes that compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def cover() -> list[tuple[specs.KernelSpec, str]]:
    """Every kernel once: the targets take turns, within the kernels that scan keys and within the others."""
    pairs = []
    for scans in (True, False):
        targets = ["sm_90", "sm_100", "sm_80", "gfx942"]
        for number, spec in enumerate(spec for spec in SHIPPED.values() if spec.k_loop == scans):
            allowed = [name for name in targets if (spec.name, name) not in NO_FP8]
            pairs.append((spec, allowed[number % len(allowed)]))
    return pairs


@pytest.mark.timeout(600)
def test_every_kernel_compiles_and_none_is_worse_than_recorded() -> None:
    pairs = cover()
    assert {spec.name for spec, _ in pairs} == set(SHIPPED)
    assert {target for _, target in pairs} == set(TARGETS)
    rows = measure_pairs(pairs)
    assert [row.key for row in rows] == [(spec.name, target) for spec, target in pairs]
    assert not [row for row in rows if row.unsupported]
    assert worse(RECORDED, rows) == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_kernels_on_all_targets() -> None:
    rows = measure(SHIPPED.values())
    assert {row.key for row in rows if row.unsupported} == NO_FP8
    assert worse(RECORDED, rows) == []


def test_the_recorded_table_is_whole_and_breaks_no_rule() -> None:
    rows = rows_of(RECORDED)
    assert [row.key for row in rows] == [(name, target) for name in SHIPPED for target in TARGETS]
    assert {row.key for row in rows if row.unsupported} == NO_FP8
    assert [sentence for row in rows for sentence in violations(row)] == []
    assert all(row.spills == 0 for row in rows)
    families = {(row.target, row.matrix_instructions) for row in rows if row.k_loop and not row.unsupported}
    # 16 heads of the sparse attention are too few rows for wgmma and tcgen05, which need 64.
    assert families == {
        ("sm_80", "mma.sync"), ("sm_90", "wgmma"), ("sm_90", "mma.sync"), ("sm_100", "tcgen05"),
        ("sm_100", "mma.sync"), ("gfx942", "mfma"),
    }  # fmt: skip
    assert markdown(RECORDED) in (DOCS / "kernels.md").read_text(), "pcp kernels --write docs/kernels.md"


GOOD = next(row for row in rows_of(RECORDED) if row.family == "topk" and row.target == "sm_90")


@pytest.mark.parametrize(
    "change, named",
    [
        ({"spills": 8}, "spills 8 bytes per thread; required: 0"),
        ({"registers": GOOD.registers + 1}, f"{GOOD.registers + 1} registers, {GOOD.registers} recorded"),
        ({"registers": 256}, "256 registers per thread; required: at most 255"),
        ({"shared_bytes": 227 * 1024 + 1}, "232449 bytes of shared memory; required: at most 232448"),
        ({"shared_bytes": GOOD.shared_bytes + 16}, f"{GOOD.shared_bytes} recorded"),
        ({"matrix_instructions": "none"}, "scans keys without matrix instructions"),
        ({"matrix_instructions": "mma.sync"}, "mma.sync, wgmma recorded"),
        ({"async_copies": 0}, "scans keys without asynchronous copies"),
        ({"async_copies": GOOD.async_copies - 1}, f"{GOOD.async_copies} recorded"),
        ({"unsupported": "no such thing"}, "compiled before, now no such thing"),
        ({"target": "sm_80"}, "compiled"),
        ({"spec": "topk_new"}, "not in the table"),
    ],
)
def test_a_worse_row_is_named(change: dict[str, Any], named: str) -> None:
    assert worse(RECORDED, [GOOD], RECORDED["triton"]) == []
    if change.get("target") == "sm_80":
        # The other way round is no loss: the recorded table has no e4m3 kernel there.
        assert worse(RECORDED, [dataclasses.replace(GOOD, **change)], RECORDED["triton"]) == []
        return
    found = worse(RECORDED, [dataclasses.replace(GOOD, **change)], RECORDED["triton"])
    assert any(named in sentence for sentence in found), found


@pytest.mark.parametrize("target, kib", [("sm_80", 163), ("sm_90", 227), ("sm_100", 227), ("gfx942", 64)])
def test_shared_memory_has_the_limit_of_its_target(target: str, kib: int) -> None:
    row = Row(spec="x", family="select", target=target, shared_bytes=kib * 1024)
    assert violations(row) == []
    assert violations(dataclasses.replace(row, shared_bytes=kib * 1024 + 1))


def test_another_triton_has_slack_in_registers_and_none_in_the_rules() -> None:
    more = dataclasses.replace(GOOD, registers=GOOD.registers + aot_table.REGISTER_SLACK, shared_bytes=99999)
    assert worse(RECORDED, [more], "3.6.0") == []
    assert worse(RECORDED, [more], RECORDED["triton"]) != []
    assert worse(RECORDED, [dataclasses.replace(more, registers=more.registers + 1)], "3.6.0") != []
    assert worse(RECORDED, [dataclasses.replace(more, spills=4)], "3.6.0") != []


def sums_over_heads(spec: specs.KernelSpec) -> list[str]:
    """How the summands over heads lie in registers, lanes and warps on sm_90: what decides the order of a sum."""
    module = store.load(spec)
    meta = module.META
    text = aot._compile(
        module.kernel, meta["signature"], {}, meta["aligned"], TARGETS["sm_90"], num_warps=meta["num_warps"],
        num_stages=meta["num_stages"], enable_fp_fusion=meta["enable_fp_fusion"],
    ).asm["ttgir"]  # fmt: skip
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    found = re.findall(r"axis = 2 : i32.*?\}\) : \(tensor<([^,]*), (#\w+)>\)", text, re.DOTALL)
    return [f"{shape} {layouts[layout]}" for shape, layout in found]


def test_fused_tiled_and_split_plans_sum_over_heads_in_one_order() -> None:
    """Their scores are equal bit for bit only then, and so are their selections."""
    sizes = {"heads": 32, "arch": 90}
    wanted = sums_over_heads(catalog.logits(**sizes))  # type: ignore[arg-type]
    assert len(wanted) == 1
    assert sums_over_heads(catalog.topk(topk=2048, **sizes)) == wanted  # type: ignore[arg-type]
    assert sums_over_heads(catalog.split(topk=2048, **sizes)) == wanted  # type: ignore[arg-type]
    other = dataclasses.replace(catalog.logits(**sizes), warps=4)  # type: ignore[arg-type]
    assert sums_over_heads(other) not in ([], wanted)


def test_a_kernel_that_does_not_fit_spills_in_the_measurement() -> None:
    crowded = dataclasses.replace(catalog.topk(heads=64, topk=2048, arch=90), warps=4)
    found = compile_spec(crowded, TARGETS["sm_90"])
    assert found.spill_bytes > 0


def test_a_barrier_in_the_inner_loop_costs_the_asynchronous_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rule on copies is for: Triton pipelines a loop only without barriers and branches."""
    spec = catalog.logits(heads=16, arch=90, store="bf16", layout="contiguous")
    assert spec.stages != 3, "the store remembers what it has loaded"
    assert compile_spec(spec, TARGETS["sm_90"]).async_copies > 0
    text = store.generate(spec)
    lines = text.splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if "tl.range(" in line) + 1
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    spoiled = "".join([*lines[:place], f"{indent}tl.debug_barrier()\n", *lines[place:]])
    monkeypatch.setattr(store, "generate", lambda *_: spoiled)
    found = compile_spec(dataclasses.replace(spec, stages=3), TARGETS["sm_90"])
    assert found.async_copies == 0
    row = Row(spec="x", family="logits", target="sm_90", k_loop=True, matrix_instructions=found.matrix_instructions)
    assert any("asynchronous copies" in sentence for sentence in violations(row))


def test_fp8_on_sm_80_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="no e4m3 values"):
        compile_spec(catalog.logits(heads=32, arch=80), TARGETS["sm_80"])


@pytest.mark.parametrize(
    "assembly, family, copies",
    [
        ("wgmma.mma_async.sync.aligned.m64n128k32", "wgmma", 0),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], ...\ncp.async.cg.shared.global [%r1], [%r2], 16;", "tcgen05", 1),
        ("mma.sync.aligned.m16n8k16\ncp.async.ca.shared.global [a], [b], 4;\ncp.async.wait_group 1;", "mma.sync", 1),
        ("cp.async.commit_group;\ncp.async.wait_all;", "none", 0),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier [a]", "none", 1),
        ("v_mfma_f32_16x16x16_f16 v[0:3]\n  buffer_load_dwordx4 v1, s[0:3], 0 offen lds", "mfma", 1),
    ],
)
def test_assembly_is_read_for_what_it_does(assembly: str, family: str, copies: int) -> None:
    assert inspect_aot.matrix_family(assembly) == family
    assert inspect_aot.async_copies(assembly) == copies


class TestCommand:
    def test_the_list_names_every_kernel(self) -> None:
        run = CliRunner().invoke(kernels_app, [], env={"COLUMNS": "160"})
        assert run.exit_code == 0
        assert all(name in run.stdout for name in SHIPPED)

    def test_show_prints_the_text_and_writes_its_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "new"))
        name = "remap_k2048_page64_count"
        path = store.folder(SHIPPED[name]) / "kernel.py"
        listed = CliRunner().invoke(kernels_app, ["--spec", name]).stdout
        assert f"{name}  {path}  (not written yet)\n" in listed
        run = CliRunner().invoke(kernels_app, ["show", name])
        assert run.stdout == path.read_text() == store.generate(SHIPPED[name])
        assert run.stderr == f"file: {path}\n"
        assert f"{name}  {path}\n" in CliRunner().invoke(kernels_app, ["--spec", name]).stdout

    @pytest.mark.parametrize("arguments", [[], ["show", "remap_k2048_page64_count"]])
    def test_a_cache_that_is_a_file(
        self, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("kept")
        monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "file"))
        run = CliRunner().invoke(kernels_app, arguments)
        assert isinstance(run.exception, ConfigError)
        assert "file is no folder. Set PCP_KERNELS_CACHE" in str(run.exception)
        assert run.stdout == "", "what cannot be had is said first"
        assert (tmp_path / "file").read_text() == "kept"

    def test_json_is_the_table_of_what_was_asked_for(self) -> None:
        arguments = ["--json", "--spec", "remap_k2048_page64_count", "--target", "sm_90", "--jobs", "1"]
        run = CliRunner().invoke(kernels_app, arguments)
        assert run.exit_code == 0, run.output
        data = json.loads(run.stdout)
        recorded = {row.key: row for row in rows_of(RECORDED)}
        assert [row.key for row in rows_of(data)] == [("remap_k2048_page64_count", "sm_90")]
        assert set(data["rows"][0]) == {
            "spec", "family", "target", "k_loop", "registers", "spills", "shared_bytes", "matrix_instructions",
            "async_copies", "unsupported",
        }  # fmt: skip
        if data["triton"] == RECORDED["triton"]:
            assert rows_of(data) == [recorded["remap_k2048_page64_count", "sm_90"]]

    @pytest.mark.parametrize(
        "arguments, named",
        [
            (
                ["show", "topk_h32_d128_bf16_paged_k2048"],
                "unknown kernel 'topk_h32_d128_bf16_paged_k2048'. Did you mean 'topk_h32_d128_bf16_paged64_k2048'? "
                "`pcp kernels` lists the 28 there are.",
            ),
            (["show", "x"], "unknown kernel 'x'. `pcp kernels` lists the 28 there are."),
            (["--target", "sm_90"], "without --json nothing is compiled: add --json"),
            (["--json", "--target", "sm_70"], "unknown target 'sm_70'"),
            (["--write", "x.md", "--target", "sm_90"], "leave out --spec and --target"),
        ],
    )
    def test_mistakes_are_named(self, arguments: list[str], named: str) -> None:
        run = CliRunner().invoke(kernels_app, arguments)
        assert isinstance(run.exception, ConfigError)
        assert named in str(run.exception)

    def test_writing_renews_the_table_and_nothing_else(self, tmp_path: Path) -> None:
        path = tmp_path / "kernels.md"
        path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
        data = table_json([GOOD])
        write_table(path, data)
        assert path.read_text() == f"before\n{BEGIN}\n\n{markdown(data)}\n{END}\nafter\n"
        assert rows_of(json.loads(path.with_suffix(".json").read_text())) == [GOOD]
        path.write_text("no marks")
        with pytest.raises(ConfigError, match="found no table to renew"):
            write_table(path, data)
        assert path.read_text() == "no marks"


def test_targets_without_a_compiler_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown target sm_70; supported: sm_80, sm_90, sm_100, gfx942"):
        measure(SHIPPED.values(), ["sm_70"])
    assert "TRITON_INTERPRET" not in os.environ
