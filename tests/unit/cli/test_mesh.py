# SPDX-License-Identifier: Apache-2.0
"""``pcp mesh``."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pcp_passes import cli
from pcp_passes.errors import ConfigError

pytestmark = pytest.mark.unit


def test_ranks_groups_and_devices(pcp_json: Any) -> None:
    code, data = pcp_json(
        "mesh", "--dp", 2, "--pp", 2, "--pcp", 2, "--nodes", 2, "--devices", 4, "--experts", 6, "--expert-parallel"
    )
    assert code == 0
    assert (data["mesh"], data["world_size"], data["engine_size"]) == ("DP2xPP2xPCP2", 8, 4)
    assert data["groups"]["ep"] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert data["ranks"][6] == {
        "rank": 6, "external_dp": 0, "dp": 1, "pp": 1, "pcp": 0, "tp": 0, "node": 1, "device": 2
    }  # fmt: skip
    assert data["experts"] == [[0, 2], [2, 4], [4, 6], [6, 6]]
    assert data["combinations"]["DP x EP, in lockstep"] == "executed"


def test_the_table_shows_what_the_json_has(pcp: Any) -> None:
    shown = pcp("mesh", "--dp", 2, "--pcp", 2, "--devices", 8, "--experts", 6, "--expert-parallel").stdout
    for text in ("DP2xPCP2", "0,1  2,3", "0,2  1,3", "0,1,2,3", "0-1, 2-3, 4-5, none", "4 ranks, 2 engines of 2"):
        assert text in shown
    assert "executed: tests compare it with one rank" in shown
    assert "node" in shown
    plain = pcp("mesh", "--dp", 2, "--pcp", 2).stdout
    assert "node" not in plain
    one = pcp("mesh", "--pcp", 1, "--expert-parallel", "--experts", 1).stdout
    assert "1 rank, 1 engine of 1" in one and "experts: whole, on one rank" in one
    assert "groups" not in one, "an empty table"
    assert "64 of 128 ranks are shown" in pcp("mesh", "--dp", 16, "--pcp", 8).stdout


def test_a_fold_shows_the_same_ranks_under_two_names(pcp_json: Any) -> None:
    _, data = pcp_json("mesh", "--pcp", 2, "--tp", 2, "--fold-on-tp")
    assert (data["mesh"], data["world_size"]) == ("PCP2 on TP", 2)
    assert data["groups"]["tp"] == data["groups"]["pcp"] == [[0, 1]]
    assert data["ranks"][1]["device"] is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--tp", 2), "set tp=1, or set fold_on_tp=True"),
        (("--pcp", 2, "--tp", 2, "--fold-on-tp", "--engine", "vllm"), "vLLM's groups cannot express"),
        (("--pp", 4, "--layers", 3), "pp=4 stages need a layer each, and the model has 3"),
        (("--pcp", 2, "--expert-parallel", "--experts", 0), "the model has no routed experts"),
        (("--dp", 3, "--pcp", 2, "--devices", 4), "Add nodes: 2 are needed"),
        (("--nodes", 2), "say how many a node has with --devices"),
        (("--pp", 0), "pp must be an integer of at least 1"),
        (("--engine", "sglang"), "unknown engine 'sglang'"),
        (("--dp", 2, "--experts", 7), "add it, or drop --experts"),
        (("--pcp", 1, "--fold-on-tp"), "has nothing to fold"),
        (("--pcp", 100000), "4096 at most; found 100000"),
    ],
)
def test_refusals_are_one_sentence(pcp: Any, given: tuple[object, ...], said: str) -> None:
    error = pcp("mesh", *given).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)
    assert "\n" not in str(error)


def test_a_refusal_exits_as_other_commands_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pcp", "mesh", "--tp", "2"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("ConfigError: tp=2 shards weights")
