# SPDX-License-Identifier: Apache-2.0
"""Compares selections of keys: the form that every selection has, and its set, up to ties of the scores.

Two selections of a row agree when their sets are equal, or when every key of their symmetric difference scores within
``epsilon`` of the row's k-th best score. ``epsilon`` is 0 where scores are exact; for scores summed in another order
see :func:`sum_band`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch


def check_form(found: torch.Tensor, n_valid: torch.Tensor, topk: int) -> None:
    """Require i32 ``[T, topk]`` of ``min(n, topk)`` rising indices in ``0 .. n - 1``, then -1.

    Raises:
        AssertionError: names the first rows that are not so.
    """
    assert found.dtype == torch.int32, f"found {found.dtype}; required int32"
    assert found.shape == (len(n_valid), topk), f"found {list(found.shape)}; required {[len(n_valid), topk]}"
    faults = []
    for row, (keys, n) in enumerate(zip(found.tolist(), n_valid.tolist(), strict=True)):
        count = max(0, min(n, topk))
        held = keys[:count]
        if any(key != -1 for key in keys[count:]):
            faults.append(f"row {row}: required -1 after {count} keys; found {keys[count:]}")
        elif any(not 0 <= key < n for key in held):
            faults.append(f"row {row}: required keys of 0 .. {n - 1}; found {held}")
        elif any(low >= high for low, high in pairwise(held)):
            faults.append(f"row {row}: required rising, unique keys; found {held}")
    _report(faults)


def compare_selected(
    found: torch.Tensor,
    wanted: torch.Tensor,
    scores: torch.Tensor | None,
    n_valid: torch.Tensor,
    topk: int,
    epsilon: float | torch.Tensor = 0.0,
) -> int:
    """Require the form of ``found``, and its sets to be those of ``wanted`` up to ties; returns the rows with ties.

    Args:
        found, wanted: ``[T, topk]``, -1 where there is no key; only the set of ``wanted`` matters, and it may hold keys
            that the row does not see (they are dropped, as models write them where fewer than ``topk`` keys exist).
        scores: ``[T, S]`` of the oracle, NaN below every number; None allows no difference.
        n_valid: integers ``[T]``, keys that each row sees.
        epsilon: half width of the band around the k-th score; a number, or ``[T]``.

    Raises:
        AssertionError: names the first rows that differ, with the scores of the keys in question.
    """
    check_form(found, n_valid, topk)
    faults, ties = [], 0
    bands = torch.as_tensor(epsilon, dtype=torch.float64).expand(len(n_valid)).tolist()
    for row, n in enumerate(n_valid.tolist()):
        have = {key for key in found[row].tolist() if key >= 0}
        want = {key for key in wanted[row].tolist() if 0 <= key < n}
        if have == want:
            continue
        if len(have) != len(want) or scores is None:
            faults.append(f"row {row}: missing {sorted(want - have)[:8]}, unexpected {sorted(have - want)[:8]}")
            continue
        visible = scores[row, :n].to(torch.float64).nan_to_num(nan=float("-inf"))
        least = float(visible.topk(topk).values[-1])
        outside = {
            key: float(visible[key]) for key in sorted(have ^ want) if not _near(visible[key], least, bands[row])
        }
        if outside:
            faults.append(f"row {row}: the k-th score is {least}, band {bands[row]}; keys outside it: {outside}")
        ties += 1
    _report(faults)
    return ties


def sum_band(q: torch.Tensor, w: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None = None) -> torch.Tensor:
    """fp64 ``[T]``: 2**-20 of the largest ``scale * sum_h |w| * (|q| . |k|)`` of each row.

    An fp32 sum of ``n`` terms is off by at most about ``n * 2**-24`` of the sum of their magnitudes in any order, and
    by ``sqrt(n)`` of it as a rule; 2**-20 holds for the 128 * 64 terms of the largest indexer with room to spare.
    """
    size = torch.einsum("thd,nd->thn", q.to(torch.float64).abs(), k.to(torch.float64).abs())
    total = torch.einsum("th,thn->tn", w.to(torch.float64).abs(), size)
    if k_scale is not None:
        total = total * k_scale.to(torch.float64)
    return total.amax(dim=1) * 2.0**-20


def selected_by_definition(scores: torch.Tensor, n_valid: torch.Tensor, topk: int) -> torch.Tensor:
    """i32 ``[T, topk]`` by sorting (score descending, index ascending) in Python; NaN last, -0 equal to +0."""
    out = torch.full((len(n_valid), topk), -1, dtype=torch.int32)
    for row, n in enumerate(n_valid.tolist()):
        values = scores[row].tolist()
        order = sorted(range(max(0, n)), key=lambda j: (math.isnan(values[j]), -values[j], j))
        held = sorted(order[:topk])
        out[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
    return out


def _near(score: torch.Tensor, least: float, band: float) -> bool:
    # Equal infinities are a tie, though their difference is not a number.
    return float(score) == least or abs(float(score) - least) <= band


def _report(faults: list[str]) -> None:
    assert not faults, "\n  ".join([f"{len(faults)} rows are wrong:", *faults[:5]])
