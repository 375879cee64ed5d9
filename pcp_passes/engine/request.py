# SPDX-License-Identifier: Apache-2.0
"""One request as the host knows it, its part of a step, and what it produced."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from pcp_passes.engine.blocks import Key
from pcp_passes.engine.options import SamplingParams
from pcp_passes.layout import Batch

Status = Literal["waiting", "running", "finished"]
FinishReason = Literal["length", "eos", "abort"]


@dataclass(eq=False)
class Request:
    """Host state. ``cursor`` is *optimistic*: it counts the drafts of the step in flight as accepted.

    Attributes:
        prefill_len: tokens to prefill: the prompt, and after a preemption also what was generated before it.
        cursor: upper bound of the tokens computed on the device.
        confirmed: tokens computed for certain, by the results collected so far.
        pending: steps in flight that will give at least one token.
        epoch: counts preemptions, so that a result of before one is told from a result of after it.
        row: place in the device state while running.
        keys: prefix-cache keys of its first blocks.
        uploaded: blocks that the device knows of; -1 until it knows the request.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    status: Status = "waiting"
    prefill_len: int = 0
    cursor: int = 0
    confirmed: int = 0
    pending: int = 0
    epoch: int = 0
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    uploaded: int = -1
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output known so far."""
        return (*self.prompt, *self.output)

    @property
    def is_prefilling(self) -> bool:
        """By state, never by length: a last chunk may be as short as a verification."""
        return self.cursor < self.prefill_len


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    ``logprobs`` are those of the last pipeline stage; empty from an engine that holds no rank of it.

    ``drafted`` and ``accepted`` count per verification step; ``cached_tokens`` came from the prefix cache.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    cached_tokens: int
    preemptions: int
    finish_reason: FinishReason

    @classmethod
    def of(cls, request: Request) -> RequestOutput:
        assert request.finish_reason is not None, f"{request.id} is not finished"
        return cls(
            request.id, request.prompt, tuple(request.output), tuple(request.logprobs), tuple(request.drafted),
            tuple(request.accepted), request.cached_tokens, request.preemptions, request.finish_reason,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Entry:
    """A request's part of one step: ``length`` tokens from host position ``start``, the last ``drafts`` of them drafts.

    ``next_prefill``: the prompt token after this chunk, -1 when nothing is left to prefill.
    """

    request: Request
    epoch: int
    row: int
    start: int
    length: int
    drafts: int
    is_prefilling: bool
    next_prefill: int

    @property
    def samples(self) -> bool:
        """Whether the step gives tokens for it: not in the middle of a prefill."""
        return self.next_prefill < 0


@dataclass(frozen=True, eq=False)
class ScheduledBatch:
    """One global batch, the same on every rank. Compared by identity: rank-local state belongs to one such object."""

    step: int
    entries: tuple[Entry, ...]
    dummy: bool = False

    @cached_property
    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """i32[R]."""
        return np.array([entry.length for entry in self.entries], dtype=np.int32)

    @cached_property
    def layout_batch(self) -> Batch:
        """As the planner takes it."""
        return Batch(
            self.lengths,
            np.array([entry.start for entry in self.entries], dtype=np.int32),
            np.array([entry.request.prefill_len for entry in self.entries], dtype=np.int32),
            np.array([entry.is_prefilling for entry in self.entries], dtype=np.bool_),
        )

    @cached_property
    def logit_rows(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """i64[L], global token rows that are sampled or verified: the last ``1 + drafts`` of each entry."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        counts = np.array([1 + entry.drafts for entry in self.entries])
        return np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)])

    @property
    def digest(self) -> int:
        """63 bits over everything that the host knows of the batch, so far collected tokens included."""
        known = [
            (e.request.id, e.epoch, e.row, e.start, e.length, e.drafts, e.next_prefill, e.request.output[-1:])
            for e in self.entries
        ]
        return int.from_bytes(hashlib.sha256(repr((self.step, known)).encode()).digest()[:8], "big") >> 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.lengths.sum())
