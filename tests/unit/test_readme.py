# SPDX-License-Identifier: Apache-2.0
"""The README, followed by someone new: the package installed into an empty environment, its commands typed as written.

The environment is a new virtual one in which a wheel of this package is installed; what it depends on is taken from the
environment of the tests. Commands run in an empty folder, so nothing is found that an install does not bring.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.unit, pytest.mark.timeout(280)]

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMAND = re.compile(r"^    (pcp \S.*?)(?:   .*)?$", re.MULTILINE)

#: What stands for a word of the README, and commands that other tests run, with the reason.
WORDS = {
    "MODEL": "glm-5.2",
    "DUMP": "dump",
    "%node": "%linear",
    "A": "dump/00-captured.txt",
    "B": "dump/01-normalize.txt",
}
ELSEWHERE = {
    "generate": "starts engines: tests/vllm/test_cli.py",
    "zoo": "runs all types for minutes: tests/unit/zoo",
    "inspect --vllm": "starts vLLM: tests/vllm/test_cli.py",
}


def commands() -> list[str]:
    """Every ``pcp`` command of the README; two on one line are two."""
    return [part.strip() for line in COMMAND.findall(README) for part in line.split(",  ")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with a new environment in ``venv``, and nothing else."""
    folder = tmp_path_factory.mktemp("newcomer")
    tree = folder / "source"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("pcp_passes", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(others(sysconfig.get_paths()["purelib"], folder / "dependencies"))
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    built = subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True, text=True)
    wheel = folder / built.stdout.split()[-1]
    subprocess.run([sys.executable, "-m", "pip", "--version"], check=True, capture_output=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder / "venv"), "install", "--no-deps", "--quiet", str(wheel)],
        check=True,
    )
    shutil.rmtree(tree)
    wheel.unlink()
    return folder


def others(site: str, folder: Path) -> str:
    """A folder of links to everything installed but this package, whose editable install must not be found."""
    folder.mkdir()
    for entry in Path(site).iterdir():
        if "pcp_passes" not in entry.name and "pcp-passes" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    return f"{folder}\n"


def run(place: Path, *arguments: str) -> str:
    """Run a program of the new environment in its folder; its output. Fails with what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "PCP_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{place / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    program = shutil.which(arguments[0], path=environment["PATH"])
    assert program is not None, f"the new environment has no {arguments[0]}"
    ran = subprocess.run(
        [program, *arguments[1:]], cwd=place, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def dump(place: Path) -> Path:
    """The dump that the README's commands look at."""
    source = snippet("from_a_newcomer") + "\nimport os\nos.environ['PCP_DUMP'] = 'dumps'\n" + TRY
    (place / "try_it.py").write_text(source)
    run(place, "python", "try_it.py")
    found = next((place / "dumps").rglob("manifest.json")).parent
    shutil.copytree(found, place / "dump")
    return place / "dump"


def snippet(name: str) -> str:
    """A small model, as the README's reader would have one, from the first example."""
    example = (ROOT / "examples" / "shard_a_model.py").read_text()
    return f"# {name}\n" + example.split("def main")[0]


TRY = """
model, inputs = Decoder().eval(), {"input_ids": torch.randint(0, 256, (1, 37))}
logits = pcp_passes.simulate_model(model, inputs, pcp=4)
print(pcp_passes.inspect_model(model, inputs, pcp=4))
"""


def test_the_package_is_the_installed_one(place: Path) -> None:
    where = run(place, "python", "-c", "import pcp_passes; print(pcp_passes.__file__)")
    assert str(place / "venv") in where


@pytest.mark.parametrize("command", commands())
def test_a_command_works_as_written(place: Path, dump: Path, command: str) -> None:
    words = [WORDS.get(word, word) for word in command.split()]
    name = words[1]
    if name == "generate" or name == "zoo" or "--vllm" in words:
        assert ELSEWHERE["inspect --vllm" if "--vllm" in words else name]
        assert "Usage" in run(place, "pcp", name, "--help")
        return
    if name == "diff":  # two stages differ, which it says with exit code 1
        with pytest.raises(AssertionError, match="reshape"):
            run(place, *words)
        return
    assert run(place, *words).strip()


def test_the_calls_of_plain_pytorch_are_the_ones_the_readme_shows() -> None:
    for line in TRY.strip().splitlines()[1:]:
        assert line.strip() in README
    assert len(commands()) >= 9


def test_a_model_on_two_ranks_under_torchrun(place: Path) -> None:
    shutil.copy(ROOT / "examples" / "hf_two_ranks.py", place)
    out = run(place, "python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "hf_two_ranks.py")
    assert out.count("last token's logits differ by") == 3


def test_the_two_commands_are_there() -> None:
    plan = subprocess.run(["make", "-n", "demo", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pcp_passes.demo" in plan
    assert "pytest" in plan
    for target in re.findall(r"^    make (\S+)", README, re.MULTILINE):
        subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=True)
