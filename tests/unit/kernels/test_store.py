# SPDX-License-Identifier: Apache-2.0
"""The cache of generated kernels: whole files, damaged files, processes that clash, folders that cannot be written."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pcp_kernels
from pcp_kernels import catalog, generate, specs, store

pytestmark = pytest.mark.unit

SPEC = specs.RemapSpec(topk=64)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_kernel_is_written_once_with_what_it_is(own_cache: Path) -> None:
    path = store.write(SPEC)
    assert path == store.folder(SPEC) / "kernel.py"
    assert path.is_relative_to(own_cache)
    assert path.read_text() == generate.generate(SPEC)
    label = json.loads((path.parent / "spec.json").read_text())
    assert specs.from_json(label["spec"]) == SPEC
    assert label["generator"] == generate.generator_version()
    before = path.stat().st_mtime_ns, path.stat().st_ino
    assert store.write(SPEC) == path
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["kernel.py", "spec.json"]


def test_the_cache_is_in_the_users_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(store.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.root() == tmp_path / "pcp_kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.root() == Path.home() / ".cache" / "pcp_kernels"


@pytest.mark.parametrize("file", ["kernel.py", "spec.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "binary"])
def test_a_damaged_file_is_generated_anew(file: str, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = store.write(SPEC).parent / file
    whole = path.read_bytes()
    damaged = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "changed": whole.replace(b"64", b"65"),
        "binary": b"\xff\x00" * 9,
    }[damage]
    assert damaged != whole
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        store.write(SPEC)
    assert path.read_bytes() == whole
    assert f"{path} is damaged" in caplog.text


def test_a_damaged_file_is_not_what_gets_imported() -> None:
    pytest.importorskip("triton")
    spec = specs.RemapSpec(topk=80)
    path = store.write(spec)
    path.write_text("raise SystemExit('the damaged text ran')\n")
    module = store.load(spec)
    assert module.__file__ == str(path)
    assert path.read_text() == generate.generate(spec)
    assert store.load(spec) is module


CLASH = """
import multiprocessing, sys
from pcp_kernels import catalog, store

def work(gate):
    gate.wait()
    for _ in range(10):
        for spec in catalog.shipped().values():
            path = store.write(spec)
            assert path.read_text().endswith("],\\n}\\n"), path

# Forked, so that all of them are ready at once.
context = multiprocessing.get_context("fork")
gate = context.Barrier(3)
children = [context.Process(target=work, args=(gate,)) for _ in range(3)]
for child in children:
    child.start()
for child in children:
    child.join()
sys.exit(max(abs(child.exitcode) for child in children))
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(pcp_kernels.__file__).parents[1]), **more}


def test_processes_that_generate_at_once_do_not_clash() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CLASH], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    # A file that another process was writing would have been taken for a damaged one.
    assert "damaged" not in run.stderr
    for spec in catalog.shipped().values():
        assert store.folder(spec).joinpath("kernel.py").read_text() == generate.generate(spec)
        assert len(list(store.folder(spec).iterdir())) == 2, "a temporary file was left"


def in_place(path: Path, content: str) -> None:
    """What :func:`store._ensure` must not be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("whole", [True, False], ids=["as it is", "sabotaged"])
def test_nobody_sees_a_file_before_it_is_whole(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the folder, and let another writer come and go, at the moment when one has written but not finished."""
    path = store.folder(SPEC) / "kernel.py"
    seen: list[bool] = []
    write = store._ensure if whole else in_place

    def look(_: int) -> None:
        seen.append(path.exists())
        if len(seen) == 1 and whole:
            write(path, generate.generate(SPEC))

    monkeypatch.setattr(os, "fsync", look)
    write(path, generate.generate(SPEC))
    assert path.read_text() == generate.generate(SPEC)
    assert seen == ([False, False] if whole else [True])


def test_a_writer_that_dies_leaves_no_half_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        store.write(SPEC)
    assert list(store.folder(SPEC).iterdir()) == []


def test_a_cache_that_cannot_be_written_is_replaced_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        path = store.write(SPEC)
    assert path.read_text() == generate.generate(SPEC)
    assert not path.is_relative_to(tmp_path)
    assert "cannot be used" in caplog.text and store.CACHE_VARIABLE in caplog.text


def test_many_kernels_that_cannot_be_kept_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for topk in (16, 32, 48):
            store.write(specs.RemapSpec(topk=topk))
    assert caplog.text.count("cannot be used") == 1
    # Another folder is another fault, which is told as well.
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "file" / "deeper"))
    with caplog.at_level(logging.WARNING):
        store.write(SPEC)
    assert caplog.text.count("cannot be used") == 2


def test_a_cache_that_is_a_file_is_said_before_anything_is_written(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.require_root() == own_cache, "a folder that is not there yet will do"
    (tmp_path / "file").write_text("")
    for named in ("file", "file/deeper"):
        monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / named))
        with pytest.raises(store.KernelStoreError, match=f"file is no folder. Set {store.CACHE_VARIABLE}"):
            store.require_root()


def test_the_home_of_the_user_may_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(store.CACHE_VARIABLE, "~/kc")
    assert store.root() == tmp_path / "kc"


def test_a_whole_cache_is_used_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.write(SPEC)

    def refuse(**_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert store.write(SPEC) == path


def test_no_folder_at_all_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(store.KernelStoreError, match=f"Set {store.CACHE_VARIABLE} to a folder"):
        # Not SPEC, which the private folder of this process may hold already.
        store.write(specs.RemapSpec(topk=112))


def test_a_text_for_the_other_mode_is_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(store.KernelStoreError, match=r"found TRITON_INTERPRET=0 .*interpret=True; required: equal"):
        store.load(SPEC, interpret=True)
    assert store.folder(SPEC) != store.folder(SPEC, interpret=True)


def test_without_triton_texts_are_written_and_nothing_is_loaded() -> None:
    source = (
        "import sys; sys.modules['triton'] = None\n"
        "from pcp_kernels import specs, store\n"
        "path = store.write(specs.RemapSpec(topk=64)); assert path.is_file()\n"
        "try:\n    store.load(specs.RemapSpec(topk=64))\n"
        "except ModuleNotFoundError: print('refused')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", source], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "refused\n", run.stderr
