# SPDX-License-Identifier: Apache-2.0
"""The groups of a mesh, as four real processes see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiproc import _mesh_groups
from tests.multiproc._mesh_groups import MESHES, WORLD
from tests.multiproc._workers import Group

pytestmark = pytest.mark.multiproc


def test_the_groups_are_those_of_the_mesh(tmp_path: Path) -> None:
    everyone = list(range(WORLD))
    with Group(WORLD, tmp_path, _mesh_groups.run) as ranks:
        assert set(ranks.exit_codes(everyone, 90).values()) == {0}
        results = ranks.results()
    for rank, found in results.items():
        assert "not initialised; call torch.distributed.init_process_group" in found["before"]
        assert found["wrong"].startswith("PCP3 has 3 ranks, and torch.distributed was started with 4; start 3")
        for mesh, seen in zip(MESHES, found["meshes"], strict=True):
            for name in ("tp", "pcp", "pp", "dp", "ep", "pp_cpu", "dp_cpu", "pcp_cpu"):
                expected = mesh.group_of(name.removesuffix("_cpu"), rank)
                assert seen[name] == (list(expected) if len(expected) > 1 else None), (mesh, rank, name)
            assert seen["coordinates"] == str(mesh.coordinates(rank))
            assert seen["one tp"] == mesh.fold_on_tp
            groups = sum(
                seen[name] is not None for name in ("tp", "pcp", "pp", "dp", "ep", "pp_cpu", "dp_cpu", "pcp_cpu")
            )
            assert seen["apart"] == groups - mesh.fold_on_tp, "hosts do not share a communicator with the wires"
            assert seen.get("beside") == (mesh.group_of("pp", rank)[-1] if mesh.pp > 1 else None)
            assert seen["closed"]
