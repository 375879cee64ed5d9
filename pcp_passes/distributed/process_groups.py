# SPDX-License-Identifier: Apache-2.0
"""The process groups of a mesh, made in one order on every rank."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist

from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import Coordinates, Mesh

DEFAULT_TIMEOUT = datetime.timedelta(minutes=5)

#: Groups in the order they are made. The first of a pair carries what the bodies exchange; its ``_cpu`` sibling what
#: the hosts tell each other. They are separate communicators even when both are gloo: a broadcast between the sends
#: and receives of a pipeline would be paired with the wrong one.
ORDER: tuple[tuple[str, str], ...] = (
    ("tp", "device"), ("pcp", "device"), ("pp", "device"), ("dp", "device"), ("ep", "device"),
    ("pp_cpu", "cpu"), ("dp_cpu", "cpu"), ("pcp_cpu", "cpu"),
)  # fmt: skip


@dataclass
class MeshGroups:
    """One rank's groups. A group of a single rank is None: there is nobody to talk to.

    Attributes:
        world: all ranks; the default group.
        pcp, dp, ep: what bodies gather and reduce over. ``tp`` is the ``pcp`` group when the mesh is folded.
        pp: wires between stages.
        pp_cpu: round states, on the host.
        dp_cpu, pcp_cpu: what replicas, and ranks of a replica's stage, tell each other of a step, on the host.
    """

    mesh: Mesh
    rank: int
    world: dist.ProcessGroup
    tp: dist.ProcessGroup | None = None
    pcp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    pp_cpu: dist.ProcessGroup | None = None
    dp_cpu: dist.ProcessGroup | None = None
    pcp_cpu: dist.ProcessGroup | None = None

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank is."""
        return self.mesh.coordinates(self.rank)

    def ranks(self, name: str) -> tuple[int, ...]:
        """Global ranks of this rank's group called ``name`` (``pp_cpu`` is ``pp``)."""
        return self.mesh.group_of(name.removesuffix("_cpu"), self.rank)

    @classmethod
    def create(
        cls, mesh: Mesh, *, timeout: datetime.timedelta = DEFAULT_TIMEOUT, device_backend: str | None = None
    ) -> MeshGroups:
        """Make every group of ``mesh`` over the default group. Called by all ranks, with equal arguments.

        Args:
            timeout: of each operation on each group.
            device_backend: of the groups that carry device tensors; None takes the default group's own. The groups of
                the hosts are gloo.

        Raises:
            ConfigError: ``torch.distributed`` is not initialised, or its world size is not the mesh's.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                f"{mesh} needs torch.distributed with {mesh.world_size} ranks, and it is not initialised; call "
                "torch.distributed.init_process_group in every process first."
            )
        size = dist.get_world_size()
        if size != mesh.world_size:
            raise ConfigError(
                f"{mesh} has {mesh.world_size} ranks, and torch.distributed was started with {size}; start "
                f"{mesh.world_size} processes, or change the mesh."
            )
        world = dist.group.WORLD
        assert world is not None, "an initialised torch.distributed has a default group"
        groups = cls(mesh, dist.get_rank(), world)
        backends = {"device": device_backend, "cpu": "gloo"}  # None: as of the default group
        for name, kind in ORDER:
            if mesh.fold_on_tp and name == "tp":
                continue
            setattr(groups, name, groups._make(name, backends[kind], timeout))
        if mesh.fold_on_tp:
            groups.tp = groups.pcp
        return groups

    def _make(self, name: str, backend: str | None, timeout: datetime.timedelta) -> dist.ProcessGroup | None:
        mine: dist.ProcessGroup | None = None
        for ranks in self.mesh.groups(name.removesuffix("_cpu")):
            if len(ranks) == 1:
                continue
            made = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=f"pcp_passes:{name}")
            if self.rank in ranks:
                mine = made
        return mine

    def close(self) -> None:
        """Destroy the groups that :meth:`create` made; the default group stays. Calling it again does nothing."""
        closed: set[int] = set()
        for name, _ in reversed(ORDER):
            group = getattr(self, name)
            setattr(self, name, None)
            if group is not None and id(group) not in closed and dist.is_initialized():
                closed.add(id(group))
                dist.destroy_process_group(group)
