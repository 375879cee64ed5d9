# SPDX-License-Identifier: Apache-2.0
"""One statistic for the tests of distributions: streams are seeded, so a test that passes passes always."""

from __future__ import annotations

import torch


def excess(drawn: torch.Tensor, expected: torch.Tensor) -> float:
    """How far counts are from ``expected`` (probabilities [cells]), in standard deviations of the chi-square statistic.

    Infinite when something impossible was drawn.
    """
    counts = torch.bincount(drawn, minlength=len(expected)).double()
    assert len(counts) == len(expected), "a drawn value outside the cells"
    possible = expected > 0
    if counts[~possible].sum() > 0:
        return float("inf")
    mean = expected[possible] * len(drawn)
    assert mean.min() > 5, "too few draws for the chi-square statistic"
    chi = ((counts[possible] - mean) ** 2 / mean).sum().item()
    freedom = int(possible.sum()) - 1
    return (chi - freedom) / (2 * freedom) ** 0.5
