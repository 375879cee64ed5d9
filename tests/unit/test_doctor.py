# SPDX-License-Identifier: Apache-2.0
"""``pcp doctor``: each fault of an environment is a problem with advice; the self-test fails when ranks are wrong."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from textwrap import indent
from typing import Any, get_args

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pcp_passes import collectives, distributed
from pcp_passes.cli import app, selftest
from pcp_passes.collectives import bound_axis
from pcp_passes.frontends.vllm import cpu_runner, plugin, versions
from pcp_passes.plan import StepPlan
from pcp_passes.proof import PROOFS, Level

#: ``pcp_passes.cli.doctor`` is the command of that name until the module is imported.
doctor: Any = importlib.import_module("pcp_passes.cli.doctor")
ROOT = Path(__file__).resolve().parents[2]
CHECKS = [f"round trip, {kind}, {decode}" for kind in ("zigzag", "contiguous") for decode in ("replicate", "owner")]
DISAGREEMENT = "disagreement is seen"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``examine`` on a made-up machine: versions by distribution, a vLLM tree, variables, entry points."""
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", cpu_runner.SWITCH):
        monkeypatch.delenv(name, raising=False)

    def examine(
        vllm: str | None = "0.32.0",
        sources: Callable[[Path], None] = lambda root: None,
        env: dict[str, str] | None = None,
        points: tuple[str, ...] = (doctor.ENTRY_POINT[2],),
        gpu: bool = False,
        **distributions: str | None,
    ) -> dict[str, Any]:
        found = {"torch": "2.13.0+cpu", "triton": "3.9.0", "transformers": "5.19.0"} | distributions
        tree = None if vllm is None else write_tree(tmp_path, vllm)
        sources(tmp_path)
        group, name, _ = doctor.ENTRY_POINT
        monkeypatch.setattr(doctor, "_installed", found.get)
        monkeypatch.setattr(doctor, "vllm_tree", lambda: tree)
        listed = [metadata.EntryPoint(name, value, group) for value in points]
        monkeypatch.setattr(metadata, "entry_points", lambda group: listed)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpu))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
        for key, value in (env or {}).items():
            monkeypatch.setenv(key, value)
        return doctor.examine(self_test=False)

    return examine


def write_tree(root: Path, version: str) -> Path:
    """Sources with every function that the front end expects of ``version``, and nothing else."""
    modules: dict[str, dict[str, list[str]]] = {}
    for symbol in versions.SYMBOLS:
        names = symbol.expected(version)
        owner, _, function = symbol.qualname.partition(".")
        if names is not None:
            code = f"def {function or owner}({', '.join(names)}): ..."
            modules.setdefault(symbol.module, {}).setdefault(owner if function else "", []).append(code)
    for module, classes in modules.items():
        path = root / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = [f"class {owner}:\n" + indent("\n".join(body), "    ") for owner, body in classes.items() if owner]
        path.write_text("\n".join((*parts, *classes.get("", []))))
    (root / "vllm/_version.py").write_text(f"version: str\n__version__ = version = '{version}'\n")
    return root


