# SPDX-License-Identifier: Apache-2.0
"""Whether the other ranks live, and where they parted: heartbeat, logs of what ranks issue, and the diagnosis."""
