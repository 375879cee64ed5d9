# SPDX-License-Identifier: Apache-2.0
"""The steps that a continuous-batching scheduler packs from a trace, without running anything.

As the embedded engine's scheduler does it: running requests in order of admission, decodes with their drafts among
them, then waiting ones, while tokens and rows last; prompts are cut into chunks by what is left of the budget.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from buckets.traces import Arrival, computed_tokens
from pcp_passes.layout import Batch

STEP_S = 0.008
"""A step takes at least this long."""


@dataclass(frozen=True)
class Serving:
    """What is served how. ``load``: share of the time that the trace's tokens keep the server busy on average."""

    budget: int
    max_requests: int = 256
    drafts: int = 0
    load: float = 0.8


@dataclass(frozen=True)
class Step:
    """Chunks of prompts and the number of decoding requests; each of these has ``1 + drafts`` tokens, the last fewer
    when the budget ends."""

    chunks: tuple[int, ...]
    decodes: int
    decode_tokens: int


def pack(arrivals: list[Arrival], serving: Serving) -> Iterator[Step]:
    """The steps, in order, until the trace is served."""
    tokens = computed_tokens(arrivals)
    total = sum(tokens) + sum(one.output for one in arrivals)
    second_per_token = serving.load * max(1e-3, arrivals[-1].seconds - arrivals[0].seconds) / total
    wanted, advance = 1 + serving.drafts, 1 + serving.drafts // 2  # half of the drafts are accepted
    waiting: deque[tuple[float, int, int]] = deque(
        (one.seconds, count, one.output) for one, count in zip(arrivals, tokens, strict=True)
    )
    ends: Counter[int] = Counter()  # step number -> decoding requests whose last step it is
    decoding, number, now = 0, 0, arrivals[0].seconds
    # Only the youngest admitted request can be amid its prompt: an older one would have taken the budget.
    prefilling: tuple[int, int] | None = None
    while waiting or decoding or prefilling is not None:
        number += 1
        left = serving.budget
        decode_tokens = min(decoding * wanted, left)
        step_decodes = -(-decode_tokens // wanted)
        left -= decode_tokens
        chunks, started = [], []
        rows = serving.max_requests - decoding
        while left > 0 and rows > 0:
            if prefilling is None:
                if not waiting or waiting[0][0] > now:
                    break
                _, count, output = waiting.popleft()
                prefilling = (count, output)
            count, output = prefilling
            chunk = min(left, count)
            chunks.append(chunk)
            left -= chunk
            prefilling = (count - chunk, output) if chunk < count else None
            if prefilling is None:
                rows -= 1
                started.append(output)
        if not chunks and not decoding:
            now = waiting[0][0]
            continue
        yield Step(tuple(chunks), step_decodes, decode_tokens)
        decoding -= ends.pop(number, 0)
        for output in started:
            # The step that ends the prompt gives the first token.
            if output > 1:
                decoding += 1
                ends[number + -(-(output - 1) // advance)] += 1
        now += max(STEP_S, (serving.budget - left) * second_per_token)


def batch_of(step: Step, drafts: int) -> Batch:
    """The step as a layout takes it, decodes first."""
    lens = np.zeros(step.decodes + len(step.chunks), dtype=np.int32)
    lens[: step.decodes] = 1 + drafts
    if step.decodes:
        lens[step.decodes - 1] -= step.decodes * (1 + drafts) - step.decode_tokens
    lens[step.decodes :] = step.chunks
    prefill_len = np.zeros_like(lens)
    prefill_len[step.decodes :] = step.chunks
    return Batch(lens, np.zeros_like(lens), prefill_len, prefill_len > 0)
