# SPDX-License-Identifier: Apache-2.0
"""The scenario that vLLM publishes for prefills beside a sustained stream, scaled to the shipped model."""

from __future__ import annotations

from pcp_passes.demo.text import held_out_prompts
from pcp_passes.engine.options import EngineOptions, SamplingParams
from tests.engine_schedules import Arrival, Schedule

STEPS = 5
"""Drafts per step."""


def sustained_stream(prefill: int = 3073, stream: int = 128, *, budget: int = 8192, threshold: int = 4096) -> Schedule:
    """One request generates ``stream`` tokens; two of ``prefill`` tokens come in between and generate 8 each."""
    text = held_out_prompts(3, max(prefill, 64)).tolist()
    blocks = 3 * (-(-(prefill + 64) // 64)) + 8
    options = EngineOptions(
        block_size=64, num_blocks=blocks, max_len=max(prefill, 64 + stream) + 64, max_requests=3, budget=budget,
        long_prefill_threshold=threshold,
    )  # fmt: skip
    arrivals = (
        Arrival(0, "stream", tuple(text[0][:64]), SamplingParams(max_tokens=stream)),
        Arrival(4, "prefill-1", tuple(text[1][:prefill]), SamplingParams(max_tokens=8)),
        Arrival(9, "prefill-2", tuple(text[2][:prefill]), SamplingParams(max_tokens=8)),
    )
    return Schedule(0, STEPS, options, arrivals, ())
