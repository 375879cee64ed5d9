# SPDX-License-Identifier: Apache-2.0
"""Dumps on disk: where they go, that graphs never share a folder, and that constants are those that were written."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from pcp_passes import dumps
from pcp_passes.errors import ConfigError, DumpError
from pcp_passes.ir import fakes
from pcp_passes.ir.printer import CONSTANT_BYTES, graph_fingerprint, print_graph
from pcp_passes.passes import PassContext, Pipeline
from pcp_passes.passes.bodies.mask_padding import MaskPadding
from pcp_passes.passes.bodies.place_rows import PlaceRows
from pcp_passes.passes.observers import DumpObserver

pytestmark = pytest.mark.unit


def test_the_option_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dumps.VARIABLE, raising=False)
    assert dumps.dump_folder(None) is None and dumps.dump_folder("a") == Path("a")
    monkeypatch.setenv(dumps.VARIABLE, "b")
    assert dumps.dump_folder(None) == Path("b") and dumps.dump_folder("a") == Path("a")
    assert dumps.dump_folder("") is None
    monkeypatch.setenv(dumps.VARIABLE, "")
    assert dumps.dump_folder(None) is None


def test_every_graph_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    assert [dumps.claim_folder(tmp_path, "model").relative_to(tmp_path) for _ in range(3)] == [
        Path("model/graph-0"), Path("model/graph-1"), Path("model/graph-2"),
    ]  # fmt: skip
    assert dumps.claim_folder(tmp_path) == tmp_path / "graph-0"
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: dumps.claim_folder(tmp_path / "many"), range(40)))
    assert len(set(claimed)) == 40


def test_a_name_cannot_leave_the_root(tmp_path: Path) -> None:
    assert dumps.claim_folder(tmp_path, "../../etc").parent == tmp_path / "etc"
    assert dumps.claim_folder(tmp_path, "/abs/a b").parent == tmp_path / "abs-a-b"


@pytest.mark.parametrize("option", [None, "given"])
def test_the_vllm_front_end_dumps_on_rank_0_wherever_it_is_told(
    option: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pcp_passes.frontends.vllm.backend import _observers
    from pcp_passes.options import PcpOptions

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(dumps.VARIABLE, "from-environment")

    def folder(rank: int) -> list[Path]:
        observers = _observers(PcpOptions(dump=option), "model", rank)
        return [observer.folder for observer in observers if isinstance(observer, DumpObserver)]

    root = Path(option or "from-environment")
    assert folder(0) == [root / "model" / "graph-0"] and folder(0) == [root / "model" / "graph-1"]
    assert folder(1) == []
    monkeypatch.delenv(dumps.VARIABLE)
    assert bool(folder(0)) == (option is not None)


def constant_graph(*constants: torch.Tensor) -> fx.GraphModule:
    """``x + c0 + c1 + ...`` with each constant held as an attribute."""
    root, graph, mode = nn.Module(), fx.Graph(), fakes.FakeTensorMode()
    total = graph.placeholder("x")
    total.meta["val"] = mode.from_tensor(torch.zeros(4))
    for index, constant in enumerate(constants):
        root.register_buffer(f"c{index}", constant)
        held = graph.get_attr(f"c{index}")
        total = graph.call_function(torch.add, (total, held))
        held.meta["val"], total.meta["val"] = mode.from_tensor(constant), mode.from_tensor(torch.zeros(4))
    graph.output(total)
    return fx.GraphModule(root, graph)


def dumped(tmp_path: Path, *constants: torch.Tensor) -> tuple[fx.GraphModule, Path]:
    gm = constant_graph(*constants)
    pipeline = Pipeline((PlaceRows(), MaskPadding()), (DumpObserver(tmp_path),))
    pipeline.run_graph(gm.graph, PassContext(2, variant="replicated", shared_cache_layers=frozenset({"l.1", "l.0"})))
    return gm, tmp_path / "replicated"


CONSTANTS = [
    torch.tensor([1.0, -2.0, 3.5, float("nan")]),
    torch.tensor([True, False, True, True]),
    torch.arange(8.0).view(4, 2)[:, 0].to(torch.bfloat16),
    torch.tensor(3),
]


def test_constants_come_back_and_the_graph_runs_with_them(tmp_path: Path) -> None:
    gm, folder = dumped(tmp_path, *CONSTANTS)
    dump = dumps.load_dump(folder)
    assert dump.ctx == PassContext(2, variant="replicated", shared_cache_layers=frozenset({"l.0", "l.1"}))
    held = dump.read_constants()
    assert [name.partition("#")[0] for name in held] == ["c0", "c1", "c2", "c3"]
    for found, wanted in zip(held.values(), CONSTANTS, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found.nan_to_num(), wanted.nan_to_num())
    parsed = dump.read(dump.stages[-1])
    assert print_graph(parsed.graph) == print_graph(gm) == dump.stages[-1].text()
    x = torch.randn(4)
    torch.testing.assert_close(parsed.module()(x), gm(x), rtol=0, atol=0, equal_nan=True)


def test_large_constants_and_parameters_stay_out(tmp_path: Path) -> None:
    gm, folder = dumped(tmp_path, torch.zeros(CONSTANT_BYTES // 4 + 1)[:4].expand(4).clone(), torch.zeros(()))
    assert len(dumps.load_dump(folder).constants) == 2
    gm.c0 = torch.zeros(CONSTANT_BYTES // 4 + 1)
    gm.register_parameter("c2", nn.Parameter(torch.zeros(4)))
    assert [name.partition("#")[0] for name in dumps.small_constants(gm.graph)] == ["c1"]


def test_a_graph_without_constants_has_no_file(tmp_path: Path) -> None:
    _, folder = dumped(tmp_path)
    assert not (folder / dumps.CONSTANTS).exists()
    assert dumps.load_dump(folder).read_constants() == {}


def test_a_second_dump_leaves_no_constants_of_the_first(tmp_path: Path) -> None:
    dumped(tmp_path, torch.ones(4))
    _, folder = dumped(tmp_path)
    assert not (folder / dumps.CONSTANTS).exists()


def test_changed_constants_are_seen(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    _, folder = dumped(tmp_path, torch.ones(4))
    (name,) = dumps.load_dump(folder).constants

    def error() -> str:
        with pytest.raises(DumpError) as raised:
            dumps.load_dump(folder).read_constants()
        return str(raised.value)

    save_file({name: torch.full((4,), 2.0)}, folder / dumps.CONSTANTS)
    assert "are not those of its digest; do not trust it" in error()
    save_file({"other": torch.ones(4)}, folder / dumps.CONSTANTS)
    assert f"holds no {name!r}" in error()
    save_file({name: torch.ones(CONSTANT_BYTES)}, folder / dumps.CONSTANTS)
    assert "do not trust it" in error()
    (folder / dumps.CONSTANTS).write_bytes(b"\x80\x04no pickle either")
    assert "is no safetensors file" in error()
    (folder / dumps.CONSTANTS).unlink()
    assert "No such file" in error()


def test_without_safetensors_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = dumped(tmp_path, torch.ones(4))
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ConfigError, match=r"found no safetensors here\. Install it"):
        dumps.load_dump(folder).read_constants()
    with pytest.raises(ConfigError, match=r"found no safetensors here\. Install it"):
        dumped(tmp_path / "other", torch.ones(4))
    dumped(tmp_path / "plain")


def test_the_manifest_says_what_stands_and_how_to_know_the_graph(tmp_path: Path) -> None:
    gm, folder = dumped(tmp_path)
    held = json.loads((folder / dumps.MANIFEST).read_text())
    assert held["format"] == dumps.FORMAT and held["torch"] == torch.__version__
    last = held["graphs"][-1]
    assert last["file"] == "02-mask-padding.txt" and last["fingerprint"] == graph_fingerprint(gm)
    assert {"PLACED", "PADDING_DEFINED", "WELL_FORMED"} <= set(last["standing"])
    assert not list(folder.glob("*.new"))


def test_dumps_are_found_below_a_folder_and_links_are_not_followed(tmp_path: Path) -> None:
    for number in range(2):
        dumped(tmp_path / "a" / f"graph-{number}")
    os.symlink(tmp_path / "a", tmp_path / "b")
    found = dumps.find_dumps(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [
        "a/graph-0/replicated", "a/graph-1/replicated",
    ]  # fmt: skip
    with pytest.raises(DumpError, match=r"holds 2 dumps; name one of them:\n  .*graph-0"):
        dumps.one_dump(tmp_path)
    assert dumps.one_dump(tmp_path / "a" / "graph-0").ctx.pcp == 2
    with pytest.raises(DumpError, match=r"found no manifest.json in it or under it"):
        dumps.find_dumps(tmp_path / "nothing")


def test_a_folder_of_too_many_files_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "_MAX_FOLDERS", 3)
    for number in range(5):
        (tmp_path / f"f{number}").touch()
    with pytest.raises(DumpError, match="more than 3 files; name the dump folder itself"):
        dumps.find_dumps(tmp_path)
