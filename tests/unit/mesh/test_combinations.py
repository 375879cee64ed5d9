# SPDX-License-Identifier: Apache-2.0
"""The table of combinations: what is refused, with which sentence, and that every row can be reached."""

from __future__ import annotations

from typing import Any

import pytest

from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.combinations import COMBINATIONS, Asked, refusals, require_allowed, rows_of

pytestmark = pytest.mark.unit

FOLDED = Mesh(pcp=2, tp=2, fold_on_tp=True)

#: By row: what reaches it.
REACHED: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "PCP": (Mesh(pcp=2), {}),
    "PP": (Mesh(pp=2), {}),
    "PP x PCP": (Mesh(pp=2, pcp=2), {}),
    "DP, independent replicas": (Mesh(dp=2), {}),
    "DP x EP, in lockstep": (Mesh(dp=2), {"expert_parallel": True, "experts": 4}),
    "DP x PCP": (Mesh(dp=2, pcp=2), {}),
    "DP x PP": (Mesh(dp=2, pp=2), {}),
    "PCP x EP": (Mesh(pcp=2), {"expert_parallel": True, "experts": 4}),
    "TP beside PCP": (Mesh(pcp=2, tp=2), {}),
    "fold_on_tp": (FOLDED, {}),
    "external DP": (Mesh(external_dp=2), {}),
    "EP of a dense model": (Mesh(pcp=2), {"expert_parallel": True, "experts": 0}),
    "more stages than layers": (Mesh(pp=3), {"layers": 2}),
    "recurrent state on several ranks": (Mesh(pp=2), {"hybrid": True}),
    "EP with graphs": (Mesh(pcp=2), {"expert_parallel": True, "experts": 4, "graph_mode": "piecewise"}),
    "PP with graphs": (Mesh(pp=2), {"graph_mode": "full_decode_only"}),
}


def test_every_row_is_reached_and_has_its_sentence() -> None:
    assert set(REACHED) >= {row.name for row in COMBINATIONS}
    for row in COMBINATIONS:
        mesh, given = REACHED[row.name]
        for frontend in ("embedded", "vllm"):
            asked = Asked(mesh, frontend, **given)
            assert (row.name, row.status(frontend)) in rows_of(asked)
            refused = row.status(frontend) == "refused"
            said = row.why.format(asked=asked, mesh=mesh)
            assert (said in refusals(asked)) == refused
            assert bool(row.why) == ("refused" in (row.embedded, row.vllm)), row.name
            if refused:
                assert said.endswith(".")
                assert "\n" not in said


def test_nothing_is_refused_for_one_rank() -> None:
    require_allowed(Mesh(), frontend="embedded", graph_mode="full_and_piecewise", hybrid=True, layers=1, experts=0)
    assert rows_of(Asked(Mesh(), "vllm")) == ()


def test_what_is_executed_is_allowed() -> None:
    for mesh in (Mesh(pp=5), Mesh(pp=2, pcp=2), Mesh(dp=2, pcp=2, pp=2), FOLDED):
        require_allowed(mesh, frontend="embedded", expert_parallel=True, experts=3, layers=5)


def test_all_refusals_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        require_allowed(Mesh(pp=5, tp=2), frontend="embedded", layers=3, expert_parallel=True, experts=0)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("tp=2 shards weights")
    assert lines[2] == "pp=5 stages need a layer each, and the model has 3; lower pp."


def test_a_fold_is_for_the_embedded_engine_alone() -> None:
    require_allowed(FOLDED, frontend="embedded")
    with pytest.raises(ConfigError, match="vLLM's groups cannot express"):
        require_allowed(FOLDED, frontend="vllm")


def test_unknown_counts_refuse_nothing() -> None:
    require_allowed(Mesh(pp=100, pcp=2), frontend="embedded", expert_parallel=True)


def test_an_unknown_frontend_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'sglang'; known: embedded, vllm"):
        require_allowed(Mesh(), frontend="sglang")  # type: ignore[arg-type]
