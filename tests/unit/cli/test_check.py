# SPDX-License-Identifier: Apache-2.0
"""``pcp check``: a whole dump is healthy; whatever is done to it is reported as what it is, and nothing of it runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pcp_passes import dumps
from pcp_passes.errors import DumpError
from pcp_passes.ir.printer import graph_fingerprint, print_graph

LAST = "05-lower-reshards.txt"


def problems(data: Any) -> dict[str, str]:
    """``{"05-lower-reshards.txt fingerprint": text}``."""
    return {
        f"{finding['stage']} {finding['check']}".strip(): finding["text"]
        for dump in data["dumps"]
        for finding in dump["findings"]
        if finding["status"] == "problem"
    }


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{old!r} is not in {path.name}"
    path.write_text(text.replace(old, new, 1))


def sign(dump: Path, file: str) -> None:
    """Make the manifest agree with an edited file, as whoever edits a dump with care would."""
    manifest = json.loads((dump / dumps.MANIFEST).read_text())
    entry = next(entry for entry in manifest["graphs"] if entry["file"] == file)
    stage = next(stage for stage in dumps.load_dump(dump).stages if stage.file == file)
    entry["sha256"] = hashlib.sha256((dump / file).read_bytes()).hexdigest()
    entry["fingerprint"] = graph_fingerprint(dumps.load_dump(dump).read(stage, strict=False).graph)
    (dump / dumps.MANIFEST).write_text(json.dumps(manifest))


def test_a_fresh_dump_is_healthy(pristine: Path, pcp: Callable[..., Any], pcp_json: Callable[..., Any]) -> None:
    code, data = pcp_json("check", pristine)
    assert (code, data["healthy"], problems(data)) == (0, True, {})
    assert [Path(dump["folder"]).name for dump in data["dumps"]] == ["replicated", "sharded"]
    last = [f for f in data["dumps"][1]["findings"] if f["stage"] == LAST]
    assert [f["check"] for f in last] == ["unchanged", "invariants"]
    assert {"EQUAL_COLLECTIVES", "META_FRESH", "LOWERED", "PLACED"} <= set(last[1]["text"].split(", "))
    result = pcp("check", pristine)
    assert result.exit_code == 0 and result.stdout.rstrip().endswith("healthy") and LAST in result.stdout


@pytest.mark.parametrize(
    "old, new, check",
    [
        ("torch.zeros(", "torch.empty(", "PADDING_DEFINED"),
        (" rank_major = pcp.all_gather_rows", " shard(0) = pcp.all_gather_rows", "ORDER_KNOWN"),
        ("pcp.all_gather_rows(%cat, 4, 'pcp')", "pcp.all_gather_rows(%cat, 4, 'tp')", "EQUAL_COLLECTIVES"),
        ("return (%mul_24,)", "return (%unflatten,)", "NO_PARTIAL_OUT"),
        (", 32] rank_major = pcp.all_gather_rows", ", 31] rank_major = pcp.all_gather_rows", "META_FRESH"),
    ],
)
def test_a_broken_invariant_is_reported_even_with_a_matching_manifest(
    dump: Path, pcp_json: Callable[..., Any], old: str, new: str, check: str
) -> None:
    edit(dump / LAST, old, new)
    code, data = pcp_json("check", dump)
    assert code == 1 and set(problems(data)) >= {f"{LAST} fingerprint", f"{LAST} {check}"}
    sign(dump, LAST)
    code, data = pcp_json("check", dump)
    assert code == 1 and f"{LAST} {check}" in problems(data) and f"{LAST} fingerprint" not in problems(data)


def test_an_edit_that_breaks_nothing_is_a_changed_fingerprint(dump: Path, pcp: Any, pcp_json: Any) -> None:
    edit(dump / LAST, "operator.add(%mean, 1e-06)", "operator.add(%mean, 2e-06)")
    code, data = pcp_json("check", dump)
    assert code == 1 and list(problems(data)) == [f"{LAST} fingerprint"]
    result = pcp("check", dump)
    assert result.exit_code == 1 and "the graph is not the one that was written" in result.stdout
    assert result.stdout.rstrip().endswith("1 problem(s)")


def test_an_edited_comment_is_an_edited_file(dump: Path, pcp_json: Any) -> None:
    edit(dump / LAST, "   # layers.0", "   # layers.7")
    code, data = pcp_json("check", dump)
    assert code == 1 and list(problems(data)) == [f"{LAST} sha256"]


def test_a_removed_file_is_named(dump: Path, pcp_json: Any) -> None:
    (dump / LAST).unlink()
    code, data = pcp_json("check", dump)
    assert code == 1 and "No such file" in problems(data)[f"{LAST} readable"]


def test_a_file_the_manifest_does_not_list_is_named(dump: Path, pcp_json: Any) -> None:
    (dump / "06-other.txt").write_text("return ()\n")
    code, data = pcp_json("check", dump)
    assert code == 1 and "06-other.txt" in problems(data)["files"]


def test_a_cut_file_is_named(dump: Path, pcp_json: Any) -> None:
    text = (dump / LAST).read_text()
    (dump / LAST).write_text(text[: text.index("torch.cat(") + 12])
    code, data = pcp_json("check", dump)
    assert code == 1 and f"{LAST}, line" in problems(data)[f"{LAST} readable"]


def test_an_op_that_is_not_loaded_is_a_note(dump: Path, pcp_json: Any) -> None:
    edit(dump / "00-captured.txt", "torch.rsqrt(%add)", "vllm.not_loaded_here(%add)")
    sign(dump, "00-captured.txt")
    code, data = pcp_json("check", dump)
    assert code == 0
    notes = [f["text"] for f in data["dumps"][0]["findings"] if f["status"] == "note"]
    assert notes == ["not loaded here, so taken as pure and as stated: vllm.not_loaded_here"]


def test_an_invariant_of_another_version_is_a_problem(dump: Path, pcp_json: Any) -> None:
    edit(dump / dumps.MANIFEST, '"LOWERED"', '"LEVITATED"')
    code, data = pcp_json("check", dump)
    assert code == 1 and "this version has no invariant LEVITATED" in problems(data)["00-captured.txt standing"]


def test_nonsense_that_no_pass_would_write_is_a_problem(dump: Path, pcp_json: Any) -> None:
    edit(dump / LAST, "pcp.all_gather_rows(%cat, 4, 'pcp')", "pcp.all_gather_rows()")
    code, data = pcp_json("check", dump)
    assert code == 1 and "cannot be checked: IndexError" in problems(data)[f"{LAST} EQUAL_COLLECTIVES"]


def manifest(dump: Path, change: Callable[[dict[str, Any]], object]) -> None:
    held = json.loads((dump / dumps.MANIFEST).read_text())
    change(held)
    (dump / dumps.MANIFEST).write_text(json.dumps(held))


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "required '00-captured.txt', in this folder": lambda m: m["graphs"][0].update(file="../../secret.txt"),
    "required '00-/etc/passwd.txt', in this folder": lambda m: m["graphs"][0].update({"pass": "/etc/passwd"}),
    "graph 0 is str": lambda m: m.update(graphs=["a"]),
    "must list 1 to 1000 graphs": lambda m: m.update(graphs=[]),
    "has format 99": lambda m: m.update(format=99),
    "'notes' 'text'; required a list": lambda m: m["graphs"][0].update(notes="text"),
    "must be lists of strings": lambda m: m["graphs"][0].update(standing=[1]),
    "'ctx' is": lambda m: m.update(ctx={"pcp": 4, "os": "x"}),
    "'ctx' is no context: pcp is 0": lambda m: m["ctx"].update(pcp=0),
    "'hints' must map symbols to sizes from 2": lambda m: m.update(hints={"s0": True}),
    "'constants' must list names": lambda m: m.update(constants=["../x"]),
}


@pytest.mark.parametrize("found", HOSTILE)
def test_a_hostile_manifest_is_one_clear_problem(dump: Path, pcp_json: Any, found: str) -> None:
    manifest(dump, HOSTILE[found])
    code, data = pcp_json("check", dump)
    assert code == 1 and list(problems(data)) == ["readable"] and found in problems(data)["readable"]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\xff", '"text"', "null", ""])
def test_a_manifest_that_is_no_json_is_one_clear_problem(dump: Path, pcp_json: Any, text: str) -> None:
    (dump / dumps.MANIFEST).write_bytes(text.encode("latin-1"))
    code, data = pcp_json("check", dump)
    assert code == 1 and list(problems(data)) == ["readable"] and dumps.MANIFEST in problems(data)["readable"]


def test_a_link_is_not_followed(dump: Path, pcp_json: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_bytes((dump / LAST).read_bytes())
    (dump / LAST).unlink()
    (dump / LAST).symlink_to(secret)
    code, data = pcp_json("check", dump)
    assert code == 1 and "is a link, which is not followed" in problems(data)[f"{LAST} readable"]
    (dump / dumps.MANIFEST).rename(tmp_path / "m")
    (dump / dumps.MANIFEST).symlink_to(tmp_path / "m")
    code, data = pcp_json("check", dump)
    assert code == 1 and "is a link" in problems(data)["readable"]


def test_a_pipe_does_not_hang(dump: Path, pcp_json: Any) -> None:
    (dump / LAST).unlink()
    os.mkfifo(dump / LAST)
    code, data = pcp_json("check", dump)
    assert code == 1 and "is no regular file" in problems(data)[f"{LAST} readable"]


def test_a_huge_file_is_not_read(dump: Path, pcp_json: Any) -> None:
    os.truncate(dump / LAST, 1 << 40)
    code, data = pcp_json("check", dump)
    assert code == 1 and "1,099,511,627,776 bytes; at most" in problems(data)[f"{LAST} readable"]


def test_terminal_escapes_are_refused(dump: Path, pcp_json: Any) -> None:
    edit(dump / LAST, "   # layers.0", "   # \x1b]0;title\x07")
    code, data = pcp_json("check", dump)
    assert code == 1 and r"holds the character '\x1b'" in problems(data)[f"{LAST} readable"]


def test_deep_nesting_is_refused(dump: Path, pcp_json: Any) -> None:
    edit(dump / LAST, "return (%mul_24,)", "return " + "[" * 5000 + "]" * 5000)
    code, data = pcp_json("check", dump)
    assert code == 1 and "nested more than 40 deep" in problems(data)[f"{LAST} readable"]


def test_nothing_that_a_dump_names_is_called(dump: Path, pcp_json: Any, tmp_path: Path) -> None:
    target = tmp_path / "made"
    edit(dump / LAST, "torch.rsqrt(%add)", f"os.mkdir('{target}')")
    edit(dump / LAST, "operator.add(%mean, 1e-06)", f"torch.from_file('{target}', True, 8)")
    code, _ = pcp_json("check", dump)
    assert code == 1 and not target.exists()


def test_a_folder_without_dumps_is_an_error(tmp_path: Path, pcp: Any) -> None:
    result = pcp("check", tmp_path)
    assert isinstance(result.exception, DumpError) and "found no manifest.json" in str(result.exception)


def test_an_unknown_import_is_an_error(dump: Path, pcp: Any) -> None:
    result = pcp("check", dump, "--import", "no_such_module_here")
    assert result.exit_code == 2 and "cannot import no_such_module_here" in result.output


def test_signing_an_untouched_dump_changes_nothing(dump: Path) -> None:
    before = json.loads((dump / dumps.MANIFEST).read_text())
    sign(dump, LAST)
    assert json.loads((dump / dumps.MANIFEST).read_text()) == before
    parsed = dumps.load_dump(dump).read(dumps.load_dump(dump).stages[-1])
    assert print_graph(parsed.graph) == (dump / LAST).read_text()
