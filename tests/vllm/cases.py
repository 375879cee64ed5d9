# SPDX-License-Identifier: Apache-2.0
"""The batches that every engine runs. Results must not depend on how an engine is built, so one PCP=1 engine per
model answers for all of them."""

from __future__ import annotations

from pcp_passes.frontends.vllm.session import Group, Request
from tests.models import prompt

#: Shorter than 2P, not divisible by anything, and more than one chunk of the 64-token budget.
RAGGED = (1, 2, 3, 5, 37, 61, 100)


def ragged(seed: int = 1) -> Group:
    """All lengths in one batch; the shortest cannot give every rank a row."""
    return Group(tuple(Request(prompt(n, seed=seed), 12) for n in RAGGED))


def alone() -> Group:
    """One-token and two-token prompts with nobody beside them: most ranks have no row at all."""
    return Group((Request(prompt(1, seed=2), 6),))


def prompt_logprobs() -> Group:
    """Every row of the prompt is read, so every row must be restored."""
    return Group(tuple(Request(prompt(n, seed=3), 2, prompt_logprobs=True) for n in RAGGED))


def shared_prefix() -> Group:
    """Arrivals after the first find 96 of their tokens in the prefix cache."""
    prefix = prompt(96, seed=4)
    tails = (1, 2, 7, 30)
    return Group(tuple(Request(prefix + prompt(n, seed=5), 6, arrive=12 * i) for i, n in enumerate(tails)))


def waves() -> Group:
    """Twenty requests in five waves: prefills, chunked prefills and decodes share steps."""
    lengths = (3, 90, 1, 17, 64, 33, 2, 71, 128, 5, 40, 11, 99, 6, 24, 55, 4, 82, 13, 37)
    return Group(tuple(Request(prompt(n, seed=6 + i), 4 + i % 9, arrive=3 * (i // 4)) for i, n in enumerate(lengths)))


def sampled() -> Group:
    """Temperature, each request with a seed of its own."""
    return Group(tuple(Request(prompt(n, seed=30), 10, temperature=0.9, seed=100 + n) for n in (2, 9, 33, 70)))


def aborted() -> Group:
    """Two requests leave in the middle of others."""
    keep = [Request(prompt(n, seed=40), 10) for n in (21, 50)]
    leave = [Request(prompt(n, seed=41), 40, abort=4) for n in (60, 7)]
    return Group((keep[0], leave[0], keep[1], leave[1]))


CASES = {
    "ragged": ragged,
    "alone": alone,
    "prompt_logprobs": prompt_logprobs,
    "shared_prefix": shared_prefix,
    "waves": waves,
    "sampled": sampled,
    "aborted": aborted,
}


def served() -> tuple[Request, ...]:
    """Fifty requests for the HTTP server."""
    return tuple(Request(prompt(1 + (7 * i) % 90, seed=50 + i), 6) for i in range(50))
