# SPDX-License-Identifier: Apache-2.0
"""Muon: SGD with momentum whose matrix updates are made orthogonal (Jordan et al., 2024).

``torch.optim.Muon`` takes matrices only; a mixture's experts are one tensor [experts, out, in], a batch of them here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonal(matrices: Tensor) -> Tensor:
    """[..., m, n] with all singular values near one and the singular vectors kept: five Newton-Schulz rounds."""
    x = matrices.bfloat16()
    turned = x.shape[-2] > x.shape[-1]
    x = x.mT if turned else x
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True).bfloat16() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        # The quintic of the paper: steep at zero, and flat enough around one.
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return (x.mT if turned else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Steps have a root mean square of 0.2 times the rate: what AdamW's typically have, so that rates compare."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(average, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape[-2:]) ** 0.5)
