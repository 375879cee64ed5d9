# SPDX-License-Identifier: Apache-2.0
"""Why a group of ranks ends, and how a process does."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)

EXIT_CODE = 75
"""Exit status of a rank that ends because another was lost (EX_TEMPFAIL of sysexits.h: trying again may help)."""

How = Literal["killed", "frozen", "silent", "left", "diverged"]


@dataclass(frozen=True)
class Loss:
    """A lost rank: how, as far as can be known; for how many seconds it was silent; which rank noticed.

    ``name``: how the rank is called in a mesh, with its coordinates; "" is ``pcp rank N``.
    """

    rank: int
    how: How
    silent_s: float
    detail: str
    seen_by: int
    also_silent: tuple[int, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        if self.how == "diverged":
            return (
                f"ranks of a group diverge: {self.detail}; noticed by rank {self.seen_by}. Next: give all ranks the "
                "same requests, options and graphs; restart all ranks."
            )
        also = f"; also silent: rank {', '.join(map(str, self.also_silent))}" if self.also_silent else ""
        name = self.name or f"pcp rank {self.rank}"
        return (
            f"{name} is lost: {self.how} ({self.detail}), silent for {self.silent_s:.1f} s, "
            f"noticed by rank {self.seen_by}{also}. Next: look at that rank, then restart all ranks."
        )


def exit_process(loss: Loss) -> None:
    """Log ``loss`` at CRITICAL and end this process with :data:`EXIT_CODE`, whatever its threads are blocked in."""
    # On a thread of its own: a full pipe behind stderr, or a logging lock held by a blocked thread, must not keep us
    # alive.
    try:
        log = threading.Thread(target=logger.critical, args=("%s", loss), daemon=True)
        log.start()
        log.join(2.0)
    finally:
        os._exit(EXIT_CODE)
