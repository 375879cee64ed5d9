# SPDX-License-Identifier: Apache-2.0
"""Ranks, coordinates and groups, against an array whose axes are moved."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import AXES, GROUPS, Coordinates, Mesh

pytestmark = pytest.mark.unit

SIZES = tuple(itertools.product((1, 2), (1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2)))  # external_dp, dp, pp, pcp, tp


def _mesh(sizes: tuple[int, ...]) -> Mesh:
    external_dp, dp, pp, pcp, tp = sizes
    return Mesh(dp, pp, pcp, tp, external_dp)


def _by_array(sizes: tuple[int, ...], name: str) -> set[tuple[int, ...]]:
    """The axes of a group moved to the back, in their order, and flattened."""
    ranks = np.arange(np.prod(sizes)).reshape(sizes)
    inner = [AXES.index(axis) for axis in GROUPS[name]]
    outer = [axis for axis in range(5) if axis not in inner]
    width = int(np.prod([sizes[axis] for axis in inner]))
    return set(map(tuple, ranks.transpose(*outer, *inner).reshape(-1, width).tolist()))


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_those_of_the_array(name: str) -> None:
    for sizes in SIZES:
        mesh = _mesh(sizes)
        groups = mesh.groups(name)
        assert set(groups) == _by_array(sizes, name), sizes
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert all(len(group) == mesh.size(name) for group in groups)
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)


def test_the_array_tells_another_order_apart() -> None:
    """PCP before PP, the order that vLLM does not have, gives other groups."""
    mesh = Mesh(pp=2, pcp=3)
    swapped = np.arange(6).reshape(1, 1, 3, 2, 1)  # pcp, pp
    assert set(mesh.groups("pcp")) != set(map(tuple, swapped.transpose(0, 1, 3, 4, 2).reshape(-1, 3).tolist()))


def test_coordinates_and_ranks_are_inverse() -> None:
    for sizes in SIZES:
        mesh = _mesh(sizes)
        found = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
        assert len(set(found)) == mesh.world_size
        assert [mesh.rank_of(at) for at in found] == list(range(mesh.world_size))
        assert found == sorted(found, key=lambda at: [getattr(at, axis) for axis in AXES])


def test_a_mesh_that_is_read_by_hand() -> None:
    mesh = Mesh(dp=2, pp=2, pcp=2)
    assert (mesh.world_size, mesh.engine_size, mesh.ep) == (8, 4, 4)
    assert mesh.groups("pcp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("ep") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.group_of("ep", 6) == (2, 3, 6, 7)
    assert (mesh.stage_ranks(1), mesh.replica_ranks(1)) == ((2, 3, 6, 7), (4, 5, 6, 7))
    assert (str(mesh), str(mesh.coordinates(6))) == ("DP2xPP2xPCP2", "dp1 pp1 pcp0")
    assert [str(Mesh(pcp=4)), str(Mesh(dp=2, tp=2)), str(Mesh())] == ["PCP4", "DP2xTP2", "1 rank"]
    for wrong in (lambda: mesh.stage_ranks(2), lambda: mesh.replica_ranks(2), lambda: mesh.replica_ranks(0, 1)):
        with pytest.raises(ConfigError, match="is not in DP2xPP2xPCP2"):
            wrong()
    with pytest.raises(ConfigError, match="fold_on_tp must be True or False, found 3"):
        Mesh(fold_on_tp=3)  # type: ignore[arg-type]


def test_a_folded_mesh_adds_no_rank() -> None:
    mesh = Mesh(dp=2, pp=2, pcp=2, tp=2, fold_on_tp=True)
    plain = Mesh(dp=2, pp=2, pcp=2)
    assert (mesh.world_size, mesh.engine_size, mesh.ep) == (plain.world_size, plain.engine_size, plain.ep)
    assert mesh.groups("tp") == mesh.groups("pcp") == plain.groups("pcp")
    assert mesh.size("tp") == 2
    for name in ("pp", "dp", "ep"):
        assert mesh.groups(name) == plain.groups(name)
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        assert at.tp == at.pcp
        assert mesh.rank_of(at) == rank
    with pytest.raises(ConfigError, match="tp and pcp name one place"):
        mesh.rank_of(Coordinates(pcp=1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pp": 0}, "pp must be an integer of at least 1, found 0"),
        ({"dp": True}, "dp must be an integer"),
        ({"pcp": 2.0}, "pcp must be an integer"),
        ({"pcp": 3, "tp": 2, "fold_on_tp": True}, "pcp=3, tp=2. Set both to the same size"),
        ({"pcp": 2, "fold_on_tp": True}, "pcp=2, tp=1"),
    ],
)
def test_sizes_that_are_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        Mesh(**given)  # type: ignore[arg-type]


def test_what_is_not_in_the_mesh_is_named() -> None:
    mesh = Mesh(dp=2, pcp=2)
    for call, said in (
        (lambda: mesh.coordinates(4), "ranks are 0 to 3"),
        (lambda: mesh.coordinates(-1), "rank -1"),
        (lambda: mesh.rank_of(Coordinates(pp=1)), "pp=1 is not in DP2xPCP2, where pp has 1"),
        (lambda: mesh.groups("ddp"), "unknown group 'ddp'; known: tp, pcp, pp, dp, ep"),
        (lambda: mesh.group_of("pcp", 9), "rank 9"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()
