# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other outside the collectives of graphs: that they agree (``agreement``, ``store``), that they
live and where they parted (``watch``), what stages send (``stages``); and the groups they do it in."""

from pcp_passes.distributed.agreement import require_agreement
from pcp_passes.distributed.process_groups import MeshGroups
from pcp_passes.distributed.store import new_connection, open_store
from pcp_passes.distributed.watch.heartbeat import EXIT_CODE, Heartbeat, Loss, exit_process

__all__ = [
    "EXIT_CODE", "Heartbeat", "Loss", "MeshGroups", "exit_process", "new_connection", "open_store",
    "require_agreement",
]  # fmt: skip
