# SPDX-License-Identifier: Apache-2.0
"""One scheduling step as a graph: target, sampling, verification and drafting, for one rank and for P ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs, plan_inputs

if TYPE_CHECKING:
    from pcp_passes.step.program import RankState, StepProgram

__all__ = ["RankState", "StepInputs", "StepOutputs", "StepPlanInputs", "StepProgram", "plan_inputs"]


def __getattr__(name: str) -> Any:
    """The program is read when it is asked for: it runs the passes, and passes read the modules of this package."""
    if name in ("RankState", "StepProgram"):
        from pcp_passes.step import program

        return getattr(program, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
