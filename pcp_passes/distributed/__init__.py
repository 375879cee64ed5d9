# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group tell each other outside their collectives: that they agree, and that they live."""

from pcp_passes.distributed.agreement import require_agreement
from pcp_passes.distributed.heartbeat import EXIT_CODE, Heartbeat, Loss, exit_process
from pcp_passes.distributed.store import new_connection, open_store

__all__ = ["EXIT_CODE", "Heartbeat", "Loss", "exit_process", "new_connection", "open_store", "require_agreement"]
