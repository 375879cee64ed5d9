# SPDX-License-Identifier: Apache-2.0
"""The training loop that all phases share: what learns, for how many steps, on windows of which shapes, how fast."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tiny.losses import Loss
from tiny.muon import Muon

logger = logging.getLogger("train_tiny")

ROWS = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "weights_proj.weight", "markov_w1.weight")
"""Tables whose rows have nothing to do with each other: AdamW's, like vectors, since orthogonality means nothing."""


@dataclass(frozen=True)
class Phase:
    """Steps of one purpose; the rate falls along a cosine from ``peak`` to ``final`` after ``warmup`` steps.

    ``shapes`` are (windows, bytes each), taken in turn.
    """

    name: str
    steps: int
    shapes: tuple[tuple[int, int], ...]
    peak: float
    final: float
    warmup: int = 1

    def rate(self, step: int) -> float:
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
        return min(1.0, (step + 1) / self.warmup) * (self.final + (self.peak - self.final) * cosine)


class Balance:
    """Keeps the experts of each router equally busy without a loss: the choice bias moves towards the idle ones."""

    def __init__(self, model: nn.Module, rate: float = 5e-3):
        self.rate = rate
        self.load: dict[nn.Module, Tensor] = {}
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                self.load[module] = torch.zeros_like(module.e_score_correction_bias)
                module.register_forward_hook(self._count)

    def _count(self, router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self.load[router] += torch.bincount(output[2].flatten(), minlength=self.load[router].numel())

    def update(self) -> None:
        for router, load in self.load.items():
            router.e_score_correction_bias += self.rate * (load.mean() - load).sign()
            load.zero_()


def run(
    phase: Phase,
    parameters: Iterable[tuple[str, nn.Parameter]],
    stream: Tensor,
    loss: Callable[[Tensor], Loss],
    balance: Balance | None = None,
) -> list[dict[str, float]]:
    """Train ``parameters``; the log, about twenty rows of averages.

    Args:
        phase: the schedule.
        parameters: names and what learns; everything else stays as it is.
        stream: i64[n], the text that windows are drawn from, by the phase's own generator.
        loss: of a batch of windows i64[B, S + 1].
        balance: updated after each step.
    """
    named = list(parameters)
    matrices = [p for name, p in named if p.ndim > 1 and not name.endswith(ROWS)]
    others = [p for name, p in named if p.ndim < 2 or name.endswith(ROWS)]
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, phase.peak)]
    if others:
        optimizers.append(torch.optim.AdamW(others, phase.peak, betas=(0.9, 0.95), weight_decay=0.0, fused=True))
    generator = torch.Generator().manual_seed(sum(phase.name.encode()))
    every, rows, sums = max(1, phase.steps // 20), [], {}
    begin = time.process_time()
    for step in range(phase.steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = phase.rate(step)
        count, length = phase.shapes[step % len(phase.shapes)]
        starts = torch.randint(stream.numel() - length - 1, (count, 1), generator=generator)
        value, report = loss(stream[starts + torch.arange(length + 1)])
        value.backward()
        nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if balance is not None:
            balance.update()
        for key, number in report.items():
            sums[key] = sums.get(key, 0.0) + number / every
        if (step + 1) % every == 0:
            row = {"step": step + 1} | {key: round(number, 4) for key, number in sums.items()}
            rows.append(row | {"cpu seconds": round(time.process_time() - begin, 1)})
            logger.info("%s %s", phase.name, "  ".join(f"{key} {number}" for key, number in rows[-1].items()))
            sums = {}
    return rows
