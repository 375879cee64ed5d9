# SPDX-License-Identifier: Apache-2.0
"""Real vLLM with PCP against stock vLLM on one rank: tokens equal, logprobs within 1e-4, and every fault seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from pcp_passes.frontends.vllm.session import Group, Output
from tests.vllm import looks, sabotage
from tests.vllm.cases import CASES, ragged
from tests.vllm.engines import COLD, FULL, NATIVE_MLA, PIECEWISE, Engine, reference, result_of

#: Clean runs differ by at most 2e-5 (another summation order in Inductor's kernels); the weakest fault by 0.3.
TOLERANCE = 1e-4

_CONTROLS = tuple(
    Group(ragged().requests, (sabotage.qualified("undo"), sabotage.qualified(fault))) for fault in sabotage.FAULTS
)
_CLEAN_AGAIN = (Group(ragged().requests, (sabotage.qualified("undo"),)),)

_LOOK = (Group(ragged().requests, (looks.qualified("count_variants"),)), Group(rpc=(looks.qualified("variants_used"),)))

#: Every two values of {model, ranks, mode, compiler, decode, layout, budget} that can stand together do, once.
COVER = (
    Engine("tiny_gqa", options={"poison": True}, budget=64, extra=_LOOK),
    Engine(
        "tiny_gqa",
        pcp=4,
        backend="eager",
        options={"decode": "owner", "layout": "contiguous", "verify": "every"},
        prefix_caching=False,
        extra=(*_CONTROLS, *_CLEAN_AGAIN),
    ),
    PIECEWISE,
    COLD,
    Engine("tiny_sliding", options={"decode": "owner"}, budget=64),
    Engine("tiny_mla", options={}, prefix_caching=False),
)


def full_matrix() -> tuple[Engine, ...]:
    """Each model with both compilers, both decode modes, mode 2 on two and four ranks and mode 3 on two; attention
    sinks with experts, unpacked gathers and SmolLM2 beside them."""
    from pcp_passes.demo.smollm2 import fetch_smollm2

    engines = [
        Engine(
            model,
            pcp=pcp,
            mode=mode,
            backend=backend,
            options={"decode": decode},
            budget=64 if model != "tiny_mla" and decode == "replicate" else 512,
            prefix_caching=model != "tiny_mla",
        )
        for model in ("tiny_gqa", "tiny_sliding", "tiny_mla")
        for pcp, mode in ((2, 2), (4, 2), (2, 3))
        for backend in ("inductor", "eager")
        for decode in ("replicate", "owner")
    ]
    engines += [Engine("tiny_sinks", backend=backend, options={}, budget=64) for backend in ("inductor", "eager")]
    engines += [Engine("tiny_gqa", mode=mode, options={"gather": {"pack": False}}) for mode in (2, 3)]
    smollm2 = str(fetch_smollm2(Path("build/models")))
    engines += [Engine(smollm2, options={}, budget=64), Engine(smollm2, pcp=4, options={"decode": "owner"})]
    return tuple(engines)


ENGINES = (*COVER, *full_matrix()) if FULL else COVER


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


def test_native_pcp_runs_here() -> None:
    """The oracle itself agrees with one rank, so that a disagreement points at us."""
    native, one = result_of(NATIVE_MLA), result_of(reference("tiny_mla"))
    for found, wanted in zip(native.outputs, one.outputs, strict=True):
        assert difference(found, wanted)[0]


def test_pure_decode_steps_run_the_body_without_collectives() -> None:
    """Seven ragged prompts under a 64-token budget, 12 tokens each: sharded while any prefill is left, then not."""
    for counts in result_of(COVER[0]).rpc[-1][0]:
        assert counts["sharded"] >= 4
        assert counts["replicated"] >= 8


def test_sampled_tokens_are_not_the_greedy_ones() -> None:
    """The temperature case really samples."""
    outputs = result_of(reference("tiny_gqa")).outputs[tuple(CASES).index("sampled")]
    assert any(min(output.logprobs) < -3 for output in outputs if output is not None)
