# SPDX-License-Identifier: Apache-2.0
"""Greedy and temperature sampling without host sync, and log probabilities of chosen tokens.

Scores are computed in float64 whatever the logits' dtype: the same logits then give the same token on every rank and
device but for ties within rounding of a logarithm. A row of NaN logits gives the token ``V``, which no vocabulary
holds: the lookup that follows fails, where an arbitrary token would be believed.
"""

from __future__ import annotations

import torch

from pcp_passes.speculative.streams import SAMPLE, uniforms


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, i64 ``[n]`` for ``[n, V]``; of equal ones the lowest id, on every device.

    ``torch.argmax`` promises no order among equal values, and ranks that break a tie differently go separate ways.
    """
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), tokens, logits.shape[-1]).amin(-1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: int = SAMPLE,
) -> torch.Tensor:
    """One token per row: the most likely one at temperature 0, else drawn from ``softmax(logits / temperature)``.

    Args:
        logits: ``[n, V]``, any float dtype.
        temperature, seeds, positions: ``[n]``; float, i64 and i64. ``positions`` are those of the rows, whose token
            comes one later.
        purpose: the stream to draw from, see :mod:`pcp_passes.speculative.streams`.

    Returns:
        i64 ``[n]``.
    """
    drawn = draw(scaled(logits, temperature), seeds, positions, purpose)
    return torch.where(temperature > 0, drawn, argmax(logits))


def scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """f64 ``[n, V]``: logits over their row's temperature; as they are where it is 0."""
    return logits.double() / torch.where(temperature > 0, temperature, 1.0).double()[:, None]


def draw(
    scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, purpose: int | torch.Tensor
) -> torch.Tensor:
    """A token of each row with probability proportional to ``exp(scores)``, i64 ``[n]``; -inf is never drawn.

    The Gumbel-max trick: the largest of ``scores - log(-log(u))`` is so distributed.
    """
    noise = uniforms(seeds, positions, purpose, scores.shape[-1])
    return argmax(scores - torch.log(-torch.log(noise)))


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Natural log probabilities of tokens under the model itself, that is at temperature 1.

    Args:
        logits: ``[n, V]``.
        tokens: i64 ``[n]`` or ``[n, k]``.

    Returns:
        f64 of the shape of ``tokens``; NaN where a token is not in the vocabulary, as -1 is not.
    """
    columns = tokens.reshape(logits.shape[0], -1)
    known = (columns >= 0) & (columns < logits.shape[-1])
    found = torch.log_softmax(logits.double(), -1).gather(1, torch.where(known, columns, 0))
    return torch.where(known, found, torch.nan).reshape(tokens.shape)
