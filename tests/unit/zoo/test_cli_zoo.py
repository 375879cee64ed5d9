# SPDX-License-Identifier: Apache-2.0
"""``pcp zoo``: what it is asked, what it prints, and how it exits. Rows are planted; no model is run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

from pcp_passes.cli import app
from pcp_passes.errors import ConfigError
from pcp_passes.zoo import children, row
from pcp_passes.zoo.check import Case, Verdict
from pcp_passes.zoo.sharded import Account, Fallback, Work


def planted(name: str) -> row.Row:
    """A row of the kind that the name asks for: ``llama`` and most are exact."""
    kinds: dict[str, Any] = {"bart": "WRONG", "gpt2": "vacuous", "bert": "refused", "dbrx": "error"}
    kind = kinds.get(name, "exact")
    error = 0.5 if kind == "WRONG" else 1e-7
    case = Case(7, 2, "WRONG" if kind == "WRONG" else "exact", error)
    fallback = Fallback("conv1d", "aten::conv1d", "layers.0", "model.py:7", "combines neighbours", 10)
    account = Account(1, 1, (), (fallback,) * 2 if name == "lfm2" else (), (), Work(64, 4, 100, 25, 95, 5, 0, 3, 64))
    base = {"type": name, "family": "x", "tolerance": 2e-4, "seconds": 1.0}
    return base | Verdict(kind, (case,)).to_json() | account.to_json()


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Any:
    asked: dict[str, Any] = {}

    def run(names: Sequence[str], work: Any, died: Any, **options: Any) -> Iterator[row.Row]:
        asked.update(names=list(names), plan=work.args[0], **options)
        yield from map(planted, reversed(names))  # they end in any order

    monkeypatch.setattr(children, "run_children", run)

    def invoke(*args: str) -> tuple[Result, dict[str, Any]]:
        result = CliRunner().invoke(app, ["zoo", *args], env={"COLUMNS": "200", "TERM": "dumb"})
        return result, asked

    return invoke


def test_by_default_the_chosen_types_on_three_numbers_of_ranks(zoo: Any) -> None:
    _, asked = zoo()
    assert len(asked["names"]) == 21
    assert asked["plan"] == row.Plan((2, 3, 4), None, "refuse")
    assert asked["jobs"] == 1


def test_options_reach_the_runs(zoo: Any) -> None:
    _, asked = zoo(
        "llama", "--pcp", "4,2", "--lengths", "7,33", "--jobs", "3", "--timeout", "9", "--unknown", "replicate"
    )
    assert asked["plan"] == row.Plan((4, 2), (7, 33), "replicate")
    assert (asked["jobs"], asked["limits"].seconds) == (3, 9.0)


def test_all_is_every_type_that_transformers_has(zoo: Any) -> None:
    _, asked = zoo("--all")
    assert {"llama", "olmo2", "bert"} < set(asked["names"])
    assert len(asked["names"]) > 100


@pytest.mark.parametrize(
    "types, code", [(["llama", "lfm2", "bert"], 0), (["llama", "bart"], 1), (["gpt2"], 1), (["dbrx"], 1)]
)
def test_exits_with_1_for_what_is_wrong_fails_or_proves_nothing(zoo: Any, types: list[str], code: int) -> None:
    result, _ = zoo(*types, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == code
    assert [found["type"] for found in told["rows"]] == types, "rows come in the order asked for"
    assert told["failed"] == [name for name in types if name in ("bart", "gpt2", "dbrx")]


def test_the_table(zoo: Any) -> None:
    result, _ = zoo("llama", "lfm2", "bart")
    lines = result.stdout.splitlines()
    llama = next(line.split() for line in lines if line.split()[:1] == ["llama"])
    assert llama == ["llama", "exact", "1.0e-07", "95%", "25%", "3", "0", "1/1", "1"]
    assert "bart: WRONG: T=7 P=2: relative error 5.0e-01" in lines
    assert "lfm2: replicated: aten::conv1d in layers.0 (model.py:7), and 1 more: combines neighbours" in lines
    assert lines[-1] == "2 exact, 1 WRONG"


@pytest.mark.parametrize(
    "args, said",
    [
        (["lama"], "Did you mean 'llama'"),
        (["llama", "--all"], "Give one of the two"),
        (["llama", "--pcp", "1,2"], "each at least 2"),
        (["llama", "--lengths", "1"], "from 2 to 512"),
        (["llama", "--unknown", "maybe"], "refuse or replicate"),
    ],
)
def test_mistakes(zoo: Any, args: list[str], said: str) -> None:
    result, asked = zoo(*args)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert not asked
