# SPDX-License-Identifier: Apache-2.0
"""Named errors. Each says what was found, what is required and what to do next.

A user's mistake raises a subclass of :class:`PcpError`; our own bugs are ``assert cond, message``.
"""

from __future__ import annotations

from collections.abc import Iterable


class PcpError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(PcpError, ValueError):
    """An option, or a combination of options, that cannot run. Raised before any capture."""


class LayoutError(PcpError, ValueError):
    """A batch that cannot be laid out over the ranks as asked."""


class Refusal(PcpError):
    """A graph that cannot be rewritten. Carries every offender, not only the first."""

    def __init__(self, headline: str, details: Iterable[tuple[str, str]] = ()) -> None:
        """``details`` are ``(label, text)`` pairs, printed one per line under the headline."""
        self.headline = headline
        self.details = tuple(details)
        width = max((len(label) for label, _ in self.details), default=0)
        lines = [f"  {label:<{width}}  {text}" for label, text in self.details]
        super().__init__("\n".join([headline, *lines]))


class PlacementConflict(Refusal):
    """An op needs a placement of an operand that the graph does not provide."""


class InvariantError(PcpError):
    """A graph broke one of the named invariants of ``pcp_passes.ir.invariants``."""


class DumpError(PcpError, ValueError):
    """A dump, or a line of one, that cannot be read back."""


class RankMismatch(PcpError):
    """Ranks of one group started with different options or different graphs."""


class PeerLost(PcpError):
    """A rank of the group died or stopped answering."""


class HostSync(PcpError):
    """Something in a step made the host wait for the device, or took its shape from data."""


class GraphError(PcpError):
    """A call that the graphs of a rank cannot serve: an input moved, a bucket never captured, buffers written over."""
