# SPDX-License-Identifier: Apache-2.0
"""Which rows are computed together over which keys, derived from positions on the host.

Causality, a window and a chunk each allow an interval of keys, so a row sees exactly one interval ``[low, high)``. The
rows are cut into *tiles*, and the keys of a tile into *parts* whose results are merged by log-sum-exp::

    causal, rows at 4..7                    window of 7, rows at 8..11
    keys  0 1 2 3 4 5 6 7                   keys   2  3  4  5  6  7  8  9 10 11
    row 4 x x x x x                         row 8  x  x  x  x  x  x  x
    row 5 x x x x x x                       row 9     x  x  x  x  x  x  x
    row 6 x x x x x x x                     row 10       x  x  x  x  x  x  x
    row 7 x x x x x x x x                   row 11          x  x  x  x  x  x  x
          full--- causal-                          masked-- full------ masked--

A *ramp* (``low`` constant, ``high`` grows by one a row) is a full prefix and a causal diagonal, whatever its length. A
*flat* run (one interval for all rows) is one full part. Any other rows go in tiles of at most :data:`ROWS` rows whose
ends differ by at most :data:`EDGE` keys: a full interior between two masked edges, or one masked part where the
interior is narrower than :data:`NARROW`. So at most ``M * (2 * EDGE + NARROW)`` pairs are masked, never ``M * S``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from pcp_passes.host_reads import allowed

ROWS = 128
"""Most rows of a tile that needs masks, and of any tile whose logits are materialised or biased."""

EDGE = 512
"""Most keys between the first and the last start (or end) of the rows of a masked tile; more splits the tile."""

NARROW = 128
"""An interior of fewer keys is not worth a part of its own: the whole hull is one masked part."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Sight(Enum):
    """What the rows of a tile see of the keys of a part."""

    FULL = "every row sees every key"
    CAUSAL = "row i sees the first i + 1 keys"
    MASKED = "row i sees its own interval"


@dataclass(frozen=True)
class Part:
    """Keys ``[start, stop)`` of a tile."""

    start: int
    stop: int
    sight: Sight


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows ``[start, stop)``, each of which sees at least one key.

    ``low`` and ``high`` are their intervals, i64 ``[stop - start]`` on the host; ``origin`` is the position of the
    middle row.
    """

    start: int
    stop: int
    origin: int
    low: torch.Tensor
    high: torch.Tensor
    parts: tuple[Part, ...]

    def seen(self, part: Part) -> torch.Tensor:
        """bool ``[rows, keys]``: whether a row sees a key of ``part``."""
        keys = torch.arange(part.start, part.stop, device=self.low.device)
        return (keys >= self.low[:, None]) & (keys < self.high[:, None])

    def blind(self, part: Part) -> torch.Tensor:
        """bool ``[rows]``: whether a row sees no key of ``part`` (it sees some of another part)."""
        return self.low.clamp(min=part.start) >= self.high.clamp(max=part.stop)


def intervals(
    positions: torch.Tensor, keys: int, left: int, right: int, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Interval ``[low, high)`` of keys of each row, i64 ``[M]`` each; ``low >= high`` where a row sees none.

    Worked example: positions (0, 5), 8 keys, left=2, right=0, chunk=4 give low (0, 4) and high (1, 6).
    """
    low = torch.zeros_like(positions)
    high = torch.full_like(positions, keys)
    if left >= 0:
        low = torch.maximum(low, positions - left)
    if right >= 0:
        high = torch.minimum(high, positions + right + 1)
    if chunk > 0:
        first = positions // chunk * chunk
        low = torch.maximum(low, first)
        high = torch.minimum(high, first + chunk)
    return low, high


@allowed("tiles are those of the reference of a CPU")
def plan(positions: torch.Tensor, keys: int, left: int, right: int, chunk: int, rows: int) -> tuple[Tile, ...]:
    """Tiles of all rows that see a key, in row order. ``rows`` caps a ramp or flat run; 0 leaves them whole.

    Every layer of a step asks for the same plan, so the last few are kept.
    """
    host = positions.detach().to("cpu", torch.int64).numpy()
    return _plan(host.tobytes(), keys, left, right, chunk, rows)


