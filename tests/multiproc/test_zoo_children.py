# SPDX-License-Identifier: Apache-2.0
"""Whatever a child of the zoo does, the others go on, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pcp_passes.zoo import children
from pcp_passes.zoo.children import Limits, run_children

Tell = Callable[[str], None]


@pytest.fixture(autouse=True)
def small_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """These children need neither PyTorch nor transformers."""
    monkeypatch.setattr(children, "_PRELOAD", [])


def work(name: str, tell: Tell) -> dict[str, Any]:
    """What each name makes a child do."""
    tell(f"being {name}")
    kind, _, argument = name.partition(":")
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "exit":
        os._exit(7)
    if kind == "raise":
        raise RuntimeError("planted")
    if kind == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(argument).write_text(str(child.pid))
        time.sleep(600)
    if kind == "spin":
        while True:
            pass
    if kind == "hoard":
        return {"name": name, "size": len(bytearray(8 * 2**30))}
    print("this must not reach the caller's output")
    return {"name": name, "leader": os.getsid(0) == os.getpid()}


def died(name: str, why: str) -> dict[str, Any]:
    return {"name": name, "why": why}


def run(*names: str, **options: Any) -> dict[str, dict[str, Any]]:
    return {found["name"]: found for found in run_children(names, work, died, **options)}


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_results_come_back_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    found = run("a", "b", "c", jobs=2)
    assert found == {name: {"name": name, "leader": True} for name in "abc"}
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    "name, why",
    [
        ("crash", "ended by SIGSEGV, during being crash"),
        ("exit", "ended with exit code 7 and no result, during being exit"),
        ("raise", "ended with exit code 1 and no result, during being raise"),
    ],
)
def test_a_child_that_dies_is_told_apart_and_the_next_one_runs(name: str, why: str) -> None:
    found = run(name, "fine")
    assert found[name]["why"] == why
    assert found["fine"]["leader"]


def test_a_child_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    name = f"hang:{note}"
    began = time.monotonic()
    found = run(name, "fine", limits=Limits(seconds=8))
    assert found[name]["why"].startswith("no result after 8 s, during being hang")
    assert time.monotonic() - began < 60
    deadline = time.monotonic() + 10
    while not gone(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(int(note.read_text()))


def test_cpu_time_is_limited() -> None:
    assert run("spin", limits=Limits(cpu_seconds=1))["spin"]["why"] == "used 1 s of CPU time, during being spin"


def test_memory_is_limited() -> None:
    found = run("hoard", limits=Limits(memory_gib=4))["hoard"]
    assert found["why"] == "ended with exit code 1 and no result, during being hoard"


def test_leaving_early_ends_the_children(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    results = run_children(["fine", f"hang:{note}"], work, died, jobs=2)
    assert next(results)["name"] == "fine"
    deadline = time.monotonic() + 30
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    results.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 10
    while not gone(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(int(note.read_text()))
