# SPDX-License-Identifier: Apache-2.0
"""Kernels of pcp_passes, each with an eager reference that defines what it computes.

Importing this package needs PyTorch alone. A kernel's Triton source is imported when it is launched or compiled.
"""

from pcp_kernels.expand_slots import PAD_SLOT_ID, expand_slots, expand_slots_reference

__all__ = ["PAD_SLOT_ID", "expand_slots", "expand_slots_reference"]
