# SPDX-License-Identifier: Apache-2.0
"""The names that ``pcp_passes`` itself offers for plain PyTorch; importing them imports the front end."""

from __future__ import annotations

from pcp_passes.frontends.torch.decorator import ContextParallel, context_parallel
from pcp_passes.frontends.torch.inspection import InspectReport, inspect_model, simulate_model, simulated

__all__ = ["ContextParallel", "InspectReport", "context_parallel", "inspect_model", "simulate_model", "simulated"]
