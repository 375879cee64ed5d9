# SPDX-License-Identifier: Apache-2.0
"""Which sizes are captured: buckets of rank-local rows, and of requests for decode and draft steps.

A step takes the smallest bucket that holds the *largest rank-local* row count of its batch
(:attr:`pcp_passes.layout.Layout.padded_tokens` of the unpadded layout, or
:func:`pcp_passes.layout.dispatch_tokens`). That count is a function of the batch, which all ranks share, so all ranks
take the same bucket. The global count would be wrong twice: at ``P`` ranks it is ``P`` times too large for prefills,
and a bucket for it says nothing about the rank that holds one row more than the others.

How the rows are derived, for ``budget = 2048``, ``pcp = 4``, 64 requests without drafts::

    even share   512 = ceil(2048 / 4)     a step of prefills only that fills the budget has exactly this many rows
    largest      560 = 64 + ceil(1984/4)  every decode on every rank, the rest shared
    rows         1 2 4 8 16 24 .. 128 .. 512 | 520 528 .. 560

Above the even share lie the full steps, which hold most of a server's rows, so the buckets there are ``1/32`` apart;
below it they are as close as the number of buckets allows. All but the smallest are multiples of 8, and of 16 from 256.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from pcp_passes.errors import ConfigError

#: Captured graphs cost memory and start-up time, each; more than this many sizes of one body are refused.
MAX_BUCKETS = 512

_CLOSEST = 32
_FINE = 8
_COARSE = 256


@dataclass(frozen=True)
class Buckets:
    """Captured sizes, rising. An empty tuple captures none of its kind.

    Attributes:
        rows: rank-local rows of a piecewise body call.
        requests: requests of a decode or draft step; its graph has ``requests * rows per request`` rows.

    Raises ConfigError for sizes that are not rising integers of at least 1, or more than ``MAX_BUCKETS`` of them.
    """

    rows: tuple[int, ...]
    requests: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("rows", "requests"):
            _check_sizes(name, getattr(self, name))

    def choose_rows(self, count: int) -> int | None:
        """Smallest bucket of at least ``count`` rows, None above the largest: such a step runs without a graph.

        ``count`` is the largest rank-local row count of the batch, never its global one.
        """
        return _smallest(self.rows, count)

    def choose_requests(self, count: int) -> int | None:
        """Smallest bucket of at least ``count`` requests, None above the largest."""
        return _smallest(self.requests, count)

    @property
    def max_rows(self) -> int:
        """Largest bucket of rows, 0 without any."""
        return self.rows[-1] if self.rows else 0

    @property
    def max_requests(self) -> int:
        """Largest bucket of requests, 0 without any."""
        return self.requests[-1] if self.requests else 0


def derive_buckets(
    *, budget: int, pcp: int, max_requests: int, steps: int, limit: int = 60, decode: str = "replicate"
) -> Buckets:
    """Buckets for every batch that a scheduler with these options can give; no batch lies above the largest.

    Args:
        budget: tokens of a step, over all requests and ranks.
        pcp: ranks.
        max_requests: requests that run at a time.
        steps: drafts of a decoding request in a step, 0 without a drafter.
        limit: most buckets of rows, and most of requests; at least 8.
        decode: where decodes run, ``replicate`` or ``owner``, see :func:`pcp_passes.layout.build_layout`.

    Raises ConfigError for values that cannot be.
    """
    for name, value, least in (
        ("budget", budget, 1), ("pcp", pcp, 1), ("max_requests", max_requests, 1), ("steps", steps, 0),
        ("limit", limit, 8),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"buckets need {name} as an integer of at least {least}; found {value!r}.")
    if decode not in ("replicate", "owner"):
        raise ConfigError(f"decode is one of replicate, owner; found {decode!r}.")
    even = _aligned(-(-budget // pcp))
    top = _aligned(largest_rows(budget=budget, pcp=pcp, max_requests=max_requests, steps=steps, decode=decode))
    # At most half of the buckets for full steps; the rest, down to one row, get what is left.
    full = _closest(even, top, limit // 2)
    rows = (*_closest(0, even, limit - len(full)), *full)
    # A step of `budget` tokens holds at most as many requests.
    return Buckets(rows, _closest(0, min(max_requests, budget), limit))


def largest_rows(*, budget: int, pcp: int, max_requests: int, steps: int, decode: str = "replicate") -> int:
    """Largest rank-local row count of any batch of ``budget`` tokens over ``max_requests`` requests.

    Prefills are shared to within one row, and one request of the batch is a prefill. Replicated decodes are on every
    rank: ``d`` tokens of them and the rest of the budget give ``d + ceil((budget - d) / pcp)`` rows, which rises with
    ``d``; without a prefill all requests decode. Owned ones go round the ranks by their ordinal, so at worst one rank's
    all have drafts and the others have one decode fewer, of one token; the shares of prefills begin on the rank after
    the last decode, so that rank gets no remainder of them.
    """
    most = 1 + steps
    if decode == "replicate" or pcp == 1:
        mixed = min(budget - 1, (max_requests - 1) * most)
        return max(mixed + -(-(budget - mixed) // pcp), min(budget, max_requests * most))
    worst = -(-budget // pcp)
    for own in range(1, -(-max_requests // pcp) + 1):
        others = (pcp - 1) * (own - 1)
        tokens = min(own * most, budget - others)
        if tokens < own:
            break
        room_for_prefill = pcp * (own - 1) + 1 < max_requests
        rest = budget - others - tokens if room_for_prefill else 0
        worst = max(worst, tokens + rest // pcp)
    return worst


def _closest(above: int, top: int, limit: int) -> tuple[int, ...]:
    """At most ``limit`` sizes over ``above`` up to ``top``, ``top`` among them, as close as the limit allows.

    Raises ConfigError when the sizes that double are already more.
    """
    for divisor in range(_CLOSEST, 0, -1):
        sizes = tuple(_rising(above, top, divisor))
        if len(sizes) <= limit:
            return sizes
    raise ConfigError(
        f"limit={limit} buckets cannot hold sizes that double up to {top}, which are {len(sizes)}; raise the limit."
    )


def _rising(above: int, top: int, divisor: int) -> Iterator[int]:
    """Sizes from ``above`` (left out) to ``top`` (in), each about ``1 / divisor`` over the one before it."""
    size = above
    while size < top:
        if size < _FINE:
            size = max(1, 2 * size)
        else:
            size = _aligned(size + max(1, size // divisor))
        yield min(size, top)


def _aligned(size: int) -> int:
    """The next multiple that kernels and their tiles like; sizes under 8 stay."""
    unit = 1 if size <= _FINE else 8 if size < _COARSE else 16
    return -(-size // unit) * unit


def _smallest(sizes: tuple[int, ...], count: int) -> int | None:
    assert count >= 0, f"a batch of {count} rows"
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def _check_sizes(name: str, sizes: object) -> None:
    plain = isinstance(sizes, tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in sizes)
    if not plain:
        raise ConfigError(f"buckets of {name} are a tuple of integers; found {sizes!r}.")
    assert isinstance(sizes, tuple)
    if sizes and (sizes[0] < 1 or list(sizes) != sorted(set(sizes))):
        raise ConfigError(f"buckets of {name} rise and start at 1 or more; found {sizes!r}: sort them, each once.")
    if len(sizes) > MAX_BUCKETS:
        raise ConfigError(
            f"{len(sizes)} buckets of {name}, of which each is captured; at most {MAX_BUCKETS}: leave some out."
        )
