# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers as one row-local op, through transformers' ``ExpertsInterface``.

transformers' own forms loop over the experts that were hit, or copy two matrices per row; see
:mod:`pcp_passes.paged.experts`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from pcp_passes.errors import Refusal
from pcp_passes.paged.experts import ACTIVATIONS, experts_op

EXPERTS = "pcp_paged"


def experts_forward(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function of ``"pcp_paged"``, in the form of transformers' ``ExpertsInterface``.

    Raises:
        Refusal: an experts layer of another form than gate and up projections in one ``[E, 2I, H]`` tensor.
    """
    config: Any = module.config
    act = getattr(config, "hidden_act", None)
    plain = (
        getattr(module, "has_gate", True)
        and getattr(module, "is_concatenated", True)
        and not getattr(module, "has_bias", False)
        and not getattr(module, "is_transposed", False)
    )
    if not plain or act not in ACTIVATIONS or not _default_gate(module):
        raise Refusal(
            "this experts layer has no form as one row-local op",
            [
                ("module", type(module).__name__),
                ("found", f"activation {act!r}, {'plain' if plain else 'transposed, biased or interleaved'} weights"),
                ("required", f"gate and up projections in one tensor [E, 2I, H]; one of {', '.join(ACTIVATIONS)}"),
                ("next", "serve this model with vLLM"),
            ],
        )
    result: torch.Tensor = experts_op(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, act
    )
    return result


def _default_gate(module: torch.nn.Module) -> bool:
    """transformers hangs its own gate on classes that do not define one."""
    gate: Any = getattr(type(module), "_apply_gate", None)
    return gate is None or bool(gate.__module__ == ExpertsInterface.__module__)


def register_experts() -> None:
    """Make the experts implementation ``"pcp_paged"`` known to transformers. Idempotent."""
    ExpertsInterface.register(EXPERTS, experts_forward)
