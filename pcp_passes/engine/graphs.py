# SPDX-License-Identifier: Apache-2.0
"""Which graph a step runs as: the same choice on every rank, from what the host knows of the batch.

The bucket of a step is the smallest that holds the rows of its *fullest rank*, never the global count, so every rank
pads to the same rows. Decode steps that every rank runs whole, and draft steps, have buckets by requests::

    P = 2, buckets of 8, 16, 32 rows, a prefill of 30 tokens and one decode    ranks hold 16 and 16 rows    bucket 16

Warm-up captures every combination that can be chosen, by dummy batches that go through the same planner; afterwards a
combination that was never captured is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pcp_passes.engine.dummies import dummy_batch, dummy_decodes
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.errors import ConfigError, GraphError
from pcp_passes.layout import Batch, Layout, dispatch_tokens
from pcp_passes.piecewise.buckets import Buckets, derive_buckets, largest_rows
from pcp_passes.piecewise.replayer import GraphMode
from pcp_passes.piecewise.runner import StepDispatch

logger = logging.getLogger(__name__)

#: The largest bucket of a kind may be so many times the largest step, whose buffers and graphs are of its size.
MOST_OVER = 4
#: A bucket up to this size is taken whatever the steps are.
FREE_SIZE = 256


@dataclass(frozen=True)
class Choice:
    """How one step runs.

    Attributes:
        dispatch: what the runner of every rank is told.
        padded_tokens: rows per rank of a sharded layout; None leaves it as it is.
        reason: why calls run without a graph; empty when all have one.
    """

    dispatch: StepDispatch
    padded_tokens: int | None = None
    reason: str = ""


WITHOUT = Choice(StepDispatch(mode=GraphMode.NONE))
STALE = Choice(StepDispatch(mode=GraphMode.NONE), reason="the batch was not loaded")


def make_buckets(options: EngineOptions, steps: int) -> Buckets:
    """The buckets of an engine: those asked for, derived ones otherwise.

    Warns of steps that none holds, and of sizes that no step needs, which are left out.

    Raises:
        ConfigError: sizes that buckets cannot be derived from, or a bucket far beyond the largest step.
    """
    sizes: dict[str, Any] = {
        "budget": options.budget, "pcp": options.pcp, "max_requests": options.max_requests, "steps": steps,
        "decode": options.decode,
    }  # fmt: skip
    derived = derive_buckets(**sizes)
    rows, requests = options.graph_rows, options.graph_requests
    if options.graph_mode == "full_decode_only":
        if rows is not None:
            logger.warning("graphs: graph_rows=%s is not used, since full_decode_only runs nothing in pieces", rows)
        rows = ()
    made = Buckets(derived.rows if rows is None else rows, derived.requests if requests is None else requests)
    most_rows, most_requests = largest_rows(**sizes), min(options.max_requests, options.budget)
    made = Buckets(_usable("graph_rows", made.rows, most_rows), _usable("graph_requests", made.requests, most_requests))
    found = [("requests", made.max_requests, most_requests)]
    if options.graph_mode != "full_decode_only":
        found.insert(0, ("rows of a rank", made.max_rows, most_rows))
    for what, largest, needed in found:
        if largest < needed:
            logger.warning("graphs: steps of more than %d %s (up to %d) run without a graph", largest, what, needed)
    return made


def _usable(name: str, sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Sizes up to the smallest that holds every step: others would only take time, and bytes from smaller ones.

    Raises:
        ConfigError: that smallest one is itself far larger than any step; its buffers and graphs are of its size.
    """
    largest = next((size for size in sizes if size >= most), None)
    if largest is not None and largest > max(MOST_OVER * most, FREE_SIZE):
        raise ConfigError(
            f"{name} has a bucket of {largest:,}, and no step of these options is larger than {most:,}; required at "
            f"most {max(MOST_OVER * most, FREE_SIZE):,}. Lower it to {most:,}, or leave {name} out to derive buckets."
        )
    unused = () if largest is None else sizes[sizes.index(largest) + 1 :]
    if unused:
        logger.warning(
            "graphs: %s %s are left out, since no step is larger than %d and %d holds it", name, unused, most, largest
        )
    return sizes[: len(sizes) - len(unused)]


