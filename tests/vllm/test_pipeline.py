# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages and multi-token prediction on Model Runner V2, against one rank: tokens, logprobs, accepted counts;
with PCP in each stage, and with a scheduler that runs ahead."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pcp_passes.frontends.vllm.session import EngineFailed
from tests.vllm import mtp_engines
from tests.vllm.engines import Engine, failure_of, result_of
from tests.vllm.mtp_engines import probed, steps_of
from tests.vllm.stage_engines import AHEAD, ENGINES, FAULTS, REFERENCES, SHARDED, STOCK, Staged
from tests.vllm.test_equality import TOLERANCE, difference

#: The first test of an engine starts it.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _references() -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(result_of, {str(engine): engine for engine in REFERENCES.values()}.values()))


def accepted(engine: Engine, name: str, rank: int = 0) -> dict[int, list[int]]:
    """Tokens that each request got, in order, one number per step that gave it any."""
    counts: dict[int, list[int]] = {}
    for step in steps_of(engine, name, "accepted", rank):
        for request, count in step.items():
            counts.setdefault(request, []).extend([count] if count else [])
    return counts


def _same_steps(engine: Staged, name: str, other: Engine, other_name: str) -> bool:
    """A request that left, or whose last step ran ahead of its end, has steps on one side only."""
    ours, theirs = accepted(engine, name, last_rank(engine)), accepted(other, other_name)
    assert ours.keys() == theirs.keys() and ours
    return all(a == b for r in ours for a, b in zip(ours[r], theirs[r], strict=False))


def last_rank(engine: Staged) -> int:
    """The first rank of the last stage."""
    return (engine.pp - 1) * engine.pcp


def _outputs(engine: Engine, name: str) -> list[Any]:
    found: list[Any] = result_of(engine).outputs[list(engine.groups()).index(name)]
    return found


def _compare(engine: Staged, name: str, other_name: str) -> tuple[bool, float]:
    other = REFERENCES[str(engine)]
    tokens, largest = difference(_outputs(engine, name), _outputs(other, other_name))
    return tokens and (not engine.drafts or _same_steps(engine, name, other, other_name)), largest


@pytest.mark.parametrize("case", mtp_engines.CASES)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_equals_one_rank(engine: Staged, case: str) -> None:
    equal, largest = _compare(engine, case, case)
    assert equal
    assert largest <= TOLERANCE


def test_rows_that_are_reused_while_a_round_is_in_flight() -> None:
    """Such a row's round is another request's."""
    equal, largest = _compare(AHEAD, "extra 1", "extra 0")
    assert equal
    assert largest <= TOLERANCE


def test_without_generations_they_are_wrong() -> None:
    equal, largest = _compare(AHEAD, "extra 3", "extra 1")
    assert not equal or not largest <= TOLERANCE


def test_stages_agree_on_every_round() -> None:
    """Tokens and rejections that the first stage derives are those that the last one counted."""
    index = list(AHEAD.groups()).index("extra 2")
    (first, last), freed = result_of(AHEAD).rpc[index]
    assert len(first) > 20
    assert first == {number: last[number] for number in first}
    assert any(sum(rejected) for _, _, rejected in first.values())
    assert freed[0] == freed[1] > 10


def test_stages_exchange_rank_local_rows() -> None:
    """Each stage runs its own sharded body, which gathers the cache rows of its own layers and nothing else; only the
    last stage gathers hidden states, those of sampled rows."""
    for rank in range(4):
        seen, last = probed(SHARDED, rank), rank >= 2
        ran = [tuple(body) for body in seen["ran"]]
        sharded = ran.count(("target", "sharded"))
        assert sharded > 50
        assert ({role for role, _ in ran} == {"target"}) is not last
        gathers = [c["shape"][1:] for c in seen["collectives"]]
        latents = [576]
        if last:
            assert gathers.count([64]) >= sharded  # the target's sampled rows
        else:
            assert gathers == [latents] * sharded


@pytest.mark.parametrize("fault", FAULTS[:-1])
def test_fault_is_seen(fault: str) -> None:
    equal, largest = _compare(SHARDED, f"extra {FAULTS.index(fault)}", "ragged")
    assert not equal or not largest <= TOLERANCE


def test_engine_is_right_without_a_fault() -> None:
    equal, largest = _compare(SHARDED, f"extra {FAULTS.index('none')}", "ragged")
    assert equal
    assert largest <= TOLERANCE


def test_requests_that_are_preempted() -> None:
    """Their drafts are of no use any more: they come back as prefills."""
    names = list(SHARDED.groups())
    (preempted,) = result_of(SHARDED).front[names.index(f"extra {len(SHARDED.extra) - 1}")]
    assert preempted
    for back, case in ((2, "ragged"), (1, "waves")):
        name = f"extra {len(SHARDED.extra) - back}"
        tokens, largest = difference(_outputs(SHARDED, name), _outputs(REFERENCES[str(SHARDED)], case))
        assert tokens, (case, preempted)
        assert largest <= TOLERANCE


def test_stage_that_stops_ends_the_engine_with_the_reason() -> None:
    failure = failure_of(AHEAD)
    assert failure.last_s < 30
    assert "rank 0 (dp0 pp0 pcp0) is lost: frozen" in str(failure)


def test_stage_that_fails_ends_the_engine_with_the_reason() -> None:
    """Stock vLLM would wait for the last stage, and that for the first."""
    failure = failure_of(SHARDED)
    assert failure.last_s < 30
    assert "pp0 pcp0) is lost: it failed with RuntimeError: planted in the first stage" in str(failure)


def test_stock_fails_an_assertion() -> None:
    """The scheduler heard of drafts before it saw the token that they follow."""
    with pytest.raises(EngineFailed) as failure:
        result_of(STOCK)
    assert failure.value.finished is not None, "it started"
    found = "AssertionError in prepare_inputs: assert (num_scheduled_tokens_np >= num_logits).all()"
    assert f"the first stage is lost: {found}" in str(failure.value)
