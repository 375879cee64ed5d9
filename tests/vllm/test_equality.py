# SPDX-License-Identifier: Apache-2.0
"""Real vLLM with PCP against stock vLLM on one rank: tokens equal, logprobs within 1e-4, and every fault seen."""

from __future__ import annotations

import pytest

from pcp_passes.frontends.vllm.session import Group, Output
from tests.vllm import sabotage
from tests.vllm.cases import CASES, ragged
from tests.vllm.engines import FULL, Engine, reference, result_of, scratch_cache
from tests.vllm.test_native import NATIVE_MLA

#: Clean runs differ by at most 2e-5 (another summation order in Inductor's kernels); the weakest fault by 0.3.
TOLERANCE = 1e-4

_CONTROLS = tuple(
    Group(ragged().requests, (sabotage.qualified("undo"), sabotage.qualified(fault))) for fault in sabotage.FAULTS
)
_CLEAN_AGAIN = (Group(ragged().requests, (sabotage.qualified("undo"),)),)

#: Every two values of {model, ranks, mode, compiler, decode, layout, budget} that can stand together do, once.
COVER = (
    Engine("tiny_gqa", options={"poison": True}, budget=64),
    Engine(
        "tiny_gqa",
        pcp=4,
        backend="eager",
        options={"decode": "owner", "layout": "contiguous", "verify": "every"},
        prefix_caching=False,
        extra=(*_CONTROLS, *_CLEAN_AGAIN),
    ),
    Engine("tiny_gqa", mode=3, backend="eager", options={"decode": "owner"}, budget=64),
    Engine("tiny_gqa", mode=3, options={}, cache_root=scratch_cache()),
    Engine("tiny_sliding", options={"decode": "owner"}, budget=64),
    Engine("tiny_mla", options={}, prefix_caching=False),
)
_MODELS = ("tiny_gqa", "tiny_sliding", "tiny_sinks", "tiny_mla")
_FULL = tuple(
    Engine(
        model,
        pcp=pcp,
        mode=mode,
        backend=backend,
        options={"decode": decode},
        budget=64 if model != "tiny_mla" and decode == "replicate" else 512,
        prefix_caching=model != "tiny_mla",
    )
    for model in _MODELS
    for pcp in (2, 4)
    for mode in (2, 3)
    for backend in ("inductor", "eager")
    for decode in ("replicate", "owner")
    if not (model == "tiny_sinks" and mode == 3)
)
ENGINES = (*COVER, *_FULL) if FULL else COVER


def difference(found: list[Output | None], wanted: list[Output | None]) -> tuple[bool, float]:
    """Whether all tokens agree, and the largest difference between logprobs, prompt logprobs included."""
    tokens, largest = True, 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs, "one side was aborted"
            continue
        tokens &= ours.tokens == theirs.tokens
        pairs = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
        pairs += zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
        gaps = [abs(a - b) for a, b in pairs]
        assert all(gap == gap for gap in gaps), "a logprob is NaN"
        largest = max(largest, *gaps)
    return tokens, largest


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_equals_one_rank(engine: Engine, case: str) -> None:
    index = engine.cases.index(case)
    tokens, largest = difference(result_of(engine).outputs[index], result_of(reference(engine.model)).outputs[index])
    assert tokens
    assert largest <= TOLERANCE


@pytest.mark.parametrize("fault", sabotage.FAULTS)
def test_fault_is_seen(fault: str) -> None:
    engine = COVER[1]
    wanted = result_of(reference(engine.model)).outputs[engine.cases.index("ragged")]
    found = result_of(engine).outputs[len(engine.cases) + sabotage.FAULTS.index(fault)]
    try:
        tokens, largest = difference(found, wanted)
    except AssertionError:  # NaN
        return
    assert not tokens or largest > 100 * TOLERANCE


def test_engine_is_right_again_without_the_fault() -> None:
    engine = COVER[1]
    wanted = result_of(reference(engine.model)).outputs[engine.cases.index("ragged")]
    tokens, largest = difference(result_of(engine).outputs[-1], wanted)
    assert tokens
    assert largest <= TOLERANCE


def test_mla_equals_native_pcp() -> None:
    ours, native = result_of(COVER[5]), result_of(NATIVE_MLA)
    for found, wanted in zip(ours.outputs, native.outputs, strict=True):
        tokens, largest = difference(found, wanted)
        assert tokens
        assert largest <= TOLERANCE


def test_sampled_tokens_are_not_the_greedy_ones() -> None:
    """The temperature case really samples."""
    outputs = result_of(reference("tiny_gqa")).outputs[tuple(CASES).index("sampled")]
    assert any(min(output.logprobs) < -3 for output in outputs if output is not None)