@lru_cache(maxsize=32)
def _plan(positions: bytes, keys: int, left: int, right: int, chunk: int, rows: int) -> tuple[Tile, ...]:
    at = np.frombuffer(positions, dtype=np.int64)
    low, high = (x.numpy() for x in intervals(torch.from_numpy(at.copy()), keys, left, right, chunk))
    tiles: list[Tile] = []
    for start, stop in _connected(low, high):
        for first, last, regular in _runs(low, high, start, stop):
            for a, b in _cut(low, high, first, last, regular, rows):
                parts = _parts(low[a:b], high[a:b], regular)
                tiles.append(Tile(a, b, int(at[(a + b) // 2]), _tensor(low[a:b]), _tensor(high[a:b]), parts))
    return tuple(tiles)


def _connected(low: Ints, high: Ints) -> Iterator[tuple[int, int]]:
    """Maximal ranges of rows that see a key, each the same key as the row before it or an adjacent one.

    So every key between those of a range is seen by one of its rows: no tile touches a key that none of its rows sees.
    """
    seeing = low < high
    apart = np.maximum(low[1:], low[:-1]) > np.minimum(high[1:], high[:-1])
    cuts = np.flatnonzero(apart | (seeing[1:] != seeing[:-1])) + 1
    for start, stop in pairwise([0, *cuts.tolist(), len(low)]):
        if start < stop and seeing[start]:
            yield start, stop


def _runs(low: Ints, high: Ints, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """Cut rows into ``(first, last, regular)``: ramps and flat runs are regular, what lies between them is not."""
    steps = np.diff(high[start:stop])
    codes = np.where(np.diff(low[start:stop]) == 0, steps, -1)
    codes[(codes != 0) & (codes != 1)] = -1
    bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    done = start
    for a, b in pairwise(bounds):
        # Steps a..b-1 join rows a..b; the first of them may belong to the run before.
        first, last = max(start + a, done), start + b + 1
        if a == b or codes[a] < 0 or last - first < 2:
            continue
        if done < first:
            yield done, first, False
        yield first, last, True
        done = last
    if done < stop:
        yield done, stop, False


def _cut(low: Ints, high: Ints, start: int, stop: int, regular: bool, rows: int) -> Iterator[tuple[int, int]]:
    """Cut one run into the row ranges of its tiles."""
    step = (rows or stop - start) if regular else ROWS
    for a in range(start, stop, step):
        b = min(a + step, stop)
        if regular:
            yield a, b
        else:
            yield from _halve(low, high, a, b)


def _halve(low: Ints, high: Ints, start: int, stop: int) -> Iterator[tuple[int, int]]:
    if stop - start == 1 or max(np.ptp(low[start:stop]), np.ptp(high[start:stop])) <= EDGE:
        yield start, stop
        return
    middle = (start + stop) // 2
    yield from _halve(low, high, start, middle)
    yield from _halve(low, high, middle, stop)


def _parts(low: Ints, high: Ints, regular: bool) -> tuple[Part, ...]:
    first, inner = int(low.min()), int(low.max())
    outer, last = int(high.min()), int(high.max())
    if first == inner and outer == last:
        parts = [Part(first, last, Sight.FULL)]
    elif regular:
        # The diagonal takes the last key of the first row along, so that each of its rows sees something.
        parts = [Part(first, outer - 1, Sight.FULL), Part(outer - 1, last, Sight.CAUSAL)]
    elif outer - inner < NARROW:
        parts = [Part(first, last, Sight.MASKED)]
    else:
        parts = [
            Part(inner, outer, Sight.FULL),
            Part(first, inner, Sight.MASKED),
            Part(outer, last, Sight.MASKED),
        ]
    return tuple(part for part in parts if part.start < part.stop)


def _tensor(x: Ints) -> torch.Tensor:
    return torch.from_numpy(x.copy())
