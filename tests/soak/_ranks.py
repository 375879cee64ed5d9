# SPDX-License-Identifier: Apache-2.0
"""What each rank of ``test_gloo`` runs."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from tests.multiproc import _engine_ranks

LIMIT_S = 1500


def trace(rank: int, world: int, folder: Path, seeds: Sequence[int], which: str) -> None:
    """Schedules on one rank of a gloo group, with time for many of them."""
    signal.alarm(LIMIT_S)
    _engine_ranks.trace(rank, world, folder, seeds, which)
