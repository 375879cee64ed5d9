# SPDX-License-Identifier: Apache-2.0
"""Which vLLM the front end accepts: by version, and by the names it overrides, calls and fills in.

0.33 is known from its sources only: ``tests/data/vllm_signatures_0.33.json``, written by ``scripts/vllm_signatures.py``
from an unpacked wheel. What the front end uses is read from its own source here, so a new use without an entry shows.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import versions
from pcp_passes.frontends.vllm.versions import KNOWN, SYMBOLS, Symbol

ROOT = Path(__file__).resolve().parents[2]
MANAGER = "vllm.v1.worker.gpu.pcp_manager.PCPManager"
INPUT_BATCH = "vllm.v1.worker.gpu.input_batch.InputBatch"
METADATA = "vllm.v1.worker.gpu.pcp_manager.PCPBatchMetadata"

_spec = importlib.util.find_spec("vllm")
INSTALLED = Path(_spec.origin).parents[1] if _spec is not None and _spec.origin else None
needs_vllm = pytest.mark.skipif(INSTALLED is None, reason="vllm is not installed")


def write(tree: Path, version: str, target: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts" / "vllm_signatures.py"), str(tree), version, str(target)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return json.loads(target.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By version prefix; that of the installed vLLM is made on the spot."""
    found = {"0.33": json.loads((ROOT / "tests/data/vllm_signatures_0.33.json").read_text())}
    if INSTALLED is not None:
        target = tmp_path_factory.mktemp("signatures") / "installed.json"
        found["0.32"] = write(INSTALLED, installed_version(), target)
    return found


def installed_version() -> str:
    assert INSTALLED is not None
    match = re.search(r"__version__ = version = '([^']+)'", (INSTALLED / "vllm" / "_version.py").read_text())
    assert match is not None
    return match[1]


def parameters_of(snapshot: dict[str, Any]) -> Callable[[Symbol], tuple[str, ...] | None]:
    def find(symbol: Symbol) -> tuple[str, ...] | None:
        names = snapshot["functions"][f"{symbol.module}.{symbol.qualname}"]
        return None if names is None else tuple(names)

    return find


PREFIXES = ["0.33", pytest.param("0.32", marks=needs_vllm)]


def test_snapshot_holds_every_symbol(snapshots: dict[str, dict[str, Any]]) -> None:
    wanted = {f"{symbol.module}.{symbol.qualname}" for symbol in SYMBOLS}
    assert set(snapshots["0.33"]["functions"]) == wanted, "run scripts/vllm_signatures.py on the sources of 0.33 again"


@pytest.mark.parametrize("prefix", PREFIXES)
def test_no_mismatch(prefix: str, snapshots: dict[str, dict[str, Any]]) -> None:
    snapshot = snapshots[prefix]
    assert snapshot["version"].startswith(prefix)
    assert list(versions.mismatches(snapshot["version"], parameters_of(snapshot))) == []


def test_every_known_version_has_a_snapshot(snapshots: dict[str, dict[str, Any]]) -> None:
    assert set(snapshots) == set(KNOWN) if INSTALLED is not None else set(snapshots) < set(KNOWN)


@pytest.mark.parametrize("symbol", SYMBOLS, ids=lambda symbol: symbol.qualname)
def test_renamed_parameter_is_named(symbol: Symbol, snapshots: dict[str, dict[str, Any]]) -> None:
    """Every single entry is compared: renaming its last parameter is seen, and so is its disappearance."""
    snapshot = json.loads(json.dumps(snapshots["0.33"]))
    name = f"{symbol.module}.{symbol.qualname}"
    if symbol.expected("0.33.0") is None:
        assert snapshot["functions"][name] is None, "gone from 0.33"
        return
    snapshot["functions"][name][-1] = "renamed"
    (found,) = versions.mismatches("0.33.0", parameters_of(snapshot))
    assert found.startswith(f"{name}: expected {symbol.expected('0.33.0')}, found ") and "'renamed'" in found
    snapshot["functions"][name] = None
    assert list(versions.mismatches("0.33.0", parameters_of(snapshot))) == [
        f"{name}: expected {symbol.expected('0.33.0')}, found None"
    ]


def test_snapshot_of_another_version_is_refused(snapshots: dict[str, dict[str, Any]]) -> None:
    found = list(versions.mismatches("0.32.0", parameters_of(snapshots["0.33"])))
    assert any("PCPManager.__init__" in line and "moe_gathers_tokens" in line for line in found)
    assert any("prepare_inputs_to_capture" in line and "found None" in line for line in found)


def test_start_refuses_listing_every_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_imported_parameters", lambda symbol: ("self", "other"))
    with pytest.raises(ConfigError) as refused:
        versions.require_signatures("0.33.0")
    message = str(refused.value)
    assert message.startswith("vLLM 0.33.0 does not have the functions that pcp_passes overrides:\n")
    assert message.endswith("Install an unmodified vLLM of a known version, or run with pcp_passes.mode=off.")
    expected = [symbol for symbol in SYMBOLS if symbol.expected("0.33.0") is not None]
    assert message.count("found ('self', 'other')") == len(expected)


@pytest.mark.parametrize("version", ["0.34.0", "0.31.2", "0.3.2", "0.320", "0.330.1", "1.0", "dev"])
def test_unknown_version_is_refused(version: str) -> None:
    with pytest.raises(ConfigError) as refused:
        versions.require_known(version)
    assert str(refused.value) == (
        f"vLLM {version} is not known to pcp_passes (known: 0.32, 0.33); its PCP hooks may have changed. "
        "Install a known version, or run with additional_config pcp_passes.mode=off."
    )


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1+cu129", "0.33.0rc2"])
def test_known_version_tells_how_far_it_is_proven(version: str) -> None:
    assert versions.require_known(version) == KNOWN[version[:4]]


