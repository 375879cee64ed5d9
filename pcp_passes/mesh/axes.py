# SPDX-License-Identifier: Apache-2.0
"""The mesh of ranks: data, pipeline, prefill-context and tensor parallel, in vLLM's order, with groups by name."""

from __future__ import annotations

import itertools
import math
from dataclasses import astuple, dataclass, fields

from pcp_passes.errors import ConfigError

#: Axes in rank order, the last varies fastest: `rank = (((external_dp * DP + dp) * PP + pp) * PCP + pcp) * TP + tp`.
AXES = ("external_dp", "dp", "pp", "pcp", "tp")

#: Which coordinates differ within a group of that name; the others are the same for all its ranks.
GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pcp": ("pcp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "ep": ("dp", "pcp", "tp"),
}


@dataclass(frozen=True)
class Coordinates:
    """Where a rank is in its mesh. With a folded mesh ``tp`` equals ``pcp``."""

    external_dp: int = 0
    dp: int = 0
    pp: int = 0
    pcp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return " ".join(f"{name}{value}" for name, value in zip(AXES, astuple(self), strict=True) if self._told(name))

    def _told(self, name: str) -> bool:
        return name in ("dp", "pp", "pcp") or getattr(self, name) > 0


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes.

    Attributes:
        dp: replicas of the engine that may run in lockstep.
        pp: pipeline stages of a replica.
        pcp: ranks that a prefill is sharded over.
        tp: ranks that weights are sharded over.
        external_dp: copies that know nothing of each other.
        fold_on_tp: prefills are sharded over the tensor-parallel ranks: ``pcp`` and ``tp`` name the same ranks, and
            no rank is added. Needs ``pcp == tp``.

    Raises:
        ConfigError: a size that is not a positive integer, or a folded mesh whose two axes differ.

    Example: ``Mesh(dp=2, pcp=2)`` has ranks 0..3; ``groups("pcp")`` is ``((0, 1), (2, 3))``, ``groups("dp")`` is
    ``((0, 2), (1, 3))``, ``groups("ep")`` is ``((0, 1, 2, 3),)``.
    """

    dp: int = 1
    pp: int = 1
    pcp: int = 1
    tp: int = 1
    external_dp: int = 1
    fold_on_tp: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "fold_on_tp" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{field.name} must be an integer of at least 1, found {value!r}.")
        if not isinstance(self.fold_on_tp, bool):
            raise ConfigError(f"fold_on_tp must be True or False, found {self.fold_on_tp!r}.")
        if self.fold_on_tp and self.pcp != self.tp:
            raise ConfigError(
                f"fold_on_tp shards prefills over the tensor-parallel ranks, so pcp must equal tp; found "
                f"pcp={self.pcp}, tp={self.tp}. Set both to the same size, or drop fold_on_tp."
            )

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Distinct ranks along each of :data:`AXES`; ``tp`` counts 1 when it is folded."""
        return self.external_dp, self.dp, self.pp, self.pcp, 1 if self.fold_on_tp else self.tp

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.shape)

    @property
    def engine_size(self) -> int:
        """Ranks of one data-parallel replica: ``pp * pcp * tp``, tp counted once when folded."""
        return math.prod(self.shape[2:])

    @property
    def ep(self) -> int:
        """Ranks that the experts of a stage are spread over."""
        return self.size("ep")

    def size(self, name: str) -> int:
        """Ranks of a group called ``name``. Raises KeyError for a name that is not in :data:`GROUPS`."""
        sizes = dict(zip(AXES, self.shape, strict=True))
        if name == "tp":
            return self.tp
        return math.prod(sizes[axis] for axis in GROUPS[name])

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of ``rank``. Raises ConfigError for a rank outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not in {self}, whose ranks are 0 to {self.world_size - 1}.")
        places: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, places[axis] = divmod(rank, size)
        if self.fold_on_tp:
            places["tp"] = places["pcp"]
        return Coordinates(**places)

    def rank_of(self, at: Coordinates) -> int:
        """The rank at these coordinates. Raises ConfigError when an axis has no such place."""
        places = list(astuple(at))
        if self.fold_on_tp:
            if at.tp != at.pcp:
                raise ConfigError(f"with fold_on_tp, tp and pcp name one place; found pcp={at.pcp}, tp={at.tp}.")
            places[-1] = 0
        rank = 0
        for axis, place, size in zip(AXES, places, self.shape, strict=True):
            if not 0 <= place < size:
                raise ConfigError(f"{axis}={place} is not in {self}, where {axis} has {size} places.")
            rank = rank * size + place
        return rank

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups called ``name``, by their first rank; ranks of a group in the order of its axes.

        ``ep`` is per pipeline stage, flattened ``(dp, pcp, tp)``. Raises ConfigError for an unknown name.
        """
        if name not in GROUPS:
            raise ConfigError(f"unknown group {name!r}; known: {', '.join(GROUPS)}.")
        within = {"pcp"} if self.fold_on_tp and name == "tp" else set(GROUPS[name])
        sizes = dict(zip(AXES, self.shape, strict=True))
        outer = [axis for axis in AXES if axis not in within]
        inner = [axis for axis in AXES if axis in within]
        found = (
            tuple(
                self._rank(dict(zip((*outer, *inner), (*fixed, *places), strict=True)))
                for places in itertools.product(*(range(sizes[axis]) for axis in inner))
            )
            for fixed in itertools.product(*(range(sizes[axis]) for axis in outer))
        )
        return tuple(sorted(found))

    def group_of(self, name: str, rank: int) -> tuple[int, ...]:
        """The group called ``name`` that ``rank`` is in. Raises ConfigError for an unknown name or rank."""
        self.coordinates(rank)
        return next(group for group in self.groups(name) if rank in group)

    def stage_ranks(self, pp: int) -> tuple[int, ...]:
        """Ranks of pipeline stage ``pp``, over all replicas, ascending. Raises ConfigError for no such stage."""
        self.rank_of(Coordinates(pp=pp))
        return tuple(rank for rank in range(self.world_size) if self.coordinates(rank).pp == pp)

    def replica_ranks(self, dp: int, external_dp: int = 0) -> tuple[int, ...]:
        """Ranks of one replica, contiguous: ``engine_size`` of them. Raises ConfigError for no such replica."""
        first = self.rank_of(Coordinates(external_dp, dp))
        return tuple(range(first, first + self.engine_size))

    def _rank(self, places: dict[str, int]) -> int:
        rank = 0
        for axis, size in zip(AXES, self.shape, strict=True):
            rank = rank * size + places[axis]
        return rank

    def __str__(self) -> str:
        names = {"external_dp": "external DP"}
        told = [
            f"{names.get(axis, axis.upper())}{size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1
        ]
        return ("x".join(told) or "1 rank") + (" on TP" if self.fold_on_tp and self.pcp > 1 else "")
