# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction with both graphs rewritten, against stock vLLM on one rank and against its own PCP: tokens,
logprobs, proposals and accepted counts of every step."""

from __future__ import annotations

import pytest

from tests.vllm import mtp_engines as engines
from tests.vllm.engines import Engine, failure_of, result_of
from tests.vllm.mtp_engines import COVER, ENGINES, GLM_1, GLM_3, MLA, MLA_FAULTS, NATIVE, probed, steps_of
from tests.vllm.test_equality import TOLERANCE, difference


@pytest.fixture(scope="module", autouse=True)
def _references() -> None:
    engines.start_references()


def _compare(engine: Engine, name: str, other: Engine, other_name: str) -> tuple[bool, float]:
    """Whether tokens, proposals and accepted counts of two groups agree, and the largest difference of logprobs."""
    index, other_index = list(engine.groups()).index(name), list(other.groups()).index(other_name)
    tokens, largest = difference(result_of(engine).outputs[index], result_of(other).outputs[other_index])
    same = [steps_of(engine, name, what) == steps_of(other, other_name, what) for what in ("accepted", "drafts")]
    return tokens and all(same), largest


@pytest.mark.parametrize("case", engines.CASES)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_equals_one_rank(engine: Engine, case: str) -> None:
    equal, largest = _compare(engine, case, engines.reference(engine), case)
    assert equal
    assert largest <= TOLERANCE


@pytest.mark.parametrize("case", engines.CASES)
def test_equals_native_pcp(case: str) -> None:
    equal, largest = _compare(MLA, case, NATIVE, case)
    assert equal
    assert largest <= TOLERANCE


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_all_ranks_accepted_the_same(engine: Engine) -> None:
    for case in engines.CASES:
        for what in ("accepted", "drafts"):
            assert steps_of(engine, case, what, rank=1) == steps_of(engine, case, what)


@pytest.mark.parametrize("engine", [engines.reference(e) for e in COVER], ids=str)
def test_acceptance_is_a_signal(engine: Engine) -> None:
    """Of the first drafts that were verified, more than a few were right, and more than a few wrong."""
    counts = [count for step in steps_of(engine, "waves", "accepted") for count in step.values()]
    assert len(counts) > 60
    verified = [count for count in counts if count > 0]
    # A request's first token is sampled without a draft.
    share = sum(count > 1 for count in verified) / (len(verified) - 20)
    assert 0.25 <= share <= 0.9


def test_drafter_runs_sharded_first_and_replicated_after() -> None:
    """Each sharded target step is followed by one sharded draft pass; nothing else of the drafter is sharded."""
    for engine in COVER:
        ran = [tuple(body) for body in probed(engine)["ran"]]
        assert len(ran) > 100
        assert {"sharded", "replicated"} >= {variant for role, variant in ran if role == "drafter"}
        for index, (role, variant) in enumerate(ran):
            if role != "target":
                continue
            passes = ran[index + 1 : index + 1 + engine.drafts]
            assert passes == [("drafter", variant), *[("drafter", "replicated")] * (engine.drafts - 1)]


def test_only_sampled_rows_come_back_from_the_drafter() -> None:
    """One collective after each sharded first pass, with one row per request that holds both of its states."""
    seen = probed(MLA)
    both_states = 2 * 64
    rows = [c["shape"][0] for c in seen["collectives"] if c["shape"][1:] == [both_states]]
    requests = [
        len(step)
        for step, planned in zip(seen["accepted"], seen["steps"], strict=True)
        # The cases only: one of the faults after them leaves this very collective out.
        if planned["variant"] == "sharded" and all(int(key.split("-")[0]) <= len(MLA.cases) for key in step)
    ]
    assert len(requests) > 50
    assert rows[: len(requests)] == requests


@pytest.mark.parametrize("fault", [name for name in MLA_FAULTS if name not in ("even", "none")])
def test_fault_is_seen(fault: str) -> None:
    extra = f"extra {list(MLA_FAULTS).index(fault)}"
    equal, largest = _compare(MLA, extra, engines.reference(MLA), "extra 0" if fault == "slots_by_shape" else "ragged")
    assert not equal or not largest <= TOLERANCE


@pytest.mark.parametrize("name, other", [("even", "extra 0"), ("none", "ragged")])
def test_engine_is_right_without_a_fault(name: str, other: str) -> None:
    equal, largest = _compare(MLA, f"extra {list(MLA_FAULTS).index(name)}", engines.reference(MLA), other)
    assert equal
    assert largest <= TOLERANCE


def test_broadcast_makes_noise_on_other_ranks_harmless() -> None:
    equal, largest = _compare(GLM_1, "extra 0", engines.reference(GLM_1), "extra 0")
    assert equal
    assert largest <= TOLERANCE


def test_without_the_broadcast_it_is_not() -> None:
    assert steps_of(GLM_1, "extra 1", "accepted", rank=1) != steps_of(GLM_1, "extra 1", "accepted")
    equal, largest = _compare(GLM_1, "extra 1", engines.reference(GLM_1), "extra 1")
    assert not equal or not largest <= TOLERANCE


def test_rank_frozen_in_a_draft_step_ends_the_engine_with_the_reason() -> None:
    failure = failure_of(GLM_3)
    assert failure.last_s < 30
    assert "pcp rank 1 is lost: frozen" in str(failure)
