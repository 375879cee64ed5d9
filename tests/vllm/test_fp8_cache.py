# SPDX-License-Identifier: Apache-2.0
"""An FP8 cache goes through the same gathers: rows travel as they are and are quantised where they are written, on
every rank alike. On CPU vLLM has it for grouped-query attention (its latent back end there takes none)."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from pcp_passes.frontends.vllm.session import Group, Result, Session, run
from tests.models import build
from tests.vllm import cases, sabotage
from tests.vllm.dspark_engines import START, STOP
from tests.vllm.test_equality import difference

CASES = ("ragged", "prompt_logprobs", "shared_prefix", "waves")
#: A key that differs in its last float32 bit may round to the next of FP8's eight steps per power of two.
TOLERANCE = 0.02


def cache_types(worker: Any) -> list[str]:
    """Element types of the caches."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return sorted({str(layer.kv_cache.dtype) for layer in layers if hasattr(layer, "kv_cache")})


@functools.cache
def engine(pcp: int) -> Result:
    """Drafts, small chunks and prefix caching over an FP8 cache; stock vLLM on one rank."""
    session = Session(
        model=str(build("tiny_glm_mtp")),
        groups=(
            Group(rpc=(*START, f"{__name__}:cache_types")),
            *(getattr(cases, name)() for name in CASES),
            Group(rpc=STOP),
            *([Group(cases.ragged().requests, (sabotage.qualified("gather_dropped"),))] if pcp > 1 else []),
        ),
        pcp=pcp,
        options={"decode": "owner"} if pcp > 1 else None,
        backend="eager",
        engine={
            "max_model_len": 256,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 64,
            "block_size": 32,
            "kv_cache_dtype": "fp8_e4m3",
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        },
        env={"VLLM_DISABLE_COMPILE_CACHE": "1"},
    )
    return run(session, timeout_s=420)


@pytest.mark.parametrize("pcp", [1, 2])
def test_the_cache_is_fp8(pcp: int) -> None:
    assert engine(pcp).rpc[0][1] == [["torch.float8_e4m3fn"]] * pcp or engine(pcp).rpc[0][1] == [["torch.uint8"]] * pcp


@pytest.mark.parametrize("case", CASES)
def test_equals_one_rank(case: str) -> None:
    group = 1 + CASES.index(case)
    tokens, largest = difference(engine(2).outputs[group], engine(1).outputs[group])
    assert tokens
    assert largest <= TOLERANCE and not math.isnan(largest)


def test_every_rank_accepts_the_same() -> None:
    def accepted(rank: dict[str, Any]) -> list[dict[str, int]]:
        return [{name.rsplit("-", 1)[0]: n for name, n in step.items()} for step in rank["accepted"]]

    stop = 1 + len(CASES)
    wanted = accepted(engine(1).rpc[stop][0][0])
    assert [accepted(rank) for rank in engine(2).rpc[stop][0]] == [wanted, wanted]


def test_a_dropped_gather_is_seen() -> None:
    tokens, largest = difference(engine(2).outputs[-1], engine(1).outputs[1])
    assert not tokens or not largest <= 10 * TOLERANCE