class GraphPlanner:
    """Chooses graphs for the steps of one engine.

    Args:
        options: of the engine; ``graph_mode`` is not ``none``.
        steps: drafts per step.
        buckets: see :func:`make_buckets`.
        draft_calls: the drafter's body is called again after its pass over all tokens (not with one MTP step).
    """

    def __init__(self, options: EngineOptions, steps: int, buckets: Buckets, *, draft_calls: bool) -> None:
        self.options, self.steps, self.buckets, self.draft_calls = options, steps, buckets, draft_calls
        self.piecewise = options.graph_mode in ("piecewise", "full_and_piecewise")
        self.full = options.graph_mode in ("full_decode_only", "full_and_piecewise")

    @property
    def max_rows(self) -> int:
        """Rows of the largest static input; no draft query has more than one row per draft and request."""
        return max(self.buckets.max_rows, self.buckets.max_requests * (1 + self.steps))

    @property
    def max_requests(self) -> int:
        """Attention rows of the largest static set; steps of more requests than buckets hold run in pieces too."""
        return max(self.buckets.max_requests, self.options.max_requests)

    def choose(self, batch: Batch, least_rows: int = 0) -> Choice:
        """The graph of a step; ``least_rows`` asks for at least that many rows per rank (warm-up)."""
        options, buckets = self.options, self.buckets
        fullest = dispatch_tokens(batch, options.pcp, kind=options.layout, decode=options.decode)
        rows = buckets.choose_rows(max(fullest, least_rows))
        requests = buckets.choose_requests(batch.num_requests)
        decode = not len(batch.prefills)
        sharded = options.pcp > 1 and not (decode and options.decode == "replicate")
        drafts, reason = GraphMode.NONE, ""
        if self.draft_calls and requests is not None:
            drafts = GraphMode.FULL if self.full else GraphMode.PIECEWISE
        elif self.draft_calls:
            reason = f"draft steps: {self._too_many_requests}"

        def dispatch(mode: GraphMode, bucket: int | None) -> StepDispatch:
            return StepDispatch(mode, bucket or 0, requests or 0, decode, drafts)

        if self.full and decode and not sharded and requests is not None:
            return Choice(dispatch(GraphMode.FULL, requests * (1 + self.steps)))
        if self.piecewise and rows is not None:
            return Choice(dispatch(GraphMode.PIECEWISE, rows), rows if sharded else None, reason)
        return Choice(dispatch(GraphMode.NONE, None), reason=self._reason(decode, sharded))

    def require_smallest(self, layout: Layout, choice: Choice, least_rows: int = 0) -> None:
        """Whether a sharded layout was padded to the smallest bucket that holds its fullest rank.

        Raises:
            GraphError: it was padded to another, as it is when the bucket is chosen by the tokens of all ranks.
        """
        fullest = int(layout.per_rank_tokens.max())
        wanted = self.buckets.choose_rows(max(fullest, least_rows))
        if choice.padded_tokens is not None and choice.padded_tokens != wanted:
            raise GraphError(
                f"a step of {layout.num_tokens} tokens, {layout.per_rank_tokens.tolist()} per rank, was given a bucket "
                f"of {choice.padded_tokens} rows; required {wanted}, the smallest that holds the fullest rank.\n"
                "  next  choose the bucket by the largest rank-local count, not by the tokens of all ranks"
            )

    @property
    def why_nothing(self) -> str:
        """Why no step of these options has a graph, and what to do; empty when some have one."""
        if next(self.warm_up(), None) is not None:
            return ""
        needed = "rows" if self.piecewise else "requests"
        if not getattr(self.buckets, needed):
            return f"graph_{needed} is empty; leave it out to derive buckets"
        return (
            f"decode={self.options.decode!r} gathers in the middle of decode steps, which no full graph holds, and "
            "there are no draft steps; use graph_mode='piecewise' or decode='replicate'"
        )

    @property
    def _too_many_requests(self) -> str:
        return f"no bucket holds more than {self.buckets.max_requests} requests"

    def _reason(self, decode: bool, sharded: bool) -> str:
        if self.piecewise:
            return f"no bucket holds more than {self.buckets.max_rows} rows of a rank"
        if not decode:
            return "full_decode_only runs steps with a prefill without a graph"
        if sharded:
            return "decode='owner' gathers in the middle of a decode step, which no full graph holds"
        return self._too_many_requests

    def warm_up(self) -> Iterator[tuple[ScheduledBatch, int]]:
        """Dummy batches, and the rows to ask for, that reach every choice; largest graphs first."""
        options, buckets = self.options, self.buckets
        longest, capacity = options.max_len, min(options.budget, options.max_len * options.max_requests)
        most = min(options.max_requests, options.budget)
        replicated = options.pcp == 1 or options.decode == "replicate"
        if self.piecewise:
            for rows in reversed(buckets.rows):
                tokens = min(rows * options.pcp, capacity)
                yield dummy_batch(tokens, -(-tokens // longest)), rows
            if options.pcp > 1 and replicated and (not self.full or buckets.max_requests < most):
                top = buckets.choose_rows(min(options.budget, most * (1 + self.steps)))
                # Decode steps in pieces: with full graphs, only those of more requests than a full graph holds.
                count = buckets.max_requests + 1 if self.full else 1
                for rows in reversed(buckets.rows):
                    if count <= rows and (top is None or rows <= top):
                        yield dummy_decodes(count, 0), rows
        reached = buckets.choose_requests(most) or buckets.max_requests
        for requests in reversed(buckets.requests):
            count = min(requests, most)
            if requests > reached:
                continue
            if replicated and self.full:
                yield dummy_decodes(count, min(self.steps, options.budget // count - 1)), 0
            elif self.draft_calls:
                yield dummy_batch(count, count), 0
