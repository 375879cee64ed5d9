# SPDX-License-Identifier: Apache-2.0
"""docs/speculative.md: its example runs as written, its passes and options are the ones there are."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from pcp_passes.options import PcpOptions
from pcp_passes.passes.steps.pipeline import STEP
from pcp_passes.step import StepProgram

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "speculative.md").read_text()


def rows(heading: str) -> list[str]:
    """First cells of the table whose header begins with ``heading``, without backquotes."""
    table = PAGE.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [re.findall(r"`([^`]+)`", line.split("|")[1])[0] for line in table]


def test_passes_are_listed_in_their_order() -> None:
    assert rows("pass") == [step.name for step in STEP]


def test_options_of_the_step_program_exist_with_these_defaults() -> None:
    parameters = inspect.signature(StepProgram).parameters
    for name in rows("option of `StepProgram`"):
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        assert line.split("|")[3].strip().strip("`") == str(parameters[name].default)


def test_options_in_vllm_exist_with_these_defaults() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(PcpOptions)}
    table = PAGE.split("| key |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    found = {line.split("`")[1]: line.split("|")[3].strip().strip("`") for line in table}
    assert found and found == {name: "null" if defaults[name] is None else defaults[name] for name in found}


def test_the_example_runs_as_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    code = PAGE.split("```python\n")[1].split("```")[0]
    held: dict[str, object] = {}
    exec(compile(code, "docs/speculative.md", "exec"), held)
    outputs, engine = held["outputs"], held["engine"]
    assert {name: len(output.tokens) for name, output in outputs.items()} == {"greedy": 40, "sampled": 40}  # type: ignore[attr-defined]
    assert engine.summary()["acceptance"]["acceptance_length"] > 1.5  # type: ignore[attr-defined]
    assert engine.summary()["sharded_steps"] > 0  # type: ignore[attr-defined]
    assert "acceptance_length" in capsys.readouterr().out
