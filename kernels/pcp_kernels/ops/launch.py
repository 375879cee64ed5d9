# SPDX-License-Identifier: Apache-2.0
"""What the operators share: checks of their arguments, and the launch of a generated kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pcp_kernels import device, store
from pcp_kernels.catalog import INTERPRETER
from pcp_kernels.specs import SOURCES, KernelSpec

DTYPES: Mapping[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""Name of a store or source -> dtype; "fp64" is known to the references alone."""
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = tuple(DTYPES[name] for name in (*SOURCES, "fp64"))


class Faults:
    """Collects what is wrong with the arguments of one call.

    Args:
        operator: name that heads the message.
        like: the tensor on whose device all others must be.
    """

    def __init__(self, operator: str, like: torch.Tensor) -> None:
        self.operator = operator
        self.device = like.device
        self.found: list[str] = []

    def tensor(
        self,
        name: str,
        value: torch.Tensor | None,
        shape: Sequence[int | str],
        dtypes: Sequence[torch.dtype],
        *,
        contiguous: bool = False,
    ) -> None:
        """Demand a device, a shape (a letter stands for any length), a dtype and a contiguous last dimension."""
        if value is None:
            return
        fits = len(value.shape) == len(shape) and all(
            isinstance(wanted, str) or size == wanted for size, wanted in zip(value.shape, shape, strict=True)
        )
        laid = value.is_contiguous() if contiguous else value.ndim == 0 or value.shape[-1] < 2 or value.stride(-1) == 1
        if not fits or value.dtype not in dtypes or value.device != self.device or not laid:
            wanted = "[" + ", ".join(map(str, shape)) + "]"
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.found.append(
                f"{name}: found {value.dtype} {list(value.shape)}, strides {list(value.stride())}, on {value.device}; "
                f"required {kinds} {wanted}, {'contiguous' if contiguous else 'its last dimension contiguous'}, on "
                f"{self.device}"
            )

    def choice(self, name: str, value: object, allowed: Sequence[object]) -> None:
        """Demand one of ``allowed``."""
        if value not in allowed:
            self.found.append(f"{name}: found {value!r}; required one of {', '.join(map(str, allowed))}")

    def expect(self, holds: bool, message: str) -> None:
        """Demand that ``holds``."""
        if not holds:
            self.found.append(message)

    def below(self, name: str, values: torch.Tensor, bound: int, what: str) -> None:
        """Demand on CPU, where looking costs nothing, that no value passes ``what``; negative ones are the caller's."""
        if values.device.type == "cpu" and values.numel() and int(values.max()) >= bound:
            self.found.append(f"{name}: found {int(values.max())}; required below {bound}, {what}")

    def workspace(self, found: int) -> None:
        """Demand a number of bytes."""
        self.expect(found >= 0, f"workspace_bytes: found {found}; required at least 0, and what the selection takes")

    def check(self) -> None:
        """Raise ValueError if there were faults."""
        if self.found:
            raise ValueError("\n  ".join([f"{self.operator} cannot run:", *self.found]))


def by_reference(*values: torch.Tensor) -> bool:
    """Whether the reference computes this call: on CPU by default, and in fp64 always."""
    return any(v.dtype == torch.float64 for v in values) or device.implementation(values[0]) == "reference"


def launch(spec: KernelSpec, grid: tuple[int, ...], on: torch.Tensor, arguments: Mapping[str, Any]) -> None:
    """Run the kernel of ``spec`` where ``on`` is; of ``arguments`` it takes those that its signature names."""
    if 0 in grid:
        return
    module = store.load(spec, interpret=device.implementation(on) == "interpreter")
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device(on.device) if on.is_cuda else contextlib.nullcontext():
        values = [arguments[name] for name in module.META["signature"]]
        module.kernel[grid](*values, **store.launch_options(module))


def capability(tensor: torch.Tensor) -> int:
    """Key of the launch settings where ``tensor`` is: major * 10 + minor, or that of the interpreter."""
    if not tensor.is_cuda:
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return major * 10 + minor


def fp8_fault(faults: Faults, on: torch.Tensor, instead: str) -> None:
    """Demand that the device of ``on`` computes with e4m3; ``instead`` says what to do without."""
    found = capability(on)
    faults.expect(
        not on.is_cuda or found >= 89,
        f"device: found compute capability {found / 10}; required 8.9 to compute with fp8: {instead}",
    )


def fresh(result: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
    """``result`` as an operator may return it: contiguous, and in memory of its own."""
    storage = result.untyped_storage().data_ptr()
    if any(storage == argument.untyped_storage().data_ptr() for argument in arguments):
        return result.clone(memory_format=torch.contiguous_format)
    return result.contiguous()


def name_of(dtype: torch.dtype) -> str:
    """Of a store or source; of another dtype its own, for the refusal that follows."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def angles(cos: torch.Tensor | None, sin: torch.Tensor | None) -> dict[str, Any]:
    """Arguments of kernels that rotate: fp32 tables with one row stride."""
    if cos is None or sin is None:
        return {}
    cos, sin = cos.float(), sin.float()
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return {"cos_ptr": cos, "sin_ptr": sin, "angle_stride": cos.stride(0)}
