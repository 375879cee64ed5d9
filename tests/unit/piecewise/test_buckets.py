# SPDX-License-Identifier: Apache-2.0
"""Buckets: one for every batch that can come, close together, and the same on all ranks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_passes.errors import ConfigError
from pcp_passes.layout import Batch, build_layout, dispatch_tokens
from pcp_passes.piecewise.buckets import MAX_BUCKETS, Buckets, derive_buckets, largest_rows

pytestmark = pytest.mark.unit

SERVED = [(2048, 2), (2048, 4), (2048, 8), (8192, 2), (8192, 4), (8192, 8), (2048, 1), (64, 2), (1, 4)]


def batch_within(rng: random.Random, budget: int, max_requests: int, steps: int) -> Batch:
    """A batch as a scheduler gives it: decodes with their drafts, chunks of prompts, ``budget`` tokens at most."""
    lens, prefilling = [], []
    left = budget
    decodes = rng.choice((0, max_requests, rng.randint(0, max_requests)))
    while left and len(lens) < decodes:
        lens.append(min(left, rng.choice((1 + steps, 1 + steps, rng.randint(1, 1 + steps)))))
        prefilling.append(False)
        left -= lens[-1]
    while left and len(lens) < max_requests and (not lens or rng.random() < 0.8):
        lens.append(rng.choice((left, rng.randint(1, left), min(left, rng.randint(1, 5)))))
        prefilling.append(True)
        left -= lens[-1]
    return Batch(lens, [0] * len(lens), [n * p for n, p in zip(lens, prefilling, strict=True)], prefilling)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 32), budget=st.integers(1, 400), pcp=st.sampled_from((1, 2, 3, 4, 8)),
    max_requests=st.integers(1, 40), steps=st.integers(0, 5),
    kind=st.sampled_from(("zigzag", "interleave", "contiguous")), decode=st.sampled_from(("replicate", "owner")),
)  # fmt: skip
def test_every_batch_has_a_bucket_that_holds_all_its_ranks(
    seed: int, budget: int, pcp: int, max_requests: int, steps: int, kind: str, decode: str
) -> None:
    batch = batch_within(random.Random(seed), budget, max_requests, steps)
    buckets = derive_buckets(budget=budget, pcp=pcp, max_requests=max_requests, steps=steps, decode=decode)
    layout = build_layout(batch, pcp, kind=kind, decode=decode)
    rows = buckets.choose_rows(dispatch_tokens(batch, pcp, kind=kind, decode=decode))
    assert rows is not None and rows == buckets.choose_rows(layout.padded_tokens)
    assert rows >= layout.per_rank_tokens.max()
    assert build_layout(batch, pcp, kind=kind, decode=decode, padded_tokens=rows).padded_tokens == rows
    assert [size for size in buckets.rows if size < rows] == [s for s in buckets.rows if s < layout.padded_tokens]
    assert buckets.choose_requests(batch.num_requests) is not None


@pytest.mark.parametrize("decode", ["replicate", "owner"])
def test_the_largest_rows_are_what_some_batch_has(decode: str) -> None:
    """Over all batches of small servers; how prompts are cut into requests does not matter."""
    for budget, pcp, requests, steps in itertools.product((1, 5, 9, 12), (2, 3), (1, 2, 4, 5), (0, 2)):
        found = 0
        for decodes in range(requests + 1):
            for lens in itertools.product(range(1, steps + 2), repeat=decodes):
                left = budget - sum(lens)
                prompt = [left] if left > 0 and decodes < requests else []
                if left >= 0 and (lens or prompt):
                    prefilling = [False] * decodes + [True] * len(prompt)
                    sizes = [*lens, *prompt]
                    batch = Batch(sizes, [0] * len(sizes), [0] * decodes + prompt, prefilling)
                    found = max(found, dispatch_tokens(batch, pcp, decode=decode))
        bound = largest_rows(budget=budget, pcp=pcp, max_requests=requests, steps=steps, decode=decode)
        assert found == bound, (budget, pcp, requests, steps)


def test_a_rank_alone_or_the_batch_as_a_whole_would_choose_another_bucket() -> None:
    """What the largest rank-local count is for: 17 tokens over two ranks are 9 and 8 rows."""
    buckets = derive_buckets(budget=64, pcp=2, max_requests=4, steps=0)
    batch = Batch([17], [0], [17])
    layout = build_layout(batch, 2)
    assert layout.per_rank_tokens.tolist() == [9, 8]
    assert [buckets.choose_rows(count) for count in layout.per_rank_tokens.tolist()] == [16, 8]
    assert buckets.choose_rows(layout.num_tokens) == 24
    assert buckets.choose_rows(dispatch_tokens(batch, 2)) == 16


@pytest.mark.parametrize("budget, pcp", SERVED)
@pytest.mark.parametrize("steps", [0, 3])
def test_few_buckets_close_together(budget: int, pcp: int, steps: int) -> None:
    buckets = derive_buckets(budget=budget, pcp=pcp, max_requests=256, steps=steps)
    even = -(-budget // pcp)
    assert len(buckets.rows) <= 60 and len(buckets.requests) <= 60
    assert buckets.rows[0] == buckets.requests[0] == 1
    assert buckets.max_requests == min(256, budget)
    largest = largest_rows(budget=budget, pcp=pcp, max_requests=256, steps=steps)
    assert largest <= buckets.max_rows < largest + 16
    # A step of prompts alone that fills the budget wastes nothing but the alignment.
    assert buckets.choose_rows(even) == even if even % 16 == 0 or even <= 8 else True
    assert all(size % (8 if size < 256 else 16) == 0 for size in buckets.rows if size > 8)
    gaps = [(b - a, a) for a, b in zip(buckets.rows, buckets.rows[1:], strict=False) if a >= 64]
    assert all(gap <= max(16, a // 4) for gap, a in gaps)
    assert all(gap <= max(16, a // 12) for gap, a in gaps if a >= even), "full steps have the closest buckets"


def test_the_limit_is_kept_or_refused() -> None:
    for limit in (15, 20, 40):
        assert len(derive_buckets(budget=8192, pcp=2, max_requests=256, steps=0, limit=limit).rows) <= limit
    with pytest.raises(ConfigError, match=r"limit=8 buckets cannot hold .* raise the limit"):
        derive_buckets(budget=1 << 20, pcp=1, max_requests=4, steps=0, limit=8)


def test_nothing_holds_more_than_the_largest() -> None:
    buckets = Buckets((2, 8), ())
    assert [buckets.choose_rows(n) for n in (0, 1, 2, 3, 8, 9)] == [2, 2, 2, 8, 8, None]
    assert buckets.choose_requests(1) is None
    assert (buckets.max_rows, buckets.max_requests) == (8, 0)


@pytest.mark.parametrize(
    "sizes, says",
    [
        ((8, 4), "rise"),
        ((4, 4), "rise"),
        ((0, 4), "start at 1"),
        ([1, 2], "tuple of integers"),
        ((1, 2.0), "tuple of integers"),
        ((True, 2), "tuple of integers"),
        (tuple(range(1, MAX_BUCKETS + 2)), f"at most {MAX_BUCKETS}"),
    ],
)
@pytest.mark.parametrize("which", ["rows", "requests"])
def test_sizes_that_are_none(sizes: Any, says: str, which: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Buckets(**({"rows": (1,), "requests": (1,)} | {which: sizes}))
    assert which in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"budget": 0}, {"pcp": 0}, {"max_requests": 0}, {"steps": -1}, {"limit": 7}, {"pcp": True}, {"decode": "x"}],
)
def test_options_that_are_none(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        derive_buckets(**({"budget": 64, "pcp": 2, "max_requests": 4, "steps": 0} | change))
