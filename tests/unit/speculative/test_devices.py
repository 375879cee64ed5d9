# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: the same random numbers to the last bit, the same tokens, and capture into a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from pcp_passes.speculative import ACCEPT, argmax, sample, uniforms, verify

pytestmark = pytest.mark.gpu

REQUESTS, STEPS, VOCAB = 64, 5, 1000


def operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(REQUESTS * (STEPS + 1), VOCAB, generator=generator)
    drafts = argmax(logits).reshape(REQUESTS, STEPS + 1)[:, :STEPS].contiguous()
    return (
        logits,
        torch.arange(REQUESTS + 1) * (STEPS + 1),
        drafts,
        logits.reshape(REQUESTS, STEPS + 1, VOCAB)[:, :STEPS] + 0.5,
        torch.tensor([0.0, 0.2, 1.0, 2.0]).repeat(REQUESTS // 4),
        torch.arange(REQUESTS) * 12345,
        torch.arange(len(logits)),
    )


def test_random_numbers_are_the_same_bits() -> None:
    seeds, positions = torch.arange(-500, 500) * (2**53 + 1), torch.arange(1000) * 7
    on_cpu = uniforms(seeds, positions, ACCEPT, 33)
    assert torch.equal(uniforms(seeds.cuda(), positions.cuda(), ACCEPT, 33).cpu(), on_cpu)


def test_of_equal_logits_the_lowest_token_wins() -> None:
    logits = torch.zeros(50, 128_000, device="cuda")
    assert argmax(logits).eq(0).all()


def test_tokens_are_those_of_the_cpu() -> None:
    given = operands()
    logits, _, _, _, temperature, seeds, _ = given
    positions = torch.arange(REQUESTS)
    on_cpu = sample(logits[:REQUESTS], temperature, seeds, positions)
    moved = (part.cuda() for part in (logits[:REQUESTS], temperature, seeds, positions))
    assert torch.equal(sample(*moved).cpu(), on_cpu)
    results = verify(*given), verify(*(part.cuda() for part in given))
    assert all(torch.equal(mine, other.cpu()) for mine, other in zip(*results, strict=True))


def test_verification_replays_from_a_captured_graph() -> None:
    given = [part.cuda() for part in operands()]
    expected = verify(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = verify(*given)
    graph.replay()
    assert all(torch.equal(mine, other) for mine, other in zip(captured, expected, strict=True))
    given[2].fill_(-1)
    graph.replay()
    assert captured[1].eq(0).all()