def check(findings: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [c for key in ("environment", "plugin", "self_test") for c in findings[key] if c["name"] == name]
    return found  # type: ignore[no-any-return]


Machine = Callable[..., dict[str, Any]]


def test_good_machine_is_healthy(machine: Machine) -> None:
    found = machine(gpu=True)
    assert found["healthy"]
    assert check(found, "vllm")["found"] == f"0.32.0 ({versions.KNOWN['0.32']})"
    assert check(found, "Model Runner V2")["found"] == "possible: Triton and a GPU"
    assert check(found, "signatures")["status"] == "ok"
    assert check(found, "devices")["found"] == "NVIDIA H200" and "run on a GPU" in check(found, "devices")["next"]
    assert found["self_test"] == []


PROBLEMS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "old torch": ({"torch": "2.10.1"}, "torch", "2.10.1", "install torch >=2.11,<2.16"),
    "new torch": ({"torch": "2.16.0.dev1"}, "torch", "2.16.0.dev1", "install torch >=2.11,<2.16"),
    "no torch": ({"torch": None}, "torch", "not installed", "install torch"),
    "old triton": ({"triton": "3.5.1"}, "triton", "3.5.1", "install triton >=3.6,<3.10"),
    "new triton": ({"triton": "3.10.0"}, "triton", "3.10.0", "install triton >=3.6,<3.10"),
    "new vllm": ({"vllm": "0.34.0"}, "vllm", "0.34.0", "Install a known version"),
    "no entry point": ({"points": ()}, "entry point", "not found", "pip install -e ."),
    "other entry point": ({"points": ("pcp_passes:old",)}, "entry point", "pcp_passes:old", "pip install -e ."),
    "filtered": ({"env": {"VLLM_PLUGINS": "a,b"}}, "VLLM_PLUGINS", "'a,b'", "unset it, or add pcp_passes"),
    "filtered to none": ({"env": {"VLLM_PLUGINS": ""}}, "VLLM_PLUGINS", "''", "unset it, or add pcp_passes"),
    "v1": ({"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, "Model Runner V2", "RUNNER=0", "unset it, or set it to 1"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_fault_is_one_problem_with_advice(name: str, machine: Machine) -> None:
    arguments, where, found, advice = PROBLEMS[name]
    findings = machine(**arguments)
    assert not findings["healthy"]
    assert [c["name"] for key in ("environment", "plugin") for c in findings[key] if c["status"] == "problem"] == [
        where
    ]
    assert found in check(findings, where)["found"] and advice in check(findings, where)["next"]
    assert "1 problem" in rendered(findings)


@pytest.mark.parametrize("change", ["renamed", "gone", "no module", "unreadable"])
def test_changed_vllm_is_a_problem_naming_the_function(change: str, machine: Machine) -> None:
    def edit(root: Path) -> None:
        path = root / "vllm/v1/worker/gpu/pcp_manager.py"
        source = path.read_text()
        if change == "no module":
            path.unlink()
        elif change == "unreadable":
            path.write_text(source + "\n???")
        else:
            new = "def partition_batch(self, batch, desc)" if change == "renamed" else "def partition(self)"
            path.write_text(source.replace("def partition_batch(self, input_batch, batch_desc)", new))

    findings = machine(sources=edit)
    signatures = check(findings, "signatures")
    assert not findings["healthy"] and signatures["status"] == "problem"
    assert "PCPManager.partition_batch: expected ('self', 'input_batch', 'batch_desc'), found " in signatures["found"]
    wrong = {"renamed": 1, "gone": 1}.get(change, source_count("pcp_manager"))
    assert len(signatures["found"].splitlines()) == wrong
    assert "pcp_passes.mode=off" in signatures["next"]


def source_count(module: str) -> int:
    return sum(s.module.endswith(module) and s.expected("0.32.0") is not None for s in versions.SYMBOLS)


def test_machine_without_vllm_is_healthy_and_says_so(machine: Machine) -> None:
    found = machine(vllm=None, triton=None, transformers=None, points=())
    assert found["healthy"]
    assert check(found, "vllm") == {
        "name": "vllm",
        "found": "not installed",
        "status": "note",
        "next": "for the vLLM front end, install 0.32 or 0.33",
    }
    assert {c["name"] for c in found["plugin"]} == {"entry point", "VLLM_PLUGINS"}
    assert "vllm" in rendered(found) and "healthy" in rendered(found)


def test_machine_without_device_names_the_stand_ins(machine: Machine) -> None:
    found = check(machine(), "Model Runner V2")
    assert found["status"] == "note" and "cpu_runner.enable()" in found["next"]
    found = check(machine(env=cpu_runner.environment()), "Model Runner V2")
    assert found["status"] == "ok" and cpu_runner.SWITCH in found["found"]
    found = check(machine(triton=None), "Model Runner V2")
    assert found["status"] == "note" and "Triton, which is not installed" in found["found"]


def test_vllm_is_found_without_importing_it() -> None:
    program = (
        "import importlib, json, sys; doctor = importlib.import_module('pcp_passes.cli.doctor')\n"
        "found = doctor.examine(self_test=False); assert 'vllm' not in sys.modules\n"
        "print(json.dumps([found['healthy'], doctor.vllm_tree() is not None, found['plugin']]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    _, installed, checks = json.loads(done.stdout)
    assert ("signatures" in {c["name"] for c in checks}) is installed


def test_package_without_vllm_in_a_bare_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that happens to be called vllm is not vLLM."""
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: type("Spec", (), {"origin": None})())
    assert doctor.vllm_tree() is None
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.vllm_tree() is None


# The ladder.


def test_proofs_point_at_tests_that_exist() -> None:
    for proof in PROOFS:
        assert proof.level in get_args(Level)
        assert (ROOT / proof.by).is_file() or (not proof.by and proof.level == "read only"), proof
    assert len({proof.feature for proof in PROOFS}) == len(PROOFS)


def test_proofs_agree_with_what_the_code_says_of_itself() -> None:
    levels = {proof.feature: proof.level for proof in PROOFS}
    assert {name for name in levels if name.startswith("vLLM ")} == {f"vLLM {version}" for version in versions.KNOWN}
    for version, proof in versions.KNOWN.items():
        assert levels[f"vLLM {version}"].startswith("executed on CPU") is proof.startswith("executed on CPU")
    read = {name.rsplit(".", 1)[1] for name, level in plugin._PAGED_IMPLS.items() if level == "read only"}
    assert read == {"FlashAttentionImpl", "TritonAttentionImpl"}
    assert levels["FlashAttention and Triton attention back ends"] == "read only"


def rendered(findings: dict[str, Any]) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(doctor.render_findings(findings))
    return console.export_text()


def test_everything_is_rendered(machine: Machine) -> None:
    text = rendered(machine(env={"VLLM_PLUGINS": "[odd]"}))
    assert "executed on GPU: nothing" in text and "'[odd]'" in text
    assert all(proof.feature in text for proof in PROOFS)


# The self-test.


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return selftest.run()


@pytest.mark.multiproc
def test_two_ranks_pass(good: dict[str, Any]) -> None:
    assert good["failures"] == []
    assert good["passed"] == [*CHECKS, DISAGREEMENT]


def in_threads(kind: str, decode: str) -> list[str]:
    """What the round trip says on both ranks, run as threads of this process that exchange rows in memory."""
    barrier, rows, said = threading.Barrier(selftest.WORLD, timeout=30), [torch.empty(0)] * selftest.WORLD, {}
    local = threading.local()

    def gather(x: torch.Tensor) -> torch.Tensor:
        rows[local.rank] = x
        barrier.wait()
        out = torch.cat(rows)
        barrier.wait()
        return out

    def work(rank: int) -> None:
        local.rank = rank
        said[rank] = selftest._why(lambda: selftest._round_trip(rank, kind, decode))

    with bound_axis(selftest._AXIS, gather):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(selftest.WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [said[rank] for rank in range(selftest.WORLD)]


_expand, _shard, _gather = StepPlan.expand_slots, StepPlan.shard_rows, collectives.all_gather_rows


def _twice(plan: StepPlan, slots: torch.Tensor) -> torch.Tensor:
    plan.write_mask.fill_(True)
    return _expand(plan, slots)


SABOTAGE: dict[str, tuple[Any, str, Callable[..., torch.Tensor], str]] = {
    "restore in rank-major order": (
        StepPlan,
        "restore_rows",
        lambda plan, rows: rows[: plan.layout.num_tokens],
        "restored rows differ from the rows before sharding",
    ),
    "one bit of one row": (
        StepPlan,
        "shard_rows",
        lambda plan, rows: _shard(plan, rows).nextafter(torch.tensor(9.0)) if rows.ndim > 1 else _shard(plan, rows),
        "restored rows differ",
    ),
    "ranks in the wrong order": (
        collectives,
        "all_gather_rows",
        lambda x, pcp, axis: _gather(x, pcp, axis).roll(len(x), 0),
        "restored rows differ",
    ),
    "pads are written": (StepPlan, "expand_slots", _twice, "do not write every cache slot exactly once"),
    "slots of other tokens": (
        StepPlan,
        "expand_slots",
        lambda plan, slots: _expand(plan, slots.flip(1)),
        "written to the cache slots of other tokens",
    ),
    "rows of nobody": (
        StepPlan,
        "shard_rows",
        lambda plan, rows: _shard(plan, rows).zero_(),
        "not those of its rows",
    ),
}


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("decode", ["replicate", "owner"])
@pytest.mark.parametrize("name", ["", *SABOTAGE])
def test_round_trip_sees_every_fault(name: str, kind: str, decode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not name:
        assert in_threads(kind, decode) == ["", ""]
        return
    owner, attribute, fault, why = SABOTAGE[name]
    monkeypatch.setattr(owner, attribute, fault)
    assert all(why in said for said in in_threads(kind, decode))


def test_agreement_that_never_complains_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "open_store", lambda *args, **options: None)
    monkeypatch.setattr(distributed, "require_agreement", lambda *args, **options: None)
    assert selftest._agreement(0, None) == "two ranks with different graphs agreed"  # type: ignore[arg-type]


def sabotaged(tmp_path: Path, source: str) -> tuple[str, ...]:
    script = tmp_path / "sabotage.py"
    script.write_text(
        f"import sys\nfrom pcp_passes.plan import StepPlan\nfrom pcp_passes.cli.selftest import main\n{source}\n"
        "main(sys.argv[1:])\n"
    )
    return (str(script),)


@pytest.mark.multiproc
def test_wrong_restore_is_seen_by_both_ranks(tmp_path: Path) -> None:
    wrong = "StepPlan.restore_rows = lambda self, rows: rows[: self.layout.num_tokens]"
    result = selftest.run(program=sabotaged(tmp_path, wrong))
    assert result["passed"] == [DISAGREEMENT]
    assert [failure.split(": ")[:2] for failure in result["failures"]] == [
        [f"rank {rank}", check] for rank in range(selftest.WORLD) for check in CHECKS
    ]
    assert all("restored rows differ from the rows before sharding" in failure for failure in result["failures"])


@pytest.mark.multiproc
def test_rank_that_hangs_is_ended(tmp_path: Path) -> None:
    program = sabotaged(tmp_path, "import time\nif sys.argv[1] == '1': time.sleep(600)")
    begin = time.monotonic()
    result = selftest.run(timeout_s=6.0, program=program)
    assert time.monotonic() - begin < 30
    assert result["passed"] == [] and result["failures"] == ["rank 0 and 1 did not finish within 6 s and was ended"]


@pytest.mark.multiproc
def test_rank_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    program = sabotaged(tmp_path, "if sys.argv[1] == '1': raise SystemExit('no memory left')")
    result = selftest.run(program=program)
    assert result["failures"] == ["rank 1 ended with exit status 1: no memory left"]


@pytest.mark.multiproc
def test_command_ends_with_the_verdict(monkeypatch: pytest.MonkeyPatch, good: dict[str, Any]) -> None:
    """The exit status follows the self-test, and without it the environment alone."""
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    broken = good | {"passed": [], "failures": ["rank 0: round trip: 3 of 4 restored rows differ"]}
    for result, arguments, code in ((good, [], 0), (broken, [], 1), (broken, ["--no-self-test"], 0)):
        monkeypatch.setattr(selftest, "run", lambda result=result: result)
        ran = CliRunner().invoke(app, ["doctor", "--json", *arguments])
        assert ran.exit_code == code, ran.output
        found = json.loads(ran.output)
        assert found["healthy"] is (code == 0)
        assert ("3 of 4 restored rows differ" in ran.output) is (code == 1)
