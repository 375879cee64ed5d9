# SPDX-License-Identifier: Apache-2.0
"""Ranks whose logits differ in the last place: left alone they accept different counts; given rank 0's they agree.

Every rank computes the logits of the sampled rows itself. Should its kernels not give the same bits as another rank's
(another GPU, another autotuning), a near-tie falls differently, and from there on the ranks hold different texts and,
worse, schedule different lengths: the next collective has unequal operands.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_passes.speculative import argmax, verify

RANKS, STEPS, VOCAB, REQUESTS = 4, 3, 8, 6
Results = list[tuple[torch.Tensor, torch.Tensor]]


def with_ties(seed: int) -> torch.Tensor:
    """bf16 ``[L, V]`` of two levels: nearly every row has several likeliest tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 3, (REQUESTS * (STEPS + 1), VOCAB), generator=generator).bfloat16()


def one_ulp(logits: torch.Tensor, rank: int) -> torch.Tensor:
    """Each logit moved by one unit in the last place, up, down or not at all, otherwise on each rank."""
    generator = torch.Generator().manual_seed(1000 + rank)
    away = torch.randint(-1, 2, logits.shape, generator=generator).to(torch.int16)
    return (logits.view(torch.int16) + away).view(torch.bfloat16)


def run(ranks: list[torch.Tensor], temperature: float) -> Results:
    """Each rank verifies the drafts that all agree on with its own logits."""
    drafts = argmax(ranks[0]).reshape(REQUESTS, STEPS + 1)[:, :STEPS]
    return [
        verify(
            logits,
            torch.arange(REQUESTS + 1) * (STEPS + 1),
            drafts,
            None,
            torch.full((REQUESTS,), temperature),
            torch.arange(REQUESTS),
            torch.arange(len(logits)) % (STEPS + 1),
        )
        for logits in ranks
    ]


def of_rank_zero(results: Results) -> Results:
    """What ``verify_tokens="broadcast"`` does: the small results are gathered and each rank keeps rank 0's rows."""
    gathered = [torch.cat(parts) for parts in zip(*results, strict=True)]
    sampled, accepted = (rows[:REQUESTS] for rows in gathered)
    return [(sampled.clone(), accepted.clone()) for _ in results]


def agree(results: Results) -> bool:
    return all(torch.equal(mine, first) for own in results for mine, first in zip(own, results[0], strict=True))


def noisy(seed: int) -> list[torch.Tensor]:
    return [one_ulp(with_ties(seed), rank) for rank in range(RANKS)]


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=40)
def test_noise_divides_the_ranks_and_rank_zeros_results_unite_them(seed: int) -> None:
    results = run(noisy(seed), 0.0)
    assert len({tuple(accepted.tolist()) for _, accepted in results}) > 1
    assert agree(of_rank_zero(results))


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.7]))
@settings(deadline=None, max_examples=40)
def test_equal_logits_with_ties_need_no_broadcast(seed: int, temperature: float) -> None:
    assert agree(run([with_ties(seed)] * RANKS, temperature))


def test_noise_divides_sampled_requests_too() -> None:
    divided = [seed for seed in range(40) if not agree(run(noisy(seed), 1.0))]
    assert divided
    assert all(agree(of_rank_zero(run(noisy(seed), 1.0))) for seed in divided)


def test_counts_alone_are_not_enough() -> None:
    """A broadcast that leaves the tokens to each rank: equal lengths, different texts."""
    results = run(noisy(5), 0.0)
    counts_only = [(sampled, results[0][1]) for sampled, _ in results]
    assert not agree(counts_only)


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_noise_is_one_unit_in_the_last_place(rank: int) -> None:
    clean, moved = with_ties(3), noisy(3)[rank]
    # bf16 has 7 stored bits of mantissa: the spacing at 1 and 2 is 2**-7 and 2**-6 upwards, half of it downwards.
    assert 0 < (moved.double() - clean.double()).abs().max() <= 2**-6
