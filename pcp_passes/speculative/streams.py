# SPDX-License-Identifier: Apache-2.0
"""Random streams that depend on the request, the position and the purpose, and on nothing else.

A number is a function of ``(seed, position, purpose, column)``: no generator state, so neither the batch that a row is
in, nor the rank that samples it, nor a preemption changes what is drawn for it. That is what makes tokens comparable
between one rank and P ranks.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64-bit words,
applied to seed, position, purpose and column in turn. Only wrapping integer arithmetic and an exact conversion to
float64 are used, so the values are the same bits on every device. Not for cryptography.
"""

from __future__ import annotations

import torch

SAMPLE = 0
"""A token drawn from the target: plain decoding, and the bonus token after the last accepted draft."""
DRAFT = 1
"""A draft token drawn from the drafter."""
ACCEPT = 2
"""Whether a draft is accepted."""
RESIDUAL = 3
"""The token drawn in place of a rejected draft."""


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word: torch has no uint64 arithmetic."""
    return word - (1 << 64) if word >> 63 else word


_STEP = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, purpose: int | torch.Tensor, columns: int) -> torch.Tensor:
    """Uniform numbers of each row's own stream.

    Args:
        seeds: i64 ``[n]``, the seed of each row's request.
        positions: i64 ``[n]``, the position of each row within its request.
        purpose: one of ``SAMPLE``, ``DRAFT``, ``ACCEPT``, ``RESIDUAL``; i64 ``[n]`` gives each row its own.
        columns: numbers per row; the first c columns do not depend on how many are asked for.

    Returns:
        f64 ``[n, columns]``, strictly between 0 and 1: odd multiples of 2**-53.
    """
    kind = torch.full_like(positions, purpose) if isinstance(purpose, int) else purpose
    stream = _mix(_mix(_mix(seeds) + positions * _STEP) + kind * _STEP)
    column = torch.arange(1, columns + 1, dtype=torch.int64, device=seeds.device)
    bits = _shift_right(_mix(stream[:, None] + column * _STEP), 12)
    # 52 bits and a half: exact in float64, and neither 0 nor 1 can come out.
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def _mix(word: torch.Tensor) -> torch.Tensor:
    word = (word ^ _shift_right(word, 30)) * _MULTIPLIERS[0]
    word = (word ^ _shift_right(word, 27)) * _MULTIPLIERS[1]
    return word ^ _shift_right(word, 31)


def _shift_right(word: torch.Tensor, bits: int) -> torch.Tensor:
    """The logical shift; torch's is arithmetic."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)