# What the front end uses, read from its source.


def manager_class() -> ast.ClassDef:
    """The batch manager and what is mixed into it, as one class."""
    ours = [
        node
        for name in ("manager", "drafting")
        for node in ast.parse((ROOT / f"pcp_passes/frontends/vllm/{name}.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert [node.name for node in ours] == ["PassesPCPManager", "DraftHooks"]
    ours[0].body += ours[1].body
    return ours[0]


def used_attributes() -> set[str]:
    """Names that our batch manager reads from ``self`` or ``super()`` and does not define itself."""
    ours = manager_class()
    defined = {n.name for n in ours.body if isinstance(n, ast.FunctionDef)}
    defined |= {n.target.id for n in ours.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    used = set()
    for node in ast.walk(ours):
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
            used.add(node.attr)
        elif getattr(node.value, "id", "") == "self":
            used.add(node.attr) if isinstance(node.ctx, ast.Load) else defined.add(node.attr)
    # Assigned by us as well as by vLLM.
    return (used - defined) | {"_global_batch", "_local_batch"}


def filled_fields(call: str) -> set[str]:
    """Field names that our batch manager gives to ``call``."""
    function = next(n for n in ast.walk(manager_class()) if getattr(n, "name", "") == "_local_input_batch")
    if call == "InputBatch":
        return {
            key.value
            for node in ast.walk(function)
            if isinstance(node, ast.Dict)
            for key in node.keys
            if isinstance(key, ast.Constant)
        }
    (found,) = [n for n in ast.walk(function) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == call]
    return {keyword.arg for keyword in found.keywords if keyword.arg is not None}


def read_fields() -> set[str]:
    """Attributes that our batch manager reads from a batch."""
    names = {"batch", "input_batch"}
    found = [n for n in ast.walk(manager_class()) if isinstance(n, ast.Attribute)]
    return {n.attr for n in found if getattr(n.value, "id", "") in names}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_fields_of_the_batch_exist(prefix: str, snapshots: dict[str, dict[str, Any]]) -> None:
    fields = set(snapshots[prefix]["fields"][INPUT_BATCH])
    assert len(filled_fields("InputBatch")) > 25 and "query_start_loc" in read_fields()
    assert filled_fields("InputBatch") | read_fields() <= fields
    assert ("pcp" in fields) is (snapshots[prefix]["fields"][METADATA] is not None)


def test_fields_of_the_metadata_exist(snapshots: dict[str, dict[str, Any]]) -> None:
    filled = filled_fields("PCPBatchMetadata")
    assert "global_num_tokens" in filled
    assert filled <= set(snapshots["0.33"]["fields"][METADATA])


@pytest.mark.parametrize("prefix", PREFIXES)
def test_attributes_of_the_upstream_manager_exist(prefix: str, snapshots: dict[str, dict[str, Any]]) -> None:
    used = used_attributes()
    assert {"_input_buffers", "_block_tables", "pcp_rank"} <= used
    only = {"0.32": {"prepare_inputs_to_capture"}, "0.33": {"prepare_inputs_for_capture_or_profile"}}
    there = set(snapshots[prefix]["attributes"][MANAGER])
    assert used - there == set().union(*(names for key, names in only.items() if key != prefix)) & used


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_override_and_call_has_its_signature_checked(prefix: str, snapshots: dict[str, dict[str, Any]]) -> None:
    ours = {n.name for n in manager_class().body if isinstance(n, ast.FunctionDef)}
    calls = {n.func.attr for n in ast.walk(manager_class()) if isinstance(n, ast.Call) and hasattr(n.func, "attr")}
    upstream = set(snapshots[prefix]["attributes"][MANAGER])
    checked = {s.qualname.split(".")[1] for s in SYMBOLS if s.qualname.startswith("PCPManager.")}
    assert (ours | calls) & upstream <= checked


def test_reader_sees_names_in_sources(tmp_path: Path) -> None:
    """The reader of sources: every kind of parameter, nested names, and what is absent."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/thing.py").write_text(
        "class A:\n    class B:\n        def f(self, a, /, b, *rest, c=1, **more): ...\nasync def g(): ...\n"
    )
    read = lambda name: versions.source_parameters(tmp_path, Symbol("vllm.thing", name, {}))  # noqa: E731
    assert read("A.B.f") == ("self", "a", "b", "rest", "c", "more")
    assert read("A.B.gone") is None and read("A") is None and read("C.f") is None


@needs_vllm
@pytest.mark.vllm
def test_imported_signatures_match() -> None:
    """Not only the sources: the functions of the installed vLLM as Python sees them."""
    program = (
        "import vllm; from pcp_passes.frontends.vllm import versions, plugin\n"
        "plugin.register(); versions.require_signatures(vllm.__version__)\n"
        "checked = [s for s in versions.SYMBOLS if s.expected(vllm.__version__) is not None]\n"
        "assert all(versions._imported_parameters(s) == s.expected(vllm.__version__) for s in checked)\n"
        "print(vllm.__version__, len(checked))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    version, count = done.stdout.splitlines()[-1].split()
    assert version == installed_version() and int(count) == len([s for s in SYMBOLS if s.expected(version) is not None])
