# SPDX-License-Identifier: Apache-2.0
"""Sampling: ties, the distribution at a temperature, independence of the batch, log probabilities."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from pcp_passes.speculative import DRAFT, SAMPLE, argmax, logprobs_of, sample
from tests.unit.speculative.statistics import excess


def inputs(count: int, vocab: int = 11) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(count, vocab, generator=generator, dtype=torch.float64)
    return (
        logits,
        torch.tensor([0.0, 0.3, 1.0, 2.5]).repeat(count)[:count],
        torch.arange(count),
        torch.arange(count) % 3,
    )


def test_of_equal_logits_the_lowest_token_wins() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [-1.0, -torch.inf, -torch.inf, -1.0]])
    assert argmax(logits).tolist() == [1, 0, 0]
    zero = torch.zeros(3, dtype=torch.int64)
    assert sample(logits, torch.zeros(3), zero, zero).tolist() == [1, 0, 0]
    assert argmax(logits.bfloat16()).tolist() == [1, 0, 0]


def test_nan_gives_a_token_that_no_vocabulary_holds() -> None:
    logits = torch.tensor([[0.0, torch.nan, 2.0]]).repeat(2, 1)
    zero = torch.zeros(2, dtype=torch.int64)
    assert sample(logits, torch.tensor([0.0, 1.0]), zero, zero).tolist() == [3, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_follow_the_distribution_at_a_temperature(temperature: float) -> None:
    count = 30_000
    logits = torch.tensor([1.5, 0.0, -2.0, 0.7, 0.7, -torch.inf], dtype=torch.float32).expand(count, 6)
    seeds, positions = torch.arange(count), torch.full((count,), 9)
    drawn = sample(logits, torch.full((count,), temperature), seeds, positions)
    expected = torch.softmax(logits[0].double() / temperature, -1)
    assert excess(drawn, expected) < 5
    # The same tokens judged by another temperature's distribution: the bound can be exceeded.
    assert excess(drawn, torch.softmax(logits[0].double() / (temperature * 1.1), -1)) > 5


def test_a_token_depends_on_its_own_row_only() -> None:
    logits, temperature, seeds, positions = inputs(24)
    together = sample(logits, temperature, seeds, positions)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    shuffled = sample(logits[order], temperature[order], seeds[order], positions[order])
    assert torch.equal(shuffled, together[order])
    alone = [sample(*(part[r : r + 1] for part in (logits, temperature, seeds, positions))) for r in range(24)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("what", ["seeds", "positions", "purpose"])
def test_seed_position_and_purpose_each_matter(what: str) -> None:
    logits, _, seeds, positions = inputs(200)
    temperature = torch.ones(200)
    first = sample(logits, temperature, seeds, positions)
    other = sample(
        logits,
        temperature,
        seeds + 1000 * (what == "seeds"),
        positions + 1000 * (what == "positions"),
        DRAFT if what == "purpose" else SAMPLE,
    )
    assert not torch.equal(first, other)


def test_no_value_is_read_on_the_host() -> None:
    with FakeTensorMode() as mode:
        parts = [mode.from_tensor(part) for part in inputs(8)]
        assert sample(*parts).shape == (8,)
        assert logprobs_of(parts[0], parts[2]).shape == (8,)
        with pytest.raises(DataDependentOutputException):
            parts[2].max().item()


def test_log_probabilities() -> None:
    logits, _, _, _ = inputs(4, vocab=5)
    tokens = torch.tensor([[0, 4], [2, -1], [5, 1], [3, 3]])
    found = logprobs_of(logits.float(), tokens)
    expected = logits.float().double() - logits.float().double().exp().sum(-1, keepdim=True).log()
    known = (tokens >= 0) & (tokens < 5)
    assert found.isnan().tolist() == (~known).tolist()
    torch.testing.assert_close(found[known], expected.gather(1, tokens.clamp(0, 4))[known], rtol=0, atol=1e-14)
    assert torch.equal(logprobs_of(logits.float(), tokens[:, 0])[:2], found[:2, 0])
