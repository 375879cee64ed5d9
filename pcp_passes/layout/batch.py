# SPDX-License-Identifier: Apache-2.0
"""The scheduled batch that is laid out over the ranks, as the host knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pcp_passes.errors import LayoutError

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_DERIVE: BoolArray = np.zeros(0, dtype=np.bool_)
_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Batch:
    """One scheduled batch of ``R`` requests, in the scheduler's order.

    Attributes:
        num_scheduled: i32[R], query length of each request; 0 is allowed.
        num_computed: i32[R], context length as the host knows it. After a rejected draft the device may be behind:
            layouts never depend on it, only the host-side bounds of :class:`~pcp_passes.layout.RankRows` do.
        prefill_len: i32[R], tokens that the request must prefill.
        is_prefilling: bool[R], default ``num_computed < prefill_len``. A request that is not prefilling is a decode;
            with more than one token it is a verification request (the last token and its drafts).

    Sequences of integers are accepted and converted. Arrays are not copied: they must not change while the batch, or a
    layout of it, is in use. Raises LayoutError for anything that is not such a batch.
    """

    num_scheduled: IntArray
    num_computed: IntArray
    prefill_len: IntArray
    is_prefilling: BoolArray = field(default_factory=lambda: _DERIVE)

    def __post_init__(self) -> None:
        for name in ("num_scheduled", "num_computed", "prefill_len"):
            value = getattr(self, name)
            if not (isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1):
                object.__setattr__(self, name, _as_int32(name, value))
        if self.is_prefilling is _DERIVE:
            if self.num_computed.shape == self.prefill_len.shape:
                object.__setattr__(self, "is_prefilling", self.num_computed < self.prefill_len)
        elif not isinstance(self.is_prefilling, np.ndarray) or self.is_prefilling.dtype != np.bool_:
            object.__setattr__(self, "is_prefilling", np.asarray(self.is_prefilling, dtype=np.bool_))
        self._validate()

    def _validate(self) -> None:
        shape = self.num_scheduled.shape
        names = ("num_scheduled", "num_computed", "prefill_len", "is_prefilling")
        if any(getattr(self, name).shape != shape for name in names):
            found = ", ".join(f"{name}{list(getattr(self, name).shape)}" for name in names)
            raise LayoutError(f"A batch needs one entry per request in each array; found {found}.")
        if shape[0] == 0:
            raise LayoutError("A batch needs at least one request; run a dummy step when nothing is scheduled.")
        # The sign bit of the OR is set exactly when one of the three is negative: one reduction instead of three.
        if (self.num_scheduled | self.num_computed | self.prefill_len).min() < 0:
            bad = [
                f"{name}[{i}] = {getattr(self, name)[i]}"
                for name in names[:3]
                for i in np.flatnonzero(getattr(self, name) < 0)
            ]
            raise LayoutError(f"Lengths of a batch are at least 0; found {', '.join(bad)}.")

    @property
    def num_requests(self) -> int:
        """R."""
        return int(self.num_scheduled.shape[0])

    @property
    def num_tokens(self) -> int:
        """T, the tokens of the global batch."""
        return int(self.query_start_loc[-1])

    @cached_property
    def query_lens(self) -> LongArray:
        """i64[R], ``num_scheduled`` in the width of the index arithmetic."""
        return self.num_scheduled.astype(np.int64)

    @cached_property
    def query_start_loc(self) -> LongArray:
        """i64[R+1], first global token of each request, and T."""
        out = np.zeros(self.num_scheduled.shape[0] + 1, dtype=np.int64)
        np.add.accumulate(self.num_scheduled, out=out[1:])
        return out

    @cached_property
    def decodes(self) -> LongArray:
        """i64[D], requests with tokens that are not prefilling."""
        return np.flatnonzero(~self.is_prefilling & (self.num_scheduled > 0))

    @cached_property
    def prefills(self) -> LongArray:
        """i64[F], requests with tokens that are prefilling."""
        return np.flatnonzero(self.is_prefilling & (self.num_scheduled > 0))


def _as_int32(name: str, value: Sequence[int] | NDArray[np.generic]) -> IntArray:
    array = np.asarray(value)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise LayoutError(f"{name} of a batch is a vector of integers; found {array.dtype}{list(array.shape)}.")
    if array.size and (int(array.max()) > _INT32_MAX or int(array.min()) < -_INT32_MAX):
        raise LayoutError(f"{name} of a batch fits in 32 bits; found values up to {int(abs(array).max())}.")
    return array.astype(np.int32)


_counting: LongArray = np.arange(4096)
_counting.flags.writeable = False


def counting(n: int) -> LongArray:
    """``arange(n)`` i64, a read-only view of one shared array: fresh pages each step cost more than the arithmetic."""
    global _counting
    shared = _counting
    if len(shared) < n:
        shared = np.arange(2 * n)
        shared.flags.writeable = False
        _counting = shared
    return shared[:n]
