# SPDX-License-Identifier: Apache-2.0
"""``pcp diff``: stages of a dump, two dumps, two files; text only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pcp_passes.errors import DumpError

CAPTURED, LAST = "00-captured.txt", "05-lower-reshards.txt"


def test_stages_of_one_dump(dump: Path, pcp: Callable[..., Any], pcp_json: Callable[..., Any]) -> None:
    code, data = pcp_json("diff", dump, "--context", "0")
    assert code == 1 and not data["equal"]
    parts = {part["to"]: part for part in data["parts"]}
    assert parts["02-gather-cache-writes.txt"]["added"] == {"pcp.reshard": 4}
    masked = parts["03-mask-padding.txt"]
    assert (masked["added"], masked["removed"]) == ({"torch.zeros": 2}, {"torch.empty": 2})
    assert sum(line.startswith("+%") for line in masked["diff"]) == 2
    assert parts["04-coalesce-reshards.txt"]["removed"] == {"pcp.reshard": 4}
    result = pcp("diff", dump)
    assert result.exit_code == 1
    assert "added: 2 torch.zeros" in result.stdout and "removed: 2 torch.empty" in result.stdout


def test_placements_can_be_left_out(dump: Path, pcp_json: Any) -> None:
    _, data = pcp_json("diff", dump)
    assert len(data["parts"][0]["diff"]) > 100
    _, data = pcp_json("diff", dump, "--no-placements")
    assert data["parts"][0]["diff"] == []
    assert data["parts"][1]["added"] == {"pcp.reshard": 4}


def test_equal_dumps_exit_with_0(dump: Path, pristine: Path, pcp: Any, pcp_json: Any) -> None:
    code, data = pcp_json("diff", dump, pristine / "sharded")
    assert code == 0 and data["equal"] and len(data["parts"]) == 6
    assert pcp("diff", dump, pristine / "sharded").stdout.count("are equal") == 6


def test_one_changed_line_is_shown(dump: Path, pristine: Path, pcp_json: Any) -> None:
    text = (dump / LAST).read_text()
    (dump / LAST).write_text(text.replace("operator.add(%mean, 1e-06)", "operator.sub(%mean, 1e-06)", 1))
    code, data = pcp_json("diff", pristine / "sharded", dump)
    changed = [part for part in data["parts"] if part["diff"]]
    assert code == 1 and len(changed) == 1 and changed[0]["to"].endswith(LAST)
    assert (changed[0]["added"], changed[0]["removed"]) == ({"operator.sub": 1}, {"operator.add": 1})


def test_comments_count_when_asked_for(dump: Path, pristine: Path, pcp_json: Any) -> None:
    text = (dump / LAST).read_text()
    (dump / LAST).write_text(text.replace("   # layers.0", "   # layers.7", 1))
    assert pcp_json("diff", dump, pristine / "sharded")[0] == 0
    code, data = pcp_json("diff", dump, pristine / "sharded", "--comments")
    assert code == 1 and any("layers.7" in line for line in data["parts"][-1]["diff"])


def test_two_files_of_ops_that_are_not_loaded(tmp_path: Path, pcp_json: Any) -> None:
    for name, op in (("a.txt", "vllm.one"), ("b.txt", "vllm.two")):
        (tmp_path / name).write_text(f"%x : f32[4] = input\n%y : f32[4] = {op}(%x)\nreturn %y\n")
    code, data = pcp_json("diff", tmp_path / "a.txt", tmp_path / "b.txt")
    assert code == 1
    assert (data["parts"][0]["added"], data["parts"][0]["removed"]) == ({"vllm.two": 1}, {"vllm.one": 1})


def test_a_stage_of_one_dump_only(dump: Path, pristine: Path, pcp: Any, pcp_json: Any) -> None:
    code, data = pcp_json("diff", dump, pristine / "replicated")
    assert code == 1
    missing = [part for part in data["parts"] if "no stage" in part["to"]]
    assert [part["to"].rpartition(" ")[2] for part in missing] == [
        "gather-cache-writes", "coalesce-reshards", "lower-reshards",
    ]  # fmt: skip
    assert "no stage lower-reshards" in pcp("diff", dump, pristine / "replicated").stdout


def test_refused(dump: Path, pristine: Path, tmp_path: Path, pcp: Any) -> None:
    def error(*args: object) -> str:
        result = pcp("diff", *args)
        assert isinstance(result.exception, DumpError), result.output
        return str(result.exception)

    assert "a folder and a file; required two dumps, or two files" in error(dump, dump / LAST)
    assert "holds 2 dumps; name one of them" in error(pristine)
    assert "found no manifest.json" in error(tmp_path / "nothing")
    assert "No such file" in error(tmp_path / "a.txt", tmp_path / "b.txt")
    (dump / "broken.txt").write_text("this is no graph\n")
    assert "broken.txt, line 1: found 'this'" in error(dump / "broken.txt", dump / LAST)
    alone = tmp_path / "alone"
    shutil.copytree(dump, alone)
    for file in alone.glob("0[1-5]*"):
        file.unlink()
    held = json.loads((alone / "manifest.json").read_text())
    held["graphs"] = held["graphs"][:1]
    (alone / "manifest.json").write_text(json.dumps(held))
    assert "has one graph, 00-captured.txt; name a second" in error(alone)
