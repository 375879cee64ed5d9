# SPDX-License-Identifier: Apache-2.0
"""``pcp generate --engine embedded``, and the example."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pcp_passes.cli import app, generate_embedded
from pcp_passes.cli.generate_embedded import EmbeddedComparison, Side, compare_embedded, render_embedded
from pcp_passes.errors import ConfigError
from tests.engine_schedules import CHECKPOINT, glm_hf, glm_models

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models that the other tests of this process captured too."""
    load = generate_embedded._load
    monkeypatch.setattr(generate_embedded, "_load", lambda folder, dtype: (glm_hf(), *load(folder, dtype)[1:]))
    kept = {"mtp": lambda: glm_models(1), "none": lambda: (glm_models(1)[0], None)}
    monkeypatch.setattr(generate_embedded, "_capture", lambda model, folder, drafter, own: kept[drafter]())


def command(*more: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    given = ["generate", str(CHECKPOINT), "--engine", "embedded", "--prompt", "The for statement is used to"]
    done = CliRunner().invoke(app, [*given, "--max-tokens", "12", "--json", *more])
    return done.exit_code, json.loads(done.stdout[done.stdout.index("{") :])


def test_both_sides_agree_and_are_counted() -> None:
    code, found = command("--pcp", "2", "--drafter", "mtp", "--steps", "3")
    assert code == 0 and found["tokens_equal"] and found["max_logprob_diff"] < 1e-9
    one, two = found["sides"]["one"], found["sides"]["many"]
    assert one["bytes"] == 0 and two["bytes"] > 0 and two["sharded_steps"] == 1
    assert len(two["rows_per_rank"]) == 2 and one["acceptance"] == two["acceptance"]
    assert one["acceptance"]["drafted"] > 0
    code, plain = command("--pcp", "2", "--graph-mode", "full_and_piecewise")
    assert code == 0 and plain["text"] == found["text"] and plain["sides"]["one"]["acceptance"]["drafted"] == 0
    hits = plain["sides"]["many"]["graph_hits"]
    assert not plain["sides"]["one"]["graph_hits"] and not found["sides"]["many"]["graph_hits"]
    assert hits.pop("target.replicated full 1x1") == 11 and set(hits.values()) == {1}, "one prefill, then decodes"


def test_a_difference_is_shown_and_exits_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = compare_embedded(str(CHECKPOINT), "import", max_tokens=4, drafter="mtp")
    assert honest.tokens_equal
    output = dataclasses.replace(honest.many.output, tokens=(1, *honest.many.output.tokens[1:]))
    wrong = EmbeddedComparison(honest.text, honest.one, Side(2, output, honest.many.summary, 0.0))
    monkeypatch.setattr(generate_embedded, "compare_embedded", lambda *args, **given: wrong)
    done = CliRunner().invoke(app, ["generate", str(CHECKPOINT), "--engine", "embedded"])
    assert done.exit_code == 1 and "DIFFERENT" in done.stdout and "acceptance length" in done.stdout
    assert render_embedded(honest) is not None


@pytest.mark.parametrize(
    "given, said",
    [
        (["--engine", "embeded"], "unknown engine 'embeded'.*Did you mean 'embedded'"),
        (["--engine", "embedded", "--drafter", "eagle"], "unknown drafter 'eagle'; accepted: 'none', 'mtp'"),
        (["--engine", "embedded", "--dtype", "bf16"], "unknown dtype 'bf16'"),
        (["--drafter", "mtp"], "--drafter mtp is for --engine embedded"),
    ],
)
def test_what_is_unknown_is_refused(given: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["generate", str(CHECKPOINT), *given])
    assert isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match=said):
        raise done.exception


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        compare_embedded(str(tmp_path), "x")


def test_the_example_runs() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/speculative_engine.py")], env=environment, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "first step: 64 tokens, (16, 16, 16, 16) rows per rank" in done.stdout
    assert "equal on 1 and 4 ranks" in done.stdout


def test_a_mesh_is_compared_replica_by_replica() -> None:
    mesh = ("--pcp", "2", "--dp", "2", "--expert-parallel")
    code, found = command(*mesh, "--drafter", "mtp", "--steps", "2")
    assert code == 0 and found["tokens_equal"] and found["max_logprob_diff"] < 1e-9
    one, many = found["sides"]["one"], found["sides"]["many"]
    assert (one["mesh"], many["mesh"]) == ("PCP=1", "DP2xPCP2")
    assert many["bytes"] > 0, "experts meet"
    assert many["replicas"] == one["replicas"] * 2, "the tokens of every replica are told"
    code, found = command("--pcp", "1", "--pp", "2")
    assert code == 0 and found["sides"]["many"]["mesh"] == "PP2" and found["tokens_equal"]


def test_more_stages_than_layers_are_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_embedded, "_load", lambda *given: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="pp=9 stages need a layer each, and the model has"):
        compare_embedded(str(CHECKPOINT), "import", pp=9)


def test_another_replica_that_differs_is_shown() -> None:
    honest = compare_embedded(str(CHECKPOINT), "import", max_tokens=4, pcp=1, dp=2, expert_parallel=True)
    assert honest.tokens_equal and len(honest.many.others) == 1
    wrong = dataclasses.replace(honest.many.others[0], tokens=(1, *honest.many.others[0].tokens[1:]))
    many = dataclasses.replace(honest.many, others=(wrong,))
    assert not dataclasses.replace(honest, many=many).tokens_equal


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--pp", "2", "--drafter", "mtp"), "embedding"),
        (("--expert-parallel", "--graph-mode", "piecewise"), "graph_mode"),
        (("--pp", "9"), "pp=9"),
    ],
)
def test_a_mesh_that_cannot_run_is_refused_in_a_sentence(more: tuple[str, ...], text: str) -> None:
    given = ["generate", str(CHECKPOINT), "--engine", "embedded", "--max-tokens", "2", *more]
    done = CliRunner().invoke(app, given)
    assert done.exit_code != 0 and text in (done.output + str(done.exception))
    of_vllm = CliRunner().invoke(app, ["generate", str(CHECKPOINT), "--dp", "2"])
    assert of_vllm.exit_code != 0 and "--engine embedded" in (of_vllm.output + str(of_vllm.exception))
