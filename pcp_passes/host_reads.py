# SPDX-License-Identifier: Apache-2.0
"""Places that may read the host although a step may not: references on the CPU that stand for a kernel.

:class:`~pcp_passes.piecewise.sync_check.SyncCheck` fails on what would make the host wait for a GPU. On a CPU some ops
have a reference that reads lengths or loads; what runs in their place on a GPU does not. Each says so::

    @allowed("stands for a kernel that reads the loads on the device")
    def reference(...): ...

Only reads of CPU tensors are exempt: the same read of a tensor on a GPU fails in here too. Without a check it costs an
addition.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any


class Exempt:
    """How many :class:`allowed` blocks are open in this process."""

    depth: int = 0


class allowed(ContextDecorator):  # read as a word of the sentence: with allowed("...")
    """As a block or a decorator: host reads of CPU tensors inside are no fault. Nests; not for several threads.

    Args:
        reason: why a real step does not have them, for whoever reads the code.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __enter__(self) -> None:
        Exempt.depth += 1

    def __exit__(self, *exc: Any) -> None:
        Exempt.depth -= 1
