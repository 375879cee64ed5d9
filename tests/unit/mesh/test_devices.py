# SPDX-License-Identifier: Apache-2.0
"""Placement tables, for every mesh on up to 4 nodes of up to 8 devices, against an enumeration of its own."""

from __future__ import annotations

import itertools

import pytest

from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.devices import Placement, place

pytestmark = pytest.mark.unit

CLUSTERS = tuple(itertools.product(range(1, 5), (1, 2, 3, 4, 6, 8)))
MESHES = tuple(
    Mesh(dp=dp, pp=pp, pcp=pcp, tp=tp)
    for dp, pp, pcp, tp in itertools.product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 4), (1, 2))
)


def _devices(mesh: Mesh, nodes: int, devices: int) -> list[tuple[int, int]] | None:
    """Devices in rank order by walking over free ones, engine by engine; None when they run out.

    Independent of the formulas: a list of free devices per node, from which each engine takes the first run that is
    long enough, or whole nodes.
    """
    size = mesh.pp * mesh.pcp * mesh.tp
    free = [[(node, device) for device in range(devices)] for node in range(nodes)]
    taken: list[tuple[int, int]] = []
    for _ in range(mesh.dp):
        if size <= devices:
            node = next((held for held in free if len(held) >= size), None)
            if node is None:
                return None
            taken += node[:size]
            del node[:size]
            continue
        if size % devices:
            return None
        whole = [held for held in free if len(held) == devices][: size // devices]
        if len(whole) * devices < size:
            return None
        for held in whole:
            taken += held
            held.clear()
    return taken


def _placed(mesh: Mesh, nodes: int, devices: int) -> Placement | None:
    try:
        return place(mesh, nodes, devices)
    except ConfigError:
        return None


def test_tables_are_those_of_the_enumeration() -> None:
    fits = 0
    for mesh, (nodes, devices) in itertools.product(MESHES, CLUSTERS):
        expected, found = _devices(mesh, nodes, devices), _placed(mesh, nodes, devices)
        assert (found is None) == (expected is None), (mesh, nodes, devices)
        if found is None:
            continue
        fits += 1
        assert [(row.node, row.device) for row in found.places] == expected, (mesh, nodes, devices)
        assert [row.rank for row in found.places] == list(range(mesh.world_size))
        assert [row.coordinates for row in found.places] == [mesh.coordinates(r) for r in range(mesh.world_size)]
        for replica in range(mesh.dp):
            ranges = [found.devices(replica, node) for node in range(nodes)]
            assert sum(map(len, ranges)) == mesh.engine_size  # contiguous on each node, and PCP is counted
    assert fits > 400


def test_the_same_tables_without_pcp_overlap() -> None:
    """What a launcher does that counts TP x PP: the second engine starts on the first one's devices."""
    mesh = Mesh(dp=2, pcp=2)
    forgotten = [replica * mesh.tp * mesh.pp + rank for replica in range(2) for rank in range(mesh.engine_size)]
    assert len(set(forgotten)) < mesh.world_size
    assert [row.device for row in place(mesh, 1, 4).places] == [0, 1, 2, 3]


def test_engines_of_a_node() -> None:
    mesh = Mesh(dp=4, pcp=2)
    assert place(mesh, 2, 8).local_dp == 4  # all fit on the first node
    spread = place(mesh, 2, 8, local_dp=2)
    assert [(row.node, row.device) for row in spread.places] == [(n, d) for n in (0, 1) for d in range(4)]
    assert (spread.devices(3, 1), list(spread.devices(3, 0))) == (range(2, 4), [])
    over = place(Mesh(dp=2, pp=2, pcp=8), 4, 8)
    assert over.local_dp is None
    assert [over.devices(1, node) for node in range(4)] == [range(0), range(0), range(8), range(8)]


def test_a_folded_engine_takes_its_ranks_once() -> None:
    folded = Mesh(dp=2, pcp=4, tp=4, fold_on_tp=True)
    assert [row.device for row in place(folded, 1, 8).places] == list(range(8))


@pytest.mark.parametrize(
    ("mesh", "cluster", "local_dp", "said"),
    [
        (Mesh(dp=3, pcp=2), (1, 4), None, "1 node of 4 devices, 2 engines each, hold 2. Add nodes: 2 are needed"),
        (Mesh(pp=3, pcp=2), (2, 4), None, "6 ranks (PP 3 x PCP 2 x TP 1) does not fill whole nodes of 4 devices"),
        (Mesh(dp=2, pcp=8), (3, 4), None, "Add nodes: 4 are needed"),
        (Mesh(dp=4, pcp=2), (2, 4), 3, "local_dp=3 engines of 2 ranks (PP 1 x PCP 2 x TP 1) need 6 devices"),
        (Mesh(dp=4, pcp=2), (2, 8), 3, "local_dp=3 does not divide the 4 engines"),
        (Mesh(dp=4, pcp=2), (1, 8), 2, "Add nodes: 2 are needed"),
        (Mesh(dp=2, pcp=8), (4, 4), 1, "cannot start on a node of 4 devices"),
        (Mesh(), (0, 4), None, "nodes must be an integer of at least 1, found 0"),
        (Mesh(), (1, 4), 0, "local_dp must be an integer"),
    ],
)
def test_what_does_not_fit_is_named(mesh: Mesh, cluster: tuple[int, int], local_dp: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        place(mesh, *cluster, local_dp=local_dp)
    assert said in str(error.value)
