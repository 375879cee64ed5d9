# SPDX-License-Identifier: Apache-2.0
"""The script for GPUs, run on tiny shapes in Triton's interpreter; what it reports as wrong, late or left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pcp_kernels import catalog
from tests.interpreted import Interpreted

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "sparse_index_gpu.py"
CPU = torch.device("cpu")


def script(folder: Path, *arguments: str, before: str = "", status: int = 0) -> dict[str, Any]:
    """Run the script, after ``before`` if there is any; returns its report."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PCP_KERNELS_CACHE": str(folder / "cache")}
    command = [sys.executable, str(SCRIPT)]
    if before:
        environment |= {"TRITON_INTERPRET": "1", "PCP_KERNELS": "interpreter"}
        code = f"import runpy, sys\nsys.path.insert(0, {str(ROOT / 'kernels')!r})\n{before}\n"
        command = [sys.executable, "-c", code + f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"]
    done = subprocess.run(
        [*command, "--interpret", "--json", *arguments], env=environment, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """The script's modules in this process, where operators run the references."""
    path, loaded = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(ROOT / "benchmarks")]
    import sparse_index_gpu
    from sparse_index import cases, checks, problems, run, speeds

    yield SimpleNamespace(main=sparse_index_gpu, cases=cases, checks=checks, problems=problems, run=run, speeds=speeds)
    sys.path[:] = path
    for name in set(sys.modules) - loaded:
        if name.startswith("sparse_index"):
            del sys.modules[name]


def test_every_section_runs_in_the_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "results"
    found = script(tmp_path, "--families", "owner", "select", "logits", "--out", str(out))
    assert {name.split("_")[0] for name in found["correctness"]} == {"owner", "select", "logits"}
    assert set(found["correctness"].values()) == {"right"}
    assert found["repeats"]["select_k16"] == "3 of 3"
    assert found["plans"] and all(plan["equal"] for plan in found["plans"].values())
    assert {row["what"] for row in found["times"]} == {"logits", "selection", "tiled", "fused", "decode"}
    assert all(row["ms"] is None for row in found["times"])
    assert "interpreter" in found["card"]
    assert found["failures"] == []
    assert found["skipped"] == ["ceilings: speeds are not measured in the interpreter", "racecheck: no CUDA device"]
    (kept,) = out.glob("*.json")
    assert json.loads(kept.read_text()) == found
    assert (out / "sparse_index.md").read_text().count(found["date"]) == 1


def test_a_kernel_that_is_wrong_or_cannot_run_is_reported(tmp_path: Path) -> None:
    """Sabotage: the text of the fused kernel without its relu, and no kernel of another family. The others run."""
    before = """
from pcp_kernels import store
generate = store.generate
def broken(spec, interpret=False):
    text = generate(spec, interpret)
    if spec.family == "owner":
        raise RuntimeError("no such kernel")
    if spec.family == "topk":
        assert text.count("tl.maximum(dots, 0.0)") == 1
    return text.replace("tl.maximum(dots, 0.0)", "dots")
store.generate = broken
"""
    arguments = ("--families", "topk", "owner", "scatter", "--only", "correctness")
    found = script(tmp_path, *arguments, before=before, status=1)
    says = found["correctness"]
    assert says.pop("owner_k16") == "failed"
    assert {name.split("_")[0] for name, value in says.items() if value == "right"} == {"scatter"}
    assert {name.split("_")[0] for name, value in says.items() if "rows are wrong" in value} == {"topk"}
    assert "correctness owner_k16: RuntimeError: no such kernel" in found["failures"]
    assert len(found["failures"]) == 1 + sum(value != "right" for value in says.values())


def runs(parts: SimpleNamespace, **given: Any) -> Any:
    return parts.run.Run(CPU, True, script=str(SCRIPT), **given)


MOVED = {"pack", "latent", "scatter", "latent_scatter", "prep", "remap", "owner"}


def test_every_shipped_family_has_a_case(parts: SimpleNamespace) -> None:
    from pcp_kernels import catalog

    assert {spec.family for spec in catalog.shipped().values()} == set(parts.problems.ALL)


def test_what_moves_bytes_is_compared_byte_by_byte(parts: SimpleNamespace) -> None:
    """Sabotage of each case: here operators run the references, so only the changed bytes are wrong."""
    seen = set()
    for spec in runs(parts).specs():
        if spec.family not in MOVED:
            continue
        case = parts.problems.ALL[spec.family](spec, runs(parts).inputs())
        outputs = case.run()
        assert case.wrong(outputs) == "", spec.name
        changed = [value.clone() for value in outputs]
        # A LayerNorm leaves a small share of bytes to rounding, so more than that is changed.
        changed[0].view(torch.uint8).view(-1)[:: 1 if getattr(spec, "norm", False) else 977] ^= 1
        assert "bytes differ" in case.wrong(tuple(changed)), spec.name
        seen.add(spec.family)
    assert seen == MOVED


def test_attention_that_is_off_is_seen(parts: SimpleNamespace) -> None:
    for spec in runs(parts, families=frozenset({"mla"})).specs():
        case = parts.problems.ALL["mla"](spec, runs(parts).inputs())
        out, lse = case.run()
        assert case.wrong((out, lse)) == ""
        assert "output is" in case.wrong((out * 1.1, lse))
        assert "log-sum-exp is" in case.wrong((out, lse + 0.1))
        assert "empty row" in case.wrong((out + torch.eye(1, len(out))[0][:, None, None], lse))


def test_paged_attention_that_is_off_is_seen(parts: SimpleNamespace) -> None:
    for spec in runs(parts, families=frozenset({"paged"})).specs():
        case = parts.problems.ALL["paged"](spec, runs(parts).inputs())
        (out,) = case.run()
        assert case.wrong((out,)) == "", spec.name
        assert "output is" in case.wrong((out * 1.1,))
        assert "empty row gives 1" in case.wrong((out + torch.eye(1, len(out))[0][:, None, None],))


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_a_selection_that_is_off_is_seen(parts: SimpleNamespace, layout: str) -> None:
    from pcp_kernels.reference import select

    spec = next(s for s in runs(parts, families=frozenset({"topk"})).specs() if s.layout == layout)
    given = parts.problems.mixed(spec, runs(parts).inputs(), spec.topk)
    cache, table = given.paged
    right = select.topk_paged(given.q, given.w, cache, table, given.request, given.ke, spec.topk, given.page)
    scale = None if given.scale is None else given.scale.flatten()
    ends = given.first + given.ke
    rows = select.topk_rows(given.q, given.w, given.keys.flatten(0, 1), scale, given.first, ends, spec.topk)
    assert torch.equal(right, rows), "both layouts hold the same keys"
    assert parts.problems.compare(right, given, spec.topk) == ""
    for wrong in (right.flip(1), right.roll(1, 0), right.clamp(min=0)):
        assert "rows are wrong" in parts.problems.compare(wrong, given, spec.topk)
    worst = right.clone()
    unseen = set(range(int(given.ke[-1]))) - set(right[-1].tolist())
    worst[-1, 0] = min(unseen, key=lambda key: float(given.scores[-1, key]))
    worst[-1] = worst[-1].sort().values
    assert "rows are wrong" in parts.problems.compare(worst, given, spec.topk)


def scores_are_wrong(layout: str, keys: int) -> str:
    """What the case of the scorer says in the interpreter, with more keys than one program covers."""
    sys.path[:0] = [str(ROOT / "benchmarks")]
    from sparse_index import cases, problems

    spec = catalog.logits(heads=4, arch=catalog.INTERPRETER, dim=32, store="fp32", layout=layout, page=16)
    case = problems.ALL["logits"](spec, cases.Inputs(CPU, 9, keys))
    wrong: str = case.wrong(case.run())
    return wrong


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_scores_of_a_tile_of_two_requests_are_all_computed(interpreted: Interpreted, layout: str) -> None:
    assert interpreted(scores_are_wrong, layout, 700) == ""


def test_what_there_is_no_time_for_is_named(parts: SimpleNamespace) -> None:
    run = runs(parts, families=frozenset({"owner"}), deadline=0.0)
    assert parts.checks.correctness(run) == {}
    assert parts.speeds.times(run) == []
    assert run.skipped[0] == "correctness owner_k16: no time left"
    assert "times fp8 4 heads decode 3 x 150: no time left" in run.skipped


def test_fp8_products_are_left_out_where_a_card_has_none(
    parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    run = parts.run.Run(CPU, False)
    names = [spec.name for spec in run.specs()]
    assert not any("fp8" in name for name in names if name.startswith(("topk", "logits", "split", "mla")))
    assert "pack_d128_half_r64_norm_fp8" in names, "records of bytes are made without fp8 instructions"
    assert len(names) + len(run.skipped) == len(set(names)) + len(run.skipped) > 20
    assert all(what.endswith("this card has no fp8 products") for what in run.skipped)


@pytest.mark.parametrize(
    "does, says",
    [
        ("exit 0", "no hazard"),
        ("echo 'Race reported'; exit 9", "exit 9: Race reported"),
        ("sleep 30 & sleep 30", "out of time"),
    ],
)
def test_what_compute_sanitizer_says(parts: SimpleNamespace, tmp_path: Path, does: str, says: str) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\n[ "$1 $2" = "--tool racecheck" ] || exit 77\n{does}\n')
    tool.chmod(0o755)
    began = time.monotonic()
    assert parts.checks.sanitize(str(tool), "racecheck", 2.0, ["script.py", "--tiny"]).startswith(says)
    assert time.monotonic() - began < 20, "what the tool has started does not keep us waiting"


def test_the_child_of_compute_sanitizer_runs_every_kernel(tmp_path: Path) -> None:
    """The tool in front of it is one that starts its command and does nothing else."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PCP_KERNELS_CACHE": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--interpret", "--tiny", "--families", "scatter", "merge"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    made = {json.loads(path.read_text())["spec"]["family"] for path in tmp_path.glob("*/spec.json")}
    assert made == {"scatter", "split", "merge"}


def test_a_run_that_hangs_is_ended_with_what_there_is(parts: SimpleNamespace, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'benchmarks')!r}, {str(ROOT / 'kernels')!r}]\n"
        "import time, sparse_index_gpu as s\nfrom sparse_index import checks\ns.GRACE_S = 1\n"
        "checks.correctness = lambda run: time.sleep(60)\n"
        f"s.main(['--interpret', '--minutes', '0.01', '--only', 'correctness', '--out', {str(tmp_path)!r}])"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "PCP_KERNELS": "interpreter"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 3, done.stderr[-2000:]
    (kept,) = tmp_path.glob("*.json")
    assert "still running after" in json.loads(kept.read_text())["failures"][0]


def test_speeds_are_shares_of_the_measured_ceiling(parts: SimpleNamespace) -> None:
    run = runs(parts)
    run.results["ceilings"] = {"fp8_tflops": 1000.0, "copy_gbps": 4000.0}
    shape = {"what": "tiled", "store": "fp8", "heads": 32, "rows": 1, "keys": 1}
    row = parts.speeds._row(run, shape, 1e-3, 5e11, 1e9)
    assert (row["ms"], row["tflops"], row["gbps"]) == (1.0, 500.0, 1000.0)
    assert (row["tflops_share"], row["gbps_share"]) == (0.5, 0.25)
    report = {
        "date": "2030-01-01", "card": "Some Card", "torch": "2", "triton": "3", "times": [row],
        "correctness": {"a": "right", "b": "no"}, "failures": ["b"], "skipped": [],
    }  # fmt: skip
    assert parts.main.line(report) == (
        "| 2030-01-01 | Some Card | torch 2, Triton 3 | 1 of 2 kernels right | 1 failures | tiled 50% | 0 left out |"
    )
