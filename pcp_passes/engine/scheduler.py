# SPDX-License-Identifier: Apache-2.0
"""Which tokens of which requests run in a step: continuous batching on the host, equal on every rank.

First come, first served: running requests in order of admission, then waiting ones while tokens, rows and blocks last.
When blocks run out, the youngest running request is preempted: it gives up its blocks and is prefilled again later,
what it generated included.

Scheduling is asynchronous: step ``t + 1`` is scheduled before the results of step ``t`` are known; with S pipeline
stages, before those of the S steps before it. The host's cursor assumes that every draft in flight is accepted, so it
is an upper bound; :meth:`Scheduler.collect` takes back what was rejected, S steps late. However many steps are in
flight, a request is in at most :data:`MOST_PENDING` that sample for it, so the bound does not grow with S. Nothing here
decides a position: those come from the device (``state.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pcp_passes.engine.blocks import BlockPool, Key, block_keys
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.request import Entry, FinishReason, Request, ScheduledBatch
from pcp_passes.errors import ConfigError

MOST_PENDING = 2
"""Steps in flight that sample for one request, the one being scheduled included."""


class Scheduler:
    """Host state of every request, and the block pool. ``steps``: drafts per step, 0 without a drafter."""

    def __init__(self, options: EngineOptions, steps: int) -> None:
        options.check(steps)
        self.options, self.steps = options, steps
        self.pool = BlockPool(options.num_blocks)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._rows = list(reversed(range(options.max_requests)))
        self._step = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises ConfigError when it can never run."""
        longest = len(request.prompt) + request.params.max_tokens
        if request.id in self.requests:
            raise ConfigError(f"request id {request.id!r} is in use; ids are unique among unfinished requests.")
        if not request.prompt:
            raise ConfigError(f"request {request.id!r} has an empty prompt; give at least one token.")
        if longest > self.options.max_len:
            raise ConfigError(
                f"request {request.id!r}: {len(request.prompt)} prompt tokens and max_tokens="
                f"{request.params.max_tokens} exceed max_len={self.options.max_len}; shorten it or raise max_len."
            )
        self.requests[request.id] = request
        self.waiting.append(request)

    @property
    def unfinished(self) -> bool:
        """Whether any request still waits or runs."""
        return bool(self.requests)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None when nothing can run before more results are collected."""
        budget = self.options.budget
        entries: list[Entry] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            length, drafts = self._wanted(request, budget)
            if length:
                while not self._grow(request, request.cursor + length):
                    preempted = True
                    self._preempt(self.running[-1])
                    if request.status != "running":
                        break
                if request.status != "running":
                    break
                entries.append(self._entry(request, length, drafts))
                budget -= length
            index += 1
        while self.waiting and self._rows and budget > 0 and not preempted:
            length = self._admit(self.waiting[0], budget)
            if not length:
                break
            entries.append(self._entry(self.running[-1], length, 0))
            budget -= length
        if not entries:
            return None
        self._step += 1
        return ScheduledBatch(self._step, tuple(entries))

    def _wanted(self, request: Request, budget: int) -> tuple[int, int]:
        """Tokens and drafts among them that ``request`` may run now; ``(0, 0)`` when it has to wait for results."""
        if request.is_prefilling:
            return self._chunk(request.prefill_len - request.cursor, budget), 0
        if request.pending >= MOST_PENDING:
            return 0, 0
        # Each step in flight gives at least one token. Rejections may leave more to do, so this never stops too early.
        left = request.params.max_tokens - len(request.output) - request.pending
        if left <= 0:
            return 0, 0
        drafts = min(self.steps, left - 1, budget - 1)
        return 1 + drafts, drafts

    def _chunk(self, left: int, budget: int) -> int:
        return min(left, budget, self.options.long_prefill_threshold or left)

    def _blocks_for(self, end: int) -> int:
        """Blocks up to optimistic position ``end``, and for what the drafter's later steps write after it."""
        return -(-(end + self.steps) // self.options.block_size)

    def _grow(self, request: Request, end: int) -> bool:
        fresh = self.pool.take(max(0, self._blocks_for(end) - len(request.blocks)))
        if fresh is None:
            return False
        request.blocks += fresh
        return True

    def _admit(self, request: Request, budget: int) -> int:
        """Move the first waiting request to the running ones; its first chunk's length, 0 when blocks are short."""
        if request.pending:  # preempted, and a step in flight still gives it a token that its prefill must have
            return 0
        tokens = request.tokens
        hits: list[int] = []
        keys: list[Key] = []
        if self.options.prefix_cache:
            # The last token is always computed: its hidden state is what the next one is sampled from.
            upto = tokens if self.steps else tokens[:-1]
            hits, keys = self.pool.find(block_keys(upto, self.options.block_size, next_token=self.steps > 0))
        cached = len(hits) * self.options.block_size
        length = self._chunk(len(tokens) - cached, budget)
        fresh = self.pool.take(self._blocks_for(cached + length) - len(hits), hits)
        if fresh is None:
            return 0
        self.waiting.popleft()
        self.running.append(request)
        request.status, request.row = "running", self._rows.pop()
        request.prefill_len = len(tokens)
        request.cursor = request.confirmed = cached
        request.cached_tokens += cached
        request.blocks, request.keys = hits + fresh, keys
        return length

    def _entry(self, request: Request, length: int, drafts: int) -> Entry:
        start, prefilling = request.cursor, request.is_prefilling
        request.cursor += length
        more = request.is_prefilling
        next_prefill = request.tokens[request.cursor] if more else -1
        request.pending += not more
        return Entry(request, request.epoch, request.row, start, length, drafts, prefilling, next_prefill)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.status = "waiting"
        request.epoch += 1
        request.preemptions += 1
        request.cursor = request.confirmed = 0
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        """Give up row and blocks. Steps in flight were issued before whatever reuses them, so they do no harm."""
        self.running.remove(request)
        self._rows.append(request.row)
        self.pool.release(request.blocks)
        request.row, request.blocks, request.keys, request.uploaded = -1, [], [], -1

    def collect(
        self, batch: ScheduledBatch, tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
    ) -> list[Request]:
        """Take in the results of a step: per entry the accepted drafts and the token after them.

        Tokens after the end of a request are dropped, and so is all of a request that was aborted. ``logprobs`` are
        empty on a stage that has none. Returns the requests that finished.
        """
        finished = []
        for entry, new, logprob in zip(batch.entries, tokens, logprobs or [()] * len(tokens), strict=True):
            request = entry.request
            if request.status == "finished":
                continue
            request.pending -= entry.samples
            rejected = entry.drafts + 1 - len(new) if not entry.is_prefilling else 0
            assert 0 <= rejected <= entry.drafts, f"{request.id}: {len(new)} tokens from {entry.drafts} drafts"
            if request.epoch == entry.epoch:
                request.confirmed += entry.length - rejected
                request.cursor -= rejected
            if not entry.is_prefilling:
                request.drafted.append(entry.drafts)
                request.accepted.append(len(new) - 1)
            reason = self._append(request, new, logprob)
            if request.epoch == entry.epoch and self.options.prefix_cache:
                self._register(request)
            if reason is not None:
                self._finish(request, reason)
                finished.append(request)
        return finished

    def _append(self, request: Request, new: Sequence[int], logprobs: Sequence[float]) -> FinishReason | None:
        for place, token in enumerate(new):
            request.output.append(token)
            request.logprobs += logprobs[place : place + 1]
            if token in request.params.eos:
                return "eos"
            if len(request.output) >= request.params.max_tokens:
                return "length"
        return None

    def _register(self, request: Request) -> None:
        """Key the blocks whose rows are final, for target and drafter: all their tokens are confirmed."""
        size, done = self.options.block_size, len(request.keys)
        if request.confirmed < (done + 1) * size:
            return
        covered = request.confirmed // size * size + (self.steps > 0)
        keys = block_keys(request.tokens[:covered], size, next_token=self.steps > 0, known=request.keys)
        for key in keys:
            self.pool.register(request.blocks[len(request.keys)], key)
            request.keys.append(key)

    def abort(self, request_id: str) -> Request:
        """End a request now; results of it that are in flight are dropped. Raises ConfigError for an unknown id."""
        request = self.requests.get(request_id)
        if request is None:
            raise ConfigError(f"no unfinished request {request_id!r}; unfinished: {sorted(self.requests) or 'none'}.")
        self._finish(request, "abort")
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status == "running":
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.status, request.finish_reason = "finished", reason
        del self.requests[request.id]
