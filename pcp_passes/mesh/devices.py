# SPDX-License-Identifier: Apache-2.0
"""Which node and device every rank of a mesh gets. Prefill-context ranks count: each has a device of its own."""

from __future__ import annotations

from dataclasses import dataclass

from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import Coordinates, Mesh


@dataclass(frozen=True)
class Place:
    """A rank, where it is in the mesh, and what it runs on. ``device`` counts from 0 on its node."""

    rank: int
    coordinates: Coordinates
    node: int
    device: int


@dataclass(frozen=True)
class Placement:
    """A place for every rank, by rank.

    Attributes:
        mesh: whose ranks they are.
        nodes, devices_per_node: of the cluster.
        local_dp: replicas that start on one node, or None when a replica spans nodes.
    """

    mesh: Mesh
    nodes: int
    devices_per_node: int
    local_dp: int | None
    places: tuple[Place, ...]

    def engine(self, replica: int) -> tuple[Place, ...]:
        """The places of a replica, counted over the external copies too: ``engine_size`` of them."""
        size = self.mesh.engine_size
        return self.places[replica * size : (replica + 1) * size]

    def devices(self, replica: int, node: int) -> range:
        """Devices of ``node`` that a replica has: one contiguous range, empty when it is elsewhere."""
        used = [place.device for place in self.engine(replica) if place.node == node]
        return range(used[0], used[-1] + 1) if used else range(0)


def place(mesh: Mesh, nodes: int, devices_per_node: int, *, local_dp: int | None = None) -> Placement:
    """Give every rank of ``mesh`` a device: engines in replica order, each its own contiguous range.

    An engine that fits on a node is never split over two: a node holds as many whole engines as fit, or ``local_dp``.
    A larger one takes whole nodes.

    Args:
        nodes: nodes of ``devices_per_node`` devices each.
        local_dp: engines on each node (vLLM's ``--data-parallel-size-local``); None puts as many as fit.

    Returns:
        A place for each rank. Example: ``Mesh(dp=2, pcp=2)`` on a node of 4: ranks 0, 1 on devices 0, 1 and ranks 2, 3
        on devices 2, 3.

    Raises:
        ConfigError: too few devices, an engine that does not fill its nodes, or ``local_dp`` that does not fit or does
            not divide the replicas; with what is needed.
    """
    for name, value in (("nodes", nodes), ("devices_per_node", devices_per_node), ("local_dp", local_dp)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} must be an integer of at least 1, found {value!r}.")
    size, engines = mesh.engine_size, mesh.dp * mesh.external_dp
    if size > devices_per_node:
        return _place_over_nodes(mesh, nodes, devices_per_node, local_dp)
    fit = devices_per_node // size
    if local_dp is not None and local_dp > fit:
        raise ConfigError(
            f"local_dp={local_dp} engines of {_counted(mesh)} need {local_dp * size} devices on a node, which has "
            f"{devices_per_node}; lower local_dp to {fit}."
        )
    if local_dp is not None and engines % local_dp:
        raise ConfigError(
            f"local_dp={local_dp} does not divide the {engines} engines of {mesh}; every node starts the same number."
        )
    each = local_dp or fit
    if engines > each * nodes:
        raise ConfigError(
            f"{mesh} has {engines} engines of {_counted(mesh)}; {_counting(nodes, 'node')} of {devices_per_node} "
            f"devices, {each} engine{'s' * (each > 1)} each, hold {each * nodes}. Add nodes: "
            f"{-(-engines // each)} are needed."
        )
    places = []
    for rank in range(mesh.world_size):
        engine, inside = divmod(rank, size)
        node, slot = divmod(engine, each)
        places.append(Place(rank, mesh.coordinates(rank), node, slot * size + inside))
    return Placement(mesh, nodes, devices_per_node, min(each, engines), tuple(places))


def _place_over_nodes(mesh: Mesh, nodes: int, devices_per_node: int, local_dp: int | None) -> Placement:
    size, engines = mesh.engine_size, mesh.dp * mesh.external_dp
    if local_dp is not None:
        raise ConfigError(
            f"local_dp={local_dp} engines cannot start on a node of {devices_per_node} devices: one engine has "
            f"{_counted(mesh)}; drop local_dp."
        )
    if size % devices_per_node:
        raise ConfigError(
            f"an engine of {_counted(mesh)} does not fill whole nodes of {devices_per_node} devices; make PP x PCP x "
            f"TP a multiple of {devices_per_node}, or at most that."
        )
    if size // devices_per_node * engines > nodes:
        raise ConfigError(
            f"{mesh} has {_counting(engines, 'engine')} of {_counted(mesh)}, {size // devices_per_node} nodes of "
            f"{devices_per_node} each; found {_counting(nodes, 'node')}. Add nodes: "
            f"{size // devices_per_node * engines} are needed."
        )
    places = tuple(
        Place(rank, mesh.coordinates(rank), rank // devices_per_node, rank % devices_per_node)
        for rank in range(mesh.world_size)
    )
    return Placement(mesh, nodes, devices_per_node, None, places)


def _counted(mesh: Mesh) -> str:
    tp = "TP folded" if mesh.fold_on_tp else f"TP {mesh.tp}"
    return f"{mesh.engine_size} ranks (PP {mesh.pp} x PCP {mesh.pcp} x {tp})"


def _counting(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
