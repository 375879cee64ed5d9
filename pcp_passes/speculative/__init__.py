# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: random streams, sampling, verification of drafts, acceptance counters, and the drafters."""

from __future__ import annotations

from pcp_passes.speculative.acceptance import AcceptanceCounters, StepRecord
from pcp_passes.speculative.sample import argmax, logprobs_of, sample
from pcp_passes.speculative.streams import ACCEPT, DRAFT, RESIDUAL, SAMPLE, uniforms
from pcp_passes.speculative.verify import verify

__all__ = [
    "ACCEPT",
    "DRAFT",
    "RESIDUAL",
    "SAMPLE",
    "AcceptanceCounters",
    "StepRecord",
    "argmax",
    "logprobs_of",
    "sample",
    "uniforms",
    "verify",
]
