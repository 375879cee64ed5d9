# SPDX-License-Identifier: Apache-2.0
"""A DSpark drafter in real vLLM: the target sharded over two ranks, the drafter whole on each, drafts and accepted
counts those of stock vLLM on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from pcp_passes.frontends.vllm.session import Output, Result
from tests.vllm.dspark_engines import CASES, FAULTS, engine
from tests.vllm.dspark_models import STEPS

#: Position in a result's groups: before the cases a scrape, after them the probe's end.
_PROBED = len(CASES) + 1


def one() -> Result:
    """Stock vLLM with the drafter."""
    return engine(1, "eager")


def two(backend: str = "eager") -> Result:
    """Ours. Under Inductor decodes have an owner, so that their rows are gathered too."""
    return engine(2, "eager", "replicate", faults=True) if backend == "eager" else engine(2, "inductor", "owner")


def probed(result: Result, what: str) -> list[list[dict[str, Any]]]:
    """Per rank and step, ``what`` by request, without the random end that vLLM gives a request's name."""
    ranks = result.rpc[_PROBED][0]
    return [[{name.rsplit("-", 1)[0]: v for name, v in step.items()} for step in rank[what]] for rank in ranks]


def tokens(outputs: list[Output | None]) -> list[list[int] | None]:
    return [None if output is None else output.tokens for output in outputs]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_tokens_equal_one_rank(backend: str, case: str) -> None:
    group = 1 + CASES.index(case)
    assert tokens(two(backend).outputs[group]) == tokens(one().outputs[group])


@pytest.mark.parametrize("what", ["accepted", "drafts"])
def test_every_rank_drafts_and_accepts_the_same(what: str) -> None:
    wanted = probed(one(), what)[0]
    assert probed(two(), what) == [wanted, wanted]


def test_acceptance_is_a_real_signal() -> None:
    accepted = [max(n - 1, 0) for step in probed(one(), "accepted")[0] for n in step.values()]
    rate = sum(accepted) / (STEPS * len(accepted))
    assert 0.1 < rate < 0.9
    assert set(accepted) == set(range(STEPS + 1)), "each count occurs"


def test_target_is_sharded_and_drafter_is_not_rewritten() -> None:
    """Only the target's graph has our bodies: every one that ran was the target's."""
    for rank in two().rpc[_PROBED][0]:
        assert {role for role, _ in rank["ran"]} == {"target"}
        assert {variant for _, variant in rank["ran"]} == {"sharded", "replicated"}


def test_auxiliary_states_travel_in_one_collective() -> None:
    """A sharded step: one gather per target layer, one for both auxiliary states, one for the sampled rows."""
    rank = two().rpc[_PROBED][0][0]
    sharded = sum(step["variant"] == "sharded" for step in rank["steps"])
    assert len(rank["collectives"]) == sharded * (3 + 1 + 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_changes_the_drafts(fault: str) -> None:
    """And no greedy token: it is the drafts that show a wrong auxiliary state or block table."""
    at = _PROBED + 1 + 2 * FAULTS.index(fault)
    clean = [step for step in probed(two(), "drafts")[0] if any(name.startswith("1-") for name in step)]
    drafts = [sorted(step.values()) for step in two().rpc[at + 1][0][0]["drafts"]]
    assert drafts != [sorted(step.values()) for step in clean]
    assert tokens(two().outputs[at]) == tokens(two().outputs[1])
