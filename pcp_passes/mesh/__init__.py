# SPDX-License-Identifier: Apache-2.0
"""The mesh of ranks: axes and groups, what goes together, who gets which device, rows of peers. Arithmetic alone: it
imports no torch, and no process is asked."""

from pcp_passes.mesh.axes import Coordinates, Mesh
from pcp_passes.mesh.combinations import require_allowed
from pcp_passes.mesh.devices import Placement, place
from pcp_passes.mesh.peer_rows import PeerRows

__all__ = ["Coordinates", "Mesh", "PeerRows", "Placement", "place", "require_allowed"]
