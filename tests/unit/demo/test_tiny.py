# SPDX-License-Identifier: Apache-2.0
"""The demonstration's first part: real text, every size compared, and an exit code that says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pcp_passes.demo import __main__ as demo
from pcp_passes.demo import text, tiny
from pcp_passes.errors import ConfigError
from pcp_passes.step import ops

pytestmark = pytest.mark.unit
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def result() -> Iterator[tiny.EngineResult]:
    """One capture for all tests of this file."""
    captured = tiny._models()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "_models", lambda: captured)
        yield tiny.run_tiny(2, 200, 20, sizes=(1, 2, 4), processes=0)


def test_every_size_gives_the_same_bytes_and_accepts_the_same_drafts(result: tiny.EngineResult) -> None:
    assert result.equal
    one, *many = result.sides
    assert [len(tokens) for tokens in one.tokens] == [20, 20]
    for side in many:
        assert side.accepted_per_position == one.accepted_per_position
        # Sharded, not repeated: no rank has more than its share of the prompts, and the decode steps that all share.
        assert max(side.rows_per_rank) < one.rows_per_rank[0]
        assert side.bytes > 0 == one.bytes
    assert one.tokens_per_round > 2


def test_its_report_names_each_size(result: tiny.EngineResult) -> None:
    report = json.loads(json.dumps(result.to_json()))
    assert report["tokens_equal"] is report["accepted_equal"] is True
    assert (
        report["accepted_per_position"].keys() == report["bytes"].keys() == report["seconds"].keys() == {"1", "2", "4"}
    )
    assert len(report["accepted_per_position"]["1"]) == report["steps"] == 3
    console = Console(record=True, width=200)
    console.print(tiny.render_tiny(result))
    shown = console.export_text()
    assert "same bytes and same accepted drafts" in shown
    assert result.text[0].splitlines()[0] in shown


@pytest.mark.parametrize("field", ["tokens", "accepted"])
def test_one_difference_ends_it_with_1(
    result: tiny.EngineResult,
    field: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [result]
    monkeypatch.setattr(demo, "run_tiny", lambda **_: given[0])
    monkeypatch.setattr("sys.argv", ["demo", "--engine-only", "--build", str(tmp_path)])
    assert demo.main() == 0
    changed = [list(row) for row in getattr(result.sides[2], field)]
    changed[1][-1] += 1
    given[0] = replace(result, sides=[*result.sides[:2], replace(result.sides[2], **{field: changed})])
    assert demo.main() == 1
    assert "THE SIZES DIFFER" in capsys.readouterr().out
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written["engine"][f"{field}_equal"] is False


def test_drafts_from_the_wrong_token_change_what_is_accepted(
    result: tiny.EngineResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that is fed each row's own token, not the next one, is seen; the target's tokens stay."""
    monkeypatch.setattr(ops, "shift", lambda ids, *_: ids)
    wrong = tiny.run_tiny(2, 200, 20, sizes=(1,), processes=0)
    assert wrong.sides[0].tokens == result.sides[0].tokens
    assert wrong.sides[0].tokens_per_round < result.sides[0].tokens_per_round - 0.5


def test_held_out_text_is_not_in_the_training_text() -> None:
    streams = text.python_text()
    train, held_out = text.readable(streams.train.tolist()), text.readable(streams.held_out.tolist())
    assert len(train) > 2_000_000 and 50_000 < len(held_out) < len(train) / 10
    pieces = [paragraph for paragraph in held_out.split("\n\n") if len(paragraph) > 200]
    found = [piece for piece in pieces if piece in train]
    assert len(pieces) > 100
    assert len(found) <= len(pieces) // 100, found
    # The same look does find what is there.
    assert sum(piece in train for piece in [p for p in train.split("\n\n") if len(p) > 200][:50]) == 50


def test_prompts_are_the_same_in_every_run() -> None:
    prompts = text.held_out_prompts(3, 100)
    assert prompts.shape == (3, 100) and prompts.dtype == torch.int64
    assert torch.equal(prompts, text.held_out_prompts(3, 100))
    assert int(prompts.max()) < text.VOCABULARY


def test_marks_and_cut_characters_are_no_text() -> None:
    assert text.readable([text.BEGIN, 72, 105, text.END, 0xC3]) == "Hi�"


def test_a_python_without_its_reference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(ConfigError, match="leaves out"):
        text.python_text()
