# SPDX-License-Identifier: Apache-2.0
"""``pcp::experts``: a mixture-of-experts layer as one row-local op.

A loop over the experts that were hit depends on data, which no graph can hold, and gathering the weights of each row's
experts costs their size per row. The op sorts the rows by expert: one pair of products per expert in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from pcp_passes.errors import ConfigError
from pcp_passes.ir.library import define

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""Activations by the names that configurations use."""


def _experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: str,
) -> torch.Tensor:
    """``hidden [N, H]``, ``top_k_* [N, k]``, ``gate_up [E, 2I, H]``, ``down [E, H, I]`` to ``[N, H]``.

    Reads the load of the experts on the host. Each row sums its experts in the order of its own top-k, so the sum does
    not depend on the other rows.
    """
    if act not in ACTIVATIONS:
        raise ConfigError(f"pcp::experts has no activation {act!r}; required one of {', '.join(ACTIVATIONS)}")
    activation = ACTIVATIONS[act]
    rows, width = top_k_index.shape
    chosen = top_k_index.flatten()
    order = chosen.argsort(stable=True)
    sorted_rows = hidden.index_select(0, order // width)
    out = hidden.new_empty(rows * width, hidden.shape[1])
    start = 0
    for expert, load in enumerate(torch.bincount(chosen, minlength=gate_up.shape[0]).tolist()):
        if not load:
            continue
        gate, up = F.linear(sorted_rows[start : start + load], gate_up[expert]).chunk(2, dim=-1)
        out[start : start + load] = F.linear(activation(gate) * up, down[expert])
        start += load
    result = torch.empty_like(out)
    result[order] = out
    weighted = result.view(rows, width, hidden.shape[1]) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden.dtype)


def _experts_fake(hidden: torch.Tensor, *operands: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


experts_op: Any = define(
    "experts(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor down, str act) -> Tensor",
    _experts,
    _experts_fake,
)
