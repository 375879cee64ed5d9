# SPDX-License-Identifier: Apache-2.0
"""Whether the ops that run now must be such as a graph can hold: no value read on the host, no data-dependent shape.

Some ops have a reference that reads lengths on the host, which is faster on a CPU. Inside :func:`capturable_only` they
take their other form, which launches the same kernels whatever the values are; on CUDA they always do. Experts alone
take theirs on CUDA only :func:`in_capture`, unless the card has a kernel for it: it copies weights, which only few rows
can afford::

    with capturable_only():
        hidden = body(ids, positions)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Mode:
    depth: int = 0


@contextmanager
def capturable_only() -> Iterator[None]:
    """Let the ops inside the block take the form that a graph can hold. Nests; not for several threads."""
    _Mode.depth += 1
    try:
        yield
    finally:
        _Mode.depth -= 1


def is_capturable_only() -> bool:
    """Whether a :func:`capturable_only` block is open."""
    return _Mode.depth > 0


def host_free(on: torch.Tensor) -> bool:
    """Whether an op on ``on`` must do without the host: inside :func:`capturable_only`, and always off the CPU."""
    return _Mode.depth > 0 or on.device.type != "cpu"


def in_capture(on: torch.Tensor) -> bool:
    """Whether an op on ``on`` is to be part of a graph: inside :func:`capturable_only`, or its stream is captured."""
    return _Mode.depth > 0 or (on.is_cuda and torch.cuda.is_current_stream_capturing())
