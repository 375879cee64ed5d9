# SPDX-License-Identifier: Apache-2.0
"""Which implementation of a kernel runs: the eager reference, Triton's interpreter, or Triton.

On CUDA (and ROCm) tensors always Triton. On CPU tensors the reference, unless ``PCP_KERNELS=interpreter`` asks for
the generated kernel in Triton's interpreter: slow, for tests.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

Implementation = Literal["reference", "interpreter", "triton"]

VARIABLE = "PCP_KERNELS"
CHOICES = ("reference", "interpreter")


def implementation(tensor: torch.Tensor) -> Implementation:
    """What runs on ``tensor``.

    Raises:
        ValueError: a device other than CPU and CUDA, ``PCP_KERNELS`` is not empty and neither ``reference`` nor
            ``interpreter``, or it is ``interpreter`` in a process without ``TRITON_INTERPRET=1``.
    """
    if tensor.is_cuda:
        return "triton"
    if tensor.device.type != "cpu":
        raise ValueError(f"no kernel runs on {tensor.device}; supported: cpu, cuda. Move the tensors there.")
    chosen = os.environ.get(VARIABLE) or "reference"
    if chosen == "reference":
        return "reference"
    if chosen != "interpreter":
        raise ValueError(f"{VARIABLE}: found {chosen!r}; supported: {', '.join(CHOICES)}")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{VARIABLE}=interpreter: found TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')!r}; required: '1', "
            f"set before triton is imported"
        )
    return "interpreter"
