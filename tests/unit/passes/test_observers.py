# SPDX-License-Identifier: Apache-2.0
import json
import logging
from pathlib import Path

import pytest

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.ir.printer import graph_fingerprint, print_graph
from pcp_passes.ir.rules import temporary_rule
from pcp_passes.passes import SHARDED, PassContext, build_variants
from pcp_passes.passes.observers import DiffObserver, DumpObserver, TimeObserver, VerifyObserver
from tests import toy_runs

pytestmark = pytest.mark.unit
CTX = PassContext(4)
NAMES = ["captured", *(step.name for step in SHARDED)]


def test_dumps_are_numbered_and_listed_in_a_manifest(tmp_path: Path) -> None:
    gm = toy_runs.captured()[1].gm
    bodies = build_variants(gm, CTX, [DumpObserver(tmp_path)])
    folder = tmp_path / "sharded"
    files = sorted(path.name for path in folder.glob("*.txt"))
    assert files == [f"{index:02d}-{name}.txt" for index, name in enumerate(NAMES)]
    assert (folder / files[-1]).read_text() == print_graph(bodies["sharded"])
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["ctx"] == {"pcp": 4, "axis": "pcp", "variant": "sharded", "shared_cache_layers": []}
    assert [entry["file"] for entry in manifest["graphs"]] == files
    assert [entry["rewrites"] for entry in manifest["graphs"][2:]] == [4, 2, 2, 2]
    assert manifest["graphs"][-1]["fingerprint"] == graph_fingerprint(bodies["sharded"])
    assert (tmp_path / "replicated" / "02-mask-padding.txt").exists()


def test_a_second_dump_leaves_no_file_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "07-from-another-version.txt").write_text("old")
    build_variants(toy_runs.captured()[1].gm, CTX, [DumpObserver(tmp_path)])
    assert not (folder / "07-from-another-version.txt").exists()


def test_a_refused_graph_leaves_the_captured_dump(tmp_path: Path) -> None:
    with temporary_rule("pcp_toy::attention_with_output", None), pytest.raises(Refusal):
        build_variants(toy_runs.captured()[1].gm, CTX, [DumpObserver(tmp_path)])
    manifest = json.loads((tmp_path / "sharded" / "manifest.json").read_text())
    assert [entry["pass"] for entry in manifest["graphs"]] == ["captured"]


def test_diffs_hold_what_each_pass_changed() -> None:
    observer = DiffObserver()
    build_variants(toy_runs.captured()[1].gm, CTX, [observer])
    diffs = observer.diffs["sharded"]
    assert list(diffs) == NAMES[1:]
    added = [line for line in diffs["mask-padding"].splitlines() if line.startswith("+%")]
    assert len(added) == 2
    assert all("torch.zeros(" in line for line in added)
    assert "reshard_many" in diffs["coalesce-reshards"]


def test_one_line_per_pass_at_info(caplog: pytest.LogCaptureFixture) -> None:
    observer = TimeObserver()
    with caplog.at_level(logging.INFO, logger="pcp_passes"):
        build_variants(toy_runs.captured()[1].gm, CTX, [observer])
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("pcp_passes")]
    assert len(lines) == 7
    assert lines[1].startswith("gather-cache-writes (sharded): 4 rewrites, ")
    assert list(observer.seconds["sharded"]) == NAMES[1:]
    assert all(seconds > 0 for seconds in observer.seconds["sharded"].values())


def test_zero_rewrites_log_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    gm = toy_runs.traced(lambda x: x + 1, torch.randn(6, 4))
    with caplog.at_level(logging.INFO, logger="pcp_passes"):
        build_variants(gm, CTX, [TimeObserver()])
    assert "nothing to gather" in caplog.text


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="required one of final, every, full"):
        VerifyObserver("sometimes")  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["final", "every", "full"])
@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_clean_pipelines_verify(level, kind: str) -> None:
    for pack in (True, False):
        build_variants(toy_runs.captured(kind)[1].gm, CTX, [VerifyObserver(level)], pack=pack)
